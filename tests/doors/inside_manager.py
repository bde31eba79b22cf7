"""Runs inside the image (test_in_image.py): the adapter under the pinned LMCache's own StorageManager.

Blocks are written to L1, stored by the StoreController, dropped from L1 and prefetched by the PrefetchController, as in
a server that has lost its RAM; a damaged or unreadable block must cut the prefix exactly where it is.

The L1 guard is installed as in the real server. `KVSTRATA_UNGUARDED=1` runs the same without it: LMCache then hands the
buffer of a failed load to its StoreController, and what was in it lies on disk as that block, checksum and all.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from l2_parts import LAYOUT, SMALLER, Memory, content, fill, from_spec, key, on_disk, plugin_spec, store_env
from lmcache.v1.distributed.api import AttnWindowDesc, MemoryLayoutDesc, ObjectKey, PrefetchRequestSpec
from lmcache.v1.distributed.config import (
    EvictionConfig,
    L1ManagerConfig,
    L1MemoryManagerConfig,
    StorageManagerConfig,
)
from lmcache.v1.distributed.l2_adapters.config import L2AdapterConfigBase, L2AdaptersConfig, get_l2_adapter_config_class
from lmcache.v1.distributed.storage_manager import StorageManager
from lmcache.v1.mp_observability import event_bus

from kvstrata.connector import l1_guard
from kvstrata.doors.l2_keys import block_key

if not os.environ.get("KVSTRATA_UNGUARDED"):
    l1_guard.install()

CHUNKS = 6
GROUP_LAYOUTS = {0: LAYOUT, 1: SMALLER}


def adapter_config(**more: Any) -> L2AdapterConfigBase:
    config = get_l2_adapter_config_class("plugin").from_dict(plugin_spec())
    for name, value in more.items():
        setattr(config, name, value)
    return config


class Server:
    """A StorageManager over one store folder, with `ranks` workers and `groups` object groups."""

    def __init__(self, root: Path, ranks: int = 1, groups: int = 1, **more: Any) -> None:
        self.root, self.ranks, self.groups = root, ranks, groups
        memory = L1MemoryManagerConfig(size_in_bytes=32 << 20, use_lazy=False, shm_name="")
        self.manager = StorageManager(
            StorageManagerConfig(
                L1ManagerConfig(memory), EvictionConfig("LRU"), L2AdaptersConfig([adapter_config(**more)]),
                prefetch_policy="retain",
            )
        )  # fmt: skip

    def keys(self, prompt: str, chunks: int = CHUNKS, salt: str = "") -> list[ObjectKey]:
        """In LMCache's order: chunk by chunk, each with its groups, each with its ranks."""
        return [
            key(
                f"{prompt}-{chunk}", group=group, rank=self.ranks << 24 | rank << 16 | self.ranks << 8 | rank, salt=salt
            )
            for chunk in range(chunks)
            for group in range(self.groups)
            for rank in range(self.ranks)
        ]

    @property
    def layouts(self) -> dict[int, MemoryLayoutDesc]:
        return {group: GROUP_LAYOUTS[group] for group in range(self.groups)}

    def write(self, keys: list[ObjectKey], *, gone: bool = False) -> None:
        """Compute and store what L1 lacks, as the real server does. `gone`: it may be evicted from disk again."""
        for group in range(self.groups):
            mine = [k for k in keys if k.object_group_id == group]
            made = self.manager.reserve_write(mine, self.layouts[group], "new")
            for name, item in made.items():
                fill(item, content(repr(name), item.get_size()))
            self.manager.finish_write(list(made))
        controller = ("pending_keys_count", "in_flight_task_count")
        self.wait(lambda: gone or all(self.file(k).exists() for k in keys), "stored")
        self.wait(lambda: not any(self.status("store_controller")[name] for name in controller), "stores reported")

    def drop_l1(self, keys: list[ObjectKey]) -> None:
        self.manager.delete_l1_keys(keys, force=True)

    def read(self, keys: list[ObjectKey], seconds: float = 20) -> int:
        """Chunks that a request over `keys` gets; each byte of them is compared."""
        spec = PrefetchRequestSpec(
            keys, self.layouts, extra_count=0,
            attn_desc=AttnWindowDesc([-1] * self.groups, world_size=self.ranks),
        )  # fmt: skip
        handle = self.manager.submit_prefetch_task(spec)
        assert self.manager.wait_prefetch_status(handle, seconds), f"not answered within {seconds} s"
        found = self.manager.query_prefetch_status(handle)
        assert found is not None
        there = found.gather(keys)
        assert there == keys[: len(there)], "a prefix"
        with self.manager.read_prefetched_results(there) as items:
            assert items is not None
            for name, item in zip(there, items, strict=True):
                assert bytes(item.byte_array) == content(repr(name), item.get_size())[: item.get_size()]
        self.manager.finish_read_prefetched(there)
        chunks, rest = divmod(len(there), self.ranks * self.groups)
        assert rest == 0
        return chunks

    def file(self, name: ObjectKey) -> Path:
        return self.root / block_key(name).path

    def status(self, part: str) -> dict[str, Any]:
        return dict(self.manager.report_status()[part])

    @property
    def store(self) -> dict[str, Any]:
        return dict(self.manager.report_status()["l2_adapters"][0])

    def wait(self, check: Callable[[], bool], what: str, seconds: float = 20) -> None:
        end = time.monotonic() + seconds
        while not check():
            assert time.monotonic() < end, f"not within {seconds} s: {what}"
            time.sleep(0.01)


