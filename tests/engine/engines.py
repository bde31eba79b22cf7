"""What the tests of the engine's core share."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from kvstrata.engine.content import Engine
from kvstrata.engine.settings import EngineSettings

MIB = 1 << 20
ANY_FS = ("tmpfs", "overlay", "fuse")
Opener = Callable[..., Engine]


@contextmanager
def reopening(start: Opener) -> Iterator[Opener]:
    """`start`, which closes the engine that is open before it opens one; none is open at the end."""
    engines: list[Engine] = []

    def open_it(*args: object, **more: object) -> Engine:
        for engine in engines:
            engine.close()
        engines.append(start(*args, **more))
        return engines[-1]

    yield open_it
    for engine in engines:
        engine.close()


def settings(root: Path, capacity: int = 64 * MIB, **more: object) -> EngineSettings:
    """An engine for tests: no floor, wherever the temporary folder lies."""
    chosen: dict[str, object] = {"allow_fs": ANY_FS, "free_floor": 0, **more}
    return EngineSettings(root, capacity, **chosen)  # type: ignore[arg-type]


def data(number: int, size: int = 64 << 10) -> bytes:
    """The bytes of the number-th value."""
    return random.Random(number).randbytes(64) * (size // 64) + bytes(size % 64)


def get(engine: Engine, key: bytes, tenant: str = "a") -> bytes | None:
    """The value, whole."""
    block = engine.open_block(tenant, key)
    if block is None:
        return None
    with block:
        return b"".join(bytes(piece) for piece in block.pieces())


def until(true: Callable[[], bool], seconds: float = 20.0) -> None:
    """Wait for what happens by itself."""
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.02)


def block_files(folder: Path) -> list[Path]:
    """The blocks below a folder, whose directories may go while we look."""
    return [Path(place, name) for place, _, names in os.walk(folder) for name in names if name.endswith(".0.0")]


def disk_bytes(folder: Path) -> int:
    """What `du` says, while files may go."""
    total = 0
    for place, _, names in os.walk(folder):
        for name in names:
            with suppress(FileNotFoundError):
                total += Path(place, name).lstat().st_blocks * 512
    return total
