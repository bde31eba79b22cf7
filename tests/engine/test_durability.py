"""A full disk, a disk that is freed again, and what durability=fsync brings to the device before it says so."""

from __future__ import annotations

import os
import re
import shutil
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from threading import Thread

import pytest

from kvstrata.engine.content import Engine
from kvstrata.engine.errors import Full
from tests.engine.engines import MIB, block_files, data, get, settings, until


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 64 MiB."""
    place = tmp_path / "disk"
    place.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", str(place)], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip(f"cannot mount a tmpfs: {mounted.stderr.decode().strip()}")
    yield place
    subprocess.run(["umount", "-l", str(place)], check=True)


def fill_up(disk: Path) -> Path:
    """A file that takes the last free byte."""
    filler = disk / "filler"
    fd = os.open(filler, os.O_WRONLY | os.O_CREAT)
    try:
        with pytest.raises(OSError, match="No space"):
            while True:
                os.write(fd, bytes(4096))
    finally:
        os.close(fd)
    return filler


def put(engine: Engine, number: int, size: int = MIB) -> bool:
    """True if it was stored."""
    try:
        return engine.put("a", b"%d" % number, memoryview(data(number, size))).new
    except Full:
        return False


def test_on_a_full_disk_what_is_there_is_served_and_the_rest_goes_on_when_there_is_room(small_disk: Path) -> None:
    # The capacity is more than the disk has, and somebody else fills the rest.
    engine = Engine.open(settings(small_disk / "engine", 1024 * MIB))
    stored = [number for number in range(20) if put(engine, number)]
    assert stored == list(range(20))
    filler = fill_up(small_disk)
    refused = 0
    for number in range(100, 160):
        there = put(engine, number)
        refused += not there
        # Acknowledged is there, refused is not; nothing in between.
        assert (get(engine, b"%d" % number) == data(number, MIB)) is there
    assert refused
    for number in range(20):
        assert get(engine, b"%d" % number) in (None, data(number, MIB))
    filler.unlink()
    for number in range(200, 210):
        assert put(engine, number)
    stats = engine.stats("a")
    keys = engine.scan("a", b"", None, 1000)[1]
    assert stats["total_refs"] == len(keys)
    values = {key: get(engine, key) for key in keys}
    engine.close()
    engine = Engine.open(settings(small_disk / "engine", 1024 * MIB))
    assert {key: get(engine, key) for key in keys} == values
    assert engine.stats("a")["logical_bytes"] == stats["logical_bytes"]
    engine.close()


def test_a_disk_without_one_free_block_still_answers(small_disk: Path) -> None:
    engine = Engine.open(settings(small_disk / "engine", 1024 * MIB))
    for number in range(3):
        assert put(engine, number)
    filler = fill_up(small_disk)
    for _ in range(3):
        try:
            engine.delete("a", [b"1"])
            break
        except Full:
            continue
    assert get(engine, b"2") == data(2, MIB)
    engine.close()
    filler.unlink()
    engine = Engine.open(settings(small_disk / "engine", 1024 * MIB))
    assert get(engine, b"2") == data(2, MIB)
    assert put(engine, 9)
    engine.close()


def test_an_engine_that_was_killed_starts_on_a_full_disk_and_serves(small_disk: Path) -> None:
    engine = Engine.open(settings(small_disk / "engine", 1024 * MIB))
    for number in range(5):
        assert put(engine, number)
    engine._tender.stop(20)
    shutil.copytree(small_disk / "engine", small_disk / "killed")
    engine.close()
    filler = fill_up(small_disk)
    engine = Engine.open(settings(small_disk / "killed", 1024 * MIB))
    for number in range(5):
        assert get(engine, b"%d" % number) == data(number, MIB)
    filler.unlink()
    assert put(engine, 9)
    engine.close()


@pytest.mark.skipif(shutil.which("strace") is None, reason="needs strace")
def test_fsync_brings_block_folders_and_catalog_to_the_device_before_it_acknowledges(tmp_path: Path) -> None:
    trace = tmp_path / "trace"
    program = (
        "import os, sys; from pathlib import Path; from kvstrata.engine.content import Engine;"
        "from tests.engine.engines import settings;"
        f"engine = Engine.open(settings(Path({str(tmp_path / 'engine')!r}), durability='fsync'));"
        "os.write(1, b'opened');"
        "engine.put('a', b'k', memoryview(bytes(300000)));"
        "os.write(1, b'acknowledged'); os._exit(0)"
    )
    subprocess.run(
        ["strace", "-f", "-y", "-e", "trace=fsync,fdatasync,linkat,write", "-o", str(trace), "python", "-c", program],
        check=True,
        capture_output=True,
        cwd=Path(__file__).resolve().parents[2],
        env={**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"},
    )
    text = trace.read_text()
    acknowledged = text[text.index('"opened"') : text.index('"acknowledged"')]
    synced = [line for line in acknowledged.splitlines() if "fsync(" in line or "fdatasync(" in line]
    linked = acknowledged.index("linkat(")
    for part in (".0.0>", "/blocks>", "catalog.sqlite-wal>"):
        assert any(part in line for line in synced), f"{part} was not brought to the device"
    assert acknowledged.index("fsync(") > linked
    # The row comes last: it must not be there without its bytes.
    assert "catalog.sqlite-wal>" in synced[-1]


@pytest.mark.skipif(shutil.which("strace") is None, reason="needs strace")
def test_fsync_brings_the_entries_of_new_folders_to_the_device(tmp_path: Path) -> None:
    root, cold, trace = tmp_path / "new/engine", tmp_path / "cold", tmp_path / "trace"
    program = (
        "import os; from pathlib import Path; from kvstrata.engine.content import Engine;"
        "from tests.engine.engines import settings;"
        f"Engine.open(settings(Path({str(root)!r}), durability='fsync',"
        f" cold_root=Path({str(cold)!r}), cold_capacity=1 << 24)); os._exit(0)"
    )
    subprocess.run(
        ["strace", "-f", "-y", "-e", "trace=fsync", "-o", str(trace), "python", "-c", program],
        check=True,
        capture_output=True,
        cwd=Path(__file__).resolve().parents[2],
        env={**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"},
    )
    synced = set(re.findall(r"fsync\(\d+<([^>]*)>\)", trace.read_text()))
    assert {str(tmp_path), str(tmp_path / "new"), str(root)} <= synced


@pytest.mark.skipif(shutil.which("gcc") is None, reason="needs gcc")
def test_a_disk_that_fails_or_hangs_on_command(tmp_path: Path) -> None:
    """Runs inside_faults.py with a shim between Python and the disk."""
    here = Path(__file__).parent
    library, faults = tmp_path / "faults.so", tmp_path / "faults"
    source = here.parent / "store/faults.c"
    subprocess.run(["gcc", "-shared", "-fPIC", "-O1", "-o", library, source, "-ldl"], check=True)
    faults.write_text("..")
    env = {
        **os.environ,
        "LD_PRELOAD": str(library),
        "KV_FAULTS": str(faults),
        "KV_FAULT_ROOT": str(tmp_path / "engine/blocks"),
        "KV_TEST_ROOT": str(tmp_path / "engine"),
    }
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(here / "inside_faults.py")]
    done = subprocess.run(
        [*command, f"--basetemp={tmp_path / 'inside'}"],
        cwd=here.parents[1],
        env=env,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_old_value_stays_on_the_disk_until_the_new_one_is_written_down(tmp_path: Path) -> None:
    engine = Engine.open(settings(tmp_path))
    engine.put("a", b"key", memoryview(data(1, 5000)))
    [old] = block_files(tmp_path)
    with sqlite3.connect(tmp_path / "catalog.sqlite", isolation_level=None) as other:
        other.execute("BEGIN IMMEDIATE")  # a commit that takes long
        writer = Thread(target=engine.put, args=("a", b"key", memoryview(data(2, 5000))), kwargs={"replace": True})
        writer.start()
        until(lambda: len(block_files(tmp_path)) == 2)
        time.sleep(1.5)  # the sweeper looks twice a second
        assert old.exists()
        other.execute("ROLLBACK")
    writer.join()
    until(lambda: not old.exists())
    assert get(engine, b"key") == data(2, 5000)
    engine.close()


@pytest.mark.parametrize("change", ["put", "delete"])
def test_a_key_whose_change_failed_does_not_come_back_with_its_old_value(change: str, tmp_path: Path) -> None:
    engine = Engine.open(settings(tmp_path))
    for key in (b"key", b"twin"):  # the old value stays on the disk for the twin
        engine.put("a", key, memoryview(data(1, 5000)))
    catalog = engine._core.catalog.file.db
    catalog.execute("PRAGMA query_only=1")
    with pytest.raises(Full):
        if change == "put":
            engine.put("a", b"key", memoryview(data(2, 5000)), replace=True)
        else:
            engine.delete("a", [b"key"])
    assert get(engine, b"key") is None
    catalog.execute("PRAGMA query_only=0")
    engine.close()
    engine = Engine.open(settings(tmp_path))
    assert get(engine, b"key") is None and get(engine, b"twin") == data(1, 5000)
    engine.close()
