"""Disks that fail: full, read-only, gone, frozen, broken. Stores fail and are counted, reads go on, no restart."""

from __future__ import annotations

import fcntl
import os
import random
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvstrata.store.store import BlockStore, Result
from tests.store.filesystems import folder_on
from tests.store.shim import environment
from tests.store.stores import MIB, books_are_right, data, get, key, outcomes, put, settings, wait_for

HERE = Path(__file__).parent
Opened = Callable[..., BlockStore]
FIFREEZE, FITHAW = 0xC0045877, 0xC0045878

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount")


def _said(results: list[Result]) -> set[tuple[str, str]]:
    return {(str(result.outcome), result.reason) for result in results}


@pytest.fixture
def ext4(tmp_path: Path) -> Iterator[Path]:
    """A small ext4 of our own."""
    with folder_on("ext4", tmp_path) as mounted:
        yield mounted


@pytest.mark.skipif(shutil.which("gcc") is None, reason="needs gcc")
def test_a_disk_that_fails_or_hangs_on_command(tmp_path: Path) -> None:
    """Runs inside_faults.py with a shim between Python and the disk."""
    env = {**os.environ, **environment(tmp_path, tmp_path / "inside")}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", HERE / "inside_faults.py"]
    done = subprocess.run(
        [*command, f"--basetemp={tmp_path / 'inside'}"],
        cwd=HERE.parents[1],
        env=env,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_root_removed_under_a_store_is_made_anew(opened: Opened, root: Path) -> None:
    store = opened()
    put(store, range(3))
    root.rename(root.with_name("away"))
    assert _said(get(store, [0])) == {("miss", "lost")}
    assert outcomes(put(store, [7])) == {"stored"}
    assert outcomes(get(store, [7])) == {"hit"}
    assert wait_for(lambda: store.contains([key(1), key(2)]) == [False, False])
    assert root.stat().st_mode & 0o777 == 0o700
    assert books_are_right(store, root)
    store.close()
    assert outcomes(get(opened(), [7])) == {"hit"}


def test_an_emptied_root_is_filled_again(opened: Opened, root: Path) -> None:
    store = opened()
    put(store, range(3))
    for path in root.iterdir():
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    assert outcomes(put(store, [7, 8])) == {"stored"}
    assert outcomes(get(store, [7, 8])) == {"hit"}
    assert outcomes(get(store, range(3))) == {"miss"}
    assert outcomes(put(store, range(3))) == {"stored"}
    assert books_are_right(store, root)


def test_removed_folders_come_back_with_the_next_put(opened: Opened, root: Path) -> None:
    store = opened()
    put(store, range(3))
    for folder in root.iterdir():
        if folder.is_dir():
            shutil.rmtree(folder)
    assert _said(get(store, range(3))) == {("miss", "lost")}
    assert outcomes(put(store, range(3))) == {"stored"}
    assert outcomes(get(store, range(3))) == {"hit"}
    assert books_are_right(store, root)


@as_root
@pytest.mark.slow
def test_a_file_system_filled_to_the_brim_still_serves_and_takes_blocks_when_space_comes_back(tmp_path: Path) -> None:
    root = tmp_path / "mounted"
    root.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=200m", "tmpfs", root], check=True)
    try:
        store = BlockStore.open(settings(root / "store", 180 * MIB))
        assert outcomes(put(store, range(40), MIB)) == {"stored"}
        filler = root / "filler"
        with filler.open("wb") as file, pytest.raises(OSError, match="No space"):
            while True:
                file.write(bytes(MIB))
        # Old blocks may be given for new ones, but below a quarter of the disk nothing goes.
        for _ in range(4):
            assert _said(put(store, range(100, 140), MIB)) <= {("error", "enospc"), ("stored", ""), ("present", "")}
        there = [n for n in [*range(40), *range(100, 140)] if store.contains([key(n)])[0]]
        assert len(there) >= 35
        assert outcomes(get(store, there, MIB)) == {"hit"}
        filler.unlink()
        assert outcomes(put(store, range(200, 240), MIB)) == {"stored"}
        assert outcomes(get(store, range(200, 240), MIB)) == {"hit"}
        assert books_are_right(store, root / "store")
        store.close()
        # A full disk does not keep a store from starting either.
        with filler.open("wb") as file, pytest.raises(OSError, match="No space"):
            while True:
                file.write(bytes(MIB))
        store = BlockStore.open(settings(root / "store", 180 * MIB))
        assert outcomes(get(store, range(200, 240), MIB)) == {"hit"}
        store.close()
    finally:
        subprocess.run(["umount", root], check=True)


@as_root
@pytest.mark.slow
def test_a_disk_remounted_read_only_serves_and_takes_blocks_again_when_it_is_writable(ext4: Path) -> None:
    store = BlockStore.open(settings(ext4 / "store", 20 * MIB))
    try:
        put(store, range(10))
        # The store's unwritten last uses and its lock must not keep the disk from it.
        subprocess.run(["mount", "-o", "remount,ro", ext4], check=True)
        assert _said(put(store, [20, 21])) == {("error", "erofs")}
        assert outcomes(get(store, range(10))) == {"hit"}
        assert outcomes(store.delete([key(1)]).result(10)) == {"error"}
        assert store.evict(MIB) == 0
        assert outcomes(get(store, range(10))) == {"hit"}
        subprocess.run(["mount", "-o", "remount,rw", ext4], check=True)
        assert outcomes(put(store, [20, 21])) == {"stored"}
        assert outcomes(store.delete([key(1)]).result(10)) == {"deleted"}
        assert books_are_right(store, ext4 / "store")
    finally:
        store.close()


@as_root
@pytest.mark.slow
def test_a_frozen_file_system_ends_puts_in_time_while_loads_go_on(ext4: Path) -> None:
    store = BlockStore.open(settings(ext4 / "store", 20 * MIB))
    handle = os.open(ext4, os.O_RDONLY)
    try:
        put(store, range(4))
        fcntl.ioctl(handle, FIFREEZE, 0)
        try:
            future = store.put([key(9)], [memoryview(data(9))], deadline_s=0.5)
            assert _said(future.result(5)) == {("expired", "deadline")}
            assert outcomes(get(store, range(4))) == {"hit"}
            assert _said(put(store, [10])) == {("error", "suspect")}
        finally:
            fcntl.ioctl(handle, FITHAW, 0)
        assert wait_for(lambda: outcomes(put(store, [10])) <= {"stored", "present"})
        assert outcomes(get(store, [10])) == {"hit"}
        assert books_are_right(store, ext4 / "store")
    finally:
        os.close(handle)
        store.close()


def _vandalise(root: Path, chance: random.Random) -> None:
    """Remove, damage or truncate a random block, or remove a whole directory of blocks."""
    try:
        files = [path for path in root.glob("*/*/*/*") if path.is_file()]
        if not files:
            return
        victim = chance.choice(files)
        deed = chance.randrange(4)
        if deed == 0:
            victim.unlink()
        elif deed == 1:
            with victim.open("r+b") as file:
                file.seek(chance.randrange(victim.stat().st_size))
                file.write(b"\xff\x00\xff")
        elif deed == 2:
            os.truncate(victim, chance.randrange(victim.stat().st_size))
        else:
            shutil.rmtree(victim.parent)
    except OSError:
        return


@pytest.mark.parametrize("seconds", [1.5, pytest.param(30.0, marks=pytest.mark.slow)])
def test_whatever_many_threads_and_a_vandal_do_no_wrong_byte_is_served_and_the_books_come_right(
    opened: Opened, root: Path, seconds: float
) -> None:
    store, end, problems = opened(capacity=16 * MIB, workers=3), time.monotonic() + seconds, []

    def work(seed: int) -> None:
        chance = random.Random(seed)
        while time.monotonic() < end and not problems:
            numbers = [chance.randrange(80) for _ in range(chance.randint(1, 6))]
            try:
                match chance.randrange(6):
                    case 0 | 1:
                        put(store, numbers)
                    case 2 | 3:
                        pinned = store.contains_and_pin([key(number) for number in numbers])
                        held = [number for number, there in zip(numbers, pinned, strict=True) if there]
                        get(store, held)
                        store.unpin([key(number) for number in held])
                    case 4:
                        store.delete([key(number) for number in numbers]).result(30)
                    case _:
                        store.touch([key(number) for number in numbers])
                        store.evict(chance.randrange(MIB))
                usage = store.usage()
                assert usage.used + usage.reserved <= usage.capacity
            except Exception as problem:
                problems.append(problem)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    vandal = random.Random(99)
    while time.monotonic() < end:
        _vandalise(root, vandal)
        time.sleep(0.01)
    for thread in threads:
        thread.join()
    assert not problems, problems
    # One pass over everything finds what the vandal did last; nobody holds anything any more.
    get(store, range(80))
    assert store._index.counts().held == 0
    there = [number for number in range(80) if store.contains([key(number)])[0]]
    assert outcomes(get(store, there)) <= {"hit"}
    assert {path.name for path in root.glob("*/*/*/*")} == {key(number).name for number in there}
    assert books_are_right(store, root)
    assert outcomes(put(store, [500])) == {"stored"}
