"""Run by test_durability.py under faults.c: an engine on a disk that fails, or hangs, on command."""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvstrata.engine.content import Engine
from kvstrata.engine.errors import Corrupt, Full
from tests.engine.engines import MIB, data, get, settings, until

Disk = Callable[[str], None]


@pytest.fixture
def disk() -> Iterator[Disk]:
    """Says what the shim does with reads and writes from now on."""
    file = Path(os.environ["KV_FAULTS"])

    def set_it(what: str) -> None:
        with file.open("r+") as faults:
            faults.write(what)

    set_it("..")
    yield set_it
    set_it("..")


@pytest.fixture
def engine() -> Iterator[Engine]:
    """On the disk of the shim; its catalog is elsewhere."""
    root = Path(os.environ["KV_TEST_ROOT"])
    shutil.rmtree(root, ignore_errors=True)
    engine = Engine.open(settings(root, 64 * MIB, disk_s=0.5))
    for number in range(3):
        engine.put("a", b"%d" % number, memoryview(data(number, MIB)))
    yield engine
    engine.close()


def test_a_write_that_fails_is_not_acknowledged_and_leaves_nothing(engine: Engine, disk: Disk) -> None:
    for fault in (".e", ".n"):
        disk(fault)
        with pytest.raises(Full):
            engine.put("a", b"new", memoryview(data(9, MIB)))
        with pytest.raises(Full), engine.receive("a", b"new", MIB) as incoming:
            incoming.write(memoryview(data(9, MIB)))
            incoming.done()
        disk("..")
        assert get(engine, b"new") is None
        assert engine.stats("a")["total_refs"] == 3
        assert next(iter(engine._core.tiers.stores.values())).usage().reserved == 0
    assert engine.put("a", b"new", memoryview(data(9, MIB))).new


def test_a_block_that_cannot_be_read_twice_is_given_up(engine: Engine, disk: Disk) -> None:
    disk("e.")
    for _ in range(2):
        try:
            assert get(engine, b"0") is None
        except Corrupt as error:
            assert not error.sent
    disk("..")
    assert engine.exists("a", [b"0", b"1"]) == [False, True]
    assert get(engine, b"1") == data(1, MIB)


def test_a_disk_that_hangs_holds_one_thread_and_the_others_get_misses(engine: Engine, disk: Disk) -> None:
    disk("ss")
    found: list[bytes | None] = []
    stuck = threading.Thread(target=lambda: found.append(get(engine, b"0")))
    stuck.start()
    until(lambda: not engine.exists("a", [b"1"], lease_s=1.0)[0])
    for number in range(20):
        assert get(engine, b"%d" % (number % 3)) is None
        with pytest.raises(Full) as error:
            engine.put("a", b"new", memoryview(data(9, MIB)))
        assert error.value.status == 503
    assert stuck.is_alive()
    assert engine.stats("a")["total_refs"] == 3
    disk("..")
    stuck.join(20)
    assert found == [data(0, MIB)]
    until(lambda: get(engine, b"1") == data(1, MIB))
    assert engine.put("a", b"new", memoryview(data(9, MIB))).new
