"""Memory of one deployment: vLLM's KV space, L1, the shared-memory volume, and the limits of both services.

A page of the shared /dev/shm counts against the service that writes it first: L1 against lmcache, vLLM's message queues
(psm_*) against vLLM. So lmcache's limit is L1 + its own, and the volume holds L1 + the queues.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvstrata.deploy.arch import DTYPE_BYTES, Arch
from kvstrata.deploy.errors import KvError
from kvstrata.deploy.extra_args import ExtraArgs
from kvstrata.deploy.host import GIB, Host
from kvstrata.deploy.model import ModelInfo
from kvstrata.deploy.settings import Settings

__all__ = ["ENGINE_BUFFERS", "LMCACHE_OWN", "RESERVE", "Memory", "size"]

#: Left to the operating system, the engine, the proxy and the CLI.
RESERVE = GIB
#: lmcache server without L1: 0.75 GiB resident measured on a CPU; the rest is room for L2 reads in flight.
LMCACHE_OWN = GIB * 3 // 2
#: Values in flight of all connections of the KV engine together, and the engine besides them and its hot tier.
ENGINE_BUFFERS = GIB // 2
_ENGINE_OWN = GIB // 2
#: vLLM without weights and KV: 3.1 GiB resident measured on a CPU (API server 0.9, engine 0.8, worker 1.4 GiB).
_VLLM_OWN = {"cpu": 4 * GIB, "nvidia": 12 * GIB, "gb10": 12 * GIB}
#: Two lives of vLLM's queues at 0.8 GiB nominal: those of a killed vLLM stay until the volume is emptied.
_QUEUES = 2 * GIB
_STEP = 64 << 20


@dataclass(frozen=True)
class Memory:
    """Bytes, or GiB where the name ends in _gb. `gpu_share`: --gpu-memory-utilization, None = vLLM's default."""

    max_model_len: int | None
    vllm_kv_gb: int
    l1_gb: float
    shm_bytes: int
    vllm_mem: int
    lmcache_mem: int
    engine_mem: int = 0
    """Limit of the KV engine's container; 0 = it is not part of the stack."""
    engine_hot: int = 0
    gpu_share: float | None = None


def size(
    settings: Settings, arch: Arch, model: ModelInfo, device: str, host: Host, weights: int, dtype: str,
    per_token: int, chunk: int, extra: ExtraArgs, explain: list[str],
) -> Memory:  # fmt: skip
    """All sizes; each decision adds its reason to `explain`. Raises KvError for a knob that cannot work."""
    length, kv_gb = _context(settings, arch, model, device, host, per_token, chunk, extra, explain)
    loaded = weights * DTYPE_BYTES[dtype] // DTYPE_BYTES[arch.dtype]
    # One request with prompt_logprobs makes the logits of a whole step, and their softmax: it must not kill the server.
    step = extra.whole("--max-num-batched-tokens") or max(2048, chunk)
    vllm_mem = _vllm(settings, device, loaded, kv_gb, 2 * 4 * step * arch.vocab_size, explain)
    hot, engine_mem = _engine(settings, explain)
    l1_gb = _l1(settings, device, host, vllm_mem + engine_mem, per_token * chunk, explain)
    l1 = int(l1_gb * GIB)
    lmcache_mem = _round_up(l1 + LMCACHE_OWN)
    if settings.lmcache_mem_gb is not None:
        lmcache_mem = _round_up(int(settings.lmcache_mem_gb * GIB))
        if lmcache_mem < l1 + GIB // 2:
            raise KvError(
                f"KV_LMCACHE_MEM_GB={settings.lmcache_mem_gb:g}",
                f"at least {(l1 + GIB // 2) / GIB:g}: L1 ({l1_gb:g} GiB, it counts against lmcache) and 0.5 of its own",
                "raise KV_LMCACHE_MEM_GB, or lower KV_L1_GB, or leave it blank",
            )
    shm = _round_up(2 * l1 + _QUEUES)
    explain.append(
        f"lmcache limit {lmcache_mem / GIB:.4g} GiB: L1, which is counted against its writer, and "
        f"{(lmcache_mem - l1) / GIB:.3g} GiB of its own"
    )
    explain.append(
        f"shared memory {shm / GIB:.4g} GiB at most: L1 twice (a restarted server's pool beside the old one for "
        f"seconds) and {_QUEUES / GIB:g} GiB for vLLM's queues"
    )
    share = _gpu_share(device, host, lmcache_mem + engine_mem, extra, explain)
    return Memory(length, kv_gb, l1_gb, shm, vllm_mem, lmcache_mem, engine_mem, hot, share)


