"""BlockStore: a capped, checked, restart-proof cache of KV blocks in one folder (docs/format.md, docs/storage.md)."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import partial

from kvstrata.store.blockfile import BlockIO
from kvstrata.store.capacity import Capacity, Device
from kvstrata.store.codecs import CodecError
from kvstrata.store.deadline import Outcome, Result
from kvstrata.store.direct import Direct, PinnedBlock
from kvstrata.store.entries import Entries
from kvstrata.store.errors import StoreError
from kvstrata.store.events import Events, NoEvents
from kvstrata.store.gate import Gate
from kvstrata.store.incoming import Incoming
from kvstrata.store.index import Index
from kvstrata.store.keeper import Keeper
from kvstrata.store.keys import BlockKey
from kvstrata.store.listing import BlockInfo, Usage, listing
from kvstrata.store.loads import Loader
from kvstrata.store.pool import LOAD, STORE, Pool
from kvstrata.store.publish import Publisher
from kvstrata.store.recency import UseClock
from kvstrata.store.removal import Remover
from kvstrata.store.root import Root, open_root
from kvstrata.store.scan import scan_root
from kvstrata.store.settings import StoreSettings
from kvstrata.store.stores import Storer
from kvstrata.store.strikes import Strikes
from kvstrata.store.surroundings import Surroundings

__all__ = ["BlockInfo", "BlockStore", "Outcome", "Result", "StoreError", "Usage"]

# A root that is mostly something else is no store: to hold the cap, its blocks would have to go.
_FOREIGN_SHARE = 0.1
# Bytes a second: a big load gets this much longer. A disk that is slower than that is no gain over computing.
_SLOWEST_USEFUL = 512 << 20

log = logging.getLogger(__name__)


class BlockStore:
    """All operations take batches, are thread-safe, and never block on the disk: what needs it returns a future.

    Futures are completed from the store's own threads. A key's result says how it went; there are no exceptions for
    one block. A put or load ends by its deadline, and its buffers are not touched after that.
    """

    def __init__(self, settings: StoreSettings, root: Root, events: Events, clock: Callable[[], int]) -> None:
        """Use `open`."""
        self._settings = settings
        self._root = root
        self._events = events
        self._clock = UseClock(clock)
        try:
            io = BlockIO(
                root.path, codec=settings.codec, direct=root.direct, native=settings.native,
                sub_bytes=settings.sub_bytes, clock=self._clock,
            )  # fmt: skip
        except CodecError as error:
            raise StoreError(error.found, error.needed, error.fix) from error
        self._reader = io.reader
        self._names = Entries(settings.class_number)
        self._index = Index(self._names)
        device = Device(root.path, settings.free_floor)
        around = Surroundings(root.path, self._index)
        self._remover = Remover(root.path, self._index, around, events)
        self._capacity = Capacity(settings, self._index, device, self._remover)
        self._keeper = Keeper(root, self._index, self._clock, device, self._remover, around)
        self._gate = Gate(root.path, settings, self._names, events)
        self._pool = Pool(settings.worker_count)
        strikes = Strikes(self._index, self._remover)
        publisher = Publisher(root, self._index, self._capacity, around, self._keeper)
        self._loader = Loader(io, self._index, self._remover, strikes, self._keeper, self._pool, settings.worker_count)
        self._storer = Storer(io, self._index, self._capacity, publisher, self._keeper, self._pool)
        self._direct = Direct(
            root, io, self._index, self._capacity, publisher, self._keeper, self._remover, strikes, self._gate.reads,
            self._gate.writes,
        )  # fmt: skip

    @classmethod
    def open(
        cls,
        settings: StoreSettings,
        events: Events | None = None,
        progress: Callable[[int], None] | None = None,
        *,
        clock: Callable[[], int] = time.time_ns,
        evicting: bool = True,
    ) -> BlockStore:
        """Own the root, scan it (`progress`: blocks seen so far), evict down to the capacity. StoreError.

        `evicting` False: what is above the watermark stays, and puts may have to wait, until `begin_evicting`.
        """
        root = open_root(settings)
        try:
            store = cls(settings, root, events or NoEvents(), clock)
        except BaseException:
            root.close()
            raise
        try:
            store._begin(progress)
            if evicting:
                store.begin_evicting()
        except BaseException:
            store.close()
            raise
        return store

    def _begin(self, progress: Callable[[int], None] | None) -> None:
        began = time.monotonic()
        found = scan_root(self._root.path, self._names, self._settings, progress)
        if found.foreign > self._settings.capacity * _FOREIGN_SHARE:
            raise StoreError(
                f"{found.foreign} bytes in {self._root.path} that are not the store's",
                f"at most {_FOREIGN_SHARE:.0%} of the capacity ({self._settings.capacity}), for they count as well",
                "move those files away, or set KV_STORE_ROOT to a folder of its own",
            )
        self._clock.seen(max(found.uses, default=0))
        self._index.load(found)
        seconds = time.monotonic() - began
        log.info("block store: %d blocks in %s, scanned in %.2f s", len(found.entries), self._root.path, seconds)
        with suppress(Exception):
            self._events.scan_done(len(found.entries), seconds)
        self._capacity.shrink_at_start()
        self._keeper.start()

    def begin_evicting(self) -> None:
        """Make room from now on; once."""
        self._capacity.start()

    @property
    def reader(self) -> str:
        """How blocks in the page cache are read and checked: native or python."""
        return self._reader

    # -- memory only

    def contains(self, keys: Sequence[BlockKey]) -> list[bool]:
        """Which blocks are there; none while the disk is suspect."""
        if self._gate.no_loads:
            return [False] * len(keys)
        return self._index.contains([self._names.known(key) for key in keys])

    def contains_and_pin(self, keys: Sequence[BlockKey]) -> list[bool]:
        """Which blocks are there; those get one more holder each, and stay until `unpin` (or until found corrupt)."""
        if self._gate.no_loads:
            return [False] * len(keys)
        return self._index.hold([self._names.known(key) for key in keys])

    def unpin(self, keys: Sequence[BlockKey]) -> None:
        """One holder less each."""
        self._index.release([self._names.known(key) for key in keys])

    def touch(self, keys: Sequence[BlockKey]) -> None:
        """They were used elsewhere (an L1 hit): they age from now on. Unknown ones are ignored."""
        for key in keys:
            self._keeper.touch(self._names.known(key))

    def usage(self) -> Usage:
        """See Usage. Memory only."""
        counts = self._index.counts()
        return Usage(
            capacity=self._settings.capacity,
            used=counts.used,
            reserved=counts.reserved,
            blocks=counts.blocks,
            by_namespace=self._index.by_names(),
            free_on_device=self._keeper.free_on_device,
            suspect=self._gate.suspect,
        )

    def scan(self, after: str | None = None, limit: int | None = None) -> Iterator[BlockInfo]:
        """A snapshot in a stable order, all of it or a page: at most `limit` blocks behind the token `after`.

        Left out are blocks whose key is not known without opening them (chunk hashes longer than 64 bytes).
        """
        return listing(self._index, after, limit)

    # -- the disk

    def put(
        self,
        keys: Sequence[BlockKey],
        buffers: Sequence[memoryview],
        itemsize: int = 1,
        deadline_s: float | None = None,
    ) -> Future[list[Result]]:
        """Store each buffer under its key: STORED (nbytes on disk), PRESENT (there, or being written), ERROR, EXPIRED.

        `itemsize`: bytes a KV element, for the codecs. Buffers must not change until the future is done.
        """
        if not 1 <= itemsize <= 255:
            raise ValueError(f"found: item size {itemsize}; needed: 1 to 255")
        if deadline_s is None:
            deadline_s = self._settings.store_deadline_s
        batch = self._gate.admit(keys, buffers, deadline_s, STORE)
        if not batch.future.done():
            self._storer.start(batch, itemsize)
        return batch.future

    def get_into(
        self, keys: Sequence[BlockKey], buffers: Sequence[memoryview], deadline_s: float | None = None
    ) -> Future[list[Result]]:
        """Load each block into its buffer of exactly its length: HIT, MISS, CORRUPT (now removed), ERROR, EXPIRED.

        For all but HIT the buffer's content is undefined.
        """
        if any(buffer.readonly for buffer in buffers):
            raise ValueError("found: a read-only buffer; needed: writable ones")
        if deadline_s is None:
            deadline_s = self._settings.load_deadline_s + sum(map(len, buffers)) / _SLOWEST_USEFUL
        batch = self._gate.admit(keys, buffers, deadline_s, LOAD)
        if batch.future.done():
            return batch.future
        there = self._index.hold(batch.entries)
        self._loader.start(batch, [at for at, is_there in enumerate(there) if is_there])
        for at, is_there in enumerate(there):
            if not is_there:
                batch.settle(at, Result(Outcome.MISS))
        return batch.future

    def put_pinned(self, key: BlockKey, source: memoryview, deadline_s: float | None = None) -> Result:
        """put, of one block and in the caller's thread, which waits for the disk. After STORED and PRESENT the block
        has one more holder: `unpin`.
        """
        if reason := self._gate.no_puts:
            return Result(Outcome.ERROR, reason)
        return self._direct.put(key, source, self._settings.store_deadline_s if deadline_s is None else deadline_s)

    def begin_put(self, size: int, salt: str, namespace: str, deadline_s: float) -> Incoming | str:
        """Room for a block whose bytes come in, in the caller's thread; else the reason. OSError."""
        return self._gate.no_puts or self._direct.begin(size, len(namespace) + len(salt), deadline_s)

    def open_pinned(self, key: BlockKey) -> PinnedBlock | None:
        """A block to read in the caller's thread, piece by piece; None: a miss."""
        return None if self._gate.no_loads else self._direct.open(key)

    def open_leaving(self, key: BlockKey) -> PinnedBlock | None:
        """During `Events.on_evicting`, one of its blocks; None: it cannot be read."""
        return self._direct.open_leaving(key)

    def delete_here(self, keys: Sequence[BlockKey]) -> tuple[Callable[[], None], list[BlockKey]]:
        """delete in two steps. At once, in memory: the blocks are not there any more, but for those that are in use,
        whose keys are in the answer. Then, by calling the first half of it, which waits for the disk: their files go.
        """
        victims, left = self._direct.take(keys)
        return partial(self._direct.remove, victims), left

    def sync(self, key: BlockKey) -> None:
        """A block that is held survives a power failure afterwards. OSError."""
        self._direct.sync(key)

    def delete(self, keys: Sequence[BlockKey]) -> Future[list[Result]]:
        """Remove blocks: DELETED, MISS (reason "pinned": somebody holds it, or its class is `pin`), ERROR, EXPIRED."""
        batch = self._gate.admit(keys, (), self._settings.store_deadline_s, None)
        if not batch.future.done():
            self._pool.submit(STORE, [partial(self._remover.delete, batch)])
        return batch.future

    def evict(self, nbytes: int) -> int:
        """Evict at least so many bytes in the usual order, and wait for it; the bytes that came free."""
        return self._capacity.evict(nbytes)

    def close(self, timeout_s: float = 5.0) -> None:
        """Finish what is under way, write the last uses, give the root up. Ends within about the timeout, whatever the
        disk does: what is not done by then is reported as EXPIRED, and never published. Idempotent.
        """
        if self._gate.closed:
            return
        end = time.monotonic() + timeout_s
        self._gate.close(timeout_s / 2)
        self._capacity.stop(max(0.1, (end - time.monotonic()) / 3))
        good = self._pool.stop(max(0.1, (end - time.monotonic()) / 2))
        good = self._keeper.stop(max(0.1, end - time.monotonic())) and good
        self._gate.stop()
        if not good:
            log.warning("block store: closed while %s did not answer", self._root.path)
        self._root.close()
