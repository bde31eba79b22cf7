"""Turn the demo model's GGUF file into an ordinary Hugging Face model folder.

Run as a script, `python demo_convert.py IN.gguf OUT_FOLDER`, inside the vLLM image: it needs numpy and nothing else, so
the host's own Python stays small and the image needs no GGUF packages. It reads what this one model uses (a Llama
architecture with a byte-level BPE; tensors F32, F16, Q8_0 and Q4_1) and refuses everything else by name.

Formats: GGUF version 3 as the ggml project documents it; safetensors as its README documents it. The weights are
written as bfloat16, which is what the model was trained and published in.
"""

from __future__ import annotations

import json
import os
import struct
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_F32, _F16, _Q4_1, _Q8_0 = 0, 1, 3, 8
_BLOCK = 32
_BLOCK_BYTES = {_F32: 4 * _BLOCK, _F16: 2 * _BLOCK, _Q4_1: 20, _Q8_0: 34}
_CONTROL_TOKEN = 3

_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_TOP_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}


class Gguf:
    """Metadata (`fields`) and tensors of one GGUF file; `tensors` maps a name to (shape, type, offset in the file)."""

    def __init__(self, path: Path) -> None:
        self._data = np.memmap(path, dtype=np.uint8, mode="r")
        self._at = 0
        if bytes(self._data[:4]) != b"GGUF":
            raise ValueError(f"{path} is not a GGUF file")
        self._at = 4
        version = self._scalar("I")
        if version != 3:
            raise ValueError(f"{path} is GGUF version {version}; this converter reads version 3")
        tensor_count, field_count = self._scalar("Q"), self._scalar("Q")
        self.fields: dict[str, Any] = {}
        for _ in range(field_count):
            name = self._string()
            self.fields[name] = self._value(self._scalar("I"))
        infos = [self._tensor_info() for _ in range(tensor_count)]
        alignment = int(self.fields.get("general.alignment", 32))
        base = -(-self._at // alignment) * alignment
        self.tensors = {name: (shape, kind, base + offset) for name, shape, kind, offset in infos}

    def _scalar(self, code: str) -> Any:
        size = struct.calcsize("<" + code)
        raw = self._data[self._at : self._at + size].tobytes()
        self._at += size
        return struct.unpack("<" + code, raw)[0]

    def _string(self) -> str:
        length = self._scalar("Q")
        raw = self._data[self._at : self._at + length].tobytes()
        self._at += length
        return raw.decode("utf-8")

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._string()
        if kind == _ARRAY:
            item, count = self._scalar("I"), self._scalar("Q")
            return [self._value(item) for _ in range(count)]
        return self._scalar(_SCALARS[kind])

    def _tensor_info(self) -> tuple[str, tuple[int, ...], int, int]:
        name = self._string()
        # GGUF names the fastest running dimension first, everybody else last.
        shape = tuple(reversed([self._scalar("Q") for _ in range(self._scalar("I"))]))
        return name, shape, self._scalar("I"), self._scalar("Q")

    def tensor(self, name: str) -> np.ndarray[Any, Any]:
        """The tensor as float32."""
        shape, kind, offset = self.tensors[name]
        if kind not in _BLOCK_BYTES:
            raise ValueError(f"tensor {name} has GGUF type {kind}; this converter reads F32, F16, Q4_1 and Q8_0")
        count = int(np.prod(shape))
        raw = self._data[offset : offset + count * _BLOCK_BYTES[kind] // _BLOCK]
        return _dequantize(raw, kind).reshape(shape)


def _dequantize(raw: np.ndarray[Any, Any], kind: int) -> np.ndarray[Any, Any]:
    if kind == _F32:
        return raw.view("<f4")
    if kind == _F16:
        return raw.view("<f2").astype(np.float32)
    blocks = raw.reshape(-1, _BLOCK_BYTES[kind])
    scale = blocks[:, 0:2].copy().view("<f2").astype(np.float32)
    if kind == _Q8_0:
        return blocks[:, 2:].view(np.int8).astype(np.float32) * scale
    minimum = blocks[:, 2:4].copy().view("<f2").astype(np.float32)
    packed = blocks[:, 4:]
    # Low halves are the block's first 16 values, high halves its last 16.
    values = np.concatenate([packed & 0x0F, packed >> 4], axis=1).astype(np.float32)
    return values * scale + minimum


def _to_bfloat16(values: np.ndarray[Any, Any]) -> bytes:
    """Round to nearest even, like every framework does."""
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    rounded = bits + (np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1)))
    return (rounded >> np.uint32(16)).astype("<u2").tobytes()


