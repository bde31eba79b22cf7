"""The disks: warm, and cold where there is one. Each is a block store of its own, with its own cap."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from kvstrata.engine.books import Content, Tier, block_key
from kvstrata.engine.errors import Full, TooLarge
from kvstrata.engine.settings import EngineSettings
from kvstrata.store.direct import PinnedBlock
from kvstrata.store.events import NoEvents
from kvstrata.store.keys import BlockKey
from kvstrata.store.settings import StoreSettings
from kvstrata.store.store import BlockStore, Outcome

__all__ = ["Tiers", "Watcher"]

_PIECE = 256 << 10
"""Bytes with one checksum: they are read, checked and sent on while they are in a CPU's cache."""
_PUT_S = 30.0
_PASSES = ("suspect", "closed", "leaving", "deadline", "eio", "full")


class Watcher(Protocol):
    """Who wants to know what the stores do, all in the store's own thread."""

    def evicting(self, tier: Tier, keys: Sequence[BlockKey]) -> None:
        """These are about to go from the disk to make room."""

    def removed(self, tier: Tier, keys: Sequence[BlockKey]) -> None:
        """These went from the disk, whyever."""

    def evicted(self) -> None:
        """The ones that were just told of went to make room."""


class _Listener(NoEvents):
    def __init__(self, tier: Tier, watcher: Watcher) -> None:
        self._tier = tier
        self._watcher = watcher

    def on_evicting(self, keys: Sequence[BlockKey]) -> None:
        self._watcher.evicting(self._tier, keys)

    def on_removed(self, keys: Sequence[BlockKey], sizes: Sequence[int]) -> None:
        self._watcher.removed(self._tier, keys)

    def on_evict(self, cls: str, blocks: int, nbytes: int) -> None:
        self._watcher.evicted()


class Tiers:
    """Thread-safe."""

    def __init__(self, settings: EngineSettings, watcher: Watcher) -> None:
        self._settings = settings
        self._watcher = watcher
        self.stores: dict[Tier, BlockStore] = {}
        self.stores[Tier.WARM] = self._open(Tier.WARM, settings.root / "blocks", settings.capacity)
        if settings.cold_root is not None:
            try:
                self.stores[Tier.COLD] = self._open(Tier.COLD, settings.cold_root, settings.cold_capacity)
            except BaseException:
                self.close(1.0)
                raise

    def _open(self, tier: Tier, root: Path, capacity: int) -> BlockStore:
        settings = StoreSettings(
            root,
            capacity,
            free_floor=self._settings.free_floor,
            allow_fs=self._settings.allow_fs,
            sub_bytes=_PIECE,
        )
        return BlockStore.open(settings, _Listener(tier, self._watcher))

    @property
    def capacity(self) -> int:
        """Bytes of all disks."""
        return self._settings.capacity + (self._settings.cold_capacity if Tier.COLD in self.stores else 0)

    def find(self, keys: Sequence[BlockKey]) -> list[Tier | None]:
        """Where each block is; memory only."""
        found: list[Tier | None] = [None] * len(keys)
        for tier, store in self.stores.items():
            for at, there in enumerate(store.contains(keys)):
                if there and found[at] is None:
                    found[at] = tier
        return found

    def put(self, key: BlockKey, body: memoryview) -> bool:
        """Into the warm tier, unless it is there; True if it was not. It is pinned there afterwards. Full, TooLarge."""
        store = self.stores[Tier.WARM]
        result = store.put_pinned(key, body, _PUT_S)
        if result.outcome is Outcome.ERROR:
            if result.reason == "too_large":
                raise TooLarge(
                    f"found: a value of {len(body)} bytes; needed: at most about {int(self._settings.capacity * 0.8)}"
                    " (KV_ENGINE_CAPACITY_BYTES)"
                )
            raise Full(f"the value cannot be stored: {result.reason}", retry=result.reason in _PASSES)
        try:
            if self._settings.durability == "fsync":
                store.sync(key)
        except OSError as error:
            store.unpin([key])
            raise Full(f"the value cannot be brought to the disk: {error}", retry=True) from error
        return result.outcome is Outcome.STORED

    def pin(self, content: Content) -> bool:
        """Keep it where it is; False if it is not there (any more)."""
        return self.stores[content.tier].contains_and_pin([block_key(content.tenant, content.digest)])[0]

    def unpin(self, content: Content) -> None:
        """One holder less."""
        self.stores[content.tier].unpin([block_key(content.tenant, content.digest)])

    def touch(self, content: Content) -> None:
        """It was used."""
        self.stores[content.tier].touch([block_key(content.tenant, content.digest)])

    def open(self, content: Content) -> PinnedBlock | None:
        """To read it."""
        return self.stores[content.tier].open_pinned(block_key(content.tenant, content.digest))

    def delete(self, tier: Tier, keys: Sequence[BlockKey]) -> list[bool]:
        """Which are gone now; the others are in use or cannot be removed."""
        results = self.stores[tier].delete(keys).result()
        return [result.outcome in (Outcome.DELETED, Outcome.MISS) and not result.reason for result in results]

    def close(self, timeout_s: float) -> None:
        """Give all roots up."""
        for store in self.stores.values():
            store.close(timeout_s)
