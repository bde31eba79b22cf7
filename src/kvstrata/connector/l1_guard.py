"""Server-side guard: bytes that were never committed are never read from L1, nor written to L2.

LMCache 0.5.3 lets three kinds of half-written blocks become readable (v1/distributed, v1/multiprocess/modules):
- a write lock that expires (`L1ObjectState.available_for_read` looks only at the lock): vLLM killed between
  PREPARE_STORE and COMMIT_STORE leaves a block of old memory that is served as a hit after `write_ttl` (600 s);
- `_release_entry` commits the pending writes of a worker that is reaped or unregisters (and nothing drops those of a
  worker that gave up waiting);
- the prefetch controller commits the buffers of failed loads before it deletes them, so that a lookup or the
  L2 store in between sees them.
Here a block is readable only after its writer finished it, and unfinished ones are deleted.
"""

import functools
import logging
from typing import Any

from lmcache.v1.distributed import l1_manager
from lmcache.v1.distributed.storage_controllers import prefetch_controller
from lmcache.v1.multiprocess.modules import engine_driven_transfer

__all__ = ["install"]

logger = logging.getLogger("lmcache.kvstrata")


class _PrefetchView:
    """What the prefetch controller sees of L1: `finish_write` + `delete` of failed loads become one forced delete."""

    def __init__(self, l1: Any) -> None:
        self._l1 = l1
        self._doomed: set[Any] = set()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._l1, name)

    def finish_write(self, keys: list[Any]) -> dict[Any, Any]:
        self._doomed.update(keys)
        return {}

    def delete(self, keys: list[Any], force: bool = False) -> dict[Any, Any]:
        doomed = [k for k in keys if k in self._doomed]
        self._doomed.difference_update(doomed)
        result: dict[Any, Any] = self._l1.delete(doomed, force=True) if doomed else {}
        rest = [k for k in keys if k not in result]
        if rest:
            result.update(self._l1.delete(rest, force=force))
        return result


def install() -> None:
    """Patch the running server process; call before the server is built. Calling twice changes nothing."""
    state, manager = l1_manager.L1ObjectState, l1_manager.L1Manager
    if getattr(state, "kvstrata", False):
        return
    reserve, finish, finish_read, delete = (
        _unlocked(method)
        for method in (
            manager.reserve_write, manager.finish_write, manager.finish_write_and_reserve_read, manager.delete
        )
    )  # fmt: skip
    success = l1_manager.L1Error.SUCCESS

    def reserve_write(self: Any, keys: Any, *args: Any, **kwargs: Any) -> Any:
        with self._lock:
            # A writer that never came back: its lock has expired, its bytes are unknown. Make room for a new one.
            dead = [k for k in keys if _unfinished(self, k) and not self._objects[k].write_lock.is_locked()]
            if dead:
                delete(self, dead, force=True)
            result = reserve(self, keys, *args, **kwargs)
            _mark(self, [k for k, (error, _) in result.items() if error == success], False)
            return result

    def finish_write(self: Any, keys: Any) -> Any:
        with self._lock:
            # Marked first: listeners inside `finish` may read the block at once. Taken back where it failed.
            finishing = _finishing(self, keys)
            _mark(self, finishing, True)
            result = finish(self, keys)
            _mark(self, [k for k in finishing if result.get(k) != success], False)
            return result

    def finish_write_and_reserve_read(self: Any, keys: Any, *args: Any, **kwargs: Any) -> Any:
        with self._lock:
            finishing = _finishing(self, keys)
            _mark(self, finishing, True)
            result = finish_read(self, keys, *args, **kwargs)
            _mark(self, [k for k in finishing if result.get(k, (None,))[0] != success], False)
            return result

    def available_for_read(self: Any) -> bool:
        return getattr(self, "kvstrata_committed", False) and not self.write_lock.is_locked()

    manager.reserve_write, manager.finish_write = reserve_write, finish_write
    manager.finish_write_and_reserve_read = finish_write_and_reserve_read
    state.available_for_read = available_for_read
    state.kvstrata = True
    _guard_prefetch()
    _guard_reaping()
    logger.info("kvstrata: unfinished blocks are never readable (L1 guard installed)")


def _unlocked(method: Any) -> Any:
    """The function inside `l1_mgr_synchronized`'s wrapper: the lock cannot be taken twice."""
    return next(cell.cell_contents for cell in method.__closure__ if callable(cell.cell_contents))


def _mark(manager: Any, keys: Any, committed: bool) -> None:
    for key in keys:
        entry = manager._objects.get(key)
        if entry is not None:
            entry.kvstrata_committed = committed


def _unfinished(manager: Any, key: Any) -> bool:
    entry = manager._objects.get(key)
    return entry is not None and not getattr(entry, "kvstrata_committed", False)


def _finishing(manager: Any, keys: Any) -> list[Any]:
    """Keys whose write is still held by its writer (lock not expired) and that nobody reads."""
    entries = [(k, manager._objects.get(k)) for k in keys]
    return [k for k, e in entries if e is not None and e.write_lock.is_locked() and not e.read_lock.is_locked()]


def _guard_prefetch() -> None:
    controller = prefetch_controller.PrefetchController
    original = controller.__init__

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        self._l1_manager = _PrefetchView(self._l1_manager)

    controller.__init__ = init


def _guard_reaping() -> None:
    """Unfinished writes of a worker are deleted when it is reaped, unregisters, or registers once more.

    The last is a worker that gave up waiting: what it asked for is answered to nobody, and would keep its chunks
    locked until the lock's time is over. The worker registers only while it moves no bytes (`adapters._moving`).
    """
    module = engine_driven_transfer.EngineDrivenTransferModule
    release, register = module._release_entry, module.register_kv_cache_engine_driven_context

    def release_entry(self: Any, instance_id: int, entry: Any) -> None:
        _drop_unfinished(self, instance_id)
        release(self, instance_id, entry)

    # LMCache compares a handler's signature with its protocol: `wraps` keeps what it looks at.
    @functools.wraps(register)
    def register_again(self: Any, payload: Any) -> Any:
        _drop_unfinished(self, payload.instance_id)
        return register(self, payload)

    module._release_entry = release_entry
    module.register_kv_cache_engine_driven_context = register_again


def _drop_unfinished(module: Any, instance_id: int) -> None:
    with module._pending_shm_lock:
        writes = [module._pending_shm_writes.pop(k) for k in [*module._pending_shm_writes] if k[0] == instance_id]
        reads = [module._pending_shm_reads.pop(k) for k in [*module._pending_shm_reads] if k[0] == instance_id]
    storage = module._ctx.storage_manager
    if unfinished := [key for keys in writes for key in keys if _unfinished(storage._l1_manager, key)]:
        logger.warning("kvstrata: %d unfinished blocks of a vLLM that was lost are deleted", len(unfinished))
        storage._l1_manager.delete(unfinished, force=True)
    for keys in filter(None, reads):
        storage.finish_read_prefetched(keys)
