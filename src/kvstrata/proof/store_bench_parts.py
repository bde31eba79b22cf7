"""Candidates of the block store's benchmark that need no LMCache: raw files, and our store asked directly.

Every candidate works on the same pre-touched buffers.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path
from typing import Any, Protocol
from unittest import mock

from kvstrata.store import blockread, blockwrite, checksum, format, pagecache
from kvstrata.store.keys import BlockKey
from kvstrata.store.settings import StoreSettings
from kvstrata.store.store import BlockStore

__all__ = [
    "MODEL", "PATIENCE_S", "AnonymousPool", "Part", "Pool", "Raw", "Slot", "Store", "checks", "chunk_hash",
    "drop_pages", "equal", "files_of", "furnish", "slot_of", "wipe",
]  # fmt: skip

_LIBC = ctypes.CDLL(None)
_LIBC.memcmp.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
MODEL = "bench--kvstrata"
PATIENCE_S = 120.0
_TRIES = 10


@dataclass
class Slot:
    """A block's buffer: the bytes, their address, and LMCache's object of it where the pool is LMCache's."""

    view: memoryview
    place: int
    obj: Any = None


def slot_of(view: memoryview, obj: Any = None) -> Slot:
    return Slot(view, ctypes.addressof(ctypes.c_char.from_buffer(view)), obj)


def equal(one: Slot, other: Slot) -> bool:
    return len(one.view) == len(other.view) and _LIBC.memcmp(one.place, other.place, len(one.view)) == 0


def wipe(slots: Sequence[Slot]) -> None:
    for slot in slots:
        ctypes.memset(slot.place, 0, len(slot.view))


def chunk_hash(index: int) -> bytes:
    return sha256(b"bench %d" % index).digest()


class Pool(Protocol):
    """Where buffers come from."""

    kind: str
    layouts: dict[int, Any]
    desc: Any

    def take(self, count: int, size: int) -> list[Slot]: ...
    def give(self, slots: Sequence[Slot]) -> None: ...
    def close(self) -> None: ...


class AnonymousPool:
    """Shared anonymous memory, for a machine without LMCache."""

    kind = "anonymous memory"

    def __init__(self, size: int) -> None:
        self.layouts: dict[int, Any] = {}
        self.desc: Any = None
        self._view = memoryview(mmap.mmap(-1, size))
        self._at = 0

    def take(self, count: int, size: int) -> list[Slot]:
        if self._at + count * size > len(self._view):
            raise MemoryError(f"{count} buffers of {size} bytes beside {self._at} of {len(self._view)}")
        start, self._at = self._at, self._at + count * size
        return [slot_of(self._view[start + i * size : start + (i + 1) * size]) for i in range(count)]

    def give(self, slots: Sequence[Slot]) -> None:
        self._at -= sum(len(slot.view) for slot in slots)

    def close(self) -> None:
        pass


class Part(Protocol):
    """One candidate. `content` says which buffers it stores: "random" or "kv". `cached`: it uses the page cache."""

    name: str
    cached: bool
    checked: bool
    threads: int
    content: str

    def store(self, slots: Sequence[Slot]) -> None: ...
    def load(self, slots: Sequence[Slot]) -> None: ...
    def files(self) -> list[Path]: ...
    def clear(self, count: int) -> None: ...
    def close(self) -> None: ...


def files_of(folder: Path) -> list[Path]:
    """Block files: not the JSON files beside them, nor what `furnish` put there."""
    return [path for path in folder.rglob("*") if path.is_file() and path.stat().st_size >= 1 << 16]


def furnish(settings: StoreSettings, like: BlockKey) -> None:
    """A tiny block in each directory of the key's salt: a store makes them once in its life, not for each block."""
    settings.root.mkdir(parents=True, mode=0o700)
    store = BlockStore.open(settings)
    keys = [replace(like, chunk=bytes([first]) * 32) for first in range(256)]
    done = store.put(keys, [memoryview(b"-")] * len(keys)).result()
    store.close()
    if wrong := [result for result in done if result.outcome != "stored"]:
        raise RuntimeError(f"{settings.root}: {wrong[0]}")


