"""RESP2 and RESP3 replies as bytes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeAlias

__all__ = ["OK", "Error", "Reply", "Simple", "bulk_head", "encode"]


class Simple(str):
    """A status word, as in +OK."""

    __slots__ = ()


class Error(Exception):
    """What went wrong, for the peer: a code in capitals, then a sentence."""


OK = Simple("OK")

Reply: TypeAlias = "int | bytes | str | Simple | Error | Sequence[Reply] | Mapping[str, Reply] | None"


def bulk_head(size: int) -> bytes:
    """What stands before a value of that many bytes."""
    return b"$%d\r\n" % size


def encode(reply: Reply, protocol: int) -> bytes:
    """The reply in the protocol version (2 or 3) that the peer asked for."""
    if reply is None:
        return b"_\r\n" if protocol == 3 else b"$-1\r\n"
    if isinstance(reply, int):
        return b":%d\r\n" % reply
    if isinstance(reply, Simple):
        return f"+{reply}\r\n".encode()
    if isinstance(reply, Error):
        # A line break that came from the peer's own words must not begin a second reply.
        return f"-{' '.join(str(reply).split())}\r\n".encode("utf-8", "replace")
    if isinstance(reply, str):
        reply = reply.encode()
    if isinstance(reply, bytes):
        return b"$%d\r\n%b\r\n" % (len(reply), reply)
    if isinstance(reply, Mapping):
        flat = [part for item in reply.items() for part in item]
        head = b"%%%d\r\n" % len(reply) if protocol == 3 else b"*%d\r\n" % len(flat)
        return head + b"".join(encode(part, protocol) for part in flat)
    return b"*%d\r\n" % len(reply) + b"".join(encode(part, protocol) for part in reply)
