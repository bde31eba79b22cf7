"""Runs inside the image: the in-process backend as the pinned LMCache makes it, over a real engine."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from inside_engine import wired
from lmcache.utils import CacheEngineKey, LayerCacheEngineKey
from lmcache.v1.config import LMCacheEngineConfig
from lmcache.v1.memory_management import MemoryFormat, MemoryObj
from lmcache.v1.metadata import LMCacheMetadata
from lmcache.v1.storage_backend import CreateStorageBackends
from remote_parts import Process, Wire

from kvstrata.doors.v1_backend import KvstrataV1Backend, key_text

SHAPE = torch.Size([2, 3, 64, 128])


@dataclass
class Stand:
    """Backends as LMCache's StorageManager has them."""

    cpu: Any
    backend: KvstrataV1Backend
    engine: Process
    wire: Wire
    loop: asyncio.AbstractEventLoop

    def item(self, seed: int, shape: torch.Size = SHAPE, dtype: torch.dtype = torch.float32) -> MemoryObj:
        made = self.cpu.allocate(shape, dtype, MemoryFormat.KV_2LTD)
        assert made is not None
        view = memoryview(made.byte_array).cast("B")
        view[:] = (bytes([seed, 7, 255 - seed]) * (len(view) // 3 + 1))[: len(view)]
        return made

    def put(self, *keys: CacheEngineKey) -> None:
        items = [self.item(number) for number in range(len(keys))]
        for future in self.backend.batched_submit_put_task(keys, items):
            assert all(future.result(20))
        for item in items:
            assert item.get_ref_count() == 1, "let go of after the store"
            item.ref_count_down()


def key(number: int, *, dtype: torch.dtype = torch.float32, **tags: str) -> CacheEngineKey:
    configs = {f"lmcache.tag.{name}": value for name, value in tags.items()}
    return CacheEngineKey("org/tiny", 2, 1, 1000 + number, dtype, configs)


@pytest.fixture(scope="module")
def stand(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stand]:
    folder = tmp_path_factory.mktemp("v1")
    told: dict[str, str] = {}
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, daemon=True).start()
    config = LMCacheEngineConfig.from_defaults(
        chunk_size=64, local_cpu=True, max_local_cpu_size=0.1, storage_plugins=["kvstrata"],
        extra_config={
            "storage_plugin.kvstrata.module_path": "kvstrata.doors.v1_backend",
            "storage_plugin.kvstrata.class_name": "KvstrataV1Backend",
        },
    )  # fmt: skip
    metadata = LMCacheMetadata("org/tiny", 1, 1, 0, 0, torch.float32, (3, 2, 64, 1, 128), role="worker")
    with wired(folder, told) as (engine, wire), pytest.MonkeyPatch.context() as patch:
        for name, value in told.items():
            patch.setenv(name, value)
        made = CreateStorageBackends(config, metadata, loop, dst_device="cpu")
        assert isinstance(made["kvstrata"], KvstrataV1Backend)
        yield Stand(made["LocalCPUBackend"], made["kvstrata"], engine, wire, loop)
        made["kvstrata"].close()
    loop.call_soon_threadsafe(loop.stop)


def same(stand: Stand, found: MemoryObj | None, seed: int) -> bool:
    wanted = stand.item(seed)
    assert found is not None and found.get_shape() == SHAPE and found.get_dtype() == torch.float32
    equal = bytes(found.byte_array) == bytes(wanted.byte_array)
    found.ref_count_down()
    wanted.ref_count_down()
    return equal


def test_what_was_stored_comes_back_in_its_shape(stand: Stand) -> None:
    keys = [key(number) for number in range(4)]
    assert stand.backend.batched_contains(keys) == 0 and stand.backend.get_blocking(keys[0]) is None
    stand.put(*keys[:3])
    assert stand.backend.batched_contains(keys) == 3 and stand.backend.contains(keys[2])
    found = stand.backend.batched_get_blocking(keys)
    assert found[3] is None
    assert all(same(stand, item, seed) for seed, item in enumerate(found[:3]))
    assert not stand.backend.exists_in_put_tasks(keys[0])


def test_a_prefix_is_counted_up_to_the_first_that_lacks(stand: Stand) -> None:
    keys = [key(100 + number) for number in range(4)]
    stand.put(keys[0], keys[2])
    assert stand.backend.batched_contains(keys) == 1
    coroutine = stand.backend.batched_get_non_blocking("id", keys)
    items = asyncio.run_coroutine_threadsafe(coroutine, stand.loop).result(20)
    assert len(items) == 1
    items[0].ref_count_down()


def test_keys_that_differ_in_any_part_are_different_keys(stand: Stand) -> None:
    base = key(200)
    others = [
        key(201), key(200, dtype=torch.bfloat16), key(200, user="a"), key(200, user="a@b"), key(200, user="a", b=""),
        CacheEngineKey("org", 2, 1, 1200, torch.float32), CacheEngineKey("org/tiny", 1, 1, 1200, torch.float32),
        LayerCacheEngineKey("org/tiny", 2, 1, 1200, torch.float32, layer_id=0),
        LayerCacheEngineKey("org/tiny", 2, 1, 1200, torch.float32, layer_id=1),
    ]  # fmt: skip
    assert len({key_text(one) for one in (base, *others)}) == len(others) + 1
    stand.put(base)
    assert [stand.backend.contains(one) for one in others] == [False] * len(others)


def test_removed_is_gone(stand: Stand) -> None:
    stand.put(key(300))
    assert stand.backend.remove(key(300)) and not stand.backend.contains(key(300))


@pytest.mark.parametrize("mode", ["hang", "cut", "flip", "rubbish"])
def test_each_fault_is_a_miss_and_leaks_no_memory(stand: Stand, mode: str) -> None:
    keys = [key(400 + number, mode=mode) for number in range(3)]
    stand.put(*keys)
    before = stand.cpu.get_memory_allocator().memcheck()
    stand.wire.mode = mode
    began = time.monotonic()
    assert stand.backend.batched_get_blocking(keys) == [None] * 3
    assert time.monotonic() - began < 10
    stand.wire.mode = "pass"
    assert stand.cpu.get_memory_allocator().memcheck() == before
    end = time.monotonic() + 20
    while not stand.backend.contains(key(0)):
        assert time.monotonic() < end, "the engine is asked again"
        time.sleep(0.1)
