"""From a model, a device and a machine to vLLM's flags and every size. Pure: the same input gives the same plan.

Sizes come from MemTotal, never from what is free just now: a plan that moved with the load would recreate containers on
each `up`. A knob in .env wins over the rule that stands here, and is checked.
"""

from __future__ import annotations

import os
import shlex
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console

from kvstrata.deploy import arch as arch_
from kvstrata.deploy.arch import DTYPE_BYTES, Arch
from kvstrata.deploy.errors import KvError
from kvstrata.deploy.extra_args import ExtraArgs
from kvstrata.deploy.host import GIB, Host, existing_parent
from kvstrata.deploy.memory import ENGINE_BUFFERS, Memory, size
from kvstrata.deploy.model import ModelInfo
from kvstrata.deploy.model_files import weight_bytes
from kvstrata.deploy.settings import Settings
from kvstrata.deploy.status_disk import folder_bytes

__all__ = ["Host", "Plan", "make"]

#: vLLM's own block size by device (vllm 0.28.0 platforms/cpu.py; 0.25.1 on CUDA).
BLOCK_SIZE = {"cpu": 128, "nvidia": 16, "gb10": 16}
_L2_DEFAULT_GB = 1500
_L2_SHARE = 0.8
_L2_LEAST = 64 << 20
_L2_BLOCKS = 8


@dataclass(frozen=True)
class Plan:
    """Flags and sizes of one deployment. Sizes that end in _gb are GiB, the others bytes. `explain` says why."""

    device: str
    family: str
    dtype: str
    max_model_len: int | None
    chunk_size: int
    block_size: int
    kv_bytes_per_token: int
    vllm_args: tuple[str, ...]
    l1_gb: float
    l2_gb: float
    vllm_kv_gb: int
    shm_bytes: int
    vllm_mem: int
    lmcache_mem: int
    engine_mem: int
    engine_hot: int
    engine_buffers: int
    explain: tuple[str, ...]

    def env(self) -> dict[str, str]:
        """The managed keys of .env that the plan decides."""
        return {
            "KV_VLLM_ARGS": shlex.join(self.vllm_args),
            "KV_PLAN_L1_GB": f"{self.l1_gb:g}",
            "KV_PLAN_L2_BYTES": str(int(self.l2_gb * GIB)),
            "KV_PLAN_SHM_BYTES": str(self.shm_bytes),
            "KV_PLAN_VLLM_KV_GB": str(self.vllm_kv_gb),
            "KV_PLAN_VLLM_MEM": str(self.vllm_mem),
            "KV_PLAN_LMCACHE_MEM": str(self.lmcache_mem),
            "KV_PLAN_ENGINE_MEM": str(self.engine_mem),
            "KV_PLAN_ENGINE_HOT": str(self.engine_hot),
            "KV_PLAN_ENGINE_BUFFERS": str(self.engine_buffers),
        }

    def summary(self) -> str:
        return (
            f"{self.family}, {self.dtype}, {self.kv_bytes_per_token / 1024:g} KiB of KV a token, "
            f"chunk {self.chunk_size}, L1 {self.l1_gb:g} GiB"
        )

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "env": self.env()}

    def render(self, console: Console, *, explain: bool = True) -> None:
        lines = [f"vllm serve /model {shlex.join(self.vllm_args)}", *(f"{k}={v}" for k, v in self.env().items())]
        lines += [""] + [f"- {why}" for why in self.explain] if explain else []
        for line in lines:
            console.print(line, markup=False, highlight=False, soft_wrap=True)


