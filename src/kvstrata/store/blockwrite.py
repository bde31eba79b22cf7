"""Fill a block's unnamed file: payload, encoded where that pays, and header."""

from __future__ import annotations

import os
from typing import Protocol

from kvstrata.store.checksum import crc32
from kvstrata.store.codecs import Codec, codec
from kvstrata.store.format import HEADER_BYTES, pack_header
from kvstrata.store.keys import BlockKey
from kvstrata.store.lease import Lease
from kvstrata.store.pagecache import CachedReader
from kvstrata.store.scratch import PAGE, Scratch, address

__all__ = ["fill"]

_BATCH = 4 << 20
"""Bytes a system call, about: half the overhead of a call a sub-block, and what was checked is still in a cache."""


class _Sink(Protocol):
    def write(self, data: memoryview) -> None:
        """Append to the payload."""

    def end(self, header: bytes) -> None:
        """Everything is in the file after it."""


def fill(
    fd: int,
    key: BlockKey,
    source: memoryview,
    itemsize: int,
    sub_bytes: int,
    encoder: Codec,
    lease: Lease,
    direct: Scratch | None,
    cached: CachedReader,
) -> int:
    """Write `source` as a block into the empty file `fd`; `direct`: memory for a file opened with O_DIRECT, else None.

    Returns the payload's length. Raises OSError, Expired.
    """
    lengths, crcs, sink = _fill(fd, source, itemsize, sub_bytes, encoder, lease, direct, cached)
    saved = len(source) - sum(lengths)
    if 0 < saved < PAGE:
        lengths, crcs, sink = _fill(fd, source, itemsize, sub_bytes, codec("raw"), lease, direct, cached)
        saved = 0
    name = encoder.name if saved else "raw"
    sink.end(pack_header(key, name, itemsize, sub_bytes, len(source), lengths, crcs))
    return sum(lengths)


def _fill(
    fd: int,
    source: memoryview,
    itemsize: int,
    sub_bytes: int,
    encoder: Codec,
    lease: Lease,
    direct: Scratch | None,
    cached: CachedReader,
) -> tuple[list[int], list[int], _Sink]:
    plain = encoder.name == "raw" and not direct
    if plain and (crcs := cached.write(fd, source, HEADER_BYTES, sub_bytes, lease)):
        return [min(sub_bytes, len(source) - at) for at in range(0, len(source), sub_bytes)], crcs, _BufferedSink(fd)
    sink = _DirectSink(fd, direct.take(sub_bytes + PAGE)) if direct else _BufferedSink(fd)
    lengths, crcs = [], []
    for start in range(0, len(source), sub_bytes):
        piece = source[start : start + sub_bytes]
        with lease.touching():
            encoded = encoder.encode(piece, itemsize)
            stored = piece if encoded is None else memoryview(encoded)
            crcs.append(crc32(stored))
        lengths.append(len(stored))
        sink.write(stored)
    return lengths, crcs, sink


class _BufferedSink:
    """Gathers sub-blocks, the header's place before the first; a small block goes out in one call."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._at = 0
        self._waiting = [memoryview(bytes(HEADER_BYTES))]
        self._size = HEADER_BYTES

    def write(self, data: memoryview) -> None:
        self._waiting.append(data)
        self._size += len(data)
        if self._size >= _BATCH:
            self._flush()

    def end(self, header: bytes) -> None:
        if not self._at:
            self._waiting[0] = memoryview(header)
            self._flush()
        else:
            self._flush()
            _write_all(self._fd, [memoryview(header)], 0)

    def _flush(self) -> None:
        _write_all(self._fd, self._waiting, self._at)
        self._at += self._size
        self._waiting, self._size = [], 0


class _DirectSink:
    """Whole pages from page-aligned memory: the caller's where it is so, else what was copied together in `room`."""

    def __init__(self, fd: int, room: memoryview) -> None:
        self._fd = fd
        self._room = room
        self._filled = 0
        self._at = HEADER_BYTES
        self._length = HEADER_BYTES

    def write(self, data: memoryview) -> None:
        self._length += len(data)
        place = address(data)
        if not self._filled and len(data) % PAGE == 0 and place is not None and place % PAGE == 0:
            _write_all(self._fd, [data], self._at)
            self._at += len(data)
            return
        self._room[self._filled : self._filled + len(data)] = data
        self._filled += len(data)
        whole = self._filled - self._filled % PAGE
        self._flush(whole)
        rest = self._filled - whole
        self._room[:rest] = bytes(self._room[whole : self._filled])
        self._filled = rest

    def end(self, header: bytes) -> None:
        if self._filled:
            self._flush(PAGE)
        os.ftruncate(self._fd, self._length)
        self._room[:HEADER_BYTES] = header
        _write_all(self._fd, [self._room[:HEADER_BYTES]], 0)

    def _flush(self, size: int) -> None:
        _write_all(self._fd, [self._room[:size]], self._at)
        self._at += size


def _write_all(fd: int, parts: list[memoryview], at: int) -> None:
    """Write the parts one after the other from `at` on. Signals and nearly full disks make short writes."""
    done = os.pwritev(fd, parts, at)
    for part in parts:
        if done >= len(part):
            done -= len(part)
            at += len(part)
            continue
        at, part, done = at + done, part[done:], 0
        while part:
            count = os.pwrite(fd, part, at)
            at, part = at + count, part[count:]
