"""Room for names: the oldest keys go before the catalog outgrows its share, or a tenant has too many."""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import islice

from kvstrata.engine.books import Tenant
from kvstrata.engine.core import Core
from kvstrata.engine.errors import Full
from kvstrata.engine.room import row_bytes

__all__ = ["Names"]

# So many keys are looked at for some that are not promised: this happens under the engine's lock.
_LOOK_AT = 10_000


class Names:
    """Called under the engine's lock. The tenant with the most bytes of names loses the first ones. A promise keeps a
    key, but not beyond the tenant's part where another tenant needs the room.
    """

    def __init__(self, core: Core, tenants: Callable[[], int]) -> None:
        self._core = core
        self._tenants = tenants
        self._limit = core.catalog.room.refs

    def make_room(self, tenant: str, key: bytes) -> None:
        """For one key more. Full: what is there was promised."""
        of = self._core.books.of(tenant)
        if self._core.catalog.crowded:
            self.shed()
        self._down_to(self._limit - row_bytes(tenant, key), tenant)
        if len(of.refs) >= self._core.settings.max_keys:
            self._retire(tenant, of)

    def shed(self) -> None:
        """The catalog has less room than was reckoned with."""
        self._core.catalog.crowded = False
        self._down_to(min(self._core.books.names, self._limit) * 7 // 8)

    def fit(self) -> None:
        """The share may be lower than at the last run."""
        self._down_to(self._limit)

    def _down_to(self, nbytes: int, tenant: str | None = None) -> None:
        books = self._core.books
        while books.names > nbytes and books.names:
            largest = max(books.tenants, key=lambda name: books.tenants[name].names)
            theirs = largest != tenant and books.of(largest).names > self._limit // self._tenants()
            if self._retire(largest, books.of(largest), promised_too=theirs):
                continue
            if tenant is None or not self._retire(tenant, books.of(tenant)):
                raise Full(
                    "found: no room for another key, and none that may go; needed: fewer promises (leases), or more"
                    " KV_ENGINE_CATALOG_BYTES",
                    retry=True,
                )

    def _retire(self, tenant: str, of: Tenant, *, promised_too: bool = False) -> bool:
        """Some of its oldest keys go, but for those that were promised, which are the youngest now."""
        now, wanted = time.monotonic(), 1 + len(of.refs) // 100
        gone: list[bytes] = []
        promised: list[bytes] = []
        for key, ref in islice(of.refs.items(), _LOOK_AT):
            (promised if ref.content.lease > now and not promised_too else gone).append(key)
            if len(gone) == wanted:
                break
        for key in promised:
            of.refs[key] = of.refs.pop(key)
        self._core.catalog.forget([it for key in gone for it in self._core.unname(of, tenant, key)])
        of.count("keys_retired", len(gone))
        return bool(gone)
