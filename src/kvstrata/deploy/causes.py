"""From a log to the likely cause: a small table of what was met, with what to do. First match wins."""

from __future__ import annotations

import re

__all__ = ["SLOW", "UNKNOWN", "likely"]

UNKNOWN = "read the lines above; `make logs` shows all of them, docs/operations.md lists symptoms"

SLOW = "it may only need longer: a larger KV_WAIT_TIMEOUT in .env; `make logs` shows how far it is"

_TABLE: tuple[tuple[str, str], ...] = (
    (r"port is already allocated|address already in use|ports are not available",
     "another program listens on that port: stop it, or change KV_PORT or KV_METRICS_PORT in .env"),
    (r"identity mismatch", "the model's files changed since the last `make up`: run `make up` again"),
    (r"No space left on device|Errno 28\b|ENOSPC",
     "a disk is full: free space (`df -h`, `docker system df`), or set KV_CACHE_DIR in .env to another disk"),
    (r"SIGBUS|Bus error", "shared memory ran full: a smaller KV_L1_GB, or blank so that the plan decides"),
    (r"CUDA out of memory|No available memory for the cache blocks|free memory on device",
     "the GPU's memory is taken: see nvidia-smi, or a smaller --gpu-memory-utilization in KV_VLLM_EXTRA_ARGS"),
    (r"out of memory|OOMKilled|Cannot allocate memory|DefaultCPUAllocator",
     "the memory limit is too small: raise KV_VLLM_MEM_GB or KV_LMCACHE_MEM_GB, or lower KV_L1_GB (`make plan`)"),
    (r"Permission denied|permission denied on cache",
     "a data folder does not belong to KV_UID:KV_GID of .env: chown -R it (KV_DATA_DIR, KV_CACHE_DIR, the model)"),
    (r"are not supported for now|does not recognize this architecture|Cannot find model module|not support hybrid",
     "this vLLM does not know the model: another MODEL_DIR, see docs for the model families that run"),
    (r"does not take its arguments|unrecognized arguments",
     "vLLM refuses an argument: mend KV_VLLM_EXTRA_ARGS in .env"),
    (r"larger than the maximum number of tokens that can be stored in KV cache|max seq len .* is larger",
     "vLLM's own KV space is too small for the context: raise KV_VLLM_KV_GB, or --max-model-len in KV_VLLM_EXTRA_ARGS"),
    (r"could not select device driver|nvidia-container-cli",
     "Docker cannot reach the GPU: install the NVIDIA container toolkit, or set KV_DEVICE=cpu in .env"),
    (r"pull access denied|manifest unknown|No such image|failed to resolve reference",
     "an image is missing: `make build`, or `make pull` with a registry that has it"),
    (r"bind source path does not exist|invalid mount config",
     "a folder that .env names is gone: run `make up`, which makes or names it"),
    (r"kvstrata-launch: \w+ (ended with|was killed)",
     "the server crashes while it starts: the lines before `kvstrata-launch` say why (`make logs` shows all of them)"),
)  # fmt: skip


def likely(text: str, default: str = UNKNOWN) -> str:
    """What most likely happened and what to do, or `default`."""
    for pattern, cause in _TABLE:
        if re.search(pattern, text, re.I):
            return cause
    return default
