"""What the page cache has of a block, or gets, with its checksums: by pagecache.c where compiled, else in Python.

The images compile it. Measured on 3 and 36 MiB blocks: docs/performance.md.
"""

from __future__ import annotations

import ctypes
import errno
import logging
import os
import stat
import sys
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import NamedTuple, Protocol

from kvstrata.store import checksum
from kvstrata.store.checksum import crc32
from kvstrata.store.errors import StoreError
from kvstrata.store.lease import Expired, Lease
from kvstrata.store.scratch import address

__all__ = ["LIBRARY", "CachedReader", "NativeReader", "Opened", "PythonReader", "cached_reader"]

# Not beside this file: a checkout's source that is mounted into an image uses the image's.
LIBRARY = Path(sys.prefix, "lib", "kvstrata-pagecache.so")
"""pagecache.c, compiled."""
_NO_NOWAIT = {errno.EAGAIN, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL}
_SAMPLE = b"123456789"
# struct opened of pagecache.c.
_Found = ctypes.c_int64 * 4

log = logging.getLogger(__name__)


class Opened(NamedTuple):
    """A file that was opened: descriptor, st_mode, st_size; `got`: bytes that were read of its first page, if it is a
    regular file; `cached`: the page cache has the byte behind them."""

    fd: int
    mode: int
    size: int
    got: int
    cached: bool


class CachedReader(Protocol):
    """Thread-safe; no interpreter's lock while it copies and checks."""

    @property
    def name(self) -> str:
        """native or python."""

    def open(self, path: str, flags: int, page: memoryview) -> Opened:
        """Open a file and read its first page into `page` (writable). May wait for the device. OSError."""

    def read(self, fd: int, target: memoryview, start: int, step: int) -> tuple[int, list[int]]:
        """Fill `target` (writable, not empty) from `start` on without waiting for a device.

        Returns how many bytes came, 0 also where the file system cannot say, and the CRC-32 of each `step` bytes of
        them, the last of which may be cut short. Raises OSError.
        """

    def send(
        self, fd: int, sock: int, room: memoryview, size: int, start: int, sums: Sequence[int], head: bytes, tail: bytes
    ) -> int:
        """Send `head`, `size` bytes of the file from `start` on, and `tail` to a blocking socket.

        They go through `room` (writable), a room at a time, and leave once their CRC-32 was found to be the next one of
        `sums`; the head leaves with the first. Ends before what would have to come from a device or is not right.
        Returns how many of the `size` bytes were sent, and if that is all of them, the file has been closed; 0 also
        where that is not done here. OSError: the socket's.
        """

    def write(self, fd: int, source: memoryview, start: int, step: int, lease: Lease) -> list[int]:
        """Write all of `source` at `start`, for as long as the device likes: who ends the lease does not wait for it.

        Returns the CRC-32 of each `step` bytes, the last of which may be cut short; [] where that is not done here:
        then nothing was written. Raises OSError, Expired.
        """


class PythonReader:
    """Read all, then check."""

    name = "python"

    def open(self, path: str, flags: int, page: memoryview) -> Opened:
        """See CachedReader."""
        fd = os.open(path, flags)
        try:
            status = os.fstat(fd)
            if not stat.S_ISREG(status.st_mode):
                return Opened(fd, status.st_mode, status.st_size, 0, False)
            got, cached = os.preadv(fd, [page], 0), False
            if not flags & os.O_DIRECT:
                with suppress(OSError):
                    cached = os.preadv(fd, [bytearray(1)], len(page), os.RWF_NOWAIT) > 0
            return Opened(fd, status.st_mode, status.st_size, got, cached)
        except BaseException:
            os.close(fd)
            raise

    def read(self, fd: int, target: memoryview, start: int, step: int) -> tuple[int, list[int]]:
        """See CachedReader."""
        try:
            done = os.preadv(fd, [target], start, os.RWF_NOWAIT)
        except OSError as error:
            if error.errno in _NO_NOWAIT:
                return 0, []
            raise
        return done, [crc32(target[begin : min(begin + step, done)]) for begin in range(0, done, step)]

    def send(
        self, fd: int, sock: int, room: memoryview, size: int, start: int, sums: Sequence[int], head: bytes, tail: bytes
    ) -> int:
        """See CachedReader: not done here."""
        return 0

    def write(self, fd: int, source: memoryview, start: int, step: int, lease: Lease) -> list[int]:
        """See CachedReader: not done here."""
        return []