def make(settings: Settings, model: ModelInfo, device: str, host: Host) -> Plan:
    """The plan. Raises KvError: a family that the cache does not serve here, or a knob that cannot work."""
    arch = arch_.read(model.path)
    extra = ExtraArgs.parse(settings.vllm_extra_args)
    if settings.persist:
        _refuse(arch, device, model)
    explain = [f"family {arch.family}: {arch.why}"]
    if model.config.note:
        explain.append(f"{model.name}: {model.config.note}")

    weights = weight_bytes(model.path)
    dtype = _dtype(arch, model, device, host, weights, extra, explain)
    kv_dtype = _kv_dtype(dtype, extra)
    per_token = arch.kv_bytes_per_token(kv_dtype)
    explain.append(
        f"{per_token} bytes of KV a token: {arch.layers} layers, {arch.kv_heads} KV heads x {arch.head_dim}, "
        f"keys and values, {kv_dtype}"
    )
    block = extra.whole("--block-size") or BLOCK_SIZE[device]
    chunk = _chunk(settings.chunk_size, block, explain)
    explain.append(f"one chunk of {chunk} tokens is {chunk * per_token / (1 << 20):.4g} MiB")
    memory = size(settings, arch, model, device, host, weights, dtype, per_token, chunk, extra, explain)
    args = _args(model, arch, device, dtype, chunk, per_token, memory, explain)
    return Plan(
        device=device,
        family=arch.family,
        dtype=dtype,
        max_model_len=memory.max_model_len,
        chunk_size=chunk,
        block_size=block,
        kv_bytes_per_token=per_token,
        vllm_args=args,
        l1_gb=memory.l1_gb,
        l2_gb=_l2(settings, chunk * per_token, explain),
        vllm_kv_gb=memory.vllm_kv_gb,
        shm_bytes=memory.shm_bytes,
        vllm_mem=memory.vllm_mem,
        lmcache_mem=memory.lmcache_mem,
        engine_mem=memory.engine_mem,
        engine_hot=memory.engine_hot,
        engine_buffers=ENGINE_BUFFERS,
        explain=tuple(explain),
    )


def _refuse(arch: Arch, device: str, model: ModelInfo) -> None:
    plain = "set KV_PERSIST=0 in .env to serve it with plain vLLM and its own prefix cache, or choose another model"
    said = model.config.family
    if said not in (None, arch.family):
        raise KvError(
            f"{model.config.file}: family = {said!r}, but config.json says {arch.family} ({arch.why})",
            f"family = {arch.family!r}, or no such line",
            f"mend {model.config.file}",
        )
    if arch.family == "compressed":
        raise KvError(
            f"{model.name}: {arch.why}",
            "a model with ordinary keys and values: LMCache 0.5.3 was not shown to restore compressed KV rightly",
            plain,
        )
    if arch.family == "hybrid" and device == "cpu":
        raise KvError(
            f"{model.name} on a CPU: {arch.why}",
            "a model without recurrent layers: on a CPU, LMCache 0.5.3 stops vLLM at the first store of such a model "
            "(shared memory) or restores a wrong state without a word (lmcache_driven)",
            plain,
        )
    if arch.family == "hybrid":
        raise KvError(
            f"{model.name}: {arch.why}",
            "chunk = batch = the block size that vLLM derives for this model on this GPU; no rule asks for it yet",
            plain,
        )


def _dtype(
    arch: Arch, model: ModelInfo, device: str, host: Host, weights: int, extra: ExtraArgs, explain: list[str]
) -> str:
    own = str(model.config.args.get(device, {}).get("dtype", ""))
    asked = extra.value("--dtype") or own
    if asked and asked != "auto":
        if asked not in DTYPE_BYTES:
            raise KvError(f"--dtype {asked}", f"one of {', '.join(DTYPE_BYTES)}", "mend KV_VLLM_EXTRA_ARGS or the TOML")
        by = "KV_VLLM_EXTRA_ARGS" if extra.value("--dtype") else f"{model.config.name}.toml"
        explain.append(f"dtype {asked}: {by}")
        return asked
    if device != "cpu":
        # As vLLM's own "auto" does: float32 weights are served in bfloat16.
        chosen = "bfloat16" if arch.dtype in ("float32", "float") else arch.dtype
        explain.append(f"dtype {chosen}: the model's own" + (", halved" if chosen != arch.dtype else ""))
        return chosen
    full = weights * 4 // DTYPE_BYTES[arch.dtype]
    if full * 4 <= host.mem_total:
        explain.append(
            "dtype float32: on a CPU bfloat16 rounds with the prefill's size, a hit may then change the answer"
        )
        return "float32"
    explain.append(f"dtype {arch.dtype}: in float32 the weights ({full / GIB:.1f} GiB) pass a quarter of the memory")
    return arch.dtype


def _kv_dtype(dtype: str, extra: ExtraArgs) -> str:
    asked = extra.value("--kv-cache-dtype")
    if asked in (None, "auto"):
        return dtype
    return "fp8" if asked.startswith("fp8") else asked if asked in DTYPE_BYTES else dtype