def _unpermute(weights: np.ndarray[Any, Any], heads: int) -> np.ndarray[Any, Any]:
    """GGUF keeps the rotary pairs of a head side by side, the Hugging Face layout keeps them half a head apart."""
    rows, columns = weights.shape
    return weights.reshape(heads, rows // heads // 2, 2, columns).swapaxes(1, 2).reshape(rows, columns)


def _renamed(gguf: Gguf) -> Iterator[tuple[str, str, int]]:
    """(name in GGUF, name in the folder, heads to un-permute or 0) for each tensor."""
    heads = gguf.fields["llama.attention.head_count"]
    kv_heads = gguf.fields["llama.attention.head_count_kv"]
    for name in gguf.tensors:
        if name in _TOP_NAMES:
            yield name, _TOP_NAMES[name], 0
            continue
        prefix, number, part, rest = name.split(".")
        if prefix != "blk" or rest != "weight" or part not in _LAYER_NAMES:
            raise ValueError(f"tensor {name} is not part of a Llama model")
        turn = {"attn_q": heads, "attn_k": kv_heads}.get(part, 0)
        yield name, f"model.layers.{number}.{_LAYER_NAMES[part]}.weight", turn


def _write_weights(gguf: Gguf, path: Path) -> None:
    entries = sorted(_renamed(gguf), key=lambda entry: entry[1])
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for source, target, _ in entries:
        shape = gguf.tensors[source][0]
        size = 2 * int(np.prod(shape))
        header[target] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [offset, offset + size]}
        offset += size
    head = json.dumps(header, separators=(",", ":")).encode("utf-8")
    head += b" " * (-len(head) % 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(head)) + head)
        for source, _, heads in entries:
            values = gguf.tensor(source)
            file.write(_to_bfloat16(_unpermute(values, heads) if heads else values))
        file.flush()
        os.fsync(file.fileno())


def _config(fields: dict[str, Any], tied: bool) -> dict[str, Any]:
    heads = fields["llama.attention.head_count"]
    hidden = fields["llama.embedding_length"]
    return {
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": fields["tokenizer.ggml.bos_token_id"],
        "eos_token_id": fields["tokenizer.ggml.eos_token_id"],
        "head_dim": hidden // heads,
        "hidden_act": "silu",
        "hidden_size": hidden,
        "initializer_range": 0.02,
        "intermediate_size": fields["llama.feed_forward_length"],
        "max_position_embeddings": fields["llama.context_length"],
        "mlp_bias": False,
        "model_type": "llama",
        "num_attention_heads": heads,
        "num_hidden_layers": fields["llama.block_count"],
        "num_key_value_heads": fields["llama.attention.head_count_kv"],
        "pad_token_id": fields["tokenizer.ggml.padding_token_id"],
        # The file has it as float32: 9.99999974e-06 is 1e-05.
        "rms_norm_eps": float(f"{fields['llama.attention.layer_norm_rms_epsilon']:.6g}"),
        "rope_scaling": None,
        "rope_theta": fields["llama.rope.freq_base"],
        "tie_word_embeddings": tied,
        "torch_dtype": "bfloat16",
        "use_cache": True,
        "vocab_size": fields["llama.vocab_size"],
    }


def _special(fields: dict[str, Any]) -> list[tuple[int, str]]:
    pairs = zip(fields["tokenizer.ggml.tokens"], fields["tokenizer.ggml.token_type"], strict=True)
    return [(number, token) for number, (token, kind) in enumerate(pairs) if kind == _CONTROL_TOKEN]


def _added(token: str) -> dict[str, Any]:
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    return {"content": token, **flags}


def _tokenizer(fields: dict[str, Any]) -> dict[str, Any]:
    if (fields["tokenizer.ggml.model"], fields["tokenizer.ggml.pre"]) != ("gpt2", "smollm"):
        raise ValueError("the tokenizer is not SmolLM's byte-level BPE")
    bytelevel = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": number, **_added(token)} for number, token in _special(fields)],
        "normalizer": None,
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [{"type": "Digits", "individual_digits": True}, bytelevel],
        },
        "post_processor": None,
        "decoder": bytelevel,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {token: number for number, token in enumerate(fields["tokenizer.ggml.tokens"])},
            "merges": [merge.split(" ") for merge in fields["tokenizer.ggml.merges"]],
        },
    }


def _tokenizer_config(fields: dict[str, Any]) -> dict[str, Any]:
    tokens = fields["tokenizer.ggml.tokens"]
    return {
        "add_prefix_space": False,
        "added_tokens_decoder": {str(number): _added(token) for number, token in _special(fields)},
        "bos_token": tokens[fields["tokenizer.ggml.bos_token_id"]],
        "chat_template": fields["tokenizer.chat_template"],
        "clean_up_tokenization_spaces": False,
        "eos_token": tokens[fields["tokenizer.ggml.eos_token_id"]],
        "model_max_length": fields["llama.context_length"],
        "pad_token": tokens[fields["tokenizer.ggml.padding_token_id"]],
        "tokenizer_class": "PreTrainedTokenizerFast",
        "unk_token": tokens[fields["tokenizer.ggml.unknown_token_id"]],
    }


def _write_json(path: Path, body: dict[str, Any], indent: int | None = 2) -> None:
    path.write_text(json.dumps(body, indent=indent, ensure_ascii=False) + "\n", encoding="utf-8")


def convert(source: Path, out: Path) -> None:
    """Write config.json, tokenizer files, generation_config.json and model.safetensors into the folder `out`."""
    gguf = Gguf(source)
    if gguf.fields["general.architecture"] != "llama":
        raise ValueError(f"{source} holds a {gguf.fields['general.architecture']} model, not a Llama one")
    fields = gguf.fields
    _write_json(out / "config.json", _config(fields, tied="output.weight" not in gguf.tensors))
    _write_json(out / "tokenizer.json", _tokenizer(fields), indent=None)
    _write_json(out / "tokenizer_config.json", _tokenizer_config(fields))
    ends = {f"{name}_token_id": fields[f"tokenizer.ggml.{name}_token_id"] for name in ("bos", "eos")}
    _write_json(out / "generation_config.json", {**ends, "pad_token_id": fields["tokenizer.ggml.padding_token_id"]})
    _write_weights(gguf, out / "model.safetensors")


if __name__ == "__main__":
    convert(Path(sys.argv[1]), Path(sys.argv[2]))
