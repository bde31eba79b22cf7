"""A catalog that fails: acknowledged deletes stay done, and what was refused leaves the old value, the new or none."""

from __future__ import annotations

import shutil
import sqlite3
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kvstrata.engine import catalog as catalog_module
from kvstrata.engine.content import Engine
from kvstrata.engine.errors import Full, NoSuchBranch
from tests.engine.engines import data, get, settings, until

OLD, NEW = data(1, 5000), data(2, 5000)


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Engine]:
    """A key whose value stays on the disk for its twin. Nothing happens by itself: nobody commits but the test."""
    engine = Engine.open(settings(tmp_path / "engine"))
    for key in (b"key", b"twin"):
        engine.put("a", key, memoryview(OLD))
    engine._tender.stop(20)
    yield engine
    engine.close()


@contextmanager
def failing(engine: Engine) -> Iterator[None]:
    """The catalog takes nothing meanwhile."""
    engine._core.catalog.file.db.execute("PRAGMA query_only=1")
    yield
    engine._core.catalog.file.db.execute("PRAGMA query_only=0")


@contextmanager
def killed(engine: Engine, tmp_path: Path) -> Iterator[Engine]:
    """What a new process would find if this one were killed now."""
    root = tmp_path / f"killed-{time.monotonic_ns()}"
    shutil.copytree(tmp_path / "engine", root)
    again = Engine.open(settings(root))
    try:
        yield again
    finally:
        again.close()


def change(engine: Engine, what: str) -> None:
    """A change that the catalog refuses."""
    with pytest.raises(Full):
        if what == "put":
            engine.put("a", b"key", memoryview(NEW), replace=True)
        else:
            engine.delete("a", [b"key"])


@pytest.mark.parametrize("what", ["put", "delete"])
def test_a_delete_after_a_change_that_failed_is_for_good(what: str, engine: Engine, tmp_path: Path) -> None:
    with failing(engine):
        change(engine, what)
    engine.delete("a", [b"key"])
    with killed(engine, tmp_path) as again:
        assert get(again, b"key") is None
        assert get(again, b"twin") == OLD


@pytest.mark.parametrize("what", ["put", "delete"])
def test_a_delete_is_not_acknowledged_while_the_old_row_cannot_be_removed(what: str, engine: Engine) -> None:
    with failing(engine):
        change(engine, what)
        with pytest.raises(Full):
            engine.delete("a", [b"key"])


@pytest.mark.parametrize("what", ["put", "delete"])
def test_a_refused_change_leaves_the_old_value_or_none_and_never_another(
    what: str, engine: Engine, tmp_path: Path
) -> None:
    with failing(engine):
        change(engine, what)
        with killed(engine, tmp_path) as again:
            assert get(again, b"key") in (None, OLD)
    assert engine.put("a", b"key", memoryview(NEW)).new
    with killed(engine, tmp_path) as again:
        assert get(again, b"key") == NEW


def test_a_delete_between_a_failed_commit_and_its_writers_word_is_for_good(engine: Engine, tmp_path: Path) -> None:
    failed, mine = threading.Event(), threading.Event()

    def hold(sql: str) -> None:
        if sql == "ROLLBACK":  # the writer has failed, and does not know it yet
            failed.set()
            mine.wait(20)

    db = engine._core.catalog.file.db
    db.execute("PRAGMA query_only=1")
    db.set_trace_callback(hold)
    writer = threading.Thread(target=change, args=(engine, "put"))
    writer.start()
    assert failed.wait(20)
    with engine._lock:
        mine.set()
        with engine._core.catalog._committing:
            db.set_trace_callback(None)
            db.execute("PRAGMA query_only=0")
        engine.delete("a", [b"key"])
    writer.join()
    with killed(engine, tmp_path) as again:
        assert get(again, b"key") is None


def test_who_is_told_that_a_key_is_gone_waits_for_the_one_who_removes_it(engine: Engine, tmp_path: Path) -> None:
    with sqlite3.connect(tmp_path / "engine/catalog.sqlite", isolation_level=None) as other:
        other.execute("BEGIN IMMEDIATE")  # a commit that takes long
        first = threading.Thread(target=engine.delete, args=("a", [b"key"]))
        first.start()
        until(lambda: engine.exists("a", [b"key"]) == [False])
        second = threading.Thread(target=engine.delete, args=("a", [b"key"]))
        second.start()
        second.join(0.3)
        assert second.is_alive()
        other.execute("ROLLBACK")
    first.join()
    second.join()


def test_what_a_catalog_that_takes_nothing_is_owed_does_not_grow_for_ever(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(catalog_module, "OWED_MOST", 10)
    with failing(engine):
        for number in range(50):
            with pytest.raises(Full):
                engine.put("a", b"%d" % number, memoryview(NEW))
        assert len(engine._core.catalog._owed) <= 11
    assert engine.put("a", b"49", memoryview(NEW)).new


def test_a_failure_is_told_however_many_others_fail_meanwhile(engine: Engine) -> None:
    catalog = engine._core.catalog
    with failing(engine):
        mine = catalog.queue([("DELETE FROM refs WHERE tenant=? AND key=?", ("a", b"key"))])
        for _ in range(300):
            with pytest.raises(Full):
                catalog.commit(catalog.queue(()))
    for _ in range(300):
        catalog.commit(catalog.queue(()))
    with pytest.raises(Full):
        catalog.commit(mine)


def test_a_branch_whose_end_failed_is_gone_when_that_is_said(engine: Engine, tmp_path: Path) -> None:
    branch = engine.fork("a", engine.snapshot("a", [b"key"])[0])
    with failing(engine):
        with pytest.raises(Full):
            engine.drop_branch("a", branch)
        with pytest.raises(Full):
            engine.drop_branch("a", branch)
    with pytest.raises(NoSuchBranch):
        engine.drop_branch("a", branch)
    with killed(engine, tmp_path) as again, pytest.raises(NoSuchBranch):
        again.branch_open("a", branch, b"key")
