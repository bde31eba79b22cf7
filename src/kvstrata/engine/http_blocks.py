"""The routes of a block: put it, get it or a part of it, ask for it, delete it."""

from __future__ import annotations

import re

from kvstrata.engine.block import Block
from kvstrata.engine.connection import Cut
from kvstrata.engine.content import Engine
from kvstrata.engine.errors import Corrupt
from kvstrata.engine.http_body import PIECE, Bodies
from kvstrata.engine.http_conditions import demand, wanted
from kvstrata.engine.http_reply import BINARY, Problem
from kvstrata.engine.http_request import Request

__all__ = ["Blocks", "send_block", "shown", "tag_of"]

_RANGE = re.compile(rb"bytes=(\d{0,19})-(\d{0,19})")
_NUMBER = re.compile(rb"\d{1,19}")


class Blocks:
    """Handlers of /kv/<key>. `segment` is the path segment as sent."""

    def __init__(self, engine: Engine, bodies: Bodies, max_value: int) -> None:
        self._engine = engine
        self._bodies = bodies
        self._max_value = max_value

    def get(self, request: Request, segment: bytes) -> None:
        """The bytes, or the range that was asked for."""
        block = self._engine.open_block(request.grant.tenant, request.key(segment))
        if block is None:
            raise _missing()
        with block:
            send_block(request, block, self._bodies)

    def head(self, request: Request, segment: bytes) -> None:
        """How many there are. Does not count as a hit or a miss; memory only."""
        about = self._engine.about(request.grant.tenant, request.key(segment))
        if about is None:
            raise _missing()
        size, digest = about
        tag = tag_of(digest)
        lines = _tag_lines(tag)
        if wanted(request.head.headers, tag):
            request.answer_head(size, lines)
        else:
            request.answer(304, headers=lines)

    def put(self, request: Request, segment: bytes) -> None:
        """Store it; 201 if it is new, 200 if the key was there: the first value stays."""
        request.need_write()
        key = request.key(segment)
        tenant = request.grant.tenant
        version = _version(request)
        size = self._bodies.announced(request.head, self._max_value)
        if size == 0:
            raise _empty()
        if version is not None and version < (current := self._engine.version(tenant)):
            raise Problem(409, "StaleVersion", f"data version {version}; the current one is {current}")
        demand(request, lambda: self._tag(tenant, key))
        connection, head = request.connection, request.head
        if (there := self._engine.present(tenant, key)) is not None:
            self._bodies.skipped(connection, head, self._max_value, tenant)
            new, digest = False, there
        elif head.chunked or size <= PIECE:
            with self._bodies.received(connection, head, self._max_value, tenant) as body:
                if not body:
                    raise _empty()
                new, digest = self._engine.put(tenant, key, body, version=version)
        else:
            new, digest = self._put_large(request, key, size, version)
        if not new:
            demand(request, lambda: tag_of(digest))  # it may have come meanwhile
        request.answer(201 if new else 200, headers=_tag_lines(tag_of(digest)))

    def _put_large(self, request: Request, key: bytes, size: int, version: int | None) -> tuple[bool, str]:
        """Hash and write while the rest is still coming."""
        bodies, connection = self._bodies, request.connection
        with (
            # Memory first: who waits for it must not keep room on the disk from others.
            bodies.pieces(connection, request.head, request.grant.tenant) as pieces,
            self._engine.receive(request.grant.tenant, key, size, version=version) as incoming,
        ):
            for piece in pieces:
                incoming.write(piece)
            return incoming.done()

    def delete(self, request: Request, segment: bytes) -> None:
        """Forget the key."""
        request.need_write()
        tenant, key = request.grant.tenant, request.key(segment)
        if (tag := self._tag(tenant, key)) is not None:
            demand(request, lambda: tag)
        if not self._engine.delete(tenant, [key]):
            raise _missing()
        request.answer(204)

    def _tag(self, tenant: str, key: bytes) -> bytes | None:
        about = self._engine.about(tenant, key)
        return tag_of(about[1]) if about is not None else None

    def exists(self, request: Request, segment: bytes) -> None:
        """Whether it is there."""
        key = request.key(segment)
        there = self._engine.exists(request.grant.tenant, [key])[0]
        request.json({"exists": there, "hash": shown(key)})


def send_block(request: Request, block: Block, bodies: Bodies) -> None:
    """Answer GET or HEAD with a block: 200, 206 for a range, 304 if the client has it, 404 if it is found damaged."""
    headers = request.head.headers
    size = block.size
    tag = tag_of(block.digest)
    lines = _tag_lines(tag)
    if not wanted(headers, tag):
        request.answer(304, headers=lines)
        return
    if request.head.method == b"HEAD":
        request.answer_head(size, lines)
        return
    start, stop, status = 0, size, 200
    asked = headers.get(b"range")
    if asked is not None and headers.get(b"if-range", tag) == tag:
        part = _range(asked, size)
        if part is not None:
            start, stop = part
            status = 206
            lines += b"Content-Range: bytes %d-%d/%d\r\n" % (start, stop - 1, size)
    bodies.allow(request.connection, stop - start)
    head = request.begin(status, stop - start, BINARY, lines)
    try:
        block.send_to(request.connection.sock, start, stop, head=head)
    except Corrupt as error:
        if error.sent:
            raise Cut from error  # a short body is how the client sees it
        raise _missing() from error
    request.sent += stop - start


def _range(header: bytes, size: int) -> tuple[int, int] | None:
    """(start, stop) of one range of bytes; None for what we do not know, which then is the whole. Problem 416."""
    match = _RANGE.fullmatch(header.strip())
    if match is None or match[0] == b"bytes=-":
        return None
    first, last = match.groups()
    if not first:
        start, stop = max(0, size - int(last)), size
    else:
        start, stop = int(first), min(int(last) + 1, size) if last else size
        if last and int(last) < int(first):
            return None
    if start >= size or start >= stop:
        raise Problem(416, "Range", f"the block has {size} bytes", headers=b"Content-Range: bytes */%d\r\n" % size)
    return start, stop


def _version(request: Request) -> int | None:
    text = request.head.headers.get(b"x-eg-data-version")
    if text is None:
        return None
    if not _NUMBER.fullmatch(text) or int(text) > 2**63 - 1:
        raise Problem(400, "BadVersion", "X-EG-Data-Version is a whole number below 2^63")
    return int(text)


def _empty() -> Problem:
    return Problem(400, "Empty", "a block has at least one byte: an empty one could not be told from a lost one")


def _missing() -> Problem:
    return Problem(404, "NoSuchBlock", "no block has this key")


def tag_of(digest: str) -> bytes:
    """The ETag of a content."""
    return b'"%b"' % digest.encode()


def _tag_lines(tag: bytes) -> bytes:
    return b"ETag: %b\r\nAccept-Ranges: bytes\r\n" % tag


def shown(key: bytes) -> str:
    """A key in JSON: as text where it is UTF-8, with replacement characters where it is not."""
    return key.decode("utf-8", "replace")
