"""Snapshots and branches: what they show, what they keep, and how they end."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstrata.engine.content import Engine
from kvstrata.engine.errors import Full, NoSuchBranch, NoSuchBranchKey, NoSuchSnapshot, StillReferenced
from tests.engine.engines import MIB, Opener, block_files, data, get, reopening, settings, until


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[Opener]:
    """Open the engine below tmp_path, closing one that is open."""

    def start(**more: object) -> Engine:
        return Engine.open(settings(tmp_path / "engine", **more))  # type: ignore[arg-type]

    with reopening(start) as open_it:
        yield open_it


def put(engine: Engine, *numbers: int, size: int = 64 << 10) -> None:
    """Keys b"0", b"1", ... with the values of their numbers."""
    for number in numbers:
        engine.put("a", b"%d" % number, memoryview(data(number, size)))


def seen(engine: Engine, branch: int, key: bytes, tenant: str = "a") -> bytes:
    """What the branch shows."""
    with engine.branch_open(tenant, branch, key) as block:
        return b"".join(map(bytes, block.pieces()))


def test_branches_share_the_snapshot_and_see_their_own_writes_only(opened: Opener) -> None:
    engine = opened()
    put(engine, 1, 2)
    snapshot, pages = engine.snapshot("a", [b"1", b"2", b"none"])
    assert pages == 2
    one, two = engine.fork("a", snapshot), engine.fork("a", snapshot)
    assert engine.branch_put("a", one, b"1", memoryview(b"mine")).new
    assert engine.branch_put("a", one, b"3", memoryview(b"new")).new
    assert not engine.branch_put("a", one, b"3", memoryview(b"newer")).new
    for _ in range(2):
        assert [seen(engine, one, key) for key in (b"1", b"2", b"3")] == [b"mine", data(2), b"newer"]
        assert [seen(engine, two, key) for key in (b"1", b"2")] == [data(1), data(2)]
        with pytest.raises(NoSuchBranchKey):
            seen(engine, two, b"3")
        assert get(engine, b"1") == data(1)
        assert get(engine, b"3") is None
        assert engine.fork_stats("a") == {
            "snapshots": 1,
            "branches": 2,
            "shared_pages": 2,
            "shared_bytes": 2 * len(data(1)),
            "overlay_pages": 2,
            "overlay_bytes": len(b"mine" + b"newer"),
            "resident_fork_bytes": 2 * len(data(1)) + len(b"mine" + b"newer"),
        }
        engine = opened()


def test_more_branches_take_no_more_bytes(opened: Opener) -> None:
    engine = opened()
    put(engine, *range(4))
    snapshot, _ = engine.snapshot("a", [b"%d" % number for number in range(4)])
    before = engine.fork_stats("a")["resident_fork_bytes"]
    for _ in range(50):
        engine.fork("a", snapshot)
    assert engine.fork_stats("a")["resident_fork_bytes"] == before == 4 * len(data(0))


def test_a_snapshot_keeps_deleted_and_replaced_values_and_no_longer(opened: Opener, tmp_path: Path) -> None:
    engine = opened()
    put(engine, 1, 2)
    snapshot, _ = engine.snapshot("a", [b"1", b"2"])
    branch = engine.fork("a", snapshot)
    engine.delete("a", [b"1"])
    engine.put("a", b"2", memoryview(b"other"), replace=True)
    for _ in range(2):
        assert [seen(engine, branch, key) for key in (b"1", b"2")] == [data(1), data(2)]
        stats = engine.stats("a")
        assert (stats["unique_blocks"], stats["resident_bytes"], stats["logical_bytes"]) == (1, 5, 5)
        engine = opened()
    with pytest.raises(StillReferenced):
        engine.drop_snapshot("a", snapshot)
    engine.drop_branch("a", branch)
    engine.drop_snapshot("a", snapshot)
    until(lambda: len(block_files(tmp_path / "engine/blocks")) == 1)


def test_a_branch_loses_no_page_to_eviction(opened: Opener) -> None:
    engine = opened(capacity=16 * MIB)
    put(engine, 1000, size=MIB)
    snapshot, _ = engine.snapshot("a", [b"1000"])
    branch = engine.fork("a", snapshot)
    engine.branch_put("a", branch, b"own", memoryview(data(2000, MIB)))
    for _ in range(2):
        put(engine, *range(60), size=MIB)
        assert seen(engine, branch, b"1000") == data(1000, MIB)
        assert seen(engine, branch, b"own") == data(2000, MIB)
        engine.delete("a", [b"%d" % number for number in range(60)])
        engine = opened(capacity=16 * MIB)


def test_snapshots_pin_no_more_than_their_share(opened: Opener) -> None:
    engine = opened(capacity=16 * MIB, fork_share=0.25)
    put(engine, *range(6), size=MIB)
    keys = [b"%d" % number for number in range(6)]
    with pytest.raises(Full):
        engine.snapshot("a", keys)
    assert engine.fork_stats("a")["snapshots"] == 0
    snapshot, _ = engine.snapshot("a", keys[:4])
    engine.snapshot("a", keys[:4])
    branch = engine.fork("a", snapshot)
    engine.branch_put("a", branch, b"x", memoryview(data(0, MIB)))
    with pytest.raises(Full):
        engine.branch_put("a", branch, b"x", memoryview(data(9, MIB)))
    assert seen(engine, branch, b"x") == data(0, MIB)


def test_forks_are_a_tenants_own(opened: Opener) -> None:
    engine = opened()
    put(engine, 1)
    snapshot, _ = engine.snapshot("a", [b"1"])
    branch = engine.fork("a", snapshot)
    with pytest.raises(NoSuchSnapshot):
        engine.fork("b", snapshot)
    with pytest.raises(NoSuchSnapshot):
        engine.fork("a", branch)
    with pytest.raises(NoSuchBranch):
        seen(engine, branch, b"1", "b")
    with pytest.raises(NoSuchBranch):
        engine.branch_put("b", branch, b"1", memoryview(b"x"))
    with pytest.raises(NoSuchBranch):
        engine.drop_branch("b", branch)
    with pytest.raises(NoSuchSnapshot):
        engine.drop_snapshot("b", snapshot)
    assert engine.fork_stats("b")["snapshots"] == 0


def test_too_many_snapshots_and_branches_are_refused(opened: Opener) -> None:
    engine = opened(max_snapshots=2, max_branches=3)
    put(engine, 1)
    first, _ = engine.snapshot("a", [b"1"])
    engine.snapshot("a", [b"1"])
    with pytest.raises(Full):
        engine.snapshot("a", [b"1"])
    branches = [engine.fork("a", first) for _ in range(3)]
    with pytest.raises(Full):
        engine.fork("a", first)
    engine.drop_branch("a", branches[0])
    engine.fork("a", first)


def test_forgotten_ones_end_and_used_ones_do_not(opened: Opener) -> None:
    engine = opened(fork_idle_s=1.5)
    put(engine, 1)
    snapshot, _ = engine.snapshot("a", [b"1"])
    used, _forgotten = engine.fork("a", snapshot), engine.fork("a", snapshot)
    end = time.monotonic() + 4
    while time.monotonic() < end:
        assert seen(engine, used, b"1") == data(1)
        time.sleep(0.1)
    assert engine.fork_stats("a")["branches"] == 1
    until(lambda: engine.fork_stats("a")["snapshots"] == 0)
    assert opened().fork_stats("a")["branches"] == 0


def test_a_number_is_not_given_twice(opened: Opener) -> None:
    engine = opened()
    put(engine, 1)
    first, _ = engine.snapshot("a", [b"1"])
    engine.drop_snapshot("a", first)
    second, _ = opened().snapshot("a", [b"1"])
    assert second != first


def test_a_lost_page_of_a_branch_does_not_uncover_the_snapshots(opened: Opener, tmp_path: Path) -> None:
    engine = opened()
    put(engine, 1)
    snapshot, _ = engine.snapshot("a", [b"1"])
    branch = engine.fork("a", snapshot)
    before = set(block_files(tmp_path / "engine/blocks"))
    engine.branch_put("a", branch, b"1", memoryview(b"mine"))
    (mine,) = set(block_files(tmp_path / "engine/blocks")) - before
    mine.unlink()
    for _ in range(2):
        with pytest.raises(NoSuchBranchKey):
            seen(engine, branch, b"1")
        engine = opened()
    assert engine.branch_put("a", branch, b"1", memoryview(b"again")).new is False
    assert seen(engine, branch, b"1") == b"again"


def test_a_write_that_could_not_be_written_down_leaves_the_branch_s_own_page_before_it(opened: Opener) -> None:
    engine = opened()
    put(engine, 0)
    branch = engine.fork("a", engine.snapshot("a", [b"0"])[0])
    engine.branch_put("a", branch, b"0", memoryview(data(1)))
    engine._core.catalog.file.db.execute("PRAGMA query_only=1")
    with pytest.raises(Full):
        engine.branch_put("a", branch, b"0", memoryview(data(2)))
    engine._core.catalog.file.db.execute("PRAGMA query_only=0")
    assert seen(engine, branch, b"0") == data(1)
    assert seen(opened(), branch, b"0") == data(1)
