"""Engines for the tests of its protocols: each a process, on a folder of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.engine.process import EngineProcess
from tests.engine.wire import Wire


@pytest.fixture
def engine_process(tmp_path: Path) -> Iterator[Callable[..., EngineProcess]]:
    """Start an engine with settings of the test (KV_ENGINE_* without the prefix); it ends with the test."""
    started: list[EngineProcess] = []

    def start(**knobs: object) -> EngineProcess:
        started.append(EngineProcess(Path(str(knobs.pop("root", tmp_path / f"engine{len(started)}"))), **knobs))
        return started[-1]

    yield start
    for one in started:
        if one.process.poll() is None:
            one.kill()


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineProcess]:
    """One engine for all tests of a module that only look at answers: open, small limits of time."""
    one = EngineProcess(tmp_path_factory.mktemp("engine"), HEADER_S=2, BODY_S=2)
    yield one
    one.kill()


@pytest.fixture
def wire(engine: EngineProcess) -> Iterator[Wire]:
    """A connection to `engine`."""
    with Wire(engine.http) as one:
        yield one
