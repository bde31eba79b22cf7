"""SCAN's cursors: keys for the engine, numbers on the wire."""

from __future__ import annotations

import secrets
import threading
from collections import OrderedDict
from collections.abc import Callable

from kvstrata.engine.resp_reply import Error

__all__ = ["Cursors"]

_MOST = 4096


class Cursors:
    """Thread-safe. A tenant has its part of so many, and forgets its own oldest ones; the numbers are drawn."""

    def __init__(self, tenants: Callable[[], int]) -> None:
        """`tenants`: how many there may be."""
        self._tenants = tenants
        self._lock = threading.Lock()
        self._known: dict[str, OrderedDict[int, bytes]] = {}

    def number(self, tenant: str, after: bytes) -> int:
        """0 for the end."""
        if not after:
            return 0
        with self._lock:
            known = self._known.setdefault(tenant, OrderedDict())
            number = 1 + secrets.randbits(52)
            known[number] = after
            while len(known) > max(1, _MOST // self._tenants()):
                known.popitem(last=False)
        return number

    def after(self, tenant: str, number: int) -> bytes:
        """Raises Error for one that is not known (any more)."""
        if number == 0:
            return b""
        with self._lock:
            known = self._known.get(tenant)
            after = known.get(number) if known else None
        if not after:
            raise Error("ERR invalid cursor: begin again with 0")
        return after
