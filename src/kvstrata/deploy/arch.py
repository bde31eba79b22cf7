"""What config.json says about a model's KV cache: its family and its bytes a token.

Families: `dense` (every layer keeps all tokens), `sliding` (some layers keep a window), `hybrid` (some layers keep a
recurrent state: Mamba, GDN, short convolutions), `compressed` (MLA: one latent vector instead of keys and values).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvstrata.deploy.errors import KvError

__all__ = ["DTYPE_BYTES", "Arch", "describe", "read"]

DTYPE_BYTES: Mapping[str, int] = {"float32": 4, "float": 4, "bfloat16": 2, "float16": 2, "half": 2, "fp8": 1}

_ATTENTION_LAYERS = {"attention", "full_attention", "global_attention", "full", "global"}
_WINDOW_LAYERS = {"sliding_attention", "chunked_attention", "local_attention", "sliding", "local"}
_LAYER_LISTS = ("layer_types", "layers_block_type", "block_types")
#: Keys that only models with recurrent layers have (Falcon-H1, Jamba, Zamba2, Nemotron-H, Qwen3-Next, LFM2, RWKV).
_STATE_KEYS = ("mamba_", "ssm_", "linear_num_", "linear_key_", "linear_conv_", "linear_attn_config", "hybrid_override_")
_STATE_EXACT = {"state_size", "conv_kernel", "conv_L_cache", "attn_layer_period", "rwkv_hidden_size"}
_STATE_TYPES = ("mamba", "rwkv", "falcon_h1", "minimax_text", "minimax_m1")


@dataclass(frozen=True)
class Arch:
    """`kv_values_per_token`: numbers kept a token in all layers together, all ranks of one copy of the model."""

    family: str
    why: str
    model_type: str
    layers: int
    kv_heads: int
    head_dim: int
    kv_values_per_token: int
    max_position: int
    dtype: str
    hidden_size: int
    vocab_size: int

    def kv_bytes_per_token(self, dtype: str) -> int:
        return self.kv_values_per_token * DTYPE_BYTES[dtype]


def read(model_path: Path) -> Arch:
    """Arch of the folder's config.json. Raises KvError where it is missing, unreadable or lacks a needed figure."""
    file = model_path / "config.json"
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise _unreadable(f"{file}: {error}") from error
    if not isinstance(config, dict):
        raise _unreadable(f"{file} is no JSON object")
    return describe(config, str(file))


def _unreadable(found: str) -> KvError:
    return KvError(found, "a readable config.json", "copy the model again, or mend MODEL_DIR")


def describe(config: Mapping[str, Any], file: str = "config.json") -> Arch:
    """Arch of a parsed config.json; a vision-language model is described by its text part."""
    text = _text_part(config)
    model_type = str(text.get("model_type") or config.get("model_type") or "unknown")
    layers = _need(text, file, "num_hidden_layers", "n_layer", "num_layers")
    heads = _need(text, file, "num_attention_heads", "n_head", "num_heads")
    hidden = _need(text, file, "hidden_size", "n_embd", "d_model")
    kv = text.get("num_key_value_heads", text.get("num_kv_heads", text.get("multi_query") and 1)) or heads
    head_dim = _whole(text.get("head_dim")) or hidden // heads
    value_dim = _whole(text.get("v_head_dim")) or head_dim
    family, why = _family(text, model_type)
    values = _per_layer_heads(kv, layers) * (head_dim + value_dim)
    if family == "compressed" and (rank := _whole(text.get("kv_lora_rank"))):
        values = layers * (rank + (_whole(text.get("qk_rope_head_dim")) or 0))
    return Arch(
        family=family,
        why=why,
        model_type=model_type,
        layers=layers,
        kv_heads=max(_list(kv, layers)),
        head_dim=head_dim,
        kv_values_per_token=values,
        max_position=_need(text, file, "max_position_embeddings", "n_positions", "max_seq_len", "seq_length"),
        dtype=_dtype(text, config),
        hidden_size=hidden,
        vocab_size=_whole(text.get("vocab_size") or config.get("vocab_size")) or 0,
    )


def _text_part(config: Mapping[str, Any]) -> Mapping[str, Any]:
    for key in ("text_config", "llm_config", "language_config"):
        part = config.get(key)
        if isinstance(part, dict) and "num_hidden_layers" in part:
            return part
    return config


def _need(config: Mapping[str, Any], file: str, *keys: str) -> int:
    for key in keys:
        if value := _whole(config.get(key)):
            return value
    raise KvError(
        f"{file} has no {keys[0]}", f"{keys[0]}, a whole number", "serve a decoder model with an ordinary config.json"
    )


def _whole(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None


def _list(value: Any, layers: int) -> list[int]:
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [item for item in value if isinstance(item, int)] or [1]
    return [int(value)] * layers


def _per_layer_heads(value: Any, layers: int) -> int:
    return sum(_list(value, layers))


def _dtype(text: Mapping[str, Any], config: Mapping[str, Any]) -> str:
    for part in (text, config):
        for key in ("dtype", "torch_dtype"):
            name = str(part.get(key) or "").removeprefix("torch.")
            if name in DTYPE_BYTES:
                return name
    # What transformers and vLLM take when a config says nothing.
    return "float32"


def _family(text: Mapping[str, Any], model_type: str) -> tuple[str, str]:
    if _whole(text.get("kv_lora_rank")):
        return "compressed", f"kv_lora_rank = {text['kv_lora_rank']}: keys and values are one latent vector (MLA)"
    if any(text.get(key) for key in ("compress_ratios", "compress_rates")):
        return "compressed", "the KV cache is compressed by layer (compress_ratios)"
    listed = next((text[key] for key in _LAYER_LISTS if isinstance(text.get(key), list) and text[key]), None)
    if listed is not None:
        return _by_layers([str(kind) for kind in listed])
    if model_type.startswith(_STATE_TYPES):
        return "hybrid", f"model_type = {model_type}: layers with a recurrent state"
    if state := sorted(key for key in text if text[key] and (key.startswith(_STATE_KEYS) or key in _STATE_EXACT)):
        return "hybrid", f"{state[0]}: layers with a recurrent state"
    window = _whole(text.get("sliding_window"))
    # Qwen2 and its heirs carry a window that is switched off.
    if window and text.get("use_sliding_window") is not False:
        return "sliding", f"sliding_window = {window}"
    return "dense", "every layer keeps the keys and values of all tokens"


def _by_layers(kinds: list[str]) -> tuple[str, str]:
    others = sorted(set(kinds) - _ATTENTION_LAYERS - _WINDOW_LAYERS)
    if others:
        count = sum(kind in others for kind in kinds)
        return "hybrid", f"{count} of {len(kinds)} layers are {', '.join(others)}: they keep a recurrent state"
    window = sum(kind in _WINDOW_LAYERS for kind in kinds)
    if window:
        return "sliding", f"{window} of {len(kinds)} layers keep a window of the tokens only"
    return "dense", "every layer keeps the keys and values of all tokens"
