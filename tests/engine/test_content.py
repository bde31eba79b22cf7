"""Values under keys: first writer wins, one content once on the disk, exact statistics, promises, ends."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
from blake3 import blake3

from kvstrata.engine.content import Engine
from kvstrata.engine.errors import Absent, Corrupt, Full, Refused, StaleVersion, TooLarge
from tests.engine.engines import MIB, Opener, block_files, data, disk_bytes, get, reopening, settings, until
from tests.sockets import received


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[Opener]:
    """Open the engine below tmp_path, closing one that is open."""

    def start(**more: object) -> Engine:
        return Engine.open(settings(tmp_path / "engine", **more))  # type: ignore[arg-type]

    with reopening(start) as open_it:
        yield open_it


def blocks(root: Path) -> list[Path]:
    """The block files of the engine's warm disk."""
    return block_files(root / "engine/blocks")


def put(engine: Engine, key: bytes, value: bytes, tenant: str = "a", **more: object) -> bool:
    """True if it was new."""
    return engine.put(tenant, key, memoryview(value), **more).new  # type: ignore[arg-type]


def test_the_first_value_of_a_key_stays(opened: Opener) -> None:
    engine = opened()
    assert put(engine, b"k", b"one")
    assert not put(engine, b"k", b"two")
    assert get(engine, b"k") == b"one"
    assert engine.stats("a")["dedup_hits"] == 1


def test_replace_takes_the_new_value_and_frees_the_old_one(opened: Opener, tmp_path: Path) -> None:
    engine = opened()
    put(engine, b"k", data(1))
    assert not put(engine, b"k", data(2), replace=True)
    assert get(engine, b"k") == data(2)
    until(lambda: len(blocks(tmp_path)) == 1)
    assert get(opened(), b"k") == data(2)


def test_equal_bytes_of_two_keys_take_the_disk_once(opened: Opener, tmp_path: Path) -> None:
    engine = opened()
    for key in (b"1", b"2", b"3"):
        put(engine, key, data(1))
    stats = engine.stats("a")
    assert len(blocks(tmp_path)) == 1
    size = len(data(1))
    assert (stats["unique_blocks"], stats["total_refs"]) == (1, 3)
    assert (stats["resident_bytes"], stats["logical_bytes"], stats["dedup_savings_bytes"]) == (size, 3 * size, 2 * size)
    assert engine.delete("a", [b"1", b"2"]) == 2
    assert get(engine, b"3") == data(1)
    engine.delete("a", [b"3"])
    until(lambda: not blocks(tmp_path))


def test_equal_bytes_of_two_tenants_are_two_blocks(opened: Opener, tmp_path: Path) -> None:
    engine = opened()
    put(engine, b"k", data(1), "a")
    put(engine, b"k", data(1), "b")
    assert len(blocks(tmp_path)) == 2
    assert engine.stats("b")["dedup_hits"] == 0
    engine.delete("a", [b"k"])
    assert get(engine, b"k", "a") is None
    assert get(engine, b"k", "b") == data(1)


def test_everything_is_told_the_same_after_a_restart(opened: Opener) -> None:
    engine = opened()
    for number in range(10):
        put(engine, b"%d" % number, data(number % 7, 1000 + number % 7))
    put(engine, b"3", b"again")
    get(engine, b"3")
    get(engine, b"none")
    engine.delete("a", [b"5"])
    before = engine.stats("a")
    engine = opened()
    assert engine.stats("a") == before
    assert [get(engine, b"%d" % n) is not None for n in range(10)] == [n != 5 for n in range(10)]


