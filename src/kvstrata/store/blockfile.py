"""Blocks as files below a root: written whole or not at all, and read with every byte checked (docs/format.md)."""

from __future__ import annotations

import ctypes
import errno
import os
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from kvstrata.store.blockread import OpenBlock, open_block
from kvstrata.store.blockwrite import fill
from kvstrata.store.codecs import codec as find_codec
from kvstrata.store.folders import json_stamps, link_unnamed, make_folders
from kvstrata.store.format import HEADER_BYTES, SUB_LIMIT, SUB_SMALLEST, BadBlock, Header, fitting_sub_bytes
from kvstrata.store.keys import BlockKey
from kvstrata.store.lease import UNLIMITED, Expired, Lease
from kvstrata.store.pagecache import cached_reader
from kvstrata.store.scratch import Scratch

__all__ = ["UNLIMITED", "BlockIO", "Expired", "Lease", "OpenBlock", "Written"]

_TRIES = 3
_MODE = 0o600
# Python's posix_fallocate would write a byte into each block where the file system cannot do it.
_fallocate = ctypes.CDLL(None).fallocate
_fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]


@dataclass(frozen=True, slots=True)
class Written:
    """What a write did. `existed`: the name was taken, so nothing was published and the rest says nothing.
    `allocated`: bytes on disk, st_blocks * 512; `stored_len`: of the payload; `mtime_ns`: its first last use.
    """

    existed: bool
    allocated: int
    stored_len: int
    mtime_ns: int


