"""Killed with SIGKILL in the middle of work: what was acknowledged is there, nothing is wrong, statistics are true."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from kvstrata.engine.content import Engine
from tests.engine.engines import MIB, block_files, data, get, settings, until

_ROOT = Path(__file__).resolve().parents[2]


def killed_writer(root: Path, seed: int, durability: str) -> list[tuple[str, bytes, int]]:
    """Run a writer for a while; its lines: (word, key, value number), in their order for each key."""
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.engine.crash_writer", str(root), str(seed), durability],
        cwd=_ROOT,
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    assert process.stdout is not None
    first = process.stdout.readline()
    time.sleep(random.Random(seed).uniform(0.2, 1.2))
    process.send_signal(signal.SIGKILL)
    rest = process.stdout.read()
    assert process.wait() == -signal.SIGKILL
    lines = (first + rest).split(b"\n")[:-1]
    found = []
    for line in lines:
        word, worker, key, number = line.decode().split()
        found.append((word, f"{worker}.{key}".encode(), int(number)))
    return found


def allowed(lines: list[tuple[str, bytes, int]], before: dict[bytes, set[int]]) -> dict[bytes, set[int]]:
    """For each key the values that it may have now, 0 for none: the last acknowledged, or what was under way."""
    may = {key: set(values) for key, values in before.items()}
    for word, key, number in lines:
        if word in "BE":
            may.setdefault(key, {0}).add(number)
        else:
            may[key] = {number}
    return may


def check(engine: Engine, may: dict[bytes, set[int]]) -> dict[bytes, set[int]]:
    """Every key has one of its values; gives which."""
    there: dict[bytes, bytes] = {}
    now: dict[bytes, set[int]] = {}
    for key, numbers in may.items():
        value = get(engine, key)
        if value is None:
            assert 0 in numbers, f"{key!r} was acknowledged and is lost"
            now[key] = {0}
            continue
        # A value begins with 64 bytes that only its number has.
        fits = [number for number in numbers if number and data(number, 64)[: len(value)] == value[:64]]
        assert fits, f"{key!r} has a value that it never had"
        assert value == data(fits[0], len(value))
        now[key] = set(fits)
        there[key] = value
    stats = engine.stats("a")
    assert stats["total_refs"] == len(there)
    assert stats["logical_bytes"] == sum(map(len, there.values()))
    assert stats["unique_blocks"] == len(set(there.values()))
    return now


def rounds(tmp_path: Path, count: int, durability: str) -> None:
    """Kill, look, go on from there."""
    may: dict[bytes, set[int]] = {}
    acknowledged = 0
    for seed in range(1, count + 1):
        lines = killed_writer(tmp_path, seed, durability)
        acknowledged += sum(word == "A" for word, _, _ in lines)
        may = allowed(lines, may)
        engine = Engine.open(
            settings(tmp_path / "engine", 48 * MIB, cold_root=tmp_path / "cold", cold_capacity=512 * MIB)
        )
        may = check(engine, may)
        # Nothing that a crash cut off stays on a disk. What was just read comes up from the cold one, a moment twice.
        until(lambda: len(block_files(tmp_path)) == engine.stats("a")["unique_blocks"])  # noqa: B023
        engine.close()
    assert acknowledged > 10 * count


@pytest.mark.parametrize("durability", ["process", "fsync"])
def test_acknowledged_values_survive_kill_9(tmp_path: Path, durability: str) -> None:
    rounds(tmp_path, 3, durability)


@pytest.mark.slow
def test_acknowledged_values_survive_twenty_kills(tmp_path: Path) -> None:
    rounds(tmp_path, 20, "process")
