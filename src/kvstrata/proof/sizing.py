"""How much disk a model's KV cache takes: `kvstrata size`.

Layers, heads and families come from config.json through deploy/arch.py, as the plan's own sizes do. GB are 10^9 bytes
as disks are sold; GiB are 2^30 bytes, the unit of every knob in .env.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from kvstrata.deploy import arch as arch_
from kvstrata.deploy import model as model_
from kvstrata.deploy.arch import DTYPE_BYTES, Arch
from kvstrata.deploy.errors import KvError
from kvstrata.deploy.extra_args import ExtraArgs
from kvstrata.deploy.host import GIB
from kvstrata.deploy.settings import Settings

__all__ = ["COMMON", "GB", "WORKING_SET_GB", "Sizing", "common", "compute", "markdown", "of_model", "render"]

GB = 10**9
WORKING_SET_GB = 200.0
#: A block file is its payload and one header page (docs/format.md); a file system gives space by the page.
_PAGE = 4096
#: The store evicts down to this share of its capacity when it gets full (KV_STORE_* defaults, store/settings.py).
_TARGET = 0.8
#: What the index of the store takes in memory at most, a block.
_INDEX_BYTES = 250


def _config(layers: int, heads: int, kv_heads: int, hidden: int, head_dim: int = 128) -> Mapping[str, Any]:
    return {
        "model_type": "decoder", "num_hidden_layers": layers, "num_attention_heads": heads,
        "num_key_value_heads": kv_heads, "hidden_size": hidden, "head_dim": head_dim,
        "max_position_embeddings": 32768, "torch_dtype": "bfloat16",
    }  # fmt: skip


#: Shapes from the config.json that each model's publisher ships; all of them keep every token in every layer.
COMMON: Mapping[str, Mapping[str, Any]] = {
    "Llama-3.1-8B": _config(32, 32, 8, 4096),
    "Llama-3.3-70B": _config(80, 64, 8, 8192),
    "Mistral-7B-v0.3": _config(32, 32, 8, 4096),
    "Qwen2.5-7B": _config(28, 28, 4, 3584),
    "Qwen2.5-14B": _config(48, 40, 8, 5120),
    "Qwen2.5-32B": _config(64, 40, 8, 5120),
    "Qwen2.5-72B": _config(80, 64, 8, 8192),
    "Qwen3-4B": _config(36, 32, 8, 2560),
    "Qwen3-8B": _config(36, 32, 8, 4096),
    "Qwen3-14B": _config(40, 40, 8, 5120),
    "Qwen3-32B": _config(64, 64, 8, 5120),
    "Qwen3-30B-A3B": _config(48, 32, 4, 2048),
    "SmolLM2-135M": _config(30, 9, 3, 576, head_dim=64),
}


@dataclass(frozen=True)
class Sizing:
    """Sizes of one model's KV cache on disk, stored as it is (codec raw).

    `bytes_per_token` counts all ranks, `block_bytes` is the payload and `file_bytes` the disk space of one block of
    one rank; a chunk of `chunk_size` tokens is `tp` such blocks. Only whole chunks are stored.
    """

    model: str
    source: str
    family: str
    dtype: str
    tp: int
    chunk_size: int
    bytes_per_token: int
    block_bytes: int
    tokens: int
    working_set_gb: float

    @property
    def file_bytes(self) -> int:
        return _PAGE + -(-self.block_bytes // _PAGE) * _PAGE

    @property
    def gb_per_1k_tokens(self) -> float:
        """Disk space of 1000 tokens of long prompts, header pages included."""
        return self.file_bytes * self.tp / self.chunk_size * 1000 / GB

    def blocks_for(self, tokens: int) -> int:
        return tokens // self.chunk_size * self.tp

    @property
    def blocks(self) -> int:
        return self.blocks_for(self.tokens)

    @property
    def disk_bytes(self) -> int:
        return self.blocks * self.file_bytes

    @property
    def working_set_chunks(self) -> int:
        return int(self.working_set_gb * GB) // (self.file_bytes * self.tp)

    @property
    def working_set_tokens(self) -> int:
        return self.working_set_chunks * self.chunk_size

    @property
    def capacity_gib(self) -> int:
        """KV_L2_GB that keeps the whole working set through an eviction: it is the newest 80 % of the capacity."""
        return -int(-self.working_set_gb * GB // (_TARGET * GIB))

    def to_json(self) -> dict[str, Any]:
        return {
            "model": self.model, "source": self.source, "family": self.family, "dtype": self.dtype, "tp": self.tp,
            "chunk_size": self.chunk_size, "bytes_per_token": self.bytes_per_token, "block_bytes": self.block_bytes,
            "file_bytes": self.file_bytes, "gb_per_1k_tokens": round(self.gb_per_1k_tokens, 4),
            "tokens": self.tokens, "blocks": self.blocks, "disk_bytes": self.disk_bytes,
            "working_set": {
                "gb": self.working_set_gb, "tokens": self.working_set_tokens,
                "blocks": self.working_set_chunks * self.tp, "capacity_gib": self.capacity_gib,
                "index_bytes": self.working_set_chunks * self.tp * _INDEX_BYTES,
            },
        }  # fmt: skip


def compute(
    model: str, source: str, arch: Arch, *, dtype: str, tp: int, chunk_size: int, tokens: int,
    working_set_gb: float = WORKING_SET_GB,
) -> Sizing:  # fmt: skip
    """Sizes of `arch` in `dtype` over `tp` ranks. Raises KvError where vLLM would not split the heads so."""
    if dtype not in DTYPE_BYTES:
        raise KvError(f"--dtype {dtype}", f"one of {', '.join(DTYPE_BYTES)}", "leave it out for the model's own")
    values = _values_per_rank(arch, tp)
    per_rank = values * DTYPE_BYTES[dtype]
    return Sizing(
        model, source, arch.family, dtype, tp, chunk_size, per_rank * tp, per_rank * chunk_size, tokens, working_set_gb
    )


def _values_per_rank(arch: Arch, tp: int) -> int:
    """KV heads are shared out; with more ranks than heads each head is kept several times (as vLLM does)."""
    if arch.family == "compressed" or tp == 1:
        return arch.kv_values_per_token  # a latent vector cannot be shared out: each rank keeps all of it
    if arch.kv_heads % tp == 0:
        return arch.kv_values_per_token // tp
    if tp % arch.kv_heads == 0:
        return arch.kv_values_per_token // arch.kv_heads
    raise KvError(
        f"--tp {tp} and {arch.kv_heads} KV heads",
        "one that divides the other",
        "choose another --tp: vLLM needs it too",
    )


def of_model(
    settings: Settings, name: str, *, dtype: str = "", tp: int = 1, tokens: int, working_set_gb: float = WORKING_SET_GB
) -> Sizing:
    """Sizes of `name`: a folder with a config.json, a file of configs/models, or a name of COMMON.

    "" is the model of .env. Raises KvError: none of these, or a config.json that lacks a figure.
    """
    model, source, arch = _find(settings, name)
    if not dtype:
        dtype = (_served_dtype(settings) if not name else "") or arch.dtype
    return compute(
        model, source, arch, dtype=dtype, tp=tp, chunk_size=settings.chunk_size, tokens=tokens,
        working_set_gb=working_set_gb,
    )  # fmt: skip


def _find(settings: Settings, name: str) -> tuple[str, str, Arch]:
    if not name:
        info = model_.resolve(settings, settings.root, must_exist=False)
        return info.name, str(info.path), _read(info.path)
    near = {key.lower(): key for key in COMMON}
    folder = Path(name).expanduser()
    if folder.is_dir():
        return model_.short_name(folder.absolute()), str(folder), arch_.read(folder)
    file = settings.root / "configs" / "models" / f"{name}.toml"
    if "/" not in name and file.is_file():
        config = model_.load_config(file)
        path = settings.models_dir if config.source == "demo" else settings.root
        return name, str(path / (config.path or name)), _read(path / (config.path or name))
    if key := near.get(name.lower()):
        return key, "the publisher's config.json", arch_.describe(COMMON[key], key)
    raise KvError(
        f"--model {name}: no such folder, no configs/models/{name}.toml, and no model of the built-in list",
        f"a folder with a config.json, or one of {', '.join(COMMON)}",
        "copy the model's config.json into a folder and name the folder",
    )


def _read(path: Path) -> Arch:
    if not (path / "config.json").is_file():
        raise KvError(
            f"{path} has no config.json", "the model's folder", "make up (it makes the demo model), or --model"
        )
    return arch_.read(path)


def _served_dtype(settings: Settings) -> str:
    """KV type that the last `up` chose for the model of .env; "" before the first one."""
    args = ExtraArgs.parse(tuple(shlex.split(settings.managed.get("KV_VLLM_ARGS", ""))))
    extra = ExtraArgs.parse(settings.vllm_extra_args)
    for flag in ("--kv-cache-dtype", "--dtype"):
        chosen = extra.value(flag) or args.value(flag) or ""
        if chosen.startswith("fp8"):
            return "fp8"
        if chosen in DTYPE_BYTES:
            return chosen
    return ""


def common(chunk_size: int = 256, tokens: int = 1000, working_set_gb: float = WORKING_SET_GB) -> list[Sizing]:
    """Sizes of the built-in list in bfloat16, one rank."""
    return [
        compute(name, "the publisher's config.json", arch_.describe(config, name), dtype="bfloat16", tp=1,
                chunk_size=chunk_size, tokens=tokens, working_set_gb=working_set_gb)
        for name, config in COMMON.items()
    ]  # fmt: skip


def markdown(sizings: list[Sizing]) -> str:
    """The table of docs/storage.md."""
    first = sizings[0]
    lines = [
        f"| model ({first.dtype}) | KiB a token | MiB a block of {first.chunk_size} | GB per 1k tokens "
        f"| tokens in {first.working_set_gb:g} GB | blocks |",
        "|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {s.model} | {s.bytes_per_token / 1024:g} | {s.block_bytes / (1 << 20):g} | {s.gb_per_1k_tokens:.3f} "
        f"| {s.working_set_tokens / 1e6:.2f} M | {s.working_set_chunks * s.tp:,} |"
        for s in sizings
    ]
    return "\n".join(lines)


def render(sizing: Sizing, console: Console) -> None:
    s, ranks = sizing, f" x {sizing.tp} ranks" if sizing.tp > 1 else ""
    lines = [
        f"{s.model}: {s.family}, {s.dtype}, from {s.source}",
        f"a token        {s.bytes_per_token:,} bytes ({s.bytes_per_token / 1024:g} KiB), all ranks",
        f"a block        {s.block_bytes / (1 << 20):.4g} MiB{ranks}, {s.chunk_size} tokens, and a header page of 4 KiB",
        f"1k tokens      {s.gb_per_1k_tokens:.3f} GB",
        f"{s.tokens:,} tokens  {s.blocks:,} blocks, {s.disk_bytes / GB:.3f} GB (whole chunks only)",
        f"{s.working_set_gb:g} GB         {s.working_set_tokens:,} tokens in {s.working_set_chunks * s.tp:,} blocks; "
        f"KV_L2_GB={s.capacity_gib} keeps them through an eviction",
    ]
    if s.family in ("compressed", "hybrid"):
        lines.append(f"{s.family} models are refused here (docs/limits.md); the figures are of their attention KV only")
    if s.family == "sliding":
        lines.append("layers with a window are counted in full: that is what is stored where the window is not used")
    for line in lines:
        console.print(line, markup=False, highlight=False, soft_wrap=True)
