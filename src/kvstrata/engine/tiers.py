"""The disks: warm, and cold where there is one. Each is a block store of its own, with its own cap."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn, Protocol

from kvstrata.engine.books import NAMESPACE, Content, Tier, block_key
from kvstrata.engine.errors import Full, TooLarge
from kvstrata.engine.settings import EngineSettings
from kvstrata.store.direct import PinnedBlock
from kvstrata.store.errors import StoreError
from kvstrata.store.events import NoEvents
from kvstrata.store.incoming import Incoming
from kvstrata.store.keys import BlockKey
from kvstrata.store.settings import StoreSettings
from kvstrata.store.store import BlockStore, Outcome, Result

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
        self.stores[Tier.WARM] = self._open(Tier.WARM, settings.root / "blocks", settings.blocks)
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
            load_deadline_s=self._settings.disk_s,
            store_deadline_s=3 * self._settings.disk_s,
        )
        try:
            return BlockStore.open(settings, _Listener(tier, self._watcher), evicting=False)
        except StoreError as error:
            ours = "KV_ENGINE_COLD_" if tier is Tier.COLD else "KV_ENGINE_"
            texts = (text.replace("KV_STORE_", ours) for text in (error.found, error.needed, error.fix))
            raise StoreError(*texts, owned=error.owned) from error

    def begin_evicting(self) -> None:
        """Evict from now on: not before somebody can bring what goes to the cold disk."""
        for store in self.stores.values():
            store.begin_evicting()

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

    def put(self, key: BlockKey, body: memoryview) -> None:
        """Into the warm tier, unless it is there; it is pinned there afterwards. Full, TooLarge."""
        self._stored(key, self.stores[Tier.WARM].put_pinned(key, body, _PUT_S), len(body))

    def begin(self, tenant: str, size: int) -> Incoming:
        """A value that comes in. Full, TooLarge."""
        try:
            incoming = self.stores[Tier.WARM].begin_put(size, tenant, NAMESPACE, _PUT_S)
        except OSError as error:
            raise Full(f"the value cannot be stored: {error}", retry=True) from error
        return self._refuse(incoming, size) if isinstance(incoming, str) else incoming

    def publish(self, incoming: Incoming, key: BlockKey, size: int) -> None:
        """It is all there: as put."""
        self._stored(key, incoming.publish(key, _PUT_S), size)

    def _stored(self, key: BlockKey, result: Result, size: int) -> None:
        store = self.stores[Tier.WARM]
        if result.outcome is Outcome.ERROR:
            self._refuse(result.reason, size)
        try:
            if self._settings.durability == "fsync":
                store.sync(key)
        except OSError as error:
            store.unpin([key])
            raise Full(f"the value cannot be brought to the disk: {error}", retry=True) from error

    def _refuse(self, reason: str, size: int) -> NoReturn:
        if reason == "too_large":
            raise TooLarge(
                f"found: a value of {size} bytes; needed: at most about {int(self._settings.blocks * 0.8)}"
                " (KV_ENGINE_CAPACITY_BYTES)"
            )
        raise Full(f"the value cannot be stored: {reason}", retry=reason in _PASSES)

    def pin(self, content: Content) -> bool:
        """Keep it where it is; False if it is not there (any more)."""
        return self.stores[content.tier].contains_and_pin([block_key(content.tenant, content.digest)])[0]

    def serves(self, content: Content) -> bool:
        """True if it is there and its disk answers, as far as memory knows."""
        return self.stores[content.tier].contains([block_key(content.tenant, content.digest)])[0]

    def unpin(self, content: Content) -> None:
        """One holder less."""
        self.stores[content.tier].unpin([block_key(content.tenant, content.digest)])

    def touch(self, content: Content) -> None:
        """It was used."""
        self.stores[content.tier].touch([block_key(content.tenant, content.digest)])

    def open(self, content: Content) -> PinnedBlock | None:
        """To read it."""
        return self.stores[content.tier].open_pinned(block_key(content.tenant, content.digest))

    def close(self, timeout_s: float) -> None:
        """Give all roots up."""
        for store in self.stores.values():
            store.close(timeout_s)
