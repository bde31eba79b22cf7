"""Threads of a listener that its clients may hold: slow peers must not hold all of them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from kvstrata.engine.shares import Shares

__all__ = ["Places", "Strangers"]

# Threads in which something is waited for from those who have shown no token.
_STRANGERS = 8


class Places:
    """All tenants together have `total` of them; where there may be several, one has half at most. Thread-safe."""

    def __init__(self, total: int, tenants: Callable[[], int]) -> None:
        self._lock = threading.Lock()
        self._shares = Shares(total, tenants, parts=2)

    def take(self, tenant: str) -> bool:
        """False: the tenant has its part, or all are taken."""
        with self._lock:
            if not self._shares.fits(tenant, 1):
                return False
            self._shares.take(tenant, 1)
            return True

    def leave(self, tenant: str) -> None:
        """Once for each `take` that was True."""
        with self._lock:
            self._shares.take(tenant, -1)


class Strangers:
    """A few threads that may wait for what strangers still send. Thread-safe."""

    def __init__(self) -> None:
        self._free = threading.Semaphore(_STRANGERS)

    @contextmanager
    def waiting(self, known: bool) -> Iterator[bool]:
        """Whether it may be waited for; always where the peer is known: its thread is counted by Places."""
        free = known or self._free.acquire(blocking=False)
        try:
            yield free
        finally:
            if free and not known:
                self._free.release()
