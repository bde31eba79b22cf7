"""What the tests of blocks share: leases that end when told to, bytes that shrink, and reads that say how they went."""

from __future__ import annotations

import os
import struct
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kvstrata.store.blockfile import UNLIMITED, BlockIO, Expired, Lease
from kvstrata.store.format import HEADER_BYTES, BadBlock
from kvstrata.store.keys import BlockKey

CODECS = ("raw", "lz4", "zstd")
MODES = [pytest.param(False, id="buffered"), pytest.param(True, id="direct")]
KEY = BlockKey("model--0123", "tenant", bytes(range(32)), 0x1000100, 1)
OTHER = BlockKey("model--0123", "tenant", bytes(range(1, 33)), 0x1000100, 1)
FILLER = 0xA5


class EndingLease:
    """Ends at the `last`-th time that it is asked; `at_end` runs then."""

    def __init__(self, last: int, at_end: Callable[[], None] = lambda: None) -> None:
        self.left = last
        self.held = False
        self.asked = 0
        self._at_end = at_end

    @contextmanager
    def touching(self) -> Iterator[None]:
        self.asked += 1
        if self.left == 0:
            self._at_end()
            raise Expired
        self.left -= 1
        self.held = True
        try:
            yield
        finally:
            self.held = False

    @contextmanager
    def ending(self, stop: Callable[[], None]) -> Iterator[None]:
        with self.touching():
            self.held = False
            yield


def smooth(size: int) -> bytes:
    """Like bf16 KV: every second byte is one of few."""
    noise = bytearray(os.urandom(size))
    noise[1::2] = (b"\x3c\x3d\x3e\xbd" * (size // 8 + 1))[: size // 2]
    return bytes(noise)


def block_files(root: Path) -> list[Path]:
    """Every file below a root but the JSON files."""
    return [path for path in root.rglob("*") if path.is_file() and path.suffix != ".json"]


def put(io: BlockIO, data: bytes, key: BlockKey = KEY, itemsize: int = 2) -> Path:
    """Write a block; its file."""
    assert not io.write(key, memoryview(data), itemsize, UNLIMITED).existed
    return Path(io._root, key.path)


def read(io: BlockIO, size: int, key: BlockKey = KEY, lease: Lease = UNLIMITED) -> bytes:
    """All of a block, into a buffer that was full of something else."""
    target = bytearray([FILLER]) * size
    with io.open(key) as block:
        block.read(0, block.header.sub_count, memoryview(target), lease)
    return bytes(target)


def outcome(io: BlockIO, data: bytes, key: BlockKey = KEY) -> str:
    """ "good", or why the block was refused, by a reader and by a full check alike. Wrong bytes fail the test."""
    said = []
    for look in (lambda: read(io, len(data), key), lambda: io.check(Path(key.path), key)):
        try:
            got = look()
        except BadBlock as error:
            said.append(error.reason)
        else:
            assert not isinstance(got, bytes) or got == data, "wrong bytes were served"
            said.append("good")
    assert said[0] == said[1], said
    return said[0]


def patch(file: Path, offset: int, data: bytes) -> None:
    """Overwrite bytes; an offset below 0 counts from the end."""
    with file.open("r+b") as handle:
        handle.seek(offset, os.SEEK_END if offset < 0 else os.SEEK_SET)
        handle.write(data)


def seal(page: bytearray) -> None:
    """Give a changed header page the checksum that fits."""
    struct.pack_into("<I", page, HEADER_BYTES - 4, zlib.crc32(page[: HEADER_BYTES - 4]))


def forge(file: Path, offset: int, data: bytes) -> None:
    """Change the header and make its checksum fit."""
    page = bytearray(file.read_bytes()[:HEADER_BYTES])
    page[offset : offset + len(data)] = data
    seal(page)
    patch(file, 0, bytes(page))


def drop_pages(file: Path) -> None:
    """Put a file out of the page cache."""
    fd = os.open(file, os.O_RDONLY)
    try:
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(fd)
