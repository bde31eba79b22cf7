"""Run by test_faults.py under faults.c: a store on a disk that fails, or hangs, on command."""

from __future__ import annotations

import ctypes
import mmap
import os
import random
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvstrata.store.blockfile import BlockIO, Expired
from kvstrata.store.deadline import TaskLease
from kvstrata.store.scratch import Scratch
from kvstrata.store.store import BlockStore, Outcome, Result
from tests.store.stores import MIB, books_are_right, data, file_of, get, key, outcomes, put, wait_for

pytestmark = pytest.mark.usefixtures("reader")
Opened = Callable[..., BlockStore]
FILLER = 0xA5


class Disk:
    """What the shim does with reads and writes from now on."""

    def __init__(self) -> None:
        self._file = Path(os.environ["KV_FAULTS"])

    def set(self, reads: str = ".", writes: str = ".") -> None:
        with self._file.open("r+") as file:
            file.write(reads + writes)


@pytest.fixture
def disk() -> Iterator[Disk]:
    disk = Disk()
    disk.set()
    yield disk
    disk.set()


def _said(results: list[Result]) -> set[tuple[str, str]]:
    return {(str(result.outcome), result.reason) for result in results}


@pytest.mark.parametrize(("word", "fault"), [("eio", "e"), ("enospc", "n")])
def test_failing_writes_are_counted_by_reason_and_never_poison_a_later_put(
    opened: Opened, root: Path, disk: Disk, word: str, fault: str
) -> None:
    store = opened()
    put(store, [1])
    disk.set(writes=fault)
    assert _said(put(store, [2, 3])) == {("error", word)}
    assert store.contains([key(2)]) == [False]
    assert outcomes(get(store, [1])) == {"hit"}
    disk.set()
    assert outcomes(put(store, [2, 3])) == {"stored"}
    assert outcomes(get(store, [1, 2, 3])) == {"hit"}
    assert books_are_right(store, root)


def test_a_read_that_fails_once_keeps_the_block_and_one_that_fails_again_gives_it_up(
    opened: Opened, root: Path, disk: Disk
) -> None:
    store = opened()
    put(store, [1, 2])
    disk.set(reads="e")
    assert _said(get(store, [1, 2])) == {("error", "eio")}
    disk.set()
    assert outcomes(get(store, [1])) == {"hit"}
    disk.set(reads="e")
    assert _said(get(store, [1, 2])) == {("error", "eio")}
    disk.set()
    assert store.contains([key(1), key(2)]) == [True, False]
    assert outcomes(put(store, [2])) == {"stored"}
    assert books_are_right(store, root)


@pytest.mark.parametrize("size", [256 << 10, 5 * MIB])
def test_a_stuck_load_is_reported_in_time_and_its_buffer_left_alone_for_ever(
    opened: Opened, disk: Disk, size: int
) -> None:
    store = opened()
    put(store, range(4), size)
    buffers = [bytearray([FILLER]) * size for _ in range(4)]
    disk.set(reads="s")
    began = time.monotonic()
    future = store.get_into([key(n) for n in range(4)], [memoryview(buffer) for buffer in buffers], deadline_s=0.3)
    assert _said(future.result(5)) == {("expired", "deadline")}
    assert time.monotonic() - began < 3
    before = [bytes(buffer) for buffer in buffers]
    # Suspect: nothing is promised, and nothing waits.
    assert store.usage().suspect
    assert store.contains([key(0)]) == store.contains_and_pin([key(0)]) == [False]
    assert _said(get(store, [0], size)) == _said(put(store, [9])) == {("error", "suspect")}
    disk.set()
    assert wait_for(lambda: not store.usage().suspect)
    assert [bytes(buffer) for buffer in buffers] == before, "a buffer was touched after its report"
    assert outcomes(get(store, range(4), size)) == {"hit"}
    assert store.delete([key(0)]).result(5)[0].outcome is Outcome.DELETED, "the stuck load still holds its block"


def test_a_store_stays_suspect_as_long_as_the_disk_is_stuck(opened: Opened, disk: Disk) -> None:
    store = opened()
    put(store, [1])
    disk.set(reads="s")
    store.get_into([key(1)], [memoryview(bytearray(256 << 10))], deadline_s=0.1).result(5)
    time.sleep(1.0)
    assert store.usage().suspect
    disk.set()
    assert wait_for(lambda: store.contains([key(1)]) == [True])


def test_a_stuck_put_is_reported_in_time_never_published_late_and_loads_go_on(
    opened: Opened, root: Path, disk: Disk
) -> None:
    store = opened()
    put(store, [1])
    source = bytearray(data(2))
    disk.set(writes="s")
    future = store.put([key(2), key(3), key(4)], [memoryview(source)] * 3, deadline_s=0.3)
    assert _said(future.result(5)) == {("expired", "deadline")}
    source[:] = bytes(len(source))
    assert outcomes(get(store, [1])) == {"hit"}
    assert not store.usage().suspect
    assert _said(put(store, [5])) == {("error", "suspect")}
    disk.set()
    assert wait_for(lambda: outcomes(put(store, [5])) <= {"stored", "present"})
    assert store.contains([key(2), key(3), key(4)]) == [False] * 3
    assert not file_of(root, 2).exists()
    assert outcomes(put(store, [2])) == {"stored"}
    assert outcomes(get(store, [2, 5])) == {"hit"}
    assert books_are_right(store, root)


