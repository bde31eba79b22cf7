"""A full disk, a disk that is freed again, and what durability=fsync brings to the device before it says so."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstrata.engine.content import Engine
from kvstrata.engine.errors import Full
from tests.engine.engines import MIB, data, get, settings


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
