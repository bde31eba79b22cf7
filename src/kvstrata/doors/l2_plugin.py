"""LMCache L2 adapter of `type: plugin` (0.5.3) over a BlockStore in the lmcache server's own process.

    --l2-adapter '{"type": "plugin", "module_path": "kvstrata.doors.l2_plugin", "class_name": "KvstrataL2Adapter",
                   "adapter_params": {}}'

Everything is configured by the environment (KV_STORE_*, store/settings.py): LMCache prints adapter_params in logs and
status. What the interface wants is in lmcache/v1/distributed/l2_adapters/base.py; where it leaves a choice:

- A lookup is answered inside submit, from memory, and locks what it found. Whether the bytes are sound is seen by the
  load: a bad block is a cleared bit, and LMCache cuts the prefix there.
- submit_* never raise: LMCache would leak its own locks, or wait for ever (storage_controllers/*_controller.py).
- Only the store evicts. LMCache's eviction knows neither bytes on disk nor locks, and IsolatedLRU deletes every
  announced block that has no quota: an `eviction` block is refused.
"""

from __future__ import annotations

import itertools
import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from types import MappingProxyType
from typing import Any
from weakref import WeakMethod

from lmcache.native_storage_ops import Bitmap
from lmcache.v1.distributed.api import KeyEntry, KeyListPage, MemoryLayoutDesc, ObjectKey
from lmcache.v1.distributed.eviction import L2EvictionPolicy
from lmcache.v1.distributed.internal_api import L1MemoryDesc, L2AdapterListener, L2StoreResult
from lmcache.v1.distributed.l1_manager import L1ObjectState
from lmcache.v1.distributed.l2_adapters.base import AdapterUsage, L2AdapterInterface, L2TaskId
from lmcache.v1.memory_management import MemoryObj
from lmcache.v1.mp_observability.event import Event, EventType

from kvstrata.doors.l2_keys import block_keys, object_key
from kvstrata.doors.l2_objects import buffers_of, itemsize_of
from kvstrata.doors.l2_pins import Pins
from kvstrata.doors.l2_tasks import Completions
from kvstrata.store.keys import BlockKey
from kvstrata.store.metrics import StoreMetrics
from kvstrata.store.settings import StoreSettings
from kvstrata.store.store import BlockStore, Outcome, Result, Usage

__all__ = ["KvstrataL2Adapter"]

logger = logging.getLogger("lmcache.kvstrata.l2")

#: LMCache's own read locks end after 300 s (l1_manager.py); a load is answered long before.
_PIN_TTL_S = 300.0
_DELETE_S = 30.0
_KEPT = (Outcome.STORED, Outcome.PRESENT)


