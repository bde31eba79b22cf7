"""RAM, warm and cold disk: each bounded, none counted twice, nothing lost between them."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstrata.engine.content import Engine
from tests.engine.engines import MIB, Opener, block_files, data, disk_bytes, get, reopening, settings, until


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[Opener]:
    """Open an engine with a warm disk of 16 MiB and a cold one of 64; closes one that is open."""

    def start(**more: object) -> Engine:
        chosen = {"capacity": 16 * MIB, "cold_root": tmp_path / "cold", "cold_capacity": 64 * MIB, **more}
        return Engine.open(settings(tmp_path / "engine", **chosen))  # type: ignore[arg-type]

    with reopening(start) as open_it:
        yield open_it


def fill(engine: Engine, count: int) -> None:
    """Put so many values of a MiB."""
    for number in range(count):
        engine.put("a", b"%d" % number, memoryview(data(number, MIB)))
    at_rest(engine)


def at_rest(engine: Engine) -> None:
    """Wait until no disk makes room any more."""
    before: object = None
    while (now := engine.stats("a")) != before:
        before = now
        time.sleep(0.7)


def tier(engine: Engine, name: str) -> dict[str, int]:
    """One tier of the statistics."""
    tiers = engine.stats("a")["tiers"]
    assert isinstance(tiers, dict)
    found: dict[str, int] = tiers[name]
    return found


def test_what_the_warm_disk_evicts_is_found_on_the_cold_one(opened: Opener, tmp_path: Path) -> None:
    engine = opened()
    fill(engine, 40)
    stats = engine.stats("a")
    assert stats["total_refs"] == 40
    assert stats["evictions"] == 0
    assert tier(engine, "warm")["blocks"] + tier(engine, "cold")["blocks"] == 40
    assert tier(engine, "cold")["blocks"] >= 24
    assert disk_bytes(tmp_path / "engine/blocks") <= 16 * MIB
    for number in range(40):
        assert get(engine, b"%d" % number) == data(number, MIB)
    assert engine.stats("a")["get_misses"] == 0


def test_what_the_cold_disk_evicts_is_gone_and_not_counted(opened: Opener, tmp_path: Path) -> None:
    engine = opened(cold_capacity=24 * MIB)
    fill(engine, 80)
    there = [number for number in range(80) if engine.exists("a", [b"%d" % number])[0]]
    stats = engine.stats("a")
    assert len(there) == stats["total_refs"] == 80 - int(str(stats["evictions"]))
    assert there[-10:] == list(range(70, 80))
    assert disk_bytes(tmp_path / "cold") <= 24 * MIB
    # Each that is read comes back to the warm disk, so that others go.
    for number in there:
        assert get(engine, b"%d" % number) in (None, data(number, MIB))


def test_what_is_read_on_the_cold_disk_comes_back(opened: Opener, tmp_path: Path) -> None:
    engine = opened()
    fill(engine, 40)
    cold = tier(engine, "cold")["blocks"]
    assert get(engine, b"0") == data(0, MIB)
    until(lambda: engine.stats("a")["promotions"] == 1)
    until(lambda: len(block_files(tmp_path / "cold")) == tier(engine, "cold")["blocks"])
    assert tier(engine, "cold")["blocks"] + tier(engine, "warm")["blocks"] == 40
    assert tier(engine, "cold")["blocks"] >= cold - 1
    assert get(engine, b"0") == data(0, MIB)


def test_a_promise_holds_on_the_cold_disk_and_on_the_way_back(opened: Opener) -> None:
    engine = opened(cold_capacity=24 * MIB)
    fill(engine, 20)
    assert engine.exists("a", [b"0"], lease_s=60) == [True]
    assert get(engine, b"0") == data(0, MIB)
    until(lambda: engine.stats("a")["promotions"] == 1)
    for number in range(100, 180):
        engine.put("a", b"%d" % number, memoryview(data(number, MIB)))
    assert get(engine, b"0") == data(0, MIB)


def test_both_disks_are_found_after_a_restart(opened: Opener) -> None:
    engine = opened()
    fill(engine, 40)
    before = engine.stats("a")
    engine = opened()
    assert engine.stats("a") == before
    for number in range(40):
        assert get(engine, b"%d" % number) == data(number, MIB)


def test_a_start_above_the_watermark_loses_nothing(opened: Opener, tmp_path: Path) -> None:
    opened(capacity=32 * MIB).close()
    engine = opened(capacity=32 * MIB, cold_root=None, cold_capacity=0)
    fill(engine, 15)
    # 15 MiB of blocks are above the watermark of the 16 MiB that are left for them, and below the limit.
    engine = opened(capacity=18 * MIB)
    until(lambda: int(str(engine.stats("a")["demotions"])) > 0)
    at_rest(engine)
    assert engine.stats("a")["evictions"] == 0
    for number in range(15):
        assert get(engine, b"%d" % number) == data(number, MIB)


def test_a_second_copy_that_a_crash_left_is_removed(opened: Opener, tmp_path: Path) -> None:
    engine = opened()
    fill(engine, 3)
    engine.close()
    warm = block_files(tmp_path / "engine/blocks")[0]
    there = tmp_path / "cold" / warm.relative_to(tmp_path / "engine/blocks")
    there.parent.mkdir(parents=True)
    for name in ("ns.json", "salt.json"):
        for path in (tmp_path / "engine/blocks").rglob(name):
            (tmp_path / "cold" / path.relative_to(tmp_path / "engine/blocks")).write_bytes(path.read_bytes())
    there.write_bytes(warm.read_bytes())
    engine = opened()
    until(lambda: not there.exists())
    assert [get(engine, b"%d" % number) for number in range(3)] == [data(number, MIB) for number in range(3)]
    assert tier(engine, "warm")["blocks"] == 3


def test_a_cold_block_whose_bytes_rotted_is_a_miss_and_does_not_come_back(opened: Opener, tmp_path: Path) -> None:
    engine = opened()
    fill(engine, 40)
    for path in block_files(tmp_path / "cold"):
        with path.open("r+b") as file:
            file.seek(4096 + MIB - 1)
            byte = file.read(1)[0]
            file.seek(4096 + MIB - 1)
            file.write(bytes([byte ^ 1]))
    wrong = 0
    for number in range(40):
        try:
            value = get(engine, b"%d" % number)
        except Exception:
            value = None
        wrong += value not in (None, data(number, MIB))
    assert not wrong
    assert int(str(engine.stats("a")["corrupt"])) > 0


def test_a_cold_disk_that_takes_nothing_costs_only_what_it_would_have_kept(opened: Opener, tmp_path: Path) -> None:
    engine = opened()
    fill(engine, 14)
    (tmp_path / "cold").chmod(0o500)
    if os.geteuid() == 0:
        engine._core.tiers.stores[list(engine._core.tiers.stores)[1]].close()
    for number in range(14, 60):
        engine.put("a", b"%d" % number, memoryview(data(number, MIB)))
    assert get(engine, b"59") == data(59, MIB)
    assert engine.stats("a")["total_refs"] == 60 - int(str(engine.stats("a")["evictions"]))
    (tmp_path / "cold").chmod(0o700)


def test_ram_holds_what_is_asked_again_and_no_more_than_it_may(opened: Opener) -> None:
    engine = opened(hot=4 * MIB, capacity=32 * MIB)
    fill(engine, 12)
    for _ in range(3):
        for number in range(12):
            assert get(engine, b"%d" % number) == data(number, MIB)
    assert tier(engine, "hot") == {"bytes": 4 * MIB, "blocks": 4, "capacity_bytes": 4 * MIB}
    assert tier(engine, "warm")["blocks"] == 8
    engine.delete("a", [b"%d" % number for number in range(12)])
    assert tier(engine, "hot")["bytes"] == tier(engine, "warm")["bytes"] == 0


def test_a_value_in_ram_is_the_one_that_the_key_means(opened: Opener) -> None:
    engine = opened(hot=4 * MIB)
    for number in range(5):
        engine.put("a", b"k", memoryview(data(number, MIB)), replace=True)
        for _ in range(4):
            assert get(engine, b"k") == data(number, MIB)
    assert tier(engine, "hot")["blocks"] == 1


def test_what_ram_holds_leaves_it_when_the_disk_evicts_it(opened: Opener) -> None:
    engine = opened(hot=4 * MIB, cold_root=None, cold_capacity=0)
    fill(engine, 1)
    for _ in range(3):
        get(engine, b"0")
    assert tier(engine, "hot")["blocks"] == 1
    for number in range(1, 40):
        engine.put("a", b"%d" % number, memoryview(data(number, MIB)))
    assert get(engine, b"0") is None
    assert tier(engine, "hot")["blocks"] == 0
