"""The right to touch a caller's buffer, which ends when the task is reported."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

__all__ = ["UNLIMITED", "Expired", "Lease"]


class Expired(Exception):
    """The task was reported as over: its buffers belong to somebody else now."""


class Lease(Protocol):
    """What every read and write of a caller's buffer asks."""

    def touching(self) -> AbstractContextManager[None]:
        """Held around memory copies and checksums of the caller's buffer, never around I/O that can block, so whoever
        ends the lease waits for microseconds only. Raises Expired once it has ended.
        """

    def ending(self, stop: Callable[[], None]) -> AbstractContextManager[None]:
        """Held around code that touches the buffer between I/O that can block, and that `stop` keeps from it for good:
        whoever ends the lease calls that first. It returns when the buffer is not touched any more, in microseconds,
        and may be called twice. Raises Expired once the lease has ended.
        """


class _Unlimited:
    def touching(self) -> AbstractContextManager[None]:
        return nullcontext()

    def ending(self, stop: Callable[[], None]) -> AbstractContextManager[None]:
        return nullcontext()


UNLIMITED: Lease = _Unlimited()
"""For callers that wait for the end, however late."""
