"""Runs inside the image: path A's client under the pinned LMCache's own native_plugin adapter and StorageManager.

What LMCache promises a request after a prefetch must be what it then has: each fault of the engine has to cut the
prefix at the prefetch, where LMCache still can, because a retrieve that fails later gives wrong text (0.5.3).
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import inside_manager
import pytest
from inside_engine import wired
from inside_manager import CHUNKS, SHAPES, Server
from l2_parts import CAPACITY, LAYOUT, content, fill, from_spec
from lmcache.v1.distributed.l2_adapters.config import get_l2_adapter_config_class
from lmcache.v1.mp_observability import event_bus
from remote_parts import Process, Wire

from kvstrata.doors import remote_touch
from kvstrata.doors.remote_wire import key_path

SPEC = {
    "type": "native_plugin", "module_path": "kvstrata.doors.l2_remote", "class_name": "KvstrataRemote",
    "adapter_params": {},
}  # fmt: skip


class Remote(Server):
    """A StorageManager whose L2 is the engine."""

    engine: Process
    wire: Wire

    def stored(self, keys: list[Any]) -> list[bool]:
        return [self.engine.call("HEAD", self.path(key))[0] == 200 for key in keys]

    @staticmethod
    def name(key: Any) -> str:
        name = f"{key.model_name}@{key.kv_rank:08x}@{key.object_group_id:x}@{key.chunk_hash.hex()}"
        return f"{name}@{key.cache_salt}" if key.cache_salt else name

    def path(self, key: Any) -> str:
        return f"/kv/{key_path(self.name(key))}"

    def put(self, keys: list[Any]) -> None:
        """Write to L1 and wait until the engine has it."""
        self.write(keys, gone=True)
        self.wait(lambda: all(self.stored(keys)), "stored")


@pytest.fixture
def serve(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Remote]]:
    config = get_l2_adapter_config_class("native_plugin").from_dict(SPEC)
    monkeypatch.setattr(inside_manager, "adapter_config", lambda **_: config)
    told: dict[str, str] = {}
    running: list[Remote] = []
    with wired(tmp_path, told) as (engine, wire):
        for name, value in told.items():
            monkeypatch.setenv(name, value)

        def make(ranks: int = 1, groups: int = 1) -> Remote:
            while running:
                running.pop().manager.close()
            made = Remote(tmp_path, ranks, groups)
            made.engine, made.wire = engine, wire
            running.append(made)
            return made

        yield make
        while running:
            running.pop().manager.close()


@pytest.mark.parametrize(("ranks", "groups"), SHAPES)
def test_what_l1_has_lost_comes_back_from_the_engine(serve: Callable[..., Remote], ranks: int, groups: int) -> None:
    server = serve(ranks, groups)
    keys = server.keys("p", salt="tenant")
    server.put(keys)
    server.drop_l1(keys)
    assert server.read(keys) == CHUNKS
    assert server.read(server.keys("p")) == 0, "another tenant"


def test_another_server_hits_what_the_first_one_stored(serve: Callable[..., Remote]) -> None:
    keys = (server := serve()).keys("p")
    server.put(keys)
    assert serve().read(keys) == CHUNKS


def replace(server: Remote, key: Any, value: bytes) -> None:
    assert server.engine.call("DELETE", server.path(key))[0] in (200, 204)
    assert server.engine.call("PUT", server.path(key), value)[0] == 201


@pytest.mark.parametrize("at", [0, CHUNKS // 2, CHUNKS - 1], ids=["first", "middle", "last"])
@pytest.mark.parametrize("damage", ["flipped", "short", "another", "garbage"])
def test_a_block_that_is_not_the_block_cuts_the_prefix_where_it_is_and_is_written_again(
    serve: Callable[..., Remote], at: int, damage: str
) -> None:
    server = serve()
    keys = server.keys("p")
    server.put(keys)
    server.drop_l1(keys)
    good = server.engine.call("GET", server.path(keys[at]))[1]
    other = server.engine.call("GET", server.path(keys[at - 1]))[1]
    bad = {
        "flipped": good[:-9] + bytes([good[-9] ^ 1]) + good[-8:], "short": good[:-1], "another": other,
        "garbage": os.urandom(len(good)),
    }  # fmt: skip
    replace(server, keys[at], bad[damage])
    assert server.read(keys) == at
    server.wait(lambda: not server.stored(keys[at : at + 1])[0], "the engine is told to drop it")
    server.put(keys)
    server.drop_l1(keys)
    assert server.read(keys) == CHUNKS


@pytest.mark.parametrize("mode", ["hang", "drip", "cut", "flip", "rubbish", "html"])
def test_a_spoilt_wire_is_no_hit_and_no_memory_is_touched_late(serve: Callable[..., Remote], mode: str) -> None:
    server = serve()
    keys = server.keys("p")
    server.put(keys)
    server.drop_l1(keys)
    server.wire.mode = mode
    assert server.read(keys, seconds=15) == 0
    began = time.monotonic()
    for number in range(16):
        assert server.read(server.keys(f"other-{number}")) == 0
    assert time.monotonic() - began < 16, "nobody waits for what is known not to answer"
    others = server.keys("others", 100)
    made = server.manager.reserve_write(others, LAYOUT, "new")
    for name, item in made.items():
        fill(item, content(repr(name), item.get_size()))
    server.wire.mode = "pass"
    time.sleep(0.5)
    assert len(made) > 50
    for name, item in made.items():
        assert bytes(item.byte_array) == content(repr(name), item.get_size())[: item.get_size()]
    fresh = server.keys("fresh")
    server.manager.finish_write(list(made))
    server.drop_l1(others)
    end = time.monotonic() + 20
    while True:  # stores fail at once until the breaker has closed
        server.write(fresh, gone=True)
        if all(server.stored(fresh)):
            break
        server.drop_l1(fresh)
        assert time.monotonic() < end
    server.drop_l1(fresh)
    assert server.read(fresh) == CHUNKS


def test_an_engine_that_ends_between_the_promise_and_the_load_is_a_cut_prefix(serve: Callable[..., Remote]) -> None:
    server = serve()
    keys = server.keys("p")
    server.put(keys)
    server.drop_l1(keys)
    server.wire.mode = "cut"  # small answers (lookups) pass, blocks are cut short: promised and not given
    assert server.read(keys) == 0
    server.wire.mode = "pass"


def test_a_prefix_that_only_l1_answers_does_not_age_in_the_engine(
    serve: Callable[..., Remote], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Traffic of twice the capacity passes; the prefix is read from L1 alone all the while, then L1 is lost."""
    monkeypatch.setattr(remote_touch.Touches.__init__, "__defaults__", (0.05,))
    bus = event_bus.init_event_bus(event_bus.EventBusConfig(enabled=True))
    bus.start()
    try:
        server = serve()
        hot = server.keys("hot")
        server.put(hot)
        passed, number = 0, 0
        while passed < 2 * CAPACITY:
            other = server.keys(f"cold-{number}", 60)
            server.write(other, gone=True)
            server.drop_l1(other)
            server.manager.touch_l1_keys(hot)
            time.sleep(0.1)
            passed, number = passed + len(other) * 196608, number + 1
        assert not any(server.stored(server.keys("cold-0"))), "others were evicted"
        server.drop_l1(hot)
        assert server.read(hot) == CHUNKS
    finally:
        bus.stop()
        event_bus.init_event_bus(event_bus.EventBusConfig(enabled=False))


def test_lmcache_is_told_to_delete_and_the_engine_has_it_no_more(serve: Callable[..., Remote]) -> None:
    server = serve()
    keys = server.keys("p")
    server.put(keys)
    server.manager.l2_adapters()[0][1].delete(keys[:2])
    assert server.stored(keys) == [False, False] + [True] * (CHUNKS - 2)


def test_parameters_are_refused_for_lmcache_prints_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KV_REMOTE_URL", "http://127.0.0.1:1")
    with pytest.raises(ValueError, match="needed: none"):
        from_spec({**SPEC, "adapter_params": {"token": "x"}})


assert os.environ.get("KVSTRATA_UNGUARDED") is None, "as in the server: with the guard of L1"
