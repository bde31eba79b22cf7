"""A body in chunks (RFC 9112, 7.1), strict: what cannot come right is refused when it is seen, not when it is waited
for."""

from __future__ import annotations

import re

from kvstrata.engine.connection import Connection
from kvstrata.engine.http_reply import Problem

__all__ = ["read_chunks"]

# Bytes of a line, and of all trailers.
_LINE, _TRAILERS = 4096, 32 << 10
# What an extension or a trailer says is forgotten; it has no control characters.
_SIZE = re.compile(rb"([0-9A-Fa-f]+)[ \t]*(?:;[\t\x20-\x7e\x80-\xff]*)?")
_TRAILER = re.compile(rb"[!#$%&'*+\-.^_`|~0-9A-Za-z]+:[\t\x20-\x7e\x80-\xff]*")


def read_chunks(connection: Connection, view: memoryview) -> int:
    """Join the chunks in `view`. Returns the length; what follows the body stays in `buffered`.

    Raises Problem 400, 413 for more than fits, and Cut.
    """
    size = 0
    while count := _size(_line(connection)):
        if count > len(view) - size:
            raise Problem(413, "TooLarge", f"a body of more than {len(view)} bytes", close=True)
        with view[size : size + count] as part:
            connection.read_into(part)
        size += count
        if _line(connection, most=1):
            raise _bad("a chunk is longer than it says")
    left = _TRAILERS
    while line := _line(connection):
        left -= len(line)
        if left < 0 or not _TRAILER.fullmatch(line):
            raise _bad("its trailers")
    return size


def _line(connection: Connection, most: int = _LINE) -> bytes:
    """The next one, without its end."""
    data = connection.buffered
    while (end := data.find(b"\n")) < 0:
        if len(data) > most:
            raise _bad("a line without an end")
        connection.wait()
    if not 0 < end <= most or data[end - 1] != 13:
        raise _bad("the end of a line")
    line = bytes(data[: end - 1])
    del data[: end + 1]
    return line


def _size(line: bytes) -> int:
    found = _SIZE.fullmatch(line)
    if found is None:
        raise _bad("the size of a chunk")
    return int(found[1], 16)


def _bad(what: str) -> Problem:
    return Problem(400, "BadChunk", f"the chunked body is not well formed: {what}", close=True)
