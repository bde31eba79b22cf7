"""What all parts of the engine share: the lock, the books, the catalog and the tiers, and how they are kept in step."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial

from kvstrata.engine.block import Block
from kvstrata.engine.books import Books, Content, Ref, Tenant, Tier, block_key
from kvstrata.engine.catalog import Catalog, Statement, forget_ref
from kvstrata.engine.catalog_file import CatalogFile
from kvstrata.engine.errors import Full
from kvstrata.engine.hot import HotTier
from kvstrata.engine.mover import Mover
from kvstrata.engine.room import Room
from kvstrata.engine.settings import EngineSettings
from kvstrata.engine.tiers import Tiers
from kvstrata.store.keys import BlockKey

__all__ = ["CATALOG", "Core"]

CATALOG = "catalog.sqlite"

_COUNT = "INSERT OR REPLACE INTO counters VALUES(?,?,?)"

log = logging.getLogger(__name__)


class Core:
    """`lock` guards books, hot tier and the order of the catalog's queue; nobody holds it over I/O or a commit.

    A content that nothing means any more goes at once from the books and soon after from the disk (`sweep`).
    """

    def __init__(self, settings: EngineSettings) -> None:
        self.settings = settings
        self.lock = threading.RLock()
        self.books = Books()
        self.hot = HotTier(settings.hot, lambda content, hot: self.books.place(content, hot=hot))
        self._copying: set[Content] = set()
        self._copying_bytes = 0
        self._garbage: set[tuple[Tier, BlockKey]] = set()
        self._victims = threading.local()
        self.wake = threading.Event()
        self.mover = Mover(self)
        self.tiers = Tiers(settings, self)
        try:
            file = CatalogFile.open(
                settings.root / CATALOG, durable=settings.durability == "fsync", room=Room(settings.names)
            )
            self.catalog = Catalog(file, self._changed_counters, self.wake.set)
        except BaseException:
            self.tiers.close(1.0)
            raise

    # -- contents

    @contextmanager
    def stored(self, key: BlockKey, body: memoryview) -> Iterator[None]:
        """The bytes are on the warm disk and stay there meanwhile. Full, TooLarge."""
        self.tiers.put(key, body)
        with self.held(key):
            yield

    @contextmanager
    def held(self, key: BlockKey) -> Iterator[None]:
        """Let go, at the end, of a block that was put into the warm disk; if nothing came to mean it, it goes."""
        try:
            yield
        finally:
            self.tiers.stores[Tier.WARM].unpin([key])
            with self.lock:
                if not self._wanted(Tier.WARM, key):
                    self.orphan(Tier.WARM, key)

    def open(self, content: Content, *, count: bool) -> Block | None:
        """To read it; `count`: it was counted as a hit, which must be undone if it turns out to be corrupt."""
        with self.lock:
            copy = self.hot.get(content)
            if copy is not None:
                self.tiers.touch(content)
            again, content.used = content.used, True
            # Copies that are being made take memory as well: one of each content, and a part of the tier together.
            wanted = copy is None and again and self.hot.wants(content) and self._may_copy(content)
        source = copy if copy is not None else self.tiers.open(content)
        if source is None:
            if wanted:
                self._copied(content, None)
            self.mover.wait(content)
            return None
        if content.tier is Tier.COLD:
            self.mover.promote(content)
        digest = content.digest.hex()
        on_copy = partial(self._copied, content) if wanted else None
        return Block(source, digest, partial(self._bad, content.tenant, count), on_copy)

    def _bad(self, tenant: str, count: bool) -> None:
        with self.lock:
            of = self.books.of(tenant)
            of.count("corrupt")
            if count:
                of.count("get_hits", -1)
                of.count("get_misses")

    def _may_copy(self, content: Content) -> bool:
        if content in self._copying or self._copying_bytes + content.size > self.settings.hot // 4:
            return False
        self._copying.add(content)
        self._copying_bytes += content.size
        return True

    def _copied(self, content: Content, copy: bytes | None) -> None:
        with self.lock:
            self._copying.discard(content)
            self._copying_bytes -= content.size
            if copy is not None and self.books.has(content):
                self.hot.add(content, copy)

    def adopt(self, key: BlockKey, size: int) -> Content:
        """The content of a block that is `stored` now. Under the lock."""
        content = self.books.content(key.salt, key.chunk, size, Tier.WARM)
        self._garbage.discard((Tier.WARM, key))
        if content.tier is not Tier.WARM:
            self.move(content, Tier.WARM)
        return content

    def move(self, content: Content, to: Tier) -> None:
        """It is on that disk as well, and counts there from now on; the other copy is garbage. Under the lock."""
        before = content.tier
        if content.pinned:
            self.tiers.unpin(content)
            content.pinned = False
        self.books.place(content, tier=to)
        self.settle(content)
        self._garbage.add((before, block_key(content.tenant, content.digest)))
        self.wake.set()

    def settle(self, content: Content | None) -> None:
        """After something that it was wanted or kept for has changed. Under the lock."""
        if content is None or not self.books.has(content):
            return
        keep = content.wanted and (content.forks > 0 or content.lease > 0)
        if keep and not content.pinned:
            content.pinned = self.tiers.pin(content)
        elif content.pinned and not keep:
            self.tiers.unpin(content)
            content.pinned = False
        if not content.wanted:
            self.hot.discard(content)
            self.books.drop(content)
            self._garbage.add((content.tier, block_key(content.tenant, content.digest)))
            self.wake.set()

    def unname(self, of: Tenant, tenant: str, key: bytes) -> list[Statement]:
        """A key means nothing from now on; what the catalog has to forget. Under the lock."""
        ref = of.refs.get(key)
        if ref is None:
            return []
        self.settle(self.books.unname(of, key))
        return [forget_ref(tenant, key, ref.content.digest)]

    def live(self, of: Tenant, tenant: str, key: bytes) -> Ref | None:
        """What the key means, if it has not expired. Under the lock."""
        ref = of.refs.get(key)
        if ref is not None and 0.0 < ref.expires <= time.time():
            self.catalog.queue(self.unname(of, tenant, key))
            return None
        return ref

    # -- what the stores tell

    def evicting(self, tier: Tier, keys: Sequence[BlockKey]) -> None:
        """See Watcher."""
        if tier is Tier.WARM:
            self.mover.demote(keys)

    def removed(self, tier: Tier, keys: Sequence[BlockKey]) -> None:
        """Blocks went from a disk. A late word: by now there may be others of the same name, with the same bytes."""
        self._victims.tenants = tenants = []
        with self.lock:
            statements: list[Statement] = []
            for key in keys:
                of = self.books.tenants.get(key.salt)
                content = of.contents.get(key.chunk) if of is not None else None
                if content is None or content.tier is not tier or self.tiers.stores[tier].contains([key])[0]:
                    continue
                if content.pinned:  # it was corrupt, or lost
                    self.tiers.unpin(content)
                    content.pinned = False
                self.hot.discard(content)
                names = self.books.drop(content)
                statements += [forget_ref(key.salt, name, key.chunk) for name in names]
                tenants.append(key.salt)
            self.catalog.forget(statements)

    def evicted(self) -> None:
        """See Watcher."""
        tenants: list[str] = getattr(self._victims, "tenants", [])
        with self.lock:
            for tenant in tenants:
                self.books.of(tenant).count("evictions")
        tenants.clear()

    def _changed_counters(self) -> list[Statement]:
        with self.lock:
            rows: list[Statement] = []
            for name, tenant in self.books.tenants.items():
                rows += [(_COUNT, (name, word, tenant.counters[word])) for word in tenant.changed]
                tenant.changed.clear()
            return rows

    def sweep(self) -> None:
        """Delete from the disks what nothing means; what somebody still reads waits for the next time."""
        with self.lock:
            before = set(self._garbage)
            ticket = self.catalog.queue()
        # First what made it garbage: a crash in between would find the old name, acknowledged long ago, without bytes.
        try:
            self.catalog.commit(ticket)
        except Full:
            return
        steps = []
        with self.lock:
            # Judged and taken out under one lock: a moment later it may be wanted again, there.
            garbage = [it for it in self._garbage & before if not self._wanted(*it)]
            self._garbage -= before
            for tier, store in self.tiers.stores.items():
                step, left = store.delete_here([key for its, key in garbage if its is tier])
                steps.append(step)
                self._garbage |= {(tier, key) for key in left}
        for step in steps:
            step()

    def _wanted(self, tier: Tier, key: BlockKey) -> bool:
        of = self.books.tenants.get(key.salt)
        content = of.contents.get(key.chunk) if of is not None else None
        return content is not None and content.tier is tier

    def orphan(self, tier: Tier, key: BlockKey) -> None:
        """A block that nothing means."""
        with self.lock:
            self._garbage.add((tier, key))
            self.wake.set()