class KvstrataL2Adapter(L2AdapterInterface):  # type: ignore[misc]
    """See the module. Raises StoreError where the store cannot be opened, ValueError for parameters."""

    def __init__(
        self,
        params: Mapping[str, Any] | None = None,
        l1_memory_desc: L1MemoryDesc | None = None,
        *,
        env: Mapping[str, str] | None = None,
    ) -> None:
        _refuse(params or {})
        super().__init__(max_capacity_bytes=0)
        self._store_done: Completions[L2StoreResult] = Completions()
        self._lookup_done: Completions[Bitmap] = Completions()
        self._load_done: Completions[Bitmap] = Completions()
        self._tasks = itertools.count()
        self._metrics = _Metrics(self._announce_removed)
        settings = StoreSettings.from_env(os.environ if env is None else env)
        logger.info("kvstrata: opening the block store at %s", settings.root)
        try:
            self._store = BlockStore.open(settings, events=self._metrics, progress=_progress)
        except BaseException:
            self._close_descriptors()
            raise
        self._settings = settings
        if not getattr(L1ObjectState, "kvstrata", False):
            logger.warning(
                "kvstrata: LMCache's L1 runs without kvstrata.connector.l1_guard: a block whose load failed may be "
                "stored again as it is, half-written; start the server by kvstrata.launch.lmcache_server"
            )
        self._metrics.watch(self._store.usage)
        self._pins = Pins(self._store.unpin, _PIN_TTL_S)
        self._seed_accounts()
        self._event_bus.subscribe(EventType.L1_KEYS_ACCESSED, _weak(self._on_l1_accessed))

    # -- descriptors --------------------------------------------------------------------------------------------

    def get_store_event_fd(self) -> int:
        return self._store_done.fileno()

    def get_lookup_and_lock_event_fd(self) -> int:
        return self._lookup_done.fileno()

    def get_load_event_fd(self) -> int:
        return self._load_done.fileno()

    # -- store --------------------------------------------------------------------------------------------------

    def submit_store_task(self, keys: list[ObjectKey], objects: list[MemoryObj]) -> L2TaskId:
        """One flag a batch: true when each block lies in the store, whoever wrote it."""
        task = next(self._tasks)
        try:
            buffers = buffers_of(keys, objects)
            future = self._store.put(block_keys(keys), buffers, itemsize=itemsize_of(objects))
        except Exception:
            logger.exception("kvstrata: a store of %d blocks was not taken", len(keys))
            self._store_done.deposit(task, L2StoreResult(False, 0))
        else:
            future.add_done_callback(lambda done: self._stored(task, list(keys), done))
        return task

    def _stored(self, task: L2TaskId, keys: list[ObjectKey], done: Future[list[Result]]) -> None:
        results = _results(done, len(keys))
        new = [
            (key, result.nbytes) for key, result in zip(keys, results, strict=True) if result.outcome is Outcome.STORED
        ]
        self._tell(self._notify_keys_stored, [key for key, _ in new], [size for _, size in new])
        good = all(result.outcome in _KEPT for result in results)
        self._store_done.deposit(task, L2StoreResult(good, sum(size for _, size in new)))

    def pop_completed_store_tasks(self) -> dict[L2TaskId, L2StoreResult]:
        return self._store_done.pop_all()

    # -- lookup and lock ----------------------------------------------------------------------------------------

    def submit_lookup_and_lock_task(
        self, keys: list[ObjectKey], group_layout_descs: dict[int, MemoryLayoutDesc]
    ) -> L2TaskId:
        task = next(self._tasks)
        found = Bitmap(len(keys))
        try:
            wanted = block_keys(keys)
            pinned = self._store.contains_and_pin(wanted)
            self._pins.add(key for key, there in zip(wanted, pinned, strict=True) if there)
            hits = [i for i, there in enumerate(pinned) if there]
            found.batched_set(hits)
            self._metrics.on_lookup(len(hits), len(keys) - len(hits))
            self._pins.sweep()
        except Exception:
            logger.exception("kvstrata: a lookup of %d blocks failed and counts as a miss", len(keys))
            found = Bitmap(len(keys))
        self._lookup_done.deposit(task, found)
        return task

    def query_lookup_and_lock_result(self, task_id: L2TaskId) -> Bitmap | None:
        return self._lookup_done.pop(task_id)

    def submit_unlock(self, keys: list[ObjectKey]) -> None:
        try:
            self._pins.release(block_keys(keys))
        except Exception:  # what is left of these locks ends with their time
            logger.exception("kvstrata: an unlock of %d blocks failed", len(keys))

    # -- load ---------------------------------------------------------------------------------------------------

    def submit_load_task(self, keys: list[ObjectKey], objects: list[MemoryObj]) -> L2TaskId:
        """A block that is missing, damaged or late is a cleared bit, and its buffer is not to be used."""
        task = next(self._tasks)
        try:
            future = self._store.get_into(block_keys(keys), buffers_of(keys, objects))
        except Exception:
            logger.exception("kvstrata: a load of %d blocks was not taken and counts as a miss", len(keys))
            self._load_done.deposit(task, Bitmap(len(keys)))
        else:
            future.add_done_callback(lambda done: self._loaded(task, list(keys), done))
        return task

    def _loaded(self, task: L2TaskId, keys: list[ObjectKey], done: Future[list[Result]]) -> None:
        hits = [i for i, result in enumerate(_results(done, len(keys))) if result.outcome is Outcome.HIT]
        self._tell(self._notify_keys_accessed, [keys[i] for i in hits])
        loaded = Bitmap(len(keys))
        loaded.batched_set(hits)
        self._load_done.deposit(task, loaded)

    def query_load_result(self, task_id: L2TaskId) -> Bitmap | None:
        return self._load_done.pop(task_id)

    # -- listeners and events -----------------------------------------------------------------------------------

    def register_listener(self, listener: L2AdapterListener) -> None:
        """Refuses LMCache's evictor, which comes where the adapter's JSON has an `eviction` block of IsolatedLRU.

        Other policies LMCache drops itself, with a warning: they need an adapter that leaves its cap to LMCache.
        """
        if isinstance(listener, L2EvictionPolicy):
            raise ValueError(
                "found: an `eviction` block beside the kvstrata adapter; needed: none, the store keeps its own cap "
                "(KV_STORE_CAPACITY_BYTES); fix: take `eviction` out of --l2-adapter"
            )
        super().register_listener(listener)

    def _announce_removed(self, keys: Sequence[BlockKey], sizes: Sequence[int]) -> None:
        known = [(name, size) for key, size in zip(keys, sizes, strict=True) if (name := object_key(key)) is not None]
        self._tell(self._notify_keys_deleted, [name for name, _ in known], [size for _, size in known])

    def _tell(self, notify: Callable[..., None], keys: list[ObjectKey], *sizes: list[int]) -> None:
        """A listener's fault must not cost a task its answer."""
        if not keys:
            return
        try:
            notify(keys, *sizes)
        except Exception:
            logger.exception("kvstrata: a listener failed")

    def _on_l1_accessed(self, event: Event) -> None:
        """L1 answers a hot prefix; without this it would be the oldest on disk, and die with L1."""
        self._store.touch(block_keys(event.metadata.get("keys", ())))

    def _seed_accounts(self) -> None:
        """The base class counts what is announced; what lay on disk before was announced by an earlier process."""
        used = _by_salt(self._store.usage())
        with self._usage_lock:
            self._bytes_by_cache_salt = dict(used)
            self._total_bytes_used = sum(used.values())

    # -- management ---------------------------------------------------------------------------------------------

    def delete(self, keys: list[ObjectKey]) -> None:
        """Remove blocks; absent and locked ones are left as they are. Raises RuntimeError when the disk refuses."""
        if not keys:
            return
        results = self._store.delete(block_keys(keys)).result(timeout=_DELETE_S)
        failed = [result.reason for result in results if result.outcome is Outcome.ERROR]
        if failed:
            raise RuntimeError(f"{len(failed)} of {len(keys)} blocks were not deleted: {failed[0]}")

    def list_l2_keys(
        self, model_name: str | None = None, page_size: int = 500, cursor: str | None = None
    ) -> KeyListPage:
        if page_size <= 0:
            raise ValueError(f"page_size must be positive, got {page_size}")
        entries: list[KeyEntry] = []
        after = cursor
        while True:
            page = list(self._store.scan(after=after, limit=page_size - len(entries)))
            for info in page:
                name = object_key(info.key)
                if name is not None and model_name in (None, name.model_name):
                    entries.append(KeyEntry(key=name.to_encoded_object_key(), size_bytes=info.nbytes))
            if not page:
                return KeyListPage(entries=tuple(entries), next_page_token=None)
            after = page[-1].token
            if len(entries) >= page_size:
                return KeyListPage(entries=tuple(entries), next_page_token=after)

    def get_usage(self) -> AdapterUsage:
        """Bytes on disk and the cap. The cap is the store's own: `supports_global_eviction` stays false."""
        usage = self._store.usage()
        return AdapterUsage(
            total_bytes_used=usage.used,
            total_capacity_bytes=usage.capacity,
            bytes_by_cache_salt=MappingProxyType(_by_salt(usage)),
        )

    def report_status(self) -> dict[str, Any]:
        """Part of GET /status. Unhealthy while the disk does not answer; LMCache's /healthcheck does not look at it."""
        usage = self._store.usage()
        return {
            "is_healthy": not usage.suspect,
            "type": type(self).__name__,
            "root": str(self._settings.root),
            "blocks": usage.blocks,
            "used_bytes": usage.used,
            "capacity_bytes": usage.capacity,
            "free_on_device_bytes": usage.free_on_device,
            "suspect": usage.suspect,
            "locks": len(self._pins),
            "codec": self._settings.codec,
            "io": self._settings.io,
            "reader": self._store.reader,
            **self._metrics.totals(),
        }

    def close(self) -> None:
        """LMCache unmaps L1 right after: nothing of a task may run on (the store's leases see to it)."""
        self._pins.release_all()
        started = time.monotonic()
        self._store.close()
        self._metrics.unwatch()
        self._close_descriptors()
        logger.info("kvstrata: the block store was closed in %.2f s", time.monotonic() - started)

    def _close_descriptors(self) -> None:
        for done in (self._store_done, self._lookup_done, self._load_done):
            done.close()


