"""What needs LMCache in the block store's benchmark: its pool, and L2 adapters through its own interface."""

from __future__ import annotations

import importlib.util
import os
import select
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any
from unittest import mock

from kvstrata.proof.store_bench_parts import MODEL, PATIENCE_S, Pool, Slot, checks, chunk_hash, files_of, slot_of

__all__ = ["Adapter", "LmcachePool", "lmcache_config", "lmcache_layout", "object_keys"]


class LmcachePool:
    """LMCache's own pool of the pinned version, in /dev/shm as the cache server has it."""

    kind = "LMCache's shared pool"

    def __init__(self, size: int) -> None:
        from lmcache.v1.distributed.config import L1MemoryManagerConfig
        from lmcache.v1.distributed.memory_manager.l1_memory_manager import L1MemoryManager

        self._manager = L1MemoryManager(L1MemoryManagerConfig(size_in_bytes=size, use_lazy=False))
        self.desc = self._manager.get_l1_memory_desc()
        self.layouts: dict[int, Any] = {}

    def take(self, count: int, size: int) -> list[Slot]:
        self.layouts = {0: lmcache_layout(size)}
        error, objects = self._manager.allocate(self.layouts[0], count)
        if not objects:
            raise MemoryError(f"{count} buffers of {size} bytes: {error}")
        return [slot_of(memoryview(obj.byte_array).cast("B"), obj) for obj in objects]

    def give(self, slots: Sequence[Slot]) -> None:
        self._manager.free([slot.obj for slot in slots])

    def close(self) -> None:
        self._manager.close()


def lmcache_layout(size: int) -> Any:
    import torch
    from lmcache.v1.distributed.api import MemoryLayoutDesc

    return MemoryLayoutDesc([torch.Size([size // 2])], [torch.bfloat16])


def lmcache_config(config: dict[str, Any]) -> Any:
    """LMCache's configuration object of an adapter. ImportError where the adapter's own library is missing."""
    from lmcache.v1.distributed.l2_adapters.config import get_l2_adapter_config_class
    from lmcache.v1.distributed.l2_adapters.factory import ensure_adapter_loaded

    if config["type"].startswith("nixl") and importlib.util.find_spec("nixl") is None:
        raise ImportError("the package nixl is not installed here")
    ensure_adapter_loaded(config["type"])  # without it LMCache imports all of them, and names another's missing library
    return get_l2_adapter_config_class(config["type"]).from_dict({k: v for k, v in config.items() if k != "type"})


class Adapter:
    """An L2 adapter of LMCache, or ours as LMCache sees it, through the interface that its controllers use."""

    def __init__(
        self, name: str, config: dict[str, Any], folder: Path, pool: Pool, *, checked: bool = False, threads: int = 0,
        content: str = "random", cached: bool = True, env: dict[str, str] | None = None,
    ) -> None:  # fmt: skip
        from lmcache.v1.distributed.l2_adapters import create_l2_adapter

        self.name, self.checked, self.threads, self.content = name, checked, threads, content
        self.cached, self._folder, self._pool = cached, folder, pool
        folder.mkdir(parents=True, mode=0o700, exist_ok=True)
        with mock.patch.dict(os.environ, env or {}):
            self._adapter = create_l2_adapter(lmcache_config(config), pool.desc)
        self._adapter.set_backend_identity(config["type"])

    def store(self, slots: Sequence[Slot]) -> None:
        adapter = self._adapter
        with checks(self.checked or not self.name.startswith("kvstrata")):
            task = adapter.submit_store_task(object_keys(len(slots)), [slot.obj for slot in slots])
            done = self._await(adapter.get_store_event_fd(), lambda: adapter.pop_completed_store_tasks().get(task))
        if not done.is_successful():
            raise RuntimeError(f"{self.name}: the store failed")

    def load(self, slots: Sequence[Slot]) -> None:
        adapter, keys = self._adapter, object_keys(len(slots))
        task = adapter.submit_lookup_and_lock_task(keys, self._pool.layouts)
        fd = adapter.get_lookup_and_lock_event_fd()
        found = self._await(fd, lambda: adapter.query_lookup_and_lock_result(task))
        if found.popcount() != len(slots):
            raise RuntimeError(f"{self.name}: {found.popcount()} of {len(slots)} blocks found")
        with checks(self.checked or not self.name.startswith("kvstrata")):
            task = adapter.submit_load_task(keys, [slot.obj for slot in slots])
            loaded = self._await(adapter.get_load_event_fd(), lambda: adapter.query_load_result(task))
        adapter.submit_unlock(keys)
        if loaded.popcount() != len(slots):
            raise RuntimeError(f"{self.name}: {loaded.popcount()} of {len(slots)} blocks loaded")

    def files(self) -> list[Path]:
        return files_of(self._folder)

    def clear(self, count: int) -> None:
        """Delete as LMCache does; some adapters do so later, so wait for it, and help out where it never happens."""
        self._adapter.delete(object_keys(count))
        until = time.monotonic() + 5
        while (left := self.files()) and time.monotonic() < until:
            time.sleep(0.02)
        for path in left:
            path.unlink(missing_ok=True)

    def close(self) -> None:
        self._adapter.close()

    def _await(self, fd: int, ask: Callable[[], Any]) -> Any:
        poll = select.poll()
        poll.register(fd, select.POLLIN)
        until = time.monotonic() + PATIENCE_S
        while time.monotonic() < until:
            poll.poll(500)
            with suppress(BlockingIOError):
                os.eventfd_read(fd)
            if (answer := ask()) is not None:
                return answer
        raise TimeoutError(f"{self.name}: no answer in {PATIENCE_S:g} s")


def object_keys(count: int) -> list[Any]:
    from lmcache.v1.distributed.api import ObjectKey

    return [ObjectKey(chunk_hash(i), MODEL, 0x01000100) for i in range(count)]