def _chunk(chunk: int, block: int, explain: list[str]) -> int:
    if chunk % block:
        below, above = chunk // block * block, (chunk // block + 1) * block
        near = f"{below} or {above}" if below else str(above)
        need = f"a multiple of vLLM's block of {block} tokens"
        raise KvError(f"KV_CHUNK_SIZE={chunk}", need, f"set KV_CHUNK_SIZE={near} in .env")
    explain.append(f"chunk {chunk}: KV_CHUNK_SIZE, {chunk // block} vLLM blocks of {block} tokens")
    return chunk


def _args(
    model: ModelInfo, arch: Arch, device: str, dtype: str, chunk: int, per_token: int, memory: Memory,
    explain: list[str],
) -> tuple[str, ...]:  # fmt: skip
    flags: dict[str, str | int | bool] = {"dtype": dtype}
    if memory.max_model_len:
        flags["max-model-len"] = memory.max_model_len
    if device == "cpu":
        flags["max-num-batched-tokens"] = max(2048, chunk)
        explain.append(
            f"batch {flags['max-num-batched-tokens']} tokens: a longer prefill step makes running answers wait for "
            "seconds on a CPU, a shorter one makes more steps"
        )
        flags["max-num-seqs"] = max(4, min(16, memory.vllm_kv_gb * GIB // per_token // 1024))
        explain.append(f"at most {flags['max-num-seqs']} requests at once: about 1024 tokens of KV space each")
        flags["enforce-eager"] = True
        explain.append("enforce-eager: compiling costs a minute at each start and gains little on a CPU")
    else:
        flags["max-num-batched-tokens"] = max(8192, chunk)
        explain.append(f"batch {flags['max-num-batched-tokens']} tokens: a dense model prefills fastest in large steps")
    if memory.gpu_share:
        flags["gpu-memory-utilization"] = f"{memory.gpu_share:.2f}"
    flags["enable-prefix-caching"] = True
    if arch.family == "sliding" and device == "cpu":
        flags["disable-hybrid-kv-cache-manager"] = True
        explain.append(
            "disable-hybrid-kv-cache-manager: LMCache 0.5.3's CPU transfer carries one group of layers only "
            "(worker_transfer.py:177), so window layers keep all tokens"
        )
    flags |= model.config.args.get(device, {})
    result: list[str] = []
    for name, value in flags.items():
        if value is not False:
            result += [f"--{name}"] if value is True else [f"--{name}", str(value)]
    return tuple(result)


def _l2(settings: Settings, block: int, explain: list[str]) -> float:
    """GiB on disk for the block store. `block`: bytes of one chunk."""
    if settings.l2_gb is not None:
        least = max(_L2_LEAST, _L2_BLOCKS * block)
        if settings.l2_gb * GIB < least:
            raise KvError(
                f"KV_L2_GB={settings.l2_gb:g}",
                f"at least {least / GIB:.2g}: {_L2_BLOCKS} blocks of {block / (1 << 20):.4g} MiB",
                "raise KV_L2_GB in .env, lower KV_CHUNK_SIZE, or leave KV_L2_GB blank",
            )
        explain.append(f"L2 {settings.l2_gb:g} GiB: KV_L2_GB")
        return settings.l2_gb
    before = int(settings.managed.get("KV_PLAN_L2_BYTES") or 0) / GIB
    place = settings.engine_dir if settings.has_engine else settings.store_root
    own = folder_bytes(place)
    if own is None and before:  # it is another user's: what is free says nothing without it
        explain.append(f"L2 {before:g} GiB: as planned before; {place} cannot be read")
        return before
    stat = os.statvfs(existing_parent(settings.l2_dir))
    room = (stat.f_bavail * stat.f_frsize + (own or 0)) / GIB
    share = room * _L2_SHARE
    gb = float(min(_L2_DEFAULT_GB, int(share))) if share >= 2 else max(_L2_LEAST / GIB, round(share, 2))
    why = f"{_L2_SHARE:.0%} of the {room:.0f} GiB that are free or the store's own, {_L2_DEFAULT_GB} at most"
    # Another figure recreates lmcache and empties L1, and others use the disk as well: what was planned before
    # stays while it fits and is no less than half of what it would be now.
    if before != gb and before <= _L2_DEFAULT_GB and _L2_SHARE / 2 * room <= before <= room:
        gb, why = before, f"as planned before; {room:.0f} GiB are free or the store's own"
    explain.append(f"L2 {gb:g} GiB: {why}")
    return gb
