"""Real L1 memory, keys and adapters of LMCache, as the tests of this folder use them. Runs where lmcache is."""

from __future__ import annotations

import contextlib
import hashlib
import os
import select
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from lmcache.native_storage_ops import Bitmap
from lmcache.v1.distributed.api import MemoryLayoutDesc, ObjectKey
from lmcache.v1.distributed.config import L1ManagerConfig, L1MemoryManagerConfig
from lmcache.v1.distributed.internal_api import L2AdapterListener
from lmcache.v1.distributed.l1_manager import L1Manager
from lmcache.v1.distributed.l2_adapters import create_l2_adapter
from lmcache.v1.distributed.l2_adapters.base import L2AdapterInterface
from lmcache.v1.distributed.l2_adapters.config import get_l2_adapter_config_class
from lmcache.v1.memory_management import MemoryObj

ANSWER_S = 20.0
CAPACITY = 256 << 20
#: 2 x layers x tokens x width: 192 KiB in float32, and another size for a second object group.
LAYOUT = MemoryLayoutDesc(shapes=[torch.Size([2, 3, 64, 128])], dtypes=[torch.float32])
SMALLER = MemoryLayoutDesc(shapes=[torch.Size([2, 1, 64, 128])], dtypes=[torch.bfloat16])
LARGER = MemoryLayoutDesc(shapes=[torch.Size([2, 4, 64, 128])], dtypes=[torch.float32])
LAYOUTS = {0: LAYOUT}


def store_env(root: Path, **more: str) -> dict[str, str]:
    env = {"KV_STORE_ROOT": str(root), "KV_STORE_CAPACITY_BYTES": str(CAPACITY), "KV_STORE_FREE_FLOOR_GB": "0"}
    return {**env, "KV_CACHE_ALLOW_FS": "tmpfs overlay", "KV_STORE_LOAD_DEADLINE": "5", **more}


def plugin_spec() -> dict[str, Any]:
    """The JSON that launch/lmcache.py gives to the server."""
    return {
        "type": "plugin", "module_path": "kvstrata.doors.l2_plugin", "class_name": "KvstrataL2Adapter",
        "adapter_params": {},
    }  # fmt: skip


def from_spec(spec: dict[str, Any]) -> L2AdapterInterface:
    """As the server makes one: config class, then factory."""
    return create_l2_adapter(get_l2_adapter_config_class(spec["type"]).from_dict(spec), None)


def make(kind: str, folder: Path, monkeypatch: Any) -> L2AdapterInterface:
    """An adapter of `kind` over `folder`."""
    fs = {"type": "fs", "base_path": str(folder / "fs")}
    if kind == "kvstrata":
        for name, value in store_env(folder / "store").items():
            monkeypatch.setenv(name, value)
        return from_spec(plugin_spec())
    if kind == "mock":
        return from_spec({"type": "mock", "max_size_gb": 0.25, "mock_bandwidth_gb": 100})
    return from_spec(fs if kind == "fs" else {"type": "fault_inject", "inner": fs})


def key(name: object, *, model: str = "tiny--0", rank: int = 0, group: int = 0, salt: str = "") -> ObjectKey:
    return ObjectKey(hashlib.sha256(str(name).encode()).digest(), model, rank, group, salt)


class Memory:
    """L1 memory of the real manager: objects that are filled with bytes that their name gives."""

    def __init__(self, size: int = 64 << 20) -> None:
        memory = L1MemoryManagerConfig(size_in_bytes=size, use_lazy=False, shm_name="")
        self.l1 = L1Manager(L1ManagerConfig(memory))
        self._count = 0

    def objects(self, count: int, layout: MemoryLayoutDesc = LAYOUT) -> list[MemoryObj]:
        """Fresh buffers, zeroed."""
        self._count += count
        names = [key(f"l1-{self._count}-{i}") for i in range(count)]
        reserved = self.l1.reserve_write(names, [False] * count, layout, "new")
        found = [reserved[name][1] for name in names]
        for item in found:
            fill(item, bytes(item.get_size()))
        return found

    def filled(self, names: Sequence[object], layout: MemoryLayoutDesc = LAYOUT) -> list[MemoryObj]:
        made = self.objects(len(names), layout)
        for item, name in zip(made, names, strict=True):
            fill(item, content(name, item.get_size()))
        return made

    def free(self) -> None:
        self.l1.clear(force=True)

    def close(self) -> None:
        self.l1.close()


