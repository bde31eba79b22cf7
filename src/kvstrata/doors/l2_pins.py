"""The locks that LMCache holds on blocks between a lookup and its unlock, with an end to each.

LMCache answers every lookup with an unlock, unless it fails in between (an exception in its prefetch loop): such a lock
would keep its block on disk for ever. So each lock ends by itself after `ttl` seconds, longer than a load can take.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable

from kvstrata.store.keys import BlockKey

__all__ = ["Pins"]

_SWEEP_S = 15.0


class Pins:
    """Counts of locks a key. `unpin` takes a list of keys, one entry a lock, and is the store's. Thread-safe."""

    def __init__(
        self, unpin: Callable[[list[BlockKey]], None], ttl: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._unpin, self._ttl, self._clock = unpin, ttl, clock
        self._lock = threading.Lock()
        self._ends: dict[BlockKey, deque[float]] = {}
        self._next_sweep = clock() + min(_SWEEP_S, ttl)

    def add(self, keys: Iterable[BlockKey]) -> None:
        """The store has pinned each of `keys` once."""
        end = self._clock() + self._ttl
        with self._lock:
            for key in keys:
                self._ends.setdefault(key, deque()).append(end)

    def release(self, keys: Iterable[BlockKey]) -> None:
        """End one lock of each key. One that has ended by itself is not ended again: it would be somebody else's."""
        with self._lock:
            self._unpin([key for key in keys if self._drop_oldest(key)])

    def sweep(self) -> int:
        """End the locks that are over; looks at most every 15 s, so that it may be called often. How many ended."""
        now = self._clock()
        with self._lock:
            if now < self._next_sweep:
                return 0
            self._next_sweep = now + min(_SWEEP_S, self._ttl)
            over = [key for key, ends in self._ends.items() for end in ends if end <= now]
            for key in over:
                self._drop_oldest(key)
            self._unpin(over)
        return len(over)

    def release_all(self) -> None:
        with self._lock:
            self._unpin([key for key, ends in self._ends.items() for _ in ends])
            self._ends.clear()

    def __len__(self) -> int:
        """Locks that are held now."""
        with self._lock:
            return sum(len(ends) for ends in self._ends.values())

    def _drop_oldest(self, key: BlockKey) -> bool:
        ends = self._ends.get(key)
        if not ends:
            return False
        ends.popleft()
        if not ends:
            del self._ends[key]
        return True
