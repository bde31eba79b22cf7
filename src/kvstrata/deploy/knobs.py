"""Which knobs .env may name: the users' own with their defaults, and what the CLI writes for compose."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from pathlib import Path

from kvstrata.deploy import dotenv
from kvstrata.deploy.errors import KvError

__all__ = ["ENV_VERSION", "MANAGED_KEYS", "RENAMED", "USER_KEYS", "places"]

ENV_VERSION = 1

#: Every user knob with its default: .env.example carries the same, a test compares them.
USER_KEYS: Mapping[str, str] = {
    "KV_ENV_VERSION": str(ENV_VERSION), "COMPOSE_PROJECT_NAME": "kvstrata",
    "KV_PERSIST": "1", "KV_LAYERS": "nvme", "KV_DEVICE": "", "KV_IMAGE_SOURCE": "", "KV_REGISTRY": "",
    "KV_INSTALL_ENGINE": "1", "KV_MODEL": "", "MODEL_DIR": "", "KV_VLLM_EXTRA_ARGS": "",
    "KV_PORT": "8000", "KV_METRICS_PORT": "9400", "KV_CHUNK_SIZE": "256",
    "KV_L1_GB": "", "KV_L2_GB": "", "KV_VLLM_KV_GB": "", "KV_VLLM_MEM_GB": "", "KV_LMCACHE_MEM_GB": "",
    "KV_STORE_CODEC": "raw", "KV_STORE_IO": "buffered", "KV_STORE_NATIVE": "auto", "KV_STORE_LOAD_DEADLINE": "10",
    "KV_STORE_FREE_FLOOR_GB": "", "KV_STORE_CLASSES": "", "KV_CACHE_ALLOW_FS": "",
    "KV_ENGINE_URL": "", "KV_RESP_URL": "", "KV_ENGINE_DEADLINE": "5", "KV_ENGINE_CONNECTIONS": "4", "KV_ENGINE_CA": "",
    "KV_ENGINE_PORT": "9130", "KV_ENGINE_DIR": "", "KV_ENGINE_HOT_GB": "0", "KV_ENGINE_DURABILITY": "process",
    "KV_OBSERVABILITY": "", "KV_PROMETHEUS_PORT": "9401", "KV_ALERTMANAGER_PORT": "9402", "KV_TRACES_PORT": "9403",
    "KV_GRAFANA_PORT": "9404", "KV_GRAFANA_ANONYMOUS": "0", "KV_PROMETHEUS_GB": "2", "KV_TRACE_SHARE": "1",
    "KV_DATA_DIR": "./data", "KV_CACHE_DIR": "", "KV_UID": "", "KV_GID": "",
    "KV_WAIT_TIMEOUT": "300", "KV_TRANSFER_MODE": "auto", "KV_MQ_TIMEOUT": "5", "KV_HEARTBEAT": "5",
    "KV_BASE_IMAGE": "", "KV_CA_BUNDLE": "",
}  # fmt: skip

#: What the CLI writes for compose, in this order (envfile.write_managed).
MANAGED_KEYS: tuple[str, ...] = (
    "COMPOSE_FILE", "KV_PULL_POLICY", "KV_IMAGE_VLLM", "KV_IMAGE_LMCACHE", "KV_IMAGE_PROXY",
    "KV_IMAGE_ENGINE",
    "KV_MODEL_NAME", "KV_MODEL_PATH", "KV_IDENTITY", "KV_VLLM_ARGS",
    "KV_PLAN_L1_GB", "KV_PLAN_L2_BYTES", "KV_PLAN_SHM_BYTES", "KV_PLAN_VLLM_KV_GB", "KV_PLAN_VLLM_MEM",
    "KV_PLAN_LMCACHE_MEM",
    "KV_PLAN_ENGINE_MEM", "KV_PLAN_ENGINE_HOT", "KV_PLAN_ENGINE_BUFFERS",
    "KV_ENGINE_ADDRESS", "KV_ENGINE_PATH", "KV_ENGINE_SECRET",
    "KV_RESP_HOST", "KV_RESP_PORT", "KV_RESP_USER", "KV_RESP_SECRET", "KV_STORE_NET_INTERNAL",
    "KV_CACHE_PATH", "KV_CLASSES_PATH", "KV_SECRETS_PATH", "KV_STATE_PATH",
    "KV_HOST_NAME", "KV_OBSERVABILITY_PATH", "KV_OBSERVABILITY_HASH", "KV_OBSERVED_DISK", "KV_PROMETHEUS_SCRAPE",
    "KV_TRACES_COMMAND", "KV_IMAGE_OTELCOL", "KV_IMAGE_PROMETHEUS", "KV_IMAGE_ALERTMANAGER", "KV_IMAGE_NODE_EXPORTER",
    "KV_IMAGE_TRACES", "KV_IMAGE_GRAFANA", "KV_IMAGE_GPU_EXPORTER",
)  # fmt: skip

#: Old name -> new name. An old name is an error that names the new one; it is never read.
RENAMED: Mapping[str, str] = {
    "KV_MODEL_DIR": "MODEL_DIR",
    "KV_METRICS": "KV_METRICS_PORT",
    "KV_DISK_DIR": "KV_CACHE_DIR",
}


def places(path: Path, entries: Sequence[dotenv.Entry]) -> dict[str, str]:
    """Where each user knob stands ("file:line"), after refusing names that are unknown, renamed, managed or doubled."""
    where: dict[str, str] = {}
    for entry in entries:
        at = f"{path}:{entry.line}"
        if entry.managed:
            continue
        if entry.key in RENAMED:
            new = RENAMED[entry.key]
            raise KvError(f"{at}: {entry.key} was renamed", f"{new}", f"rename {entry.key} to {new} in that line")
        if entry.key in MANAGED_KEYS:
            raise KvError(f"{at}: {entry.key} is written by the CLI", "it only between the two marker lines",
                          "delete that line")  # fmt: skip
        if entry.key not in USER_KEYS:
            near = difflib.get_close_matches(entry.key, USER_KEYS, n=1, cutoff=0.0)[0]
            raise KvError(f"{at}: unknown setting {entry.key}", f"a setting of .env.example; the nearest is {near}",
                          f"rename it to {near}, or delete that line")  # fmt: skip
        if entry.key in where:
            raise KvError(f"{at}: {entry.key} stands twice, first at {where[entry.key]}", "one line a setting",
                          "delete one of the two")  # fmt: skip
        where[entry.key] = at
    return where
