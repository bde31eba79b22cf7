"""Codecs on real KV: what the demo model computes for a real text, in bf16 and fp32."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib import resources
from pathlib import Path
from statistics import median
from typing import Any

from kvstrata.store.codecs import codec

__all__ = ["DTYPES", "measure", "real_kv"]

DTYPES = {"bf16": ("bfloat16", 2), "fp32": ("float32", 4)}
CODECS = ("lz4", "zstd")
_SUB = 1 << 20


def real_kv(model: Path, chunk: int, chunks: int) -> dict[str, list[bytes]]:
    """KV of `chunks` chunks of `chunk` tokens by type, each laid out as LMCache does: [2, layers, tokens, width].

    Computed once in fp32 and rounded for bf16: 16-bit arithmetic takes minutes on a CPU without it, for the same
    statistics. Raises ImportError without torch and transformers, OSError without a usable model folder.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    text = resources.files("kvstrata.proof").joinpath("handbook.txt").read_text(encoding="utf-8")
    ids = AutoTokenizer.from_pretrained(str(model), local_files_only=True)(text, return_tensors="pt").input_ids
    while ids.shape[1] < chunk * chunks:
        ids = torch.cat([ids, ids.flip(1)], dim=1)
    network = AutoModelForCausalLM.from_pretrained(str(model), dtype=torch.float32, local_files_only=True)
    with torch.inference_mode():
        cache = network.model(ids[:, : chunk * chunks], use_cache=True).past_key_values
    pairs = [(layer.keys, layer.values) for layer in cache.layers]
    whole = torch.stack([torch.stack([pair[which][0] for pair in pairs]) for which in (0, 1)])
    whole = whole.transpose(2, 3).flatten(3)  # [2, layers, heads, tokens, dim] to [2, layers, tokens, heads x dim]
    return {
        name: [_bytes(whole[:, :, at : at + chunk].to(getattr(torch, kind))) for at in range(0, chunk * chunks, chunk)]
        for name, (kind, _) in DTYPES.items()
    }


def _bytes(tensor: Any) -> bytes:
    import torch

    return bytes(tensor.contiguous().view(torch.uint8).numpy().data)


def measure(kv: Mapping[str, Sequence[bytes]], repeats: int, threads: int = 0) -> list[dict[str, Any]]:
    """Ratio and speed of each codec over the KV of each type; speeds are GB/s of KV, all cores together.

    Works as the store does: sub-blocks of 1 MiB, each by one thread, what does not shrink kept as it is.
    """
    return [
        _one(name, dtype, blocks, repeats, threads or os.cpu_count() or 1)
        for dtype, blocks in kv.items()
        for name in CODECS
    ]


def _one(name: str, dtype: str, blocks: Sequence[bytes], repeats: int, threads: int) -> dict[str, Any]:
    tool, itemsize = codec(name), DTYPES[dtype][1]
    pieces = [memoryview(block)[at : at + _SUB] for block in blocks for at in range(0, len(block), _SUB)]
    total = sum(len(piece) for piece in pieces)
    targets = [bytearray(len(piece)) for piece in pieces]
    encode_s, decode_s = [], []
    with ThreadPoolExecutor(threads) as pool:
        for _ in range(repeats):
            began = time.perf_counter()
            stored = list(pool.map(lambda piece: tool.encode(piece, itemsize), pieces))
            encode_s.append(time.perf_counter() - began)

            def decode(index: int, kept: Sequence[bytes | None] = stored) -> None:
                if (one := kept[index]) is None:
                    targets[index][:] = pieces[index]
                else:
                    tool.decode_into(memoryview(one), memoryview(targets[index]))

            began = time.perf_counter()
            list(pool.map(decode, range(len(pieces))))
            decode_s.append(time.perf_counter() - began)
            if any(target != piece for target, piece in zip(targets, pieces, strict=True)):
                raise RuntimeError(f"{name}: what was decoded is not what was encoded")
    size = sum(len(one) if one is not None else len(piece) for one, piece in zip(stored, pieces, strict=True))
    return {
        "name": name, "dtype": dtype, "ratio": round(total / size, 3), "threads": threads, "bytes": total,
        "encode_gbps": round(total / 1e9 / median(encode_s), 3),
        "decode_gbps": round(total / 1e9 / median(decode_s), 3),
    }  # fmt: skip
