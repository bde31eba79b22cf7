"""What cannot work is refused before anything starts: found / needed / to fix, exit code 2, nothing made or deleted.

Of a checkout of which nothing runs. Beside a running stack, and where the fault shows once images and model are there:
tests/stack/test_bad_input.py.
"""

from __future__ import annotations

import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.stack.harness import Stack
from tests.stack.refusals import Case, refused

from kvstrata.deploy import engine
from kvstrata.deploy.steps import Steps

pytestmark = pytest.mark.docker


@pytest.fixture(scope="module")
def docker_engine() -> None:
    """As `make up` does it: used when it answers, started or installed when not."""
    engine.ensure(True, Steps())


@pytest.fixture
def fresh(docker_engine: None, tmp_path: Path) -> Iterator[Stack]:
    """A checkout where nothing was started yet."""
    made = Stack(tmp_path, "kvtestbad", KV_DEVICE="cpu", KV_IMAGE_SOURCE="build", KV_LAYERS="nvme")
    try:
        yield made
    finally:
        made.client.close()


def unknown_key(stack: Stack) -> None:
    with (stack.root / ".env").open("a") as file:
        file.write("KV_PROT=8000\n")


def renamed_key(stack: Stack) -> None:
    with (stack.root / ".env").open("a") as file:
        file.write("KV_MODEL_DIR=/m\n")


def two_models(stack: Stack) -> None:
    folder = stack.root / "configs" / "models"
    text = (folder / "smollm2-135m-instruct.toml").read_text()
    (folder / "other.toml").write_text(text.replace('name = "smollm2-135m-instruct"', 'name = "other"'))


def incomplete_model(stack: Stack) -> None:
    folder = stack.root / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    stack.set(MODEL_DIR=str(folder))


CASES = (
    Case("bad port", lambda s: s.set(KV_PORT="eighty"), ("KV_PORT=eighty", ".env:")),
    Case("bad size", lambda s: s.set(KV_L1_GB="-1"), ("KV_L1_GB=-1",)),
    Case("unknown layer", lambda s: s.set(KV_LAYERS="nvmee"), ("nvmee", "write nvme")),
    Case("unknown device", lambda s: s.set(KV_DEVICE="tpu"), ("KV_DEVICE=tpu", "cpu")),
    Case("unknown key", unknown_key, ("KV_PROT", "KV_PORT")),
    Case("renamed key", renamed_key, ("KV_MODEL_DIR was renamed", "MODEL_DIR")),
    Case("missing model", lambda s: s.set(MODEL_DIR="/nowhere/model"), ("/nowhere/model",)),
    Case("incomplete model", incomplete_model, ("tokenizer", "weights")),
    Case("two models and no choice", two_models, ("other", "smollm2-135m-instruct", "KV_MODEL=")),
)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_refused_before_anything_starts(fresh: Stack, case: Case) -> None:
    refused(fresh, case)


def test_a_port_in_use_is_refused(fresh: Stack) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        fresh.set(KV_PORT=str(port))
        done = fresh.cli("up")
    assert done.returncode == 2 and str(port) in done.stderr and "KV_PORT" in done.stderr
    assert fresh.containers() == {}


def test_a_disk_that_is_too_small_is_refused(fresh: Stack, tmp_path: Path) -> None:
    small = tmp_path / "small"
    small.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", str(small)], check=False)
    assert mounted.returncode == 0, "this test mounts a small file system: run it as root"
    try:
        fresh.set(KV_CACHE_DIR=str(small / "cache"))
        done = fresh.cli("up")
        assert done.returncode == 2
        assert str(small) in done.stderr and "KV cache" in done.stderr and "KV_CACHE_DIR" in done.stderr
        assert not any(small.iterdir()) or not any((small / "cache").iterdir())
    finally:
        subprocess.run(["umount", str(small)], check=True)
    assert fresh.containers() == {}
