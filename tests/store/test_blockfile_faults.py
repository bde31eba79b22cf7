"""Blocks under trouble: leases that end, disks that are full, things that are no block, and nothing left behind."""

import errno
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kvstrata.store import blockread, folders, pagecache
from kvstrata.store.blockfile import UNLIMITED, BlockIO, Expired
from kvstrata.store.format import BadBlock
from kvstrata.store.keys import BlockKey
from tests.store.blocks import (
    CODECS,
    FILLER,
    KEY,
    MODES,
    OTHER,
    EndingLease,
    block_files,
    drop_pages,
    put,
    read,
    smooth,
)
from tests.store.filesystems import KINDS, folder_on

pytestmark = pytest.mark.usefixtures("reader")


@pytest.fixture
def io(tmp_path: Path) -> BlockIO:
    return BlockIO(tmp_path)


def _descriptors() -> list[str]:
    return sorted(str(link.readlink()) for link in Path("/proc/self/fd").iterdir() if link.is_symlink())


# --- a lease that ends


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("direct", MODES)
@pytest.mark.parametrize("cold", [False, True])
@pytest.mark.parametrize("last", range(7))
def test_a_read_touches_nothing_after_its_lease_ended(
    codec: str, direct: bool, cold: bool, last: int, tmp_path: Path
) -> None:
    io = BlockIO(tmp_path, codec=codec, direct=direct, sub_bytes=64 << 10)
    data = smooth(192 << 10)
    file = put(io, data)
    if cold:
        drop_pages(file)
    target = bytearray([FILLER]) * len(data)
    then: list[bytes] = []
    lease = EndingLease(last, lambda: then.append(bytes(target)))
    with io.open(KEY) as block:
        try:
            block.read(0, 3, memoryview(target), lease)
        except Expired:
            assert [target] == then
            assert lease.asked == last + 1
        else:
            assert target == data and 1 <= lease.asked <= last


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("last", range(4))
def test_a_write_whose_lease_ended_publishes_nothing(codec: str, last: int, io: BlockIO, tmp_path: Path) -> None:
    io, lease = BlockIO(tmp_path, codec=codec, sub_bytes=64 << 10), EndingLease(last)
    try:
        io.write(KEY, memoryview(smooth(192 << 10)), 2, lease)
    except Expired:
        assert lease.asked == last + 1 and block_files(tmp_path) == []
    else:
        assert 2 <= lease.asked <= last and len(block_files(tmp_path)) == 1


def test_a_write_that_may_not_publish_publishes_nothing(io: BlockIO, tmp_path: Path) -> None:
    with pytest.raises(Expired):
        io.write(KEY, memoryview(b"abc"), 1, UNLIMITED, publish=lambda: False)
    assert block_files(tmp_path) == []


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("kind", KINDS)
def test_no_io_that_can_block_is_done_while_the_buffer_is_held(
    codec: str, kind: str, reader: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lease, real, native = EndingLease(1000), os.preadv, pagecache.NativeReader.read
    seen: set[tuple[bool, bool]] = set()

    def watched(fd: int, buffers: list[memoryview], offset: int, flags: int = 0) -> int:
        seen.add((lease.held, flags == os.RWF_NOWAIT))
        return real(fd, buffers, offset, flags)

    # That the compiled piece asks with RWF_NOWAIT as well is what test_pagecache.py shows.
    def watched_native(self: pagecache.NativeReader, fd: int, *more: object) -> tuple[int, list[int]]:
        seen.add((lease.held, True))
        return native(self, fd, *more)  # type: ignore[arg-type]

    monkeypatch.setattr(blockread.os, "preadv", watched)
    monkeypatch.setattr(pagecache.NativeReader, "read", watched_native)
    with folder_on(kind, tmp_path) as root:
        io = BlockIO(root, codec=codec)
        data = smooth(2 << 20)
        file = put(io, data)
        assert read(io, len(data), lease=lease) == data
        if codec == "raw" and kind == "here":
            assert (True, True) in seen
        drop_pages(file)
        assert read(io, len(data), lease=lease) == data
    assert (True, False) not in seen and (False, False) in seen


# --- what fails


@pytest.mark.slow
@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("direct", MODES)
def test_a_full_disk_fails_the_write_and_leaves_nothing(codec: str, direct: bool, tmp_path: Path) -> None:
    with folder_on("ext4", tmp_path) as root:
        io = BlockIO(root, codec=codec, direct=direct)
        put(io, b"x" * 100)
        with pytest.raises(OSError) as caught:
            for number in range(100):
                put(io, os.urandom(3 << 20), BlockKey("m", "", bytes([number]) * 8))
        assert caught.value.errno == errno.ENOSPC
        good = [path for path in block_files(root) if "lost+found" not in path.parts]
        assert len(good) > 5 and all(io.check(path) for path in good)
        assert read(io, 100) == b"x" * 100


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir, lambda path: path.symlink_to("/dev/zero")])
def test_what_is_no_regular_file_is_no_block(io: BlockIO, tmp_path: Path, make: Callable[[Path], None]) -> None:
    put(io, b"x", OTHER)
    folders.make_folders(str(tmp_path), KEY)
    make(tmp_path / KEY.path)
    with pytest.raises(BadBlock, match="magic"):
        io.open(KEY)


def test_no_descriptor_is_left_open(tmp_path: Path) -> None:
    @contextmanager
    def failing() -> Iterator[None]:
        with pytest.raises((OSError, Expired, BadBlock)):
            yield

    io = BlockIO(tmp_path, codec="zstd")
    file = put(io, smooth(1 << 20))
    before = _descriptors()
    for _ in range(20):
        read(io, 1 << 20)
        io.write(KEY, memoryview(b"x"), 1, UNLIMITED)
        with failing():
            io.write(OTHER, memoryview(b"x"), 1, EndingLease(0))
        with failing():
            read(io, 1 << 20, lease=EndingLease(0))
        with failing():
            read(io, 5)
        with failing():
            io.open(OTHER)
        with failing():
            io.check(file, OTHER)
    assert _descriptors() == before


@pytest.mark.parametrize(
    "wrong", [{"sub_bytes": 3000}, {"sub_bytes": 2048}, {"sub_bytes": 128 << 20}, {"sub_bytes": 0}]
)
def test_a_sub_block_size_that_the_format_has_not_is_refused(tmp_path: Path, wrong: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="needed"):
        BlockIO(tmp_path, **wrong)


@pytest.mark.parametrize("itemsize", [0, -1, 256])
def test_an_item_size_that_the_header_cannot_hold_is_refused(io: BlockIO, itemsize: int) -> None:
    with pytest.raises(ValueError, match="needed"):
        io.write(KEY, memoryview(b"x"), itemsize, UNLIMITED)
