"""Bodies of requests: into a buffer of the budget, whole or not at all, by length or in chunks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from kvstrata.engine.buffers import Budget, Busy, TooBig
from kvstrata.engine.connection import Connection
from kvstrata.engine.http_chunks import read_chunks
from kvstrata.engine.http_head import Head
from kvstrata.engine.http_reply import Problem

__all__ = ["PIECE", "Bodies"]

PIECE = 512 << 10
"""Bytes of a large body that are handled at once: half of an L2 cache, so that hashing finds them there."""

# The slowest client that is waited for: bytes a second, on top of the time that every body has.
_SLOWEST = 1 << 20
_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"


class Bodies:
    """Receives bodies within the memory of `budget`; each has `body_s` seconds and one more for each MiB."""

    def __init__(self, budget: Budget, body_s: float) -> None:
        self._budget = budget
        self._body_s = body_s

    def allow(self, connection: Connection, size: int) -> None:
        """Start the time that a body of `size` bytes may take, in either direction."""
        connection.until(self._body_s + size / _SLOWEST)

    def announced(self, head: Head, limit: int) -> int:
        """The length of the body that follows; `limit` where it is chunked. Raises Problem 411, 413."""
        if head.chunked:
            return limit
        if head.length is None:
            raise Problem(411, "LengthRequired", "send Content-Length, or the body in chunks")
        if head.length > limit:
            raise Problem(413, "TooLarge", f"a body of {head.length} bytes; {limit} at most")
        return head.length

    @contextmanager
    def received(self, connection: Connection, head: Head, limit: int, tenant: str) -> Iterator[memoryview]:
        """The whole body. The view is gone after the block.

        Raises Problem (411, 413, 503 when no memory came free in time, 400 for bad chunks), Cut when the body is short.
        """
        size = self.announced(head, limit)
        try:
            with self._budget.take(size, self._body_s / 2, tenant) as view:
                self.allow(connection, size)
                self.invite(connection, head)
                if head.chunked:
                    size = read_chunks(connection, view)
                else:
                    connection.read_into(view)
                head.unread = False
                connection.until(None)  # from here on it is our own work that takes time
                part = view[:size]
                try:
                    yield part
                finally:
                    part.release()
        except Busy as error:
            raise _busy(error) from None
        except TooBig:
            raise Problem(413, "TooLarge", f"a body of {size} bytes; the server has {self._budget.total}") from None

    @contextmanager
    def pieces(self, connection: Connection, head: Head, tenant: str) -> Iterator[Iterator[memoryview]]:
        """The body piece by piece, in one small buffer that is used again for each. For a length that is announced.

        Raises Problem 503, and Cut when the body is short.
        """
        size = head.length or 0
        try:
            with self._budget.take(min(size, PIECE), self._body_s / 2, tenant) as view:
                yield self._read_pieces(connection, head, view, size)
        except Busy as error:
            raise _busy(error) from None

    def _read_pieces(self, connection: Connection, head: Head, view: memoryview, size: int) -> Iterator[memoryview]:
        self.allow(connection, size)
        self.invite(connection, head)
        left = size
        while left:
            part = view[: min(left, len(view))]
            connection.read_into(part)
            left -= len(part)
            if not left:
                head.unread = False
                connection.until(None)
            yield part
            part.release()

    def skipped(self, connection: Connection, head: Head, limit: int, tenant: str) -> None:
        """Read the body and forget it. Raises as `received` does."""
        if head.chunked:
            with self.received(connection, head, limit, tenant):
                return
        size = self.announced(head, limit)
        self.allow(connection, size)
        self.invite(connection, head)
        connection.skip(size)
        head.unread = False

    @staticmethod
    def invite(connection: Connection, head: Head) -> None:
        """Say "100 Continue" to whom waits for it."""
        if head.expect:
            head.expect = False
            connection.send(_CONTINUE)


def _busy(error: Busy) -> Problem:
    return Problem(503, "Busy", f"no memory for the body: {error}", headers=b"Retry-After: 1\r\n")
