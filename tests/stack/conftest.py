"""One stack for all tests of this folder, brought up by `kvstrata up` from a copy of the checkout.

A start of vLLM takes half a minute. So a fixture that wants other settings only writes them, and writes them back: just
before a test's own lines the stack is brought up once with what .env says then. Tests that want settings of their own
for vLLM come last, so that each such stack takes the place of the one before.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest

from kvstrata.deploy import engine
from kvstrata.deploy.steps import Steps
from tests.stack.harness import Stack

KEEP = "KVSTRATA_KEEP_STACK"
_REPORT: dict[str, str] = {}
HERE = Path(__file__).parent
#: Fixtures that write settings with which vLLM or its cache server is another one.
OWN_SETTINGS = ("path_a", "tight", "own_model", "small_steps", "without_guard")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    def place(item: pytest.Item) -> int:
        names = getattr(item, "fixturenames", ()) if item.path.parent == HERE else ()
        return next((number for number, name in enumerate(OWN_SETTINGS, 1) if name in names), 0)

    items.sort(key=place)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_call(item: pytest.Item) -> None:
    made = getattr(item, "funcargs", {}).get("stack")
    if isinstance(made, Stack):
        made.settle()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """What both servers said last, with the failure: nobody can look at them after CI."""
    report = yield
    made = getattr(item, "funcargs", {}).get("stack")
    if report.when == "call" and report.failed and isinstance(made, Stack):
        for service in ("vllm", "lmcache"):
            name = f"{made.project}-{service}-1"
            done = subprocess.run(["docker", "logs", "--tail", "40", name], capture_output=True, text=True)
            report.sections.append((f"the last lines of {service}", done.stdout + done.stderr))
    return report


@pytest.fixture(scope="session")
def docker_engine() -> None:
    """As `make up` does it: used when it answers, started or installed when not."""
    engine.ensure(True, Steps())


@pytest.fixture(scope="session")
def up_output() -> dict[str, str]:
    """What the first `up` of the session printed, under `first`."""
    return _REPORT


@pytest.fixture(scope="session")
def stack(docker_engine: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    kept = os.environ.get(KEEP)  # while writing tests: one stack in that folder, brought up once and left running
    root = Path(kept) if kept else tmp_path_factory.mktemp("stack")
    (root / "data" / "hook").mkdir(parents=True, exist_ok=True)
    (root / "data" / "hook").chmod(0o777)
    name = os.environ.get("KVSTRATA_KEEP_PROJECT", "kvtestkept") if kept else f"kvtest{os.getpid()}"
    made = Stack(root, name, KV_LAYERS="nvme,hook", KV_L1_GB="1")
    try:
        _REPORT["first"] = made.ok("up")
        made.wait_ready()
        yield made
    finally:
        if not kept:
            made.close()


@pytest.fixture
def hook(stack: Stack) -> Iterator[Path]:
    """Folder of the guard's test hook, empty before and after."""
    folder = stack.root / "data" / "hook"
    for file in folder.iterdir():
        file.unlink()
    yield folder
    for file in folder.iterdir():
        file.unlink()
