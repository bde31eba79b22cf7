"""Another model under the same path shares nothing, and the first one finds its blocks again."""

from __future__ import annotations

import json
import shutil
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.stack.harness import Stack, chunks, prompt

pytestmark = pytest.mark.stack


def perturb(weights: Path) -> None:
    """Flip the sign of some values of one large tensor: same size, other model."""
    with weights.open("r+b") as file:
        size = struct.unpack("<Q", file.read(8))[0]
        header = json.loads(file.read(size))
        name = next(n for n in header if n.endswith("layers.0.mlp.down_proj.weight"))
        begin, end = header[name]["data_offsets"]
        file.seek(8 + size + begin)
        data = bytearray(file.read(end - begin))
        for index in range(1, len(data), 2):  # the high byte of a bf16 holds its sign
            data[index] ^= 0x80
        file.seek(8 + size + begin)
        file.write(data)


@pytest.fixture
def own_model(stack: Stack, tmp_path: Path) -> Iterator[Path]:
    """The stack runs a copy of the model that the test may change; afterwards it runs the demo model again."""
    source = next(p for p in (stack.root / "data" / "models").iterdir() if p.is_dir())
    tmp_path.chmod(0o755)
    folder = tmp_path / "model"
    shutil.copytree(source, folder)
    stack.set(MODEL_DIR=str(folder))
    try:
        yield folder
    finally:
        stack.set(MODEL_DIR="", KV_VLLM_EXTRA_ARGS="")
        stack.ok("up", "--no-proof")
        stack.wait_ready()


def up(stack: Stack) -> None:
    stack.ok("up", "--no-proof")
    stack.wait_ready()


def test_replaced_weights_and_dtype_are_misses_and_come_back_as_hits(stack: Stack, own_model: Path) -> None:
    text = prompt("identity")
    up(stack)
    first = stack.store(text)
    weights = next(own_model.glob("*.safetensors"))
    keep = weights.read_bytes()

    perturb(weights)
    refused = stack.containers()["vllm"]["Id"]
    stack.docker("restart", "-t", "1", refused)  # not through `up`: the launcher must notice by itself
    log = _wait_for_log(stack, "identity mismatch")
    assert "make up" in log or "run it again" in log
    up(stack)
    other = stack.store(text)
    assert other.lmcache == 0 and other.text != first.text

    weights.write_bytes(keep)
    stack.set(KV_VLLM_EXTRA_ARGS="'--dtype bfloat16'")
    up(stack)
    assert stack.store(text).lmcache == 0, "bf16 read fp32 blocks"

    stack.set(KV_VLLM_EXTRA_ARGS="")
    up(stack)
    back = stack.ask(text)
    assert back.lmcache == chunks(back.prompt_tokens) and back.text == first.text


def _wait_for_log(stack: Stack, needle: str) -> str:
    from tests.stack.harness import wait_until

    def seen() -> str:
        log = stack.compose("logs", "--no-color", "--tail", "50", "vllm")
        return log if needle in log else ""

    return str(wait_until(seen, 90, needle))
