"""Stores on a fresh root."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvstrata.store import pagecache
from kvstrata.store.store import BlockStore
from tests.store.stores import settings


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """pagecache.c, compiled as in the images."""
    if shutil.which("gcc") is None:
        pytest.skip("needs gcc")
    made = tmp_path_factory.mktemp("native") / "pagecache.so"
    source = Path(pagecache.__file__).with_suffix(".c")
    flags = ["-O2", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC"]
    subprocess.run(["gcc", *flags, "-o", made, source], check=True)
    return made


@pytest.fixture(params=["python", "native"])
def reader(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """How this test's stores read what is in the page cache: each test that asks for it runs both ways."""
    way: str = request.param
    made = request.getfixturevalue("library") if way == "native" else Path("/nonexistent")
    monkeypatch.setattr(pagecache, "LIBRARY", made)
    return way


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