def _engine(settings: Settings, explain: list[str]) -> tuple[int, int]:
    """(hot tier, limit of the container), both 0 without the layer."""
    if not settings.has_engine:
        return 0, 0
    hot = int(settings.engine_hot_gb * GIB)
    limit = _round_up(hot + ENGINE_BUFFERS + _ENGINE_OWN)
    explain.append(
        f"engine limit {limit / GIB:.4g} GiB: hot tier {hot / GIB:g} (KV_ENGINE_HOT_GB), values in flight "
        f"{ENGINE_BUFFERS / GIB:g}, {_ENGINE_OWN / GIB:g} of its own"
    )
    return hot, limit


def _context(
    settings: Settings, arch: Arch, model: ModelInfo, device: str, host: Host, per_token: int, chunk: int,
    extra: ExtraArgs, explain: list[str],
) -> tuple[int | None, int]:  # fmt: skip
    asked = extra.whole("--max-model-len")
    length = asked or min(model.config.max_model_len or arch.max_position, arch.max_position)
    if device != "cpu":
        # vLLM measures the GPU itself; a length is passed only where somebody chose one.
        return (length if model.config.max_model_len and not asked else asked), 0
    if settings.vllm_kv_gb is not None:
        if settings.vllm_kv_gb != int(settings.vllm_kv_gb) or settings.vllm_kv_gb < 1:
            raise KvError(
                f"KV_VLLM_KV_GB={settings.vllm_kv_gb:g}", "whole GiB, at least 1: vLLM takes no fractions here",
                "set KV_VLLM_KV_GB to a whole number in .env, or leave it blank",
            )  # fmt: skip
        kv_gb = int(settings.vllm_kv_gb)
        explain.append(f"vLLM's KV space {kv_gb} GiB: KV_VLLM_KV_GB")
    else:
        most = max(1, host.mem_total // 6 // GIB)
        kv_gb = min(most, max(1, -(-2 * length * per_token // GIB)))
        explain.append(
            f"vLLM's KV space {kv_gb} GiB: two requests of full length, a sixth of the memory ({most} GiB) at most"
        )
    fits = kv_gb * GIB // per_token // chunk * chunk
    if length > fits:
        if asked:
            raise KvError(
                f"--max-model-len {asked} in KV_VLLM_EXTRA_ARGS, {per_token} bytes of KV a token",
                f"KV_VLLM_KV_GB >= {-(-asked * per_token // GIB)} (now {kv_gb}), or at most {fits} tokens",
                "raise KV_VLLM_KV_GB in .env, or lower --max-model-len",
            )
        if fits < chunk:
            raise KvError(
                f"{per_token} bytes of KV a token: not one chunk of {chunk} fits {kv_gb} GiB", "more KV space",
                "raise KV_VLLM_KV_GB, or lower KV_CHUNK_SIZE, or choose a smaller model",
            )  # fmt: skip
        explain.append(f"context {fits} instead of {length} tokens: one request has to fit the KV space")
        length = fits
    else:
        explain.append(f"context {length} tokens: {'KV_VLLM_EXTRA_ARGS' if asked else 'the model'}")
    return length, kv_gb


def _vllm(settings: Settings, device: str, loaded: int, kv_gb: int, logits: int, explain: list[str]) -> int:
    if device == "cpu":
        need = _VLLM_OWN[device] + loaded * 5 // 4 + kv_gb * GIB + logits
        why = (
            f"weights {loaded / GIB:.2g} and a quarter, KV {kv_gb}, logits of a step {logits / GIB:.2g}, "
            f"{_VLLM_OWN[device] / GIB:g} of its own"
        )
    else:
        # Weights pass through the page cache, which gives way; what stays are a few shards in flight.
        need = _VLLM_OWN[device] + loaded // 4
        why = f"{_VLLM_OWN[device] / GIB:g} GiB of its own and a quarter of the weights while they load"
    if settings.vllm_mem_gb is None:
        limit = _round_up(need)
        explain.append(f"vllm limit {limit / GIB:.4g} GiB: {why}")
        return limit
    limit = _round_up(int(settings.vllm_mem_gb * GIB))
    least = need - _VLLM_OWN[device] // 4
    if device == "cpu" and limit < least:
        raise KvError(
            f"KV_VLLM_MEM_GB={settings.vllm_mem_gb:g}",
            f"at least {least / GIB:.3g} GiB: {why}, less a quarter of that",
            "raise KV_VLLM_MEM_GB, or lower KV_VLLM_KV_GB, or leave it blank",
        )  # fmt: skip
    explain.append(f"vllm limit {limit / GIB:.4g} GiB: KV_VLLM_MEM_GB")
    return limit


def _l1(settings: Settings, device: str, host: Host, vllm_mem: int, chunk_bytes: int, explain: list[str]) -> float:
    least = max(0.25, -(-4 * chunk_bytes // _STEP) * _STEP / GIB)
    if settings.l1_gb is not None:
        if settings.l1_gb * GIB < 4 * chunk_bytes:
            raise KvError(
                f"KV_L1_GB={settings.l1_gb:g}", f"at least {least:g}: four chunks of {chunk_bytes / (1 << 20):.4g} MiB",
                "raise KV_L1_GB, or lower KV_CHUNK_SIZE, or leave KV_L1_GB blank",
            )  # fmt: skip
        explain.append(f"L1 {settings.l1_gb:g} GiB: KV_L1_GB")
        return settings.l1_gb
    share, most = {"cpu": (12, 8.0), "nvidia": (3, 256.0), "gb10": (10, 16.0)}[device]
    wanted = max(1.0, min(most, _half(host.mem_total / GIB / share)))
    left = _half((host.mem_total - vllm_mem - LMCACHE_OWN - RESERVE) / GIB)
    gb = max(least, min(wanted, left))
    pool = "the one pool of GPU and CPU" if device == "gb10" else "the memory"
    note = "" if gb == wanted else f", cut from {wanted:g} to what vLLM leaves"
    explain.append(f"L1 {gb:g} GiB: a {_ORDINALS[share]} of {pool}, {most:g} at most{note}")
    return gb


_ORDINALS = {3: "third", 10: "tenth", 12: "twelfth"}


def _gpu_share(device: str, host: Host, lmcache_mem: int, extra: ExtraArgs, explain: list[str]) -> float | None:
    """On unified memory, vLLM's share of the "GPU" is a share of the same RAM that L1 and the system live in."""
    if device != "gb10" or extra.value("--gpu-memory-utilization"):
        return None
    free = host.mem_total - lmcache_mem - _VLLM_OWN[device] - 4 * RESERVE
    share = max(0.1, min(0.85, int(free * 100 / host.mem_total) / 100))
    explain.append(f"gpu-memory-utilization {share:.2f}: one pool; lmcache, vLLM's host side and 4 GiB come off first")
    return share


def _half(gib: float) -> float:
    """Down to half GiB: MemTotal differs by a few MiB from kernel to kernel, a size must not."""
    return int(gib * 2) / 2


def _round_up(size: int) -> int:
    return -(-size // _STEP) * _STEP
