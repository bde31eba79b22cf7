"""Values that come in piece by piece: whole or never there, and the same as those that come at once."""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstrata.engine.content import Engine
from kvstrata.engine.errors import Full, TooLarge
from kvstrata.engine.receiving import Put
from tests.engine.engines import MIB, block_files, data, disk_bytes, get, settings, until


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Engine]:
    """An engine with 32 MiB."""
    engine = Engine.open(settings(tmp_path / "engine", 32 * MIB))
    yield engine
    engine.close()


def receive(engine: Engine, key: bytes, value: bytes, step: int, **more: object) -> Put:
    """Give the value in pieces of `step` bytes, all in the same memory."""
    buffer = bytearray(step)
    with engine.receive("a", key, len(value), **more) as incoming:  # type: ignore[arg-type]
        for at in range(0, len(value), step):
            piece = value[at : at + step]
            buffer[: len(piece)] = piece
            incoming.write(memoryview(buffer)[: len(piece)])
        return incoming.done()


def reserved(engine: Engine) -> int:
    """Bytes that are set aside."""
    return next(iter(engine._core.tiers.stores.values())).usage().reserved


@pytest.mark.parametrize("size", [0, 1, (256 << 10) - 1, 256 << 10, (256 << 10) + 1, 3 * MIB + 7])
@pytest.mark.parametrize("step", [65_537, 256 << 10, MIB])
def test_pieces_of_any_size_give_the_block_that_one_put_gives(
    engine: Engine, tmp_path: Path, size: int, step: int
) -> None:
    value = os.urandom(size)
    received = receive(engine, b"k", value, step)
    assert received.new
    assert get(engine, b"k") == value
    (file,) = block_files(tmp_path)
    ours = file.read_bytes()
    engine.delete("a", [b"k"])
    until(lambda: not block_files(tmp_path))
    assert engine.put("a", b"k", memoryview(value)).digest == received.digest
    (file,) = block_files(tmp_path)
    assert file.read_bytes() == ours
    assert reserved(engine) == 0


def test_the_largest_value_has_larger_pieces(tmp_path: Path) -> None:
    engine = Engine.open(settings(tmp_path / "engine", 512 * MIB))
    value = random.Random(1).randbytes(1 << 20) * 120
    assert receive(engine, b"k", value, 700_001).new
    assert get(engine, b"k") == value
    engine.close()


def test_a_value_that_is_cut_short_was_never_there(engine: Engine, tmp_path: Path) -> None:
    with engine.receive("a", b"k", 2 * MIB) as incoming:
        incoming.write(memoryview(bytes(MIB)))
        with pytest.raises(ValueError, match="announced"):
            incoming.done()
    with engine.receive("a", b"k", MIB) as incoming:
        incoming.write(memoryview(bytes(MIB)))
        with pytest.raises(ValueError, match="announced"):
            incoming.write(memoryview(b"x"))
    assert get(engine, b"k") is None
    assert reserved(engine) == 0
    assert not block_files(tmp_path)
    assert engine.stats("a")["put_new"] == 0


def test_the_first_value_stays_and_the_others_bytes_go(engine: Engine, tmp_path: Path) -> None:
    assert receive(engine, b"k", data(1), 65_536).new
    assert receive(engine, b"k", data(2), 65_536) == Put(False, receive(engine, b"k", data(1), 65_536).digest)
    assert get(engine, b"k") == data(1)
    until(lambda: len(block_files(tmp_path)) == 1)
    assert not receive(engine, b"k", data(2), 65_536, replace=True).new
    assert get(engine, b"k") == data(2)
    until(lambda: len(block_files(tmp_path)) == 1)


def test_equal_values_of_many_threads_are_one_block(engine: Engine, tmp_path: Path) -> None:
    value = os.urandom(MIB)
    results: list[Put] = []
    threads = [
        threading.Thread(target=lambda key=b"%d" % number: results.append(receive(engine, key, value, 100_000)))
        for number in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [put.new for put in results] == [True] * 8
    assert len(block_files(tmp_path)) == engine.stats("a")["unique_blocks"] == 1
    assert reserved(engine) == 0


def test_room_is_made_before_the_first_byte_and_the_cap_holds(engine: Engine, tmp_path: Path) -> None:
    for number in range(60):
        receive(engine, b"%d" % number, data(number, MIB), 256 << 10)
    assert disk_bytes(tmp_path / "engine/blocks") <= 32 * MIB
    assert get(engine, b"59") == data(59, MIB)
    with pytest.raises(TooLarge):
        engine.receive("a", b"k", 40 * MIB)


def test_too_many_that_come_in_at_once_are_refused_and_not_written(engine: Engine) -> None:
    open_ones = []
    with pytest.raises(Full):
        for _ in range(20):
            open_ones.append(engine.receive("a", b"k", 4 * MIB))
    assert 5 <= len(open_ones) <= 8
    for incoming in open_ones:
        incoming.close()
    assert receive(engine, b"k", data(1, 4 * MIB), MIB).new


def test_options_may_come_after_the_bytes(engine: Engine) -> None:
    receive(engine, b"k", data(1), MIB)
    with engine.receive("a", b"k", len(data(2))) as incoming:
        incoming.write(memoryview(data(2)))
        assert not incoming.done(replace=True, ttl_s=100.0).new
    assert get(engine, b"k") == data(2)
    assert 90 < (engine.ttl("a", b"k") or 0) <= 100
