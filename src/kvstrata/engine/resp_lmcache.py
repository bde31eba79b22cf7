"""Replies for LMCache's own RESP client, which reads as many bytes as the good reply would have, whatever comes.

After a nil or an error in words it is out of step for good: it takes each reply for that of the next command, and one
day another key's bytes for the ones it asked for. It never connects again either, so a connection that is closed costs
one of its workers, but that one only fails. Hence: failures in exactly the bytes that it reads, and where that cannot
be, the end of the connection. Seen with lmcache 0.5.3 (lmcache_redis, csrc/storage_backends/redis).
"""

from __future__ import annotations

from kvstrata.engine.resp_reply import Error, Reply, bulk_head

__all__ = ["USER", "Unfit", "failed_get", "fitting"]

USER = b"lmcache"
"""The user name that asks for such replies."""


class Unfit(Exception):
    """There is no reply to this that the client would understand."""


def fitting(name: bytes, reply: Reply) -> bytes | None:
    """The bytes instead of a failure; None: the reply may go as it is. Raises Unfit."""
    if name == b"SET":
        return b"-ER\r\n" if reply is None or isinstance(reply, Error) else None
    if not isinstance(reply, Error) or name == b"AUTH":
        return None
    if name in (b"EXISTS", b"DEL"):
        return b":0\r\n"
    raise Unfit(str(reply))


def failed_get(size: int) -> bytes:
    """Instead of a value of that many bytes: an error as long as the head that the client waits for."""
    return b"-" + b"E" * (len(bulk_head(size)) - 3) + b"\r\n"
