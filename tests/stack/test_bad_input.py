"""Refusals beside a running stack, which stays as it is. Those of a fresh checkout: tests/unit/test_refusals.py."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.stack.harness import Stack
from tests.stack.refusals import Case, refused

pytestmark = pytest.mark.stack


@pytest.fixture
def fresh(stack: Stack, tmp_path: Path) -> Iterator[Stack]:
    """A checkout where nothing was started yet, with images and a model, so that the plan is made."""
    model = next(p for p in (stack.root / "data" / "models").iterdir() if p.is_dir())
    made = Stack(
        tmp_path, "kvtestbad", KV_DEVICE="cpu", KV_IMAGE_SOURCE="build", KV_LAYERS="nvme", MODEL_DIR=str(model)
    )
    try:
        yield made
    finally:
        made.client.close()


CASES = (
    Case("more memory than there is", lambda s: s.set(KV_L1_GB="900"), ("GiB", "KV_L1_GB")),
    Case("own connector", lambda s: s.set(KV_VLLM_EXTRA_ARGS="'--kv-transfer-config {}'"), ("kv-transfer-config",)),
    Case("chunk that is no multiple", lambda s: s.set(KV_CHUNK_SIZE="100"), ("KV_CHUNK_SIZE", "128")),
)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_refused_before_anything_starts(stack: Stack, fresh: Stack, case: Case) -> None:
    before = {name: c["Id"] for name, c in stack.containers().items()}
    refused(fresh, case)
    assert {name: c["Id"] for name, c in stack.containers().items()} == before


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
