"""Threads of a server that the requests of a tenant may hold: slow peers of one must not hold all of them."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable

__all__ = ["Places"]


class Places:
    """Where there may be several tenants, one has half of `total` at most. Thread-safe."""

    def __init__(self, total: int, tenants: Callable[[], int]) -> None:
        self._total = total
        self._tenants = tenants
        self._lock = threading.Lock()
        self._of: Counter[str] = Counter()

    def take(self, tenant: str) -> bool:
        """False: the tenant has its part."""
        with self._lock:
            if self._of[tenant] >= (self._total // 2 if self._tenants() > 1 else self._total):
                return False
            self._of[tenant] += 1
            return True

    def leave(self, tenant: str) -> None:
        """Once for each `take` that was True."""
        with self._lock:
            self._of[tenant] -= 1
            if not self._of[tenant]:
                del self._of[tenant]
