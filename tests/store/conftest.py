"""Stores on a fresh root."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvstrata.store.store import BlockStore
from tests.store.stores import settings


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Where the test's store lies."""
    return tmp_path / "store"


@pytest.fixture
def opened(root: Path) -> Iterator[Callable[..., BlockStore]]:
    """Open the store at `root`, with settings of the test; what is still open at the end is closed."""
    stores: list[BlockStore] = []

    def open_it(capacity: int = 64 << 20, **more: object) -> BlockStore:
        clock = more.pop("clock", None)
        events = more.pop("events", None)
        extra = {} if clock is None else {"clock": clock}
        stores.append(BlockStore.open(settings(root, capacity, **more), events, **extra))  # type: ignore[arg-type]
        return stores[-1]

    yield open_it
    for store in stores:
        store.close()
