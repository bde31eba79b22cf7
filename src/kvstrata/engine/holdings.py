"""What snapshots and branches keep from being evicted, and what their names take: a share of each for each tenant."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from kvstrata.engine.books import Content
from kvstrata.engine.core import Core
from kvstrata.engine.errors import Full
from kvstrata.engine.room import row_bytes
from kvstrata.engine.shares import Shares

__all__ = ["Holdings"]


class Holdings:
    """Called under the engine's lock."""

    def __init__(self, core: Core, tenants: Callable[[], int]) -> None:
        self._core = core
        self._blocks = Shares(int(core.settings.capacity * core.settings.fork_share), tenants)
        self._names = Shares(core.catalog.room.forks, tenants)

    def need(self, tenant: str, new: Iterable[Content] = (), keys: Iterable[bytes] = (), nbytes: int = 0) -> None:
        """Full, unless there is room to hold these contents, a further one of `nbytes`, and these keys."""
        nbytes += sum(content.size for content in new if not content.forks)
        for shares, wanted, knob in (
            (self._blocks, nbytes, "KV_ENGINE_FORK_SHARE of the capacity"),
            (self._names, sum(row_bytes(tenant, key) for key in keys), "for their names"),
        ):
            if wanted and not shares.fits(tenant, wanted):
                raise Full(
                    f"found: no room for {wanted} bytes more in snapshots and branches; needed: at most {shares.each}"
                    f" a tenant ({knob}); to fix: DELETE some, or wait until idle ones end"
                )

    def hold(self, content: Content) -> None:
        """One page more means it."""
        content.forks += 1
        if content.forks == 1:
            self._blocks.take(content.tenant, content.size)
            self._core.settle(content)

    def release(self, content: Content) -> None:
        """One page less means it."""
        content.forks -= 1
        if not content.forks:
            self._blocks.take(content.tenant, -content.size)
            self._core.settle(content)

    def name(self, tenant: str, key: bytes, sign: int = 1) -> None:
        """A page has this key now, or (-1) has it no more."""
        self._names.take(tenant, sign * row_bytes(tenant, key))
