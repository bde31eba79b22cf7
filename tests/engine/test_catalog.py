"""The catalog alone: what was acknowledged is there, what cannot be read is put aside."""

from __future__ import annotations

import os
import sqlite3
import threading
from pathlib import Path

import pytest

from kvstrata.engine.catalog import Catalog, Statement
from kvstrata.engine.catalog_file import CatalogFile
from kvstrata.engine.content import Engine
from kvstrata.engine.errors import Full
from kvstrata.engine.room import Room
from kvstrata.store.errors import StoreError
from tests.engine.engines import data, get, settings

_INSERT = "INSERT OR REPLACE INTO refs VALUES('a',?,x'00',1,NULL,NULL)"


def opened(path: Path, *, durable: bool = False, counters: list[Statement] | None = None) -> Catalog:
    """A catalog that counts what it is told."""
    return Catalog(CatalogFile.open(path, durable=durable, room=Room(128 << 20)), lambda: counters or [])


def keys(path: Path) -> set[bytes]:
    """What another process reads now."""
    with sqlite3.connect(path) as db:
        return {row[0] for row in db.execute("SELECT key FROM refs")}


@pytest.mark.parametrize("durable", [False, True])
def test_what_commit_returned_for_is_seen_by_others_while_many_commit(tmp_path: Path, durable: bool) -> None:
    path = tmp_path / "catalog"
    catalog = opened(path, durable=durable)
    missing: list[bytes] = []

    def work(worker: int) -> None:
        for number in range(10):
            key = b"%d.%d" % (worker, number)
            catalog.commit(catalog.queue([(_INSERT, (key,))]))
            if key not in keys(path):
                missing.append(key)

    threads = [threading.Thread(target=work, args=(worker,)) for worker in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    catalog.close()
    assert not missing
    assert len(keys(path)) == 80


def test_statements_take_effect_in_the_order_in_which_they_were_queued(tmp_path: Path) -> None:
    catalog = opened(tmp_path / "catalog")
    tickets = []
    for number in range(10):
        tickets.append(catalog.queue([(_INSERT, (b"k",))]))
        if number < 9:
            tickets.append(catalog.queue([("DELETE FROM refs WHERE key=?", (b"k",))]))
    catalog.commit(tickets[-1])
    assert keys(tmp_path / "catalog") == {b"k"}
    catalog.close()


def test_counters_that_a_failed_commit_could_not_write_are_written_later(tmp_path: Path) -> None:
    counters: list[Statement] = [("INSERT OR REPLACE INTO counters VALUES(?,?,?)", ("a", "put_new", 7))]
    catalog = opened(tmp_path / "catalog", counters=counters)
    catalog.file.db.execute("PRAGMA query_only=1")
    catalog.tend()
    counters.clear()
    catalog.file.db.execute("PRAGMA query_only=0")
    catalog.tend()
    assert list(catalog.rows("SELECT value FROM counters")) == [(7,)]
    catalog.close()


def test_the_log_is_merged_before_it_grows_large(tmp_path: Path) -> None:
    catalog = opened(tmp_path / "catalog")
    log = tmp_path / "catalog-wal"
    sizes = []
    for batch in range(12):
        rows = [(_INSERT, (b"%d.%d" % (batch, number) * 400,)) for number in range(1000)]
        catalog.commit(catalog.queue(rows))
        catalog.tend()
        sizes.append(log.stat().st_size)
    assert max(sizes[3:]) < 24 << 20
    catalog.close()


def test_a_damaged_catalog_is_put_aside_and_the_cache_begins_empty(tmp_path: Path) -> None:
    root = tmp_path / "engine"
    engine = Engine.open(settings(root))
    engine.put("a", b"k", memoryview(data(1)))
    engine.close()
    (root / "catalog.sqlite").write_bytes(b"no database" * 1000)
    engine = Engine.open(settings(root))
    assert get(engine, b"k") is None
    assert engine.put("a", b"k", memoryview(data(2))).new
    assert get(engine, b"k") == data(2)
    engine.close()
    assert (root / "catalog.sqlite.damaged").exists()


def test_another_versions_catalog_is_refused(tmp_path: Path) -> None:
    opened(tmp_path / "catalog").close()
    with sqlite3.connect(tmp_path / "catalog") as db:
        db.execute("PRAGMA user_version=99")
    with pytest.raises(StoreError, match="99"):
        opened(tmp_path / "catalog")


def test_nobody_else_may_read_the_catalog(tmp_path: Path) -> None:
    engine = Engine.open(settings(tmp_path / "engine"))
    engine.put("a", b"k", memoryview(b"v"))
    files = [path for path in (tmp_path / "engine").iterdir() if path.is_file()]
    assert files
    assert all(path.stat().st_mode & 0o077 == 0 for path in files)
    assert (tmp_path / "engine").stat().st_mode & 0o077 == 0
    engine.close()


def test_a_second_engine_on_the_same_folder_is_refused(tmp_path: Path) -> None:
    engine = Engine.open(settings(tmp_path / "engine"))
    with pytest.raises(StoreError, match=rf"owned by another process \(pid {os.getpid()}\)") as caught:
        Engine.open(settings(tmp_path / "engine"))
    assert caught.value.fix.endswith("(KV_ENGINE_ROOT)")
    engine.put("a", b"k", memoryview(b"v"))
    assert get(engine, b"k") == b"v"
    engine.close()


def test_what_failed_to_be_committed_is_not_said_to_be(tmp_path: Path) -> None:
    catalog = opened(tmp_path / "catalog")
    catalog.file.db.execute("PRAGMA query_only=1")
    ticket = catalog.queue([(_INSERT, (b"k",))])
    with pytest.raises(Full):
        catalog.commit(ticket)
    assert not ticket.committed
    catalog.file.db.execute("PRAGMA query_only=0")
    later = catalog.queue([(_INSERT, (b"k",))])
    catalog.commit(later)
    assert later.committed
    catalog.close()


def test_damage_that_shows_only_when_all_is_read_does_not_keep_the_engine_from_starting(tmp_path: Path) -> None:
    engine = Engine.open(settings(tmp_path))
    for number in range(1000):
        engine.put("a", b"%d" % number * 20, memoryview(b"v"))
    engine.close()
    with sqlite3.connect(tmp_path / "catalog.sqlite") as db:
        db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    db.close()
    with (tmp_path / "catalog.sqlite").open("r+b") as file:
        file.seek(8 * 4096)
        file.write(b"\xa5" * (8 * 4096))
    engine = Engine.open(settings(tmp_path))
    assert (tmp_path / "catalog.sqlite.damaged").exists()
    assert engine.put("a", b"new", memoryview(data(1))).new
    assert get(engine, b"new") == data(1)
    engine.close()
