"""Promises: what EXISTS has answered "yes" for can still be read a while later.

LMCache's RESP client waits for ever on the answer to a GET that says "not there", so a promise must hold.
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Callable
from itertools import count

from kvstrata.engine.books import Content
from kvstrata.engine.core import Core
from kvstrata.engine.shares import Shares

__all__ = ["Leases"]


class Leases:
    """Called under the engine's lock. Leased contents are not evicted; beyond its part of their share of the capacity
    a tenant is promised nothing more.
    """

    def __init__(self, core: Core, tenants: Callable[[], int]) -> None:
        self._core = core
        self._shares = Shares(int(core.settings.capacity * core.settings.lease_share), tenants)
        self._ends: list[tuple[float, int, Content]] = []
        self._numbers = count()
        self.refused = 0

    def grant(self, content: Content, seconds: float) -> bool:
        """Promise it for so long; False: do not count on it."""
        until = time.monotonic() + seconds
        if content.lease > 0.0:
            content.lease = max(content.lease, until)
            # Pinned, but on a disk that does not answer now?
            return content.pinned and self._core.tiers.serves(content)
        if not self._shares.fits(content.tenant, content.size):
            self.refused += 1
            return False
        content.lease = until
        self._core.settle(content)
        if not content.pinned:
            content.lease = 0.0
            return False
        self._shares.take(content.tenant, content.size)
        heapq.heappush(self._ends, (until, next(self._numbers), content))
        return True

    def end(self, now: float) -> None:
        """Let go of those that are over at `now` (monotonic)."""
        while self._ends and self._ends[0][0] <= now:
            _, number, content = heapq.heappop(self._ends)
            if content.lease > now:
                heapq.heappush(self._ends, (content.lease, number, content))
                continue
            content.lease = 0.0
            self._shares.take(content.tenant, -content.size)
            self._core.settle(content)