class Raw:
    """The ceiling: one file a block, read and written by parallel preadv and pwrite, nothing else done.

    `place` names files that somebody else wrote; their payload begins at `offset`.
    """

    checked = False
    content = "random"

    def __init__(self, name: str, folder: Path, threads: int, *, direct: bool = False) -> None:
        self.name, self.threads, self._folder = name, threads, folder
        self.cached = not direct
        self._flags = os.O_DIRECT if direct else 0
        self._pool = ThreadPoolExecutor(threads)
        folder.mkdir(parents=True)

    def store(self, slots: Sequence[Slot]) -> None:
        list(self._pool.map(self._write, range(len(slots)), slots))

    def load(self, slots: Sequence[Slot]) -> None:
        self.load_files([self._folder / str(i) for i in range(len(slots))], slots, 0)

    def load_files(self, files: Sequence[Path], slots: Sequence[Slot], offset: int) -> None:
        list(self._pool.map(self._read, files, slots, [offset] * len(slots)))

    def files(self) -> list[Path]:
        return files_of(self._folder)

    def clear(self, count: int) -> None:
        for path in self.files():
            path.unlink()

    def close(self) -> None:
        self._pool.shutdown()

    def _write(self, index: int, slot: Slot) -> None:
        fd = os.open(self._folder / str(index), os.O_WRONLY | os.O_CREAT | os.O_EXCL | self._flags, 0o600)
        try:
            done = 0
            while done < len(slot.view):
                done += os.pwrite(fd, slot.view[done:], done)
        finally:
            os.close(fd)

    def _read(self, path: Path, slot: Slot, offset: int) -> None:
        fd = os.open(path, os.O_RDONLY | self._flags)
        try:
            done = 0
            while done < len(slot.view):
                got = os.preadv(fd, [slot.view[done:]], offset + done)
                if not got:
                    raise OSError(f"{path} ends early")
                done += got
        finally:
            os.close(fd)


def _no_check(*_: object) -> int:
    return 0


@contextmanager
def checks(on: bool) -> Iterator[None]:
    """Without checks every checksum is 0, on both ways: the very same code less that work, and all of it in Python."""
    with ExitStack() as patches:
        for module in () if on else (checksum, format, blockread, blockwrite, pagecache):
            patches.enter_context(mock.patch.object(module, "crc32", _no_check))
        if not on:
            for name in ("read", "write"):
                way = getattr(pagecache.PythonReader, name)
                patches.enter_context(mock.patch.object(pagecache.NativeReader, name, way))
        yield


class Store:
    """Our BlockStore, asked directly."""

    def __init__(self, name: str, settings: StoreSettings, *, checked: bool = True, content: str = "random") -> None:
        self.name, self.checked, self.content, self.threads = name, checked, content, settings.worker_count
        self.cached = settings.io != "direct"
        self._folder = settings.root
        furnish(settings, _keys(1)[0])
        self._store = BlockStore.open(settings)

    def store(self, slots: Sequence[Slot]) -> None:
        with checks(self.checked):
            done = self._store.put(_keys(len(slots)), [slot.view for slot in slots], 2, deadline_s=PATIENCE_S).result()
        if wrong := [result for result in done if result.outcome != "stored"]:
            raise RuntimeError(f"{self.name}: {wrong[0]}")

    def load(self, slots: Sequence[Slot]) -> None:
        keys = _keys(len(slots))
        if not all(self._store.contains_and_pin(keys)):
            raise RuntimeError(f"{self.name}: blocks are missing")
        with checks(self.checked):
            done = self._store.get_into(keys, [slot.view for slot in slots], deadline_s=PATIENCE_S).result()
        self._store.unpin(keys)
        if wrong := [result for result in done if result.outcome != "hit"]:
            raise RuntimeError(f"{self.name}: {wrong[0]}")

    def files(self) -> list[Path]:
        return files_of(self._folder)

    def clear(self, count: int) -> None:
        self._store.delete(_keys(count)).result()

    def close(self) -> None:
        self._store.close()


def _keys(count: int) -> list[BlockKey]:
    return [BlockKey(MODEL, "", chunk_hash(i)) for i in range(count)]


def drop_pages(files: Sequence[Path]) -> bool:
    """Write the files back and take their pages out of the page cache; False if some stayed."""
    left = list(files)
    for _ in range(_TRIES):
        for path in left:
            fd = os.open(path, os.O_RDONLY)
            try:
                os.fdatasync(fd)
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(fd)
        left = [path for path in left if _cached(path)]
        if not left:
            return True
        time.sleep(0.1)  # another CPU may still hold pages in its list of new ones
    try:  # root on a writable /proc
        os.sync()
        Path("/proc/sys/vm/drop_caches").write_text("1", encoding="ascii")
    except OSError:
        return False
    return not any(_cached(path) for path in left)


def _cached(path: Path) -> bool:
    """Whether the last page is there to be read at once; asking does not bring it in."""
    fd = os.open(path, os.O_RDONLY)
    try:
        at = max(0, os.fstat(fd).st_size - 4096)
        return bool(os.preadv(fd, [bytearray(4096)], at, os.RWF_NOWAIT))
    except OSError:
        return False
    finally:
        os.close(fd)
