"""What cannot work is refused before anything starts: found / needed / to fix, exit code 2, nothing made or deleted."""

from __future__ import annotations

import shutil
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.stack.harness import Stack

pytestmark = pytest.mark.stack


@pytest.fixture
def fresh(docker_engine: None, tmp_path: Path) -> Iterator[Stack]:
    """A checkout where nothing was started yet."""
    made = Stack(tmp_path, "kvtestbad", KV_DEVICE="cpu", KV_IMAGE_SOURCE="build", KV_LAYERS="nvme")
    try:
        yield made
    finally:
        made.client.close()


@dataclass(frozen=True)
class Case:
    name: str
    break_it: Callable[[Stack], object]
    says: tuple[str, ...]


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
    Case("more memory than there is", lambda s: s.set(KV_L1_GB="900"), ("GiB", "KV_L1_GB")),
    Case("own connector", lambda s: s.set(KV_VLLM_EXTRA_ARGS="'--kv-transfer-config {}'"), ("kv-transfer-config",)),
    Case("chunk that is no multiple", lambda s: s.set(KV_CHUNK_SIZE="100"), ("KV_CHUNK_SIZE", "128")),
)  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_refused_before_anything_starts(fresh: Stack, stack: Stack, case: Case) -> None:
    model = next(p for p in (stack.root / "data" / "models").iterdir() if p.is_dir())
    if "model" not in case.name:
        fresh.set(MODEL_DIR=str(model))
    case.break_it(fresh)
    before = snapshot(fresh)
    done = fresh.cli("up")
    assert done.returncode == 2, done.stdout + done.stderr
    for word in ("found:", "needed:", "to fix:", *case.says):
        assert word in done.stderr, f"{word!r} is not in\n{done.stderr}"
    assert "Traceback" not in done.stderr
    assert fresh.containers() == {}
    assert before.items() <= snapshot(fresh).items(), "something was changed or deleted"


def snapshot(stack: Stack) -> dict[str, bytes]:
    """Every file of the checkout but .env, whose blanks may be filled, by name."""
    files = (p for p in stack.root.rglob("*") if p.is_file() and p.name != ".env" and p.stat().st_size < 1 << 20)
    return {str(p): p.read_bytes() for p in files}


def test_a_port_in_use_is_refused(fresh: Stack, stack: Stack) -> None:
    model = next(p for p in (stack.root / "data" / "models").iterdir() if p.is_dir())
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        fresh.set(KV_PORT=str(port), MODEL_DIR=str(model))
        done = fresh.cli("up")
    assert done.returncode == 2 and str(port) in done.stderr and "KV_PORT" in done.stderr
    assert fresh.containers() == {}


def test_a_disk_that_is_too_small_is_refused(fresh: Stack, stack: Stack, tmp_path: Path) -> None:
    import subprocess

    small = tmp_path / "small"
    small.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", str(small)], check=False)
    assert mounted.returncode == 0, "this test mounts a small file system: run it as root"
    try:
        model = next(p for p in (stack.root / "data" / "models").iterdir() if p.is_dir())
        fresh.set(KV_CACHE_DIR=str(small / "cache"), MODEL_DIR=str(model))
        done = fresh.cli("up")
        assert done.returncode == 2
        assert str(small) in done.stderr and "KV cache" in done.stderr and "KV_CACHE_DIR" in done.stderr
        assert not any(small.iterdir()) or not any((small / "cache").iterdir())
    finally:
        subprocess.run(["umount", str(small)], check=True)
    assert fresh.containers() == {}


def test_the_same_project_name_in_two_checkouts_is_refused(stack: Stack, tmp_path: Path) -> None:
    other = Stack(tmp_path, stack.project, KV_DEVICE="cpu", KV_IMAGE_SOURCE="build")
    try:
        before = {name: c["Id"] for name, c in stack.containers().items()}
        done = other.cli("up")
        assert done.returncode == 2 and str(stack.root) in done.stderr and "COMPOSE_PROJECT_NAME" in done.stderr
        assert {name: c["Id"] for name, c in stack.containers().items()} == before
    finally:
        other.client.close()
        shutil.rmtree(tmp_path / "data", ignore_errors=True)
