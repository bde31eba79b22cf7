"""kill -9 at any moment of a store storm: nothing half visible, the books exact, no temporary files."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest

from kvstrata.store.blockfile import BlockIO
from kvstrata.store.format import HEADER_BYTES
from kvstrata.store.store import BlockStore
from tests.store.stores import MIB, du, get, key, outcomes, put, settings
from tests.store.storm import size_of

CAPACITY = 40 * MIB


def _storm_and_kill(root: Path, seed: int, seconds: float) -> set[int]:
    """Which blocks the storm saw stored before it was killed."""
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.store.storm", str(root), str(CAPACITY), str(seed)],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
        cwd=Path(__file__).parents[2],
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "open\n"
    time.sleep(seconds)
    process.kill()
    lines = process.stdout.read().splitlines()
    process.stdout.close()
    process.wait()
    return {int(line) for line in lines if line.isdigit()}


def _check_after_kill(root: Path, stored: set[int]) -> None:
    # Before a store comes and tidies: what is visible under a block's name is a whole block.
    io = BlockIO(root)
    for path in root.glob("*/*/*/*"):
        assert path.stat().st_size > HEADER_BYTES
        io.check(path)
    assert du(root) <= CAPACITY
    visible = {path.name for path in root.glob("*/*/*/*")}
    # A watermark at the cap: nothing goes while the books are compared.
    store = BlockStore.open(settings(root, CAPACITY, watermark=1.0))
    try:
        usage = store.usage()
        assert usage.used == du(root)
        assert (usage.reserved, usage.blocks) == (0, len(visible))
        there = [number for number in (*range(180), 1000) if store.contains([key(number)])[0]]
        assert {key(number).name for number in there} == visible
        for number in there:
            assert outcomes(get(store, [number], size_of(number))) == {"hit"}
        # Had nothing to be evicted, everything that was reported as stored is there.
        if usage.used < 0.5 * CAPACITY:
            assert stored <= set(there)
        assert outcomes(put(store, [1000], size_of(1000))) <= {"stored", "present"}
    finally:
        store.close()


def test_a_killed_storm_leaves_whole_blocks_and_exact_books(root: Path) -> None:
    for turn in range(2):
        _check_after_kill(root, _storm_and_kill(root, turn, 0.3))


@pytest.mark.slow
def test_thirty_kills_at_random_points_lose_nothing_but_what_was_being_written(root: Path) -> None:
    chance = random.Random(7)
    for turn in range(30):
        _check_after_kill(root, _storm_and_kill(root, turn, chance.uniform(0.0, 0.7)))


def test_the_lock_ends_with_its_process(root: Path) -> None:
    _storm_and_kill(root, 1, 0.0)
    BlockStore.open(settings(root, CAPACITY)).close()