def content(name: object, size: int) -> bytes:
    """The bytes of the block called `name`."""
    return hashlib.shake_128(str(name).encode()).digest(4096) * (size // 4096 + 1)


def on_disk(folder: Path) -> int:
    """Bytes of all files below `folder`, while others make and remove them."""
    total = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                total += Path(parent, name).stat().st_blocks * 512
    return total


def fill(item: MemoryObj, data: bytes) -> None:
    view = memoryview(item.byte_array).cast("B")
    view[:] = data[: len(view)]


def holds(item: MemoryObj, name: object) -> bool:
    return bytes(item.byte_array) == content(name, item.get_size())[: item.get_size()]


def bits(bitmap: Bitmap, count: int) -> list[bool]:
    found = set(bitmap.get_indices_list())
    return [i in found for i in range(count)]


def signalled(descriptor: int, seconds: float) -> bool:
    """Wait for the descriptor as LMCache's controllers do, and consume the signal."""
    poller = select.poll()
    poller.register(descriptor, select.POLLIN)
    if not poller.poll(seconds * 1000):
        return False
    os.eventfd_read(descriptor)
    return True


def until(look: Callable[[], Any], descriptor: int, what: str) -> Any:
    """What `look` gives after a signal: as the controllers do it, so that a result without a signal is not found."""
    end = time.monotonic() + ANSWER_S
    while signalled(descriptor, max(0.0, end - time.monotonic())):
        if (found := look()) not in (None, {}):
            return found
    raise AssertionError(f"{what}: not answered within {ANSWER_S:g} s")


class Driver:
    """One adapter, driven as the two controllers drive it."""

    def __init__(self, adapter: L2AdapterInterface, memory: Memory) -> None:
        self.adapter, self.memory = adapter, memory

    def store(self, keys: list[ObjectKey], objects: list[MemoryObj]) -> Any:
        task = self.adapter.submit_store_task(keys, objects)
        done = until(self.adapter.pop_completed_store_tasks, self.adapter.get_store_event_fd(), "store")
        assert set(done) == {task}
        return done[task]

    def put(self, *names: object, layout: MemoryLayoutDesc = LAYOUT, **fields: Any) -> list[ObjectKey]:
        """Store one block a name; its content goes by name and fields."""
        keys = [key(name, **fields) for name in names]
        assert self.store(keys, self.memory.filled([*map(repr, keys)], layout)).is_successful()
        return keys

    def lookup(self, keys: list[ObjectKey]) -> list[bool]:
        task = self.adapter.submit_lookup_and_lock_task(keys, LAYOUTS)
        descriptor = self.adapter.get_lookup_and_lock_event_fd()
        found = until(lambda: self.adapter.query_lookup_and_lock_result(task), descriptor, "lookup")
        return bits(found, len(keys))

    def load(self, keys: list[ObjectKey], objects: list[MemoryObj]) -> list[bool]:
        task = self.adapter.submit_load_task(keys, objects)
        descriptor = self.adapter.get_load_event_fd()
        found = until(lambda: self.adapter.query_load_result(task), descriptor, "load")
        return bits(found, len(keys))

    def get(self, keys: list[ObjectKey], layout: MemoryLayoutDesc = LAYOUT) -> list[bool]:
        """Load into fresh buffers. A set bit must mean the very bytes that were stored under that key."""
        objects = self.memory.objects(len(keys), layout)
        loaded = self.load(keys, objects)
        for item, name, there in zip(objects, keys, loaded, strict=True):
            assert not there or holds(item, repr(name)), f"other bytes than those of {name}"
        return loaded


class Heard(L2AdapterListener):
    """A listener that remembers."""

    def __init__(self) -> None:
        self.stored: dict[ObjectKey, int] = {}
        self.accessed: list[ObjectKey] = []
        self.deleted: list[ObjectKey] = []

    def on_l2_keys_stored(self, keys: list[ObjectKey], sizes: list[int]) -> None:
        self.stored |= dict(zip(keys, sizes, strict=True))

    def on_l2_keys_accessed(self, keys: list[ObjectKey]) -> None:
        self.accessed += keys

    def on_l2_keys_deleted(self, keys: list[ObjectKey]) -> None:
        self.deleted += keys
