"""The engine's folder stays below its capacity, names and all: rows go before a put is refused, the log is merged."""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstrata.engine.content import Engine
from kvstrata.engine.errors import Full
from tests.engine.engines import MIB, Opener, data, disk_bytes, get, reopening, settings

CAPACITY = 16 * MIB


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[Opener]:
    """Open the engine below tmp_path, closing one that is open."""

    def start(capacity: int = CAPACITY, **more: object) -> Engine:
        return Engine.open(settings(tmp_path / "engine", capacity, **more))

    with reopening(start) as open_it:
        yield open_it


def key(number: int, size: int = 4096) -> bytes:
    """A name of that many bytes."""
    return b"%07d" % number + b"." * (size - 7)


def log_bytes(engine: Engine) -> int:
    """Of the catalog's log."""
    return (engine.settings.root / "catalog.sqlite-wal").stat().st_size


@pytest.mark.parametrize(("size", "tended"), [(40, True), (1000, True), (4096, True), (4096, False)])
def test_names_make_the_oldest_go_before_the_folder_outgrows_the_capacity(
    opened: Opener, tmp_path: Path, size: int, tended: bool
) -> None:
    engine = opened()
    if not tended:
        engine._tender.stop(20)
    for number in range(20):
        engine.put("a", b"block%d" % number, memoryview(data(number, MIB)))
    for number in range(3_300_000 // (size + 500)):
        assert engine.put("a", key(number, size), memoryview(b"v")).new
        if number % 100 == 0:
            assert disk_bytes(tmp_path / "engine") <= CAPACITY
    assert engine.exists("a", [key(number, size)]) == [True]
    there = engine.count("a")
    assert disk_bytes(tmp_path / "engine") <= CAPACITY
    assert opened().count("a") == there
    if size == 4096:
        assert 100 < there < 1000


def test_a_key_that_was_promised_does_not_make_room_for_others(opened: Opener) -> None:
    engine = opened()
    engine.put("a", b"promised", memoryview(b"v"))
    assert engine.exists("a", [b"promised"], lease_s=60) == [True]
    for number in range(1500):
        engine.put("a", key(number), memoryview(b"w"))
    assert engine.stats("a")["keys_retired"] != 0
    assert get(engine, b"promised") == b"v"


def test_where_all_names_are_promised_a_new_one_is_refused(opened: Opener) -> None:
    engine = opened()
    with pytest.raises(Full):
        for number in range(3000):
            engine.put("a", key(number), memoryview(b"v"))
            assert engine.exists("a", [key(number)], lease_s=60) == [True]
    assert engine.exists("a", [key(0)]) == [True]


def test_many_names_of_one_tenant_do_not_push_out_those_of_another(opened: Opener) -> None:
    engine = opened()
    for number in range(10):
        engine.put("b", key(number), memoryview(b"v"))
    for number in range(1500):
        engine.put("a", key(number), memoryview(b"v"))
    assert engine.count("b") == 10


def test_the_log_stays_small_while_many_write_all_the_time(opened: Opener) -> None:
    engine = opened()
    engine._tender.stop(20)
    seen: list[int] = []

    def work(worker: int) -> None:
        for number in range(150):
            engine.put("a", key(1000 * worker + number), memoryview(b"v"), replace=True)
            seen.append(log_bytes(engine))

    threads = [threading.Thread(target=work, args=(worker,)) for worker in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert max(seen) <= engine._core.catalog.room.log


def test_a_log_that_a_stranger_keeps_from_being_merged_stops_writes_and_not_the_disk(opened: Opener) -> None:
    engine = opened()
    with sqlite3.connect(engine.settings.root / "catalog.sqlite", isolation_level=None) as stranger:
        stranger.execute("BEGIN")
        stranger.execute("SELECT * FROM refs").fetchall()
        with pytest.raises(Full, match="log"):
            for number in range(1000):
                engine.put("a", key(number), memoryview(b"v"))
        assert log_bytes(engine) <= engine._core.catalog.room.log
        stranger.execute("ROLLBACK")
    stranger.close()
    assert engine.put("a", b"k", memoryview(b"v")).new


def test_snapshots_of_long_names_are_refused_before_they_take_the_catalog(opened: Opener, tmp_path: Path) -> None:
    engine = opened()
    keys = [key(number) for number in range(10)]
    for name in keys:
        engine.put("a", name, memoryview(b"v"))
    with pytest.raises(Full):
        for _ in range(500):
            engine.snapshot("a", keys)
    assert disk_bytes(tmp_path / "engine") <= CAPACITY
    branch = engine.fork("a", engine.snapshot("a", keys[:1])[0])
    with pytest.raises(Full):
        for number in range(500):
            engine.branch_put("a", branch, key(number), memoryview(b"v"))
    assert engine.put("a", key(99), memoryview(b"v")).new


def test_a_lower_capacity_holds_from_the_next_start_on(opened: Opener, tmp_path: Path) -> None:
    engine = opened(256 * MIB)
    for number in range(1000):
        engine.put("a", key(number), memoryview(b"v"))
    before = engine.count("a")
    engine = opened()
    assert 0 < engine.count("a") < before
    assert disk_bytes(tmp_path / "engine") <= CAPACITY
    assert engine.put("a", b"k", memoryview(b"v")).new


def test_a_catalog_that_is_fuller_than_it_was_thought_to_be_loses_rows_and_takes_the_new_one(opened: Opener) -> None:
    engine = opened()
    pages = engine._core.catalog.file.db.execute("PRAGMA page_count").fetchone()[0]
    engine._core.catalog.file.db.execute(f"PRAGMA max_page_count={pages + 40}")
    for number in range(100):
        assert engine.put("a", key(number), memoryview(b"v")).new
    assert 0 < engine.count("a") < 100