@pytest.mark.parametrize("size", [0, 1, 4095, (256 << 10) - 1, 256 << 10, (256 << 10) + 1, (3 << 20) + 5])
def test_values_of_any_size_come_back_whole_and_in_parts(opened: Opener, size: int) -> None:
    engine = opened()
    value = os.urandom(size)
    put(engine, b"k", value)
    for start, stop in ((0, None), (0, size), (1, size - 1), (size // 2, None), (300_000, 600_001), (5, 5), (9, 3)):
        block = engine.open_block("a", b"k")
        assert block is not None
        with block:
            assert block.size == size
            assert b"".join(bytes(piece) for piece in block.pieces(start, stop)) == value[start:stop]
            send = partial(block.send_to, start=start, stop=stop, head=b"head", tail=b"tail")
            assert received(send) == b"head" + value[start:stop] + b"tail"


@pytest.mark.parametrize("at", [4096 + 5, 4096 + (256 << 10) + 5])
def test_no_byte_of_a_bad_piece_leaves(opened: Opener, tmp_path: Path, at: int) -> None:
    engine = opened(hot=0)
    value = os.urandom(1 << 20)
    put(engine, b"k", value)
    (file,) = blocks(tmp_path)
    with file.open("r+b") as block_file:
        block_file.seek(at)
        byte = block_file.read(1)[0]
        block_file.seek(at)
        block_file.write(bytes([byte ^ 1]))
    caught: list[Corrupt] = []

    def send(sock: socket.socket) -> None:
        block = engine.open_block("a", b"k")
        assert block is not None
        with block, pytest.raises(Corrupt) as error:
            block.send_to(sock, head=b"head")
        caught.append(error.value)

    first = at < 4096 + (256 << 10)
    assert received(send) == (b"" if first else b"head" + value[: 256 << 10])
    assert caught[0].sent is not first
    stats = engine.stats("a")
    assert (stats["corrupt"], stats["get_hits"], stats["get_misses"], stats["total_refs"]) == (1, 0, 1, 0)
    assert get(engine, b"k") is None
    assert put(engine, b"k", value)
    assert get(engine, b"k") == value


def test_a_block_whose_file_is_gone_is_a_miss_and_not_counted(opened: Opener, tmp_path: Path) -> None:
    engine = opened()
    put(engine, b"k", data(1))
    put(engine, b"l", data(1))
    blocks(tmp_path)[0].unlink()
    assert get(engine, b"k") is None
    assert engine.stats("a")["total_refs"] == 0
    assert engine.exists("a", [b"k", b"l"]) == [False, False]


def test_evicted_values_are_misses_and_the_statistics_know(opened: Opener, tmp_path: Path) -> None:
    engine = opened(capacity=16 * MIB)
    for number in range(60):
        put(engine, b"%d" % number, data(number, MIB))
    there = [number for number in range(60) if get(engine, b"%d" % number) == data(number, MIB)]
    stats = engine.stats("a")
    assert 59 in there
    assert len(there) == stats["total_refs"] == stats["unique_blocks"] == 60 - int(str(stats["evictions"]))
    assert stats["logical_bytes"] == len(there) * MIB
    assert disk_bytes(tmp_path / "engine/blocks") <= 16 * MIB


def test_what_is_asked_stays_longer(opened: Opener) -> None:
    engine = opened(capacity=16 * MIB)
    put(engine, b"used", data(1000, MIB))
    for number in range(40):
        put(engine, b"%d" % number, data(number, MIB))
        assert get(engine, b"used") is not None


def test_a_promised_value_outlives_the_eviction_of_all_others(opened: Opener) -> None:
    engine = opened(capacity=16 * MIB)
    put(engine, b"promised", data(1000, MIB))
    assert engine.exists("a", [b"promised", b"none"], lease_s=60) == [True, False]
    for number in range(60):
        put(engine, b"%d" % number, data(number, MIB))
    assert get(engine, b"promised") == data(1000, MIB)


def test_a_promise_ends(opened: Opener) -> None:
    engine = opened(capacity=16 * MIB)
    put(engine, b"promised", data(1000, MIB))
    assert engine.exists("a", [b"promised"], lease_s=0.1) == [True]
    time.sleep(1.0)
    for number in range(60):
        put(engine, b"%d" % number, data(number, MIB))
    assert engine.exists("a", [b"promised"]) == [False]


def test_no_more_is_promised_than_can_be_kept(opened: Opener) -> None:
    engine = opened(capacity=16 * MIB, lease_share=0.25)
    for number in range(8):
        put(engine, b"%d" % number, data(number, MIB))
    assert engine.exists("a", [b"%d" % number for number in range(8)], lease_s=60) == [True] * 4 + [False] * 4
    assert engine.exists("a", [b"7"]) == [True]


def test_an_expired_value_is_gone_also_after_a_restart(opened: Opener) -> None:
    engine = opened()
    put(engine, b"short", data(1), ttl_s=0.2)
    put(engine, b"long", data(2), ttl_s=3600)
    put(engine, b"ever", data(3))
    assert engine.ttl("a", b"none") is None
    assert engine.ttl("a", b"ever") == -1.0
    assert 3590 < (engine.ttl("a", b"long") or 0) <= 3600
    time.sleep(0.3)
    assert engine.exists("a", [b"short", b"long", b"ever"]) == [False, True, True]
    assert engine.count("a") == engine.stats("a")["total_refs"] == 2
    engine = opened()
    assert 3500 < (engine.ttl("a", b"long") or 0) <= 3600
    assert put(engine, b"short", data(4))


def test_a_version_retires_older_tags_of_its_tenant_alone(opened: Opener) -> None:
    engine = opened()
    put(engine, b"old", data(1), version=1)
    put(engine, b"new", data(2), version=2)
    put(engine, b"untagged", data(3))
    put(engine, b"old", data(1), "b", version=1)
    assert engine.bump_version("a", 2) == 2
    assert engine.bump_version("a", 1) == 2
    for _ in range(2):
        assert engine.exists("a", [b"old", b"new", b"untagged"]) == [False, True, True]
        assert engine.exists("b", [b"old"]) == [True]
        assert engine.stats("a")["stale_retired"] == 1
        with pytest.raises(Refused):
            put(engine, b"older", data(4), version=1)
        engine = opened()


def test_a_scan_meets_every_key_once(opened: Opener) -> None:
    engine = opened()
    keys = {b"%d\x00\xff" % number for number in range(57)}
    for key in keys:
        put(engine, key, b"v")
    put(engine, b"other", b"v", "b")
    cursor, seen = b"", []
    while True:
        cursor, some = engine.scan("a", cursor, None, 10)
        seen += some
        if not cursor:
            break
    assert sorted(seen) == sorted(keys)
    assert engine.scan("a", b"", b"1?\x00*", 1000)[1] == sorted(key for key in keys if len(key) == 4 and key[0] == 49)


def test_more_keys_than_allowed_make_the_oldest_go(opened: Opener) -> None:
    engine = opened(max_keys=100)
    for number in range(250):
        put(engine, b"%d" % number, b"same")
    assert engine.count("a") <= 100
    assert engine.exists("a", [b"249", b"0"]) == [True, False]
    assert engine.count("a") == opened(max_keys=100).count("a")


@pytest.mark.parametrize("key", [b"", b"x" * 4097])
def test_keys_of_a_wrong_length_are_refused(opened: Opener, key: bytes) -> None:
    with pytest.raises(Refused):
        put(opened(), key, b"v")


def test_a_value_that_can_never_fit_is_too_large(opened: Opener) -> None:
    with pytest.raises(TooLarge):
        put(opened(capacity=10 * MIB), b"k", bytes(9 * MIB))


def test_a_value_that_is_read_stays_until_it_is_closed(opened: Opener, tmp_path: Path) -> None:
    engine = opened()
    put(engine, b"k", data(1, MIB))
    block = engine.open_block("a", b"k")
    assert block is not None
    with block:
        engine.delete("a", [b"k"])
        time.sleep(1.0)
        assert b"".join(map(bytes, block.pieces())) == data(1, MIB)
        assert blocks(tmp_path)
    until(lambda: not blocks(tmp_path))


def test_many_threads_write_and_delete_the_same_few_contents(opened: Opener, tmp_path: Path) -> None:
    engine = opened()
    wrong: list[object] = []

    def work(seed: int) -> None:
        try:
            for step in range(150):
                key, number = b"%d" % ((seed + step) % 5), (seed * step) % 3
                put(engine, key, data(number), replace=step % 2 == 0)
                if (found := get(engine, key)) not in (None, data(0), data(1), data(2)):
                    wrong.append(found)
                if step % 3 == 0:
                    engine.delete("a", [key])
        except Exception as error:
            wrong.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    keys = engine.scan("a", b"", None, 100)[1]
    there = {key: get(engine, key) for key in keys}
    assert None not in there.values()
    assert engine.stats("a")["unique_blocks"] == len(set(there.values()))
    until(lambda: len(blocks(tmp_path)) == len(set(there.values())))
    engine = opened()
    assert {key: get(engine, key) for key in keys} == there


def test_a_catalog_that_takes_nothing_refuses_and_goes_on_later(opened: Opener) -> None:
    engine = opened()
    put(engine, b"before", data(1))
    engine._core.catalog.file.db.execute("PRAGMA query_only=1")
    with pytest.raises(Full):
        put(engine, b"k", data(2))
    assert engine.exists("a", [b"k", b"before"]) == [False, True]
    engine._core.catalog.file.db.execute("PRAGMA query_only=0")
    assert put(engine, b"k", data(2))
    assert engine.stats("a")["put_new"] == 2
    assert get(opened(), b"k") == data(2)


def test_a_value_whose_version_passed_while_its_bytes_came_in_is_not_stored(tmp_path: Path) -> None:
    engine = Engine.open(settings(tmp_path))
    with engine.receive("a", b"k", MIB, version=1) as incoming:
        incoming.write(memoryview(data(1, MIB)))
        engine.bump_version("a", 2)
        with pytest.raises(StaleVersion):
            incoming.done()
    assert get(engine, b"k") is None
    engine.close()


def test_a_key_that_is_written_anew_with_another_end_takes_no_more_memory_each_time(tmp_path: Path) -> None:
    engine = Engine.open(settings(tmp_path))
    for _ in range(3000):
        engine.put("a", b"k", memoryview(b"v"), replace=True, ttl_s=1e6)
    assert len(engine._expiries._ends) < 2000
    engine.close()


def test_size_and_digest_are_of_one_value_while_it_is_replaced(opened: Opener) -> None:
    engine = opened()
    values = [b"short", b"a longer one"]
    good = {(len(value), blake3(value).hexdigest()) for value in values}
    put(engine, b"k", values[0])
    ended = threading.Event()

    def replace() -> None:
        while not ended.is_set():
            for value in values:
                put(engine, b"k", value, replace=True)

    writer = threading.Thread(target=replace)
    writer.start()
    seen = {engine.about("a", b"k") for _ in range(5000)}
    ended.set()
    writer.join()
    assert seen <= good
    assert engine.about("a", b"none") is None


def test_a_value_for_a_key_that_must_be_there_is_refused_where_it_is_not(opened: Opener, tmp_path: Path) -> None:
    engine = opened()
    with pytest.raises(Absent):
        put(engine, b"k", data(1), replace=True, over=True)
    put(engine, b"k", data(1))
    assert not put(engine, b"k", data(2), replace=True, over=True)
    with engine.receive("a", b"k", len(data(3))) as incoming:
        incoming.write(memoryview(data(3)))
        engine.delete("a", [b"k"])
        with pytest.raises(Absent):
            incoming.done(replace=True, over=True)
    assert get(engine, b"k") is None
    until(lambda: not blocks(tmp_path))
