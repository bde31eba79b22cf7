"""Beside plain loads and stores: LMCache's real controllers, and what written pages do to the page cache."""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any
from unittest import mock

from kvstrata.proof.store_bench_parts import Slot, equal, files_of, slot_of, wipe

__all__ = ["page_cache", "prefetch"]

_PATIENCE_S = 120.0
_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.sync_file_range.argtypes = (ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint)
_WRITE, _ALL = 2, 7  # SYNC_FILE_RANGE_WRITE; _WAIT_BEFORE | _WRITE | _WAIT_AFTER
_WINDOW = 8 << 20


def prefetch(
    name: str, config: dict[str, Any], folder: Path, env: dict[str, str], size: int, count: int, repeats: int
) -> dict[str, Any]:
    """Store by LMCache's StoreController, drop from L1, load by its PrefetchController; every block compared.

    GB/s from the call that starts it to the answer, controllers and all.
    """
    from lmcache.v1.distributed.api import ObjectKey, PrefetchRequestSpec
    from lmcache.v1.distributed.config import (
        EvictionConfig,
        L1ManagerConfig,
        L1MemoryManagerConfig,
        StorageManagerConfig,
    )
    from lmcache.v1.distributed.l2_adapters.config import L2AdaptersConfig
    from lmcache.v1.distributed.storage_manager import StorageManager

    from kvstrata.proof.store_bench_lmcache import lmcache_config, lmcache_layout
    from kvstrata.proof.store_bench_parts import chunk_hash

    folder.mkdir(parents=True, mode=0o700)
    layout, total = lmcache_layout(size), size * count
    with mock.patch.dict(os.environ, env):
        manager = StorageManager(
            StorageManagerConfig(
                L1ManagerConfig(L1MemoryManagerConfig(size_in_bytes=2 * total + (64 << 20), use_lazy=False)),
                EvictionConfig("noop"), L2AdaptersConfig([lmcache_config(config)]),
            )
        )  # fmt: skip
    store_s, load_s = [], []
    try:
        noise = os.urandom(size)
        for turn in range(repeats):
            keys = [ObjectKey(chunk_hash(turn * count + i), "bench--kvstrata", 0x01000100) for i in range(count)]
            objects = manager.reserve_write(keys, layout, "new")
            for index, key in enumerate(keys):
                view = memoryview(objects[key].byte_array).cast("B")
                view[:] = noise
                view[:8] = index.to_bytes(8, "little")
            began = time.perf_counter()
            manager.finish_write(keys)
            _wait(lambda: len(files_of(folder)) >= (turn + 1) * count, f"{name}: the store does not end")  # noqa: B023
            store_s.append(time.perf_counter() - began)
            _wait(lambda: manager.delete_l1_keys(keys)[1] == 0, f"{name}: L1 keeps its locks")  # noqa: B023
            began = time.perf_counter()
            handle = manager.submit_prefetch_task(PrefetchRequestSpec(keys=keys, group_layout_descs={0: layout}))
            manager.wait_prefetch_status(handle, _PATIENCE_S)
            found = manager.query_prefetch_status(handle)
            load_s.append(time.perf_counter() - began)
            if found is None or found.popcount() != count:
                raise RuntimeError(f"{name}: {found and found.popcount()} of {count} blocks through the controllers")
            _compare(manager, keys, noise, name)
            manager.finish_read_prefetched(keys)
            manager.delete_l1_keys(keys, force=True)
    finally:
        manager.close()
    return {
        "name": name, "block_mib": size >> 20, "blocks": count,
        "store_gbps": round(total / 1e9 / median(store_s), 3), "load_gbps": round(total / 1e9 / median(load_s), 3),
    }  # fmt: skip


def _compare(manager: Any, keys: Sequence[Any], noise: bytes, name: str) -> None:
    wanted = bytearray(noise)
    with manager.read_prefetched_results(keys) as objects:
        for index, obj in enumerate(objects):
            wanted[:8] = index.to_bytes(8, "little")
            if not equal(slot_of(memoryview(obj.byte_array).cast("B")), slot_of(memoryview(wanted))):
                raise RuntimeError(f"{name}: block {index} came back changed")


def _wait(done: Any, message: str) -> None:
    until = time.monotonic() + _PATIENCE_S
    while not done():
        if time.monotonic() > until:
            raise TimeoutError(message)
        time.sleep(0.001)


def page_cache(folder: Path, slots: Sequence[Slot], victim_bytes: int, turns: int) -> list[dict[str, Any]]:
    """Write blocks and leave their pages, or push them out (sync_file_range, DONTNEED): what each costs and spares.

    `victim_resident`: the share of another file, read before, that is still in the page cache at the end.
    """
    folder.mkdir(parents=True)
    victim = folder / "victim"
    victim.write_bytes(os.urandom(1 << 20) * (victim_bytes >> 20))
    return [_pages(folder, slots, victim, turns, drop) for drop in (False, True)]


def _pages(folder: Path, slots: Sequence[Slot], victim: Path, turns: int, drop: bool) -> dict[str, Any]:
    with victim.open("rb", buffering=0) as file:
        while file.read(1 << 20):
            pass
    write_s, read_s = [], []
    total = sum(len(slot.view) for slot in slots)
    written: list[Path] = []
    for turn in range(turns):
        paths = [folder / f"{'drop' if drop else 'keep'}-{turn}-{i}" for i in range(len(slots))]
        began = time.perf_counter()
        for path, slot in zip(paths, slots, strict=True):
            _write(path, slot, drop)
        write_s.append(time.perf_counter() - began)
        written += paths
    wipe(slots)
    began = time.perf_counter()
    for path, slot in zip(paths, slots, strict=True):
        with path.open("rb", buffering=0) as file:
            done = 0
            while done < len(slot.view):
                done += file.readinto(slot.view[done:])
    read_s.append(time.perf_counter() - began)
    resident = _resident(victim)
    for path in written:
        path.unlink()
    return {
        "mode": "drop" if drop else "keep", "written_gb": round(total * turns / 1e9, 3),
        "store_gbps": round(total / 1e9 / median(write_s), 3),
        "load_after_gbps": round(total / 1e9 / median(read_s), 3),
        "victim_resident": round(resident, 3),
    }  # fmt: skip


def _write(path: Path, slot: Slot, drop: bool) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        done = 0
        while done < len(slot.view):
            more = os.pwrite(fd, slot.view[done : done + _WINDOW], done)
            if drop:  # start this window, wait for the one before it, then let that one go
                _LIBC.sync_file_range(fd, done, more, _WRITE)
                if done:
                    _LIBC.sync_file_range(fd, done - _WINDOW, _WINDOW, _ALL)
                    os.posix_fadvise(fd, done - _WINDOW, _WINDOW, os.POSIX_FADV_DONTNEED)
            done += more
        if drop:
            _LIBC.sync_file_range(fd, 0, 0, _ALL)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(fd)


def _resident(path: Path) -> float:
    """Share of the file's pages that can be read at once."""
    size, step, found = path.stat().st_size, 1 << 20, 0
    page = bytearray(4096)
    fd = os.open(path, os.O_RDONLY)
    try:
        for at in range(0, size, step):
            try:
                found += os.preadv(fd, [page], at, os.RWF_NOWAIT) > 0
            except OSError:
                continue
    finally:
        os.close(fd)
    return found / max(1, -(-size // step))