class _Metrics(StoreMetrics):
    """The store's metrics, which also tell LMCache what went, for whatever reason."""

    def __init__(self, removed: Callable[[Sequence[BlockKey], Sequence[int]], None]) -> None:
        super().__init__()
        self._announce = WeakMethod(removed)

    def on_removed(self, keys: Sequence[BlockKey], sizes: Sequence[int]) -> None:
        super().on_removed(keys, sizes)
        if (announce := self._announce()) is not None:
            announce(keys, sizes)


def _refuse(params: Mapping[str, Any]) -> None:
    """Parameters of the adapter's JSON: there are none, and those that would do harm say why."""
    if "eviction" in params:
        raise ValueError(
            "found: `eviction` for the kvstrata adapter; needed: none, the store keeps its own cap "
            "(KV_STORE_CAPACITY_BYTES); fix: take it out of adapter_params"
        )
    if params:
        raise ValueError(
            f"found: adapter_params {sorted(params)}; needed: none, LMCache prints them in logs and status; "
            "fix: set KV_STORE_* in the environment of the server"
        )


def _weak(method: Callable[[Event], None]) -> Callable[[Event], None]:
    """The event bus has no unsubscribe: it must not keep a closed adapter alive."""
    reference = WeakMethod(method)

    def call(event: Event) -> None:
        if (target := reference()) is not None:
            target(event)

    return call


def _progress(blocks: int) -> None:
    logger.info("kvstrata: scanning, %d blocks so far", blocks)


def _by_salt(usage: Usage) -> dict[str, int]:
    used: dict[str, int] = {}
    for (_, salt), (_, size) in usage.by_namespace.items():
        used[salt] = used.get(salt, 0) + size
    return used


def _results(done: Future[list[Result]], count: int) -> list[Result]:
    """What the store answered; a fault of its own is an error of each block."""
    try:
        results = done.result()
    except BaseException as error:
        logger.exception("kvstrata: a task of %d blocks failed", count)
        return [Result(Outcome.ERROR, type(error).__name__)] * count
    return results