@pytest.fixture
def serve(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Server]]:
    """Makes servers over one folder; `env` goes to the store. A new one replaces the one before, as a restart does."""
    running: list[Server] = []

    def make(ranks: int = 1, groups: int = 1, env: dict[str, str] | None = None, **more: Any) -> Server:
        for name, value in store_env(tmp_path / "store", **(env or {})).items():
            monkeypatch.setenv(name, value)
        while running:
            running.pop().manager.close()
        running.append(Server(tmp_path / "store", ranks, groups, **more))
        return running[0]

    yield make
    while running:
        running.pop().manager.close()


SHAPES = [(1, 1), (2, 1), (4, 1), (1, 2), (2, 2)]


@pytest.mark.parametrize(("ranks", "groups"), SHAPES)
def test_what_l1_has_lost_comes_back_from_disk(serve: Callable[..., Server], ranks: int, groups: int) -> None:
    server = serve(ranks, groups)
    keys = server.keys("p")
    server.write(keys)
    server.drop_l1(keys)
    assert server.read(keys) == CHUNKS
    assert server.store["locks"] == 0, "each lookup was unlocked"


@pytest.mark.parametrize(("ranks", "groups"), SHAPES)
def test_a_restarted_server_has_it_all_and_counts_it_from_the_first_second(
    serve: Callable[..., Server], ranks: int, groups: int
) -> None:
    server = serve(ranks, groups)
    keys = server.keys("p", salt="tenant")
    server.write(keys)
    before = server.manager.get_usage_bytes_by_cache_salt()
    server = serve(ranks, groups)
    assert server.manager.get_usage_bytes_by_cache_salt() == before
    assert server.manager.get_l2_usages()[0][0] >= before["tenant"] > 0
    assert server.read(keys) == CHUNKS
    assert server.read(server.keys("p")) == 0, "another tenant"


def random_bytes(path: Path) -> None:
    path.write_bytes(os.urandom(path.stat().st_size))


def flip_payload(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(4096 + 1000)
        byte = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte[0] ^ 1]))


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def another_block(path: Path) -> None:
    other = next(p for p in path.parent.parent.rglob("*.*.*") if p != path and p.stat().st_size == path.stat().st_size)
    path.write_bytes(other.read_bytes())


