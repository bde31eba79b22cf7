"""What the tests of the whole store share: keys, bytes that belong to a key, and what `du` says."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from kvstrata.store.keys import BlockKey
from kvstrata.store.settings import StoreSettings
from kvstrata.store.store import BlockStore, Outcome, Result

MIB = 1 << 20
ANY_FS = ("tmpfs", "overlay", "fuse")


def settings(root: Path, capacity: int = 64 * MIB, **more: object) -> StoreSettings:
    """A store for tests: no floor, wherever the temporary folder lies."""
    chosen: dict[str, object] = {"allow_fs": ANY_FS, "free_floor": 0, "workers": 2, **more}
    return StoreSettings(root, capacity, **chosen)  # type: ignore[arg-type]


def key(number: int, salt: str = "", namespace: str = "model") -> BlockKey:
    """The number-th key."""
    return BlockKey(namespace, salt, random.Random(number).randbytes(32), 0x1000000, 0)


def data(number: int, size: int = 256 << 10) -> bytes:
    """The bytes of the number-th key."""
    return random.Random(~number).randbytes(64) * (size // 64) + bytes(size % 64)


def put(store: BlockStore, numbers: Iterable[int], size: int = 256 << 10, salt: str = "") -> list[Result]:
    """Put the blocks of these numbers."""
    chosen = list(numbers)
    buffers = [memoryview(data(number, size)) for number in chosen]
    return store.put([key(number, salt) for number in chosen], buffers).result(60)


def put_in_order(store: BlockStore, numbers: Iterable[int]) -> None:
    """Put the blocks of these numbers one after the other: in a batch it is open which ends first."""
    for number in numbers:
        assert put(store, [number])[0].outcome is Outcome.STORED


def get(store: BlockStore, numbers: Iterable[int], size: int = 256 << 10, salt: str = "") -> list[Result]:
    """Get them; a hit with wrong bytes fails the test."""
    chosen = list(numbers)
    buffers = [bytearray(size) for _ in chosen]
    results = store.get_into([key(number, salt) for number in chosen], [memoryview(b) for b in buffers]).result(60)
    for number, buffer, result in zip(chosen, buffers, results, strict=True):
        if result.outcome is Outcome.HIT:
            assert buffer == data(number, size), f"wrong bytes for block {number}"
    return results


def outcomes(results: Iterable[Result]) -> set[str]:
    """The words, without repetitions."""
    return {str(result.outcome) for result in results}


def file_of(root: Path, number: int, salt: str = "") -> Path:
    """The file of a block."""
    return root / key(number, salt).path


def du(root: Path) -> int:
    """Bytes on disk below a root and of itself. Files that go away meanwhile do not count."""
    total, folders = 0, [str(root)]
    while folders:
        folder = folders.pop()
        try:
            total += os.lstat(folder).st_blocks * 512
            for entry in os.scandir(folder):
                if entry.is_dir(follow_symlinks=False):
                    folders.append(entry.path)
                else:
                    total += entry.stat(follow_symlinks=False).st_blocks * 512
        except FileNotFoundError:
            continue
    return total


def wait_for(condition: Callable[[], bool], seconds: float = 10.0) -> bool:
    """True as soon as it holds; False if it does not within the time."""
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.005)
    return True


def books_are_right(store: BlockStore, root: Path) -> bool:
    """Usage is what `du` says and nothing is reserved, once the evictor has come to rest, and a file system that wrote
    back early (somebody else's sync) has had its extent blocks counted: the keeper looks for them after 45 s.
    """
    return wait_for(lambda: store.usage().reserved == 0 and store.usage().used == du(root), 60.0)