class NativeReader:
    """Check what was just read. `library`: pagecache.c, compiled. OSError, AttributeError: it cannot be used."""

    name = "native"

    def __init__(self, library: Path) -> None:
        functions = ctypes.CDLL(str(library))
        self._open = functions.kv_open
        self._open.restype = ctypes.c_int
        self._open.argtypes = [ctypes.c_char_p, ctypes.c_int, ctypes.c_void_p, ctypes.c_uint64, ctypes.c_void_p]
        self._read, self._send = functions.kv_read_cached, functions.kv_send_cached
        self._read.restype = ctypes.c_int64
        self._read.argtypes = [
            ctypes.c_int, ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint64, ctypes.c_uint64, ctypes.c_void_p,
            ctypes.c_void_p,
        ]  # fmt: skip
        self._send.restype = ctypes.c_int64
        self._send.argtypes = [
            ctypes.c_int, ctypes.c_int, ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint64, ctypes.c_uint64,
            ctypes.c_void_p, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_size_t, ctypes.c_char_p, ctypes.c_size_t,
        ]  # fmt: skip
        self._write = functions.kv_write_checked
        self._write.restype = ctypes.c_int
        self._write.argtypes = [
            ctypes.c_int, ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint64, ctypes.c_uint64, ctypes.c_void_p,
            ctypes.c_void_p, ctypes.c_void_p,
        ]  # fmt: skip
        self._take_back = functions.kv_take_back
        self._take_back.restype = None
        self._take_back.argtypes = [ctypes.c_void_p]
        # The function behind `crc32`: not one more library, and no second opinion about what a checksum is.
        function = ctypes.CDLL(checksum.LIBRARY).zng_crc32_z
        function.restype = ctypes.c_uint32
        function.argtypes = [ctypes.c_uint32, ctypes.c_char_p, ctypes.c_size_t]
        if function(0, _SAMPLE, len(_SAMPLE)) != crc32(_SAMPLE):
            raise OSError(errno.ENOEXEC, "zng_crc32_z is another checksum", checksum.LIBRARY)
        self._crc = ctypes.cast(function, ctypes.c_void_p)

    def open(self, path: str, flags: int, page: memoryview) -> Opened:
        """See CachedReader."""
        found = _Found()
        fd = self._open(os.fsencode(path), flags, address(page), len(page), found)
        if fd < 0:
            raise OSError(-fd, os.strerror(-fd), path)
        mode, size, got, cached = found
        return Opened(fd, mode, size, got, cached != 0)

    def read(self, fd: int, target: memoryview, start: int, step: int) -> tuple[int, list[int]]:
        """See CachedReader."""
        sums = (ctypes.c_uint32 * -(-len(target) // step))()
        done = self._read(fd, address(target), len(target), start, step, self._crc, sums)
        if done < 0:
            if -done in _NO_NOWAIT:
                return 0, []
            raise OSError(-done, os.strerror(-done))
        return done, sums[: -(-done // step)]

    def send(
        self, fd: int, sock: int, room: memoryview, size: int, start: int, sums: Sequence[int], head: bytes, tail: bytes
    ) -> int:
        """See CachedReader."""
        right = (ctypes.c_uint32 * len(sums))(*sums)
        done: int = self._send(
            fd, sock, address(room), size, start, len(room), self._crc, right, head, len(head), tail, len(tail)
        )
        if done < 0:
            raise OSError(-done, os.strerror(-done))
        return done

    def write(self, fd: int, source: memoryview, start: int, step: int, lease: Lease) -> list[int]:
        """See CachedReader."""
        place = address(source)
        if place is None:
            return []
        sums = (ctypes.c_uint32 * -(-len(source) // step))()
        state = ctypes.byref(ctypes.c_uint32())
        with lease.ending(partial(self._take_back, state)):
            error = self._write(fd, place, len(source), start, step, self._crc, sums, state)
        if error == errno.ECANCELED:
            raise Expired
        if error:
            raise OSError(error, os.strerror(error))
        return sums[:]


def cached_reader(choice: str) -> CachedReader:
    """`off`: Python's; `on`: pagecache.c's, StoreError where it cannot be had; `auto`: Python's then."""
    if choice == "off" or (choice == "auto" and not LIBRARY.exists()):
        return PythonReader()
    try:
        return NativeReader(LIBRARY)
    except (OSError, AttributeError) as error:
        if choice == "auto":
            log.warning("block store: reads are checked in Python, because %s cannot be used: %s", LIBRARY, error)
            return PythonReader()
        raise StoreError(
            f"KV_STORE_NATIVE={choice}, and {error}",
            f"{LIBRARY}, which the images hold, and the package zlib-ng from a wheel",
            "KV_STORE_NATIVE=auto, or compile pagecache.c as its first lines say",
        ) from error