class BlockIO:
    """Reads and writes the blocks of one root; thread-safe, and without state but per-thread scratch memory
    and the folder that was made last.

    `codec`: of what is written (CodecError where it cannot be had); every codec is read. `direct`: O_DIRECT, for a file
    system that takes it. `native`: as for cached_reader (StoreError). `sub_bytes`: a power of two from 4 KiB to 64 MiB.
    `clock`: gives new blocks their mtime in ns.
    """

    def __init__(
        self,
        root: Path,
        *,
        codec: str = "raw",
        direct: bool = False,
        native: str = "auto",
        sub_bytes: int = 1 << 20,
        clock: Callable[[], int] = time.time_ns,
    ) -> None:
        if sub_bytes & (sub_bytes - 1) or not SUB_SMALLEST <= sub_bytes <= SUB_LIMIT:
            raise ValueError(f"found: sub_bytes {sub_bytes}; needed: a power of two, {SUB_SMALLEST} to {SUB_LIMIT}")
        self._root = os.path.realpath(root)
        self._codec = find_codec(codec)
        self._direct = direct
        self._cached = cached_reader(native)
        self._sub_bytes = sub_bytes
        self._clock = clock
        self._scratch = Scratch()
        self._decoded = Scratch()
        self._spelled: list[object] = []

    def write(
        self,
        key: BlockKey,
        source: memoryview,
        itemsize: int,
        lease: Lease,
        *,
        publish: Callable[[], bool] | None = None,
    ) -> Written:
        """Store `source` (contiguous, format B; `itemsize` bytes a KV element, 1 to 255) under `key`, unless there is
        such a block. `publish` is asked right before the block becomes visible; False means Expired.

        Raises OSError (ENOSPC, EIO, …; FileNotFoundError: the root is gone), Expired, ValueError. Then nothing is left.
        """
        if not 1 <= itemsize <= 255:
            raise ValueError(f"found: item size {itemsize}; needed: 1 to 255")
        sub_bytes = fitting_sub_bytes(len(source), self._sub_bytes)
        path = f"{self._root}/{key.path}"
        fd = self._unnamed(key, path)
        try:
            if not os.readlink(f"/proc/self/fd/{fd}").startswith(path[: path.rindex("/") + 1]):  # noqa: PTH115
                raise OSError(errno.ELOOP, "a symlink leads out of the root", path)
            direct = self._scratch if self._direct else None
            stored_len = fill(fd, key, source, itemsize, sub_bytes, self._codec, lease, direct, self._cached)
            status = os.fstat(fd)
            if status.st_mode & 0o777 != _MODE:  # the umask; 0400 would be a pin
                os.fchmod(fd, _MODE)
            mtime_ns = self._clock()
            os.utime(fd, ns=(mtime_ns, mtime_ns))
            with lease.touching():
                pass
            if publish is not None and not publish():
                raise Expired
            existed = not self._link(fd, key, path)
        finally:
            os.close(fd)
        return Written(existed, status.st_blocks * 512, stored_len, mtime_ns)

    def unnamed(self, size: int) -> int:
        """A descriptor of a file without a name, for `name`, that will have a payload of `size` bytes. OSError."""
        fd = os.open(self._root, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, _MODE)
        # Writing is a fifth faster where the blocks are there. Whatever this says: writing will tell it again.
        _fallocate(fd, 0, 0, HEADER_BYTES + size)
        return fd

    def name(self, fd: int, key: BlockKey, header: bytes) -> Written:
        """Publish a file whose payload is complete: write its header, link it. OSError; then nothing is left."""
        path = f"{self._root}/{key.path}"
        folder = path[: path.rindex("/")]
        os.pwrite(fd, header, 0)
        status = os.fstat(fd)
        if status.st_mode & 0o777 != _MODE:  # the umask; 0400 would be a pin
            os.fchmod(fd, _MODE)
        mtime_ns = self._clock()
        os.utime(fd, ns=(mtime_ns, mtime_ns))
        try:
            existed = not _link_inside(fd, folder, path)
        except FileNotFoundError:
            self._make_folders(key, folder)
            existed = not _link_inside(fd, folder, path)
        return Written(existed, status.st_blocks * 512, status.st_size - len(header), mtime_ns)

    @property
    def reader(self) -> str:
        """How what is in the page cache is read and checked, and gets there: native or python."""
        return self._cached.name

    @property
    def sub_bytes(self) -> int:
        """Raw bytes with one checksum, where the block is not too large for that."""
        return self._sub_bytes

    def open(self, key: BlockKey) -> OpenBlock:
        """The block of `key`, its header checked. Raises FileNotFoundError, BadBlock, OSError."""
        return open_block(f"{self._root}/{key.path}", key, self._scratch, self._direct, self._cached)

    def check(self, path: Path, key: BlockKey | None = None) -> Header:
        """Check a whole file below the root, and that it lies where its key belongs; `path`: absolute or relative to
        the root. The key comes from the header; where that is too long for it, only `key` can tell.

        Raises FileNotFoundError, BadBlock, OSError, CodecError.
        """
        place = os.path.relpath(os.path.join(self._root, path), self._root)  # noqa: PTH118
        with open_block(f"{self._root}/{place}", key, self._scratch, self._direct, self._cached) as block:
            header = block.header
            if header.key is not None and header.key.path != place:
                raise BadBlock("key", f"the block that belongs at {header.key.path}")
            block.verify(self._decoded)
        return header

    def remove(self, key: BlockKey) -> int:
        """Delete a block; the bytes on disk that this frees, 0 where there was none. OSError."""
        path = f"{self._root}/{key.path}"
        try:
            freed = os.stat(path, follow_symlinks=False).st_blocks * 512  # noqa: PTH116
            os.unlink(path)  # noqa: PTH108
        except FileNotFoundError:
            return 0
        return freed

    def _unnamed(self, key: BlockKey, path: str) -> int:
        folder = path[: path.rindex("/")]
        for left in reversed(range(_TRIES)):
            try:
                return os.open(folder, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC | self._direct * os.O_DIRECT, _MODE)
            except FileNotFoundError:
                if not left:
                    raise
                self._make_folders(key, folder)
        raise AssertionError("unreachable")

    def _make_folders(self, key: BlockKey, innermost: str) -> None:
        """make_folders, quicker where the last one that it made was beside this one."""
        outer = innermost[: innermost.rindex("/")]
        with suppress(OSError):  # whatever it is: found again, or made good, the long way
            if self._spelled == [outer, *json_stamps(outer)] and os.path.realpath(outer) == outer:
                os.mkdir(innermost, 0o700)  # noqa: PTH102
                os.chmod(innermost, 0o700)  # noqa: PTH101
                return
        make_folders(self._root, key)
        with suppress(OSError):
            self._spelled = [outer, *json_stamps(outer)]

    def _link(self, fd: int, key: BlockKey, path: str) -> bool:
        try:
            return link_unnamed(fd, path)
        except FileNotFoundError:  # somebody removed the empty folder meanwhile
            make_folders(self._root, key)
            return link_unnamed(fd, path)


def _link_inside(fd: int, folder: str, path: str) -> bool:
    """As link_unnamed; FileNotFoundError also where the folder is just going, OSError where it is another one."""
    into = os.open(folder, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        where = os.readlink(f"/proc/self/fd/{into}")  # noqa: PTH115
        if where == f"{folder} (deleted)":
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), folder)
        if where != folder:
            raise OSError(errno.ELOOP, "a symlink leads out of the root", path)
        return link_unnamed(fd, path[len(folder) + 1 :], into)
    finally:
        os.close(into)