@pytest.mark.parametrize("faults", ["s.", ".s", "ss"])
def test_close_does_not_wait_for_a_stuck_disk_and_gives_the_root_up(
    opened: Opened, root: Path, disk: Disk, faults: str
) -> None:
    store = opened()
    put(store, range(4))
    disk.set(*faults)
    buffer = bytearray([FILLER]) * (256 << 10)
    futures = [
        store.get_into([key(1)], [memoryview(buffer)]),
        store.put([key(7)], [memoryview(data(7))]),
    ]
    time.sleep(0.1)
    before = bytes(buffer)
    began = time.monotonic()
    store.close(timeout_s=0.5)
    assert time.monotonic() - began < 4
    assert all(future.done() for future in futures)
    disk.set()
    time.sleep(0.2)
    if faults[0] == "s":
        assert buffer == before
    store = opened()
    assert outcomes(get(store, range(4))) == {"hit"}
    assert books_are_right(store, root)


def test_a_block_that_hangs_does_not_take_the_threads_of_the_stores(opened: Opened, disk: Disk) -> None:
    store = opened(workers=1)
    put(store, [1])
    disk.set(reads="s")
    stuck = store.get_into([key(1)], [memoryview(bytearray(256 << 10))], deadline_s=20)
    assert outcomes(put(store, [2])) == {"stored"}
    assert not stuck.done()
    disk.set()
    assert outcomes(stuck.result(10)) == {"hit"}


class Lent:
    """Memory that a write may not touch any more once it was taken back: that would end the process."""

    def __init__(self, size: int) -> None:
        self._pool = mmap.mmap(-1, size)
        self._pool.write(os.urandom(size))
        self.view = memoryview(self._pool)
        self._protect = ctypes.CDLL(None, use_errno=True).mprotect
        self._protect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
        self._place = ctypes.addressof(ctypes.c_char.from_buffer(self._pool))

    def protect(self, how: int, start: int = 0) -> None:
        assert self._protect(self._place + start, len(self.view) - start, how) == 0

    def writer(self, io: BlockIO, number: int, lease: TaskLease, failed: list[BaseException]) -> threading.Thread:
        def write() -> None:
            try:
                io.write(key(number), self.view, 1, lease)
            except (OSError, Expired) as error:
                failed.append(error)

        thread = threading.Thread(target=write)
        thread.start()
        return thread


@pytest.fixture
def lent() -> Iterator[Lent]:
    lent = Lent(5 * MIB)
    yield lent
    lent.protect(mmap.PROT_READ | mmap.PROT_WRITE)


def test_a_write_that_hangs_does_not_hold_what_was_lent_and_never_touches_it_again(
    root: Path, disk: Disk, lent: Lent
) -> None:
    root.mkdir()
    lease, failed = TaskLease(), list[BaseException]()
    disk.set(writes="s")
    writer = lent.writer(BlockIO(root), 1, lease, failed)
    time.sleep(0.2)  # it hangs in the middle of the block by now
    lease.end()
    assert writer.is_alive()
    lent.protect(0, MIB)  # what the disk was just given has been taken by the kernel
    disk.set()
    writer.join()
    assert len(failed) == 1 and not [*root.rglob("*.0.0")]


@pytest.mark.parametrize("end", ["deadline", "closed"])
def test_a_put_that_hangs_gives_its_buffer_back_with_its_report(
    opened: Opened, root: Path, disk: Disk, lent: Lent, end: str
) -> None:
    store = opened()
    disk.set(writes="s")
    future = store.put([key(1)], [lent.view], deadline_s=0.2 if end == "deadline" else 60)
    if end == "closed":
        time.sleep(0.2)
        store.close(timeout_s=0)
    assert _said(future.result(10)) == {("expired", end)}
    lent.protect(0, MIB)
    disk.set()
    store.close()
    assert wait_for(lambda: not [one for one in threading.enumerate() if one.name.startswith("kvstrata-io")])
    assert not file_of(root, 1).exists()


def test_what_was_lent_can_be_taken_back_at_any_moment_of_a_write(root: Path, disk: Disk, lent: Lent) -> None:
    root.mkdir()
    io, chance, lost = BlockIO(root), random.Random(4), 0
    for number in range(150):
        lease, failed = TaskLease(), list[BaseException]()
        writer = lent.writer(io, number, lease, failed)
        time.sleep(chance.random() * 0.004)
        lease.end()
        lent.protect(0)
        writer.join()
        lent.protect(mmap.PROT_READ | mmap.PROT_WRITE)
        assert bool(failed) != file_of(root, number).exists()
        lost += len(failed)
        if not failed:
            with io.open(key(number)) as block:
                block.verify(Scratch())
            io.remove(key(number))
    assert lost


@pytest.mark.parametrize("size", [1, 256 << 10, 5 * MIB + 12345])
def test_writes_that_are_interrupted_and_cut_short_make_whole_blocks(opened: Opened, disk: Disk, size: int) -> None:
    store = opened()
    disk.set(writes="i")
    assert outcomes(put(store, range(4), size)) == {"stored"}
    assert outcomes(get(store, range(4), size)) == {"hit"}


def test_a_disk_that_is_full_in_the_middle_of_a_block_fails_the_put_and_leaves_nothing(
    opened: Opened, root: Path, disk: Disk
) -> None:
    store = opened()
    disk.set(writes="m")
    assert _said(put(store, [1], 5 * MIB)) == {("error", "enospc")}
    assert store.contains([key(1)]) == [False] and not file_of(root, 1).exists()
    disk.set()
    assert outcomes(put(store, [1], 5 * MIB)) == {"stored"}
    assert outcomes(get(store, [1], 5 * MIB)) == {"hit"}
    assert books_are_right(store, root)