@pytest.mark.parametrize("damage", [random_bytes, flip_payload, truncate, another_block])
@pytest.mark.parametrize("at", [0, CHUNKS // 2, CHUNKS - 1], ids=["first", "middle", "last"])
@pytest.mark.parametrize(("ranks", "groups"), [(1, 1), (2, 2)])
def test_a_damaged_block_cuts_the_prefix_where_it_is_and_is_written_again(
    serve: Callable[..., Server], ranks: int, groups: int, at: int, damage: Callable[[Path], None]
) -> None:
    server = serve(ranks, groups)
    keys = server.keys("p")
    server.write(keys)
    server.drop_l1(keys)
    bad = keys[at * ranks * groups + ranks * groups - 1]
    damage(server.file(bad))
    assert server.read(keys) == at
    assert server.store["corrupt"] == 1
    server.wait(lambda: not server.file(bad).exists(), "the damaged block is removed")
    server.write(keys)
    server.drop_l1(keys)
    assert server.read(keys) == CHUNKS
    assert server.store["corrupt"] == 1


def test_a_missing_file_cuts_the_prefix_as_well(serve: Callable[..., Server]) -> None:
    server = serve()
    keys = server.keys("p")
    server.write(keys)
    server.drop_l1(keys)
    server.file(keys[2]).unlink()
    assert server.read(keys) == 2


@contextmanager
def hanging_disk() -> Iterator[None]:
    """Whatever reads below /cache/t waits until the end, and nothing of it is in the page cache (store/faults.c)."""

    def reads(fault: str) -> None:
        with Path(os.environ["KV_FAULTS"]).open("r+") as file:
            file.write(fault)

    reads("s")
    try:
        yield
    finally:
        reads(".")


def test_a_disk_that_hangs_is_a_miss_within_the_deadline_and_touches_no_memory_after_it(
    serve: Callable[..., Server],
) -> None:
    server = serve(env={"KV_STORE_LOAD_DEADLINE": "1"})
    keys = server.keys("p")
    server.write(keys)
    server.drop_l1(keys)
    with hanging_disk():
        assert server.read(keys, seconds=10) == 0
        assert server.store["suspect"] and not server.store["is_healthy"]
        # From now on nobody waits: eight requests in flight would be all that LMCache takes.
        began = time.monotonic()
        for number in range(16):
            assert server.read(server.keys(f"other-{number}")) == 0
        assert server.read(keys) == 0
        assert time.monotonic() - began < 1.0 * 16
        # L1 gives the same memory to others; the late reads must not reach it.
        others = server.keys("others", 100)
        made = server.manager.reserve_write(others, LAYOUT, "new")
        for name, item in made.items():
            fill(item, content(repr(name), item.get_size()))
        assert server.store["suspect"], "a read still hangs"
    server.wait(lambda: not server.store["suspect"], "late reads are back, the disk is trusted again")
    assert len(made) > 50
    for name, item in made.items():
        assert bytes(item.byte_array) == content(repr(name), item.get_size())[: item.get_size()]
    server.drop_l1(others)
    assert server.read(keys) == CHUNKS


def test_a_lookup_that_is_never_unlocked_ends_by_itself(
    serve: Callable[..., Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    from kvstrata.doors import l2_plugin

    monkeypatch.setattr(l2_plugin, "_PIN_TTL_S", 0.2)
    server = serve()
    keys = server.keys("p")
    server.write(keys)
    adapter = server.manager.l2_adapters()[0][1]
    task = adapter.submit_lookup_and_lock_task(keys, server.layouts)
    assert adapter.query_lookup_and_lock_result(task).popcount() == CHUNKS
    adapter.delete(keys)
    assert server.store["blocks"] == CHUNKS and server.store["locks"] == CHUNKS
    time.sleep(0.4)
    adapter.query_lookup_and_lock_result(adapter.submit_lookup_and_lock_task([], server.layouts))
    assert server.store["locks"] == 0
    adapter.delete(keys)
    assert server.store["blocks"] == 0


def test_a_prefix_that_only_l1_answers_does_not_age_on_disk(serve: Callable[..., Server]) -> None:
    """Traffic of three times the cap passes; the prefix is read from L1 alone all the while, then L1 is lost."""
    bus = event_bus.init_event_bus(event_bus.EventBusConfig(enabled=True))
    bus.start()
    cap = 24 << 20
    try:
        server = serve(env={"KV_STORE_CAPACITY_BYTES": str(cap)})
        hot = server.keys("hot")
        server.write(hot)
        passed, number = 0, 0
        while passed < 3 * cap:
            other = server.keys(f"cold-{number}", 8)
            server.write(other, gone=True)
            server.drop_l1(other)
            server.manager.touch_l1_keys(hot)
            passed, number = passed + len(other) * (196608 + 4096), number + 1
            assert on_disk(server.root) <= cap
        assert server.store["evictions"] > 0
        server.drop_l1(hot)
        assert server.read(hot) == CHUNKS
        server = serve(env={"KV_STORE_CAPACITY_BYTES": str(cap)})
        assert server.read(hot) == CHUNKS
    finally:
        bus.stop()
        event_bus.init_event_bus(event_bus.EventBusConfig(enabled=False))


def test_an_eviction_block_for_lmcache_is_refused(serve: Callable[..., Server]) -> None:
    """IsolatedLRU deletes each announced block of a tenant without a quota: all of them, a second after the start."""
    with pytest.raises(ValueError, match="eviction"):
        serve(eviction_config=EvictionConfig("IsolatedLRU"))


@pytest.mark.parametrize("params", [{"eviction": {}}, {"root": "/x"}])
def test_parameters_are_refused_for_lmcache_prints_them(
    params: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in store_env(tmp_path / "store").items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match="needed: none"):
        from_spec({**plugin_spec(), "adapter_params": params})


def test_evicted_and_damaged_blocks_are_announced_as_deleted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from l2_parts import Driver, Heard

    for name, value in store_env(tmp_path / "store", KV_STORE_CAPACITY_BYTES=str(9 << 20)).items():
        monkeypatch.setenv(name, value)
    memory, heard = Memory(), Heard()
    driver = Driver(from_spec(plugin_spec()), memory)
    driver.adapter.register_listener(heard)
    keys = [driver.put(number)[0] for number in range(80)]

    def listed() -> set[ObjectKey]:
        return {entry.key.to_object_key() for entry in driver.adapter.list_l2_keys().entries}

    end = time.monotonic() + 10
    while set(heard.deleted) | (there := listed()) != set(keys) and time.monotonic() < end:
        time.sleep(0.01)
    assert heard.deleted and set(heard.deleted) | there == set(keys) and not set(heard.deleted) & there
    bad = next(iter(there))
    flip_payload(tmp_path / "store" / block_key(bad).path)
    assert driver.get([bad]) == [False]
    assert heard.deleted[-1] == bad
    driver.adapter.close()
    memory.close()
