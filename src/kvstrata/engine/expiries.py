"""When which key ends."""

from __future__ import annotations

import heapq

from kvstrata.engine.core import Core

__all__ = ["Expiries"]

# The heap still has the ends of keys that were written anew or deleted; twice what was left at the last look, and so
# many, before they are taken out.
_SPARE = 1024


class Expiries:
    """Called under the engine's lock. Times are seconds since the epoch: they outlive the process."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self._ends: list[tuple[float, str, bytes]] = []
        self._most = _SPARE

    def load(self) -> None:
        """Those that the books know, and no others."""
        self._ends = [
            (ref.expires, name, key)
            for name, of in self._core.books.tenants.items()
            for key, ref in of.refs.items()
            if ref.expires
        ]
        heapq.heapify(self._ends)
        self._most = 2 * len(self._ends) + _SPARE

    def add(self, expires: float, tenant: str, key: bytes) -> None:
        """The key ends then, unless it is written anew."""
        heapq.heappush(self._ends, (expires, tenant, key))
        if len(self._ends) > self._most:
            self.load()

    def end(self, now: float) -> None:
        """End what is over."""
        while self._ends and self._ends[0][0] <= now:
            _, tenant, key = heapq.heappop(self._ends)
            # It looks whether the key is over: it may have been written anew, with another end.
            self._core.live(self._core.books.of(tenant), tenant, key)
