"""Another model under the same path shares nothing, and the first one finds its blocks again."""

from __future__ import annotations

import json
import shutil
import struct
from collections.abc import Iterator
from pathlib import Path

import numpy as np
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


def write_adapter(folder: Path, seed: int) -> None:
    """A LoRA adapter for the demo model (30 layers, 576 wide, 3 KV heads x 64), in PEFT's format."""
    rank, layers, hidden, kv = 8, 30, 576, 192
    random = np.random.default_rng(seed)
    header: dict[str, object] = {}
    blob = b""
    for layer in range(layers):
        for name, shape in (("lora_A", (rank, hidden)), ("lora_B", (kv, rank))):
            data = random.normal(0, 0.3, shape).astype("<f4").tobytes()
            key = f"base_model.model.model.layers.{layer}.self_attn.v_proj.{name}.weight"
            header[key] = {"dtype": "F32", "shape": shape, "data_offsets": [len(blob), len(blob) + len(data)]}
            blob += data
    head = json.dumps(header).encode()
    folder.mkdir(parents=True)
    (folder / "adapter_model.safetensors").write_bytes(struct.pack("<Q", len(head)) + head + blob)
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": 16, "target_modules": ["v_proj"], "bias": "none",
              "task_type": "CAUSAL_LM", "base_model_name_or_path": "m", "inference_mode": True}  # fmt: skip
    (folder / "adapter_config.json").write_text(json.dumps(config))


@pytest.fixture
def own_model(stack: Stack, tmp_path: Path) -> Iterator[Path]:
    """The stack is to run a copy of the model that the test may change; afterwards the demo model again."""
    source = next(p for p in (stack.root / "data" / "models").iterdir() if p.is_dir())
    tmp_path.chmod(0o755)
    folder = tmp_path / "model"
    shutil.copytree(source, folder)
    stack.set(MODEL_DIR=str(folder))
    try:
        yield folder
    finally:
        for name in ("lora", "lora2"):
            shutil.rmtree(stack.root / "data" / "hook" / name, ignore_errors=True)
        stack.set(MODEL_DIR="", KV_VLLM_EXTRA_ARGS="")


def up(stack: Stack) -> None:
    stack.ok("up", "--no-proof")
    stack.wait_ready()


def test_other_weights_dtype_and_adapters_are_misses_and_come_back_as_hits(stack: Stack, own_model: Path) -> None:
    text = prompt("identity")
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

    write_adapter(stack.root / "data" / "hook" / "lora", seed=1)
    write_adapter(stack.root / "data" / "hook" / "lora2", seed=2)
    folder = "/run/kvstrata-hook"
    stack.set(KV_VLLM_EXTRA_ARGS=f"'--enable-lora --lora-modules one={folder}/lora two={folder}/lora2'")
    up(stack)
    back = stack.ask(text)
    assert back.lmcache == chunks(back.prompt_tokens) and back.text == first.text
    adapted = stack.store(text, model="one")
    assert adapted.status == 200, adapted.text
    assert adapted.lmcache == 0, "an adapter read the base model's blocks"
    assert adapted.text != first.text, "the adapter changes nothing: the test shows nothing"
    stack.drop_l0()
    assert stack.ask(text, model="two").lmcache == 0, "an adapter read another one's blocks"
    stack.drop_l0()
    again = stack.ask(text, model="one")
    assert again.text == adapted.text and again.lmcache == chunks(again.prompt_tokens)
    stack.drop_l0()
    assert stack.ask(text).text == first.text


def _wait_for_log(stack: Stack, needle: str) -> str:
    from tests.stack.harness import wait_until

    def seen() -> str:
        log = stack.compose("logs", "--no-color", "--tail", "50", "vllm")
        return log if needle in log else ""

    return str(wait_until(seen, 90, needle))
