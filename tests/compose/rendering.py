"""What the tests of this folder share: the values of a complete .env, and a Compose binary to run."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvstrata.deploy.knobs import MANAGED_KEYS, USER_KEYS

ROOT = Path(__file__).parents[2]
OLDEST = "2.24.7"  # the oldest that the README promises
NEWEST = "5.6.1"

#: A managed block with values that are hard to quote where they may be.
MANAGED = {
    **dict.fromkeys(MANAGED_KEYS, "1"),
    "KV_PULL_POLICY": "never",
    "KV_IMAGE_VLLM": "kvstrata/vllm:cpu-0123456789ab",
    "KV_IMAGE_LMCACHE": "kvstrata/vllm:cpu-0123456789ab",
    "KV_IMAGE_PROXY": "kvstrata/proxy:0123456789ab",
    "KV_IMAGE_ENGINE": "kvstrata/engine:0123456789ab",
    "KV_MODEL_NAME": "tiny",
    "KV_MODEL_PATH": "/data/models/tiny model",
    "KV_IDENTITY": "ab" * 32,
    "KV_VLLM_ARGS": shlex.join(["--dtype", "float32", "--hf-overrides", '{"a": "it\'s $HOME"}']),
    "KV_PLAN_L2_BYTES": "7000000000",
    "KV_PLAN_SHM_BYTES": "1500000000",
    "KV_PLAN_VLLM_MEM": "6000000000",
    "KV_PLAN_LMCACHE_MEM": "3000000000",
    "KV_PLAN_ENGINE_MEM": "1073741824",
    "KV_PLAN_ENGINE_HOT": "0",
    "KV_PLAN_ENGINE_BUFFERS": "536870912",
    "KV_ENGINE_ADDRESS": "http://engine:9130",
    "KV_ENGINE_PATH": "/data/engine",
    "KV_ENGINE_SECRET": "token",
    "KV_RESP_HOST": "engine",
    "KV_RESP_PORT": "6379",
    "KV_RESP_USER": "lmcache",
    "KV_RESP_SECRET": "token",
    "KV_STORE_NET_INTERNAL": "true",
    "KV_HOST_NAME": "host-1",
    "KV_OBSERVABILITY_PATH": "/data/observability",
    "KV_OBSERVED_DISK": "/data/cache",
    "KV_PROMETHEUS_SCRAPE": "flag",
    "KV_TRACES_COMMAND": "/jaeger --config=/etc/traces/jaeger.yaml",
    "KV_CACHE_PATH": "/data/cache",
    "KV_CLASSES_PATH": "/data/classes.json",
    "KV_SECRETS_PATH": "/data/secrets",
    "KV_STATE_PATH": "/data/state",
}


@dataclass(frozen=True)
class Version:
    """One Compose binary, run as a person would: in the root of the checkout, without -f."""

    name: str
    binary: str

    def run(self, root: Path, *args: str, **extra: str) -> subprocess.CompletedProcess[str]:
        known = {*USER_KEYS, *MANAGED_KEYS}
        env = {k: v for k, v in os.environ.items() if k not in known and not k.startswith("COMPOSE_")}
        return subprocess.run(
            [self.binary, *args], cwd=root, env={**env, **extra}, capture_output=True, text=True, check=False
        )

    def config(self, root: Path, **extra: str) -> dict[str, Any]:
        """The resolved model, with the forms that differ between versions made equal."""
        done = self.run(root, "config", "--format", "json", **extra)
        assert done.returncode == 0, done.stderr
        model: dict[str, Any] = json.loads(done.stdout)
        for service in model["services"].values():
            for key in ("command", "entrypoint"):
                if isinstance(service.get(key), str):
                    service[key] = shlex.split(service[key])
            if isinstance(service.get("environment"), list):
                service["environment"] = dict(item.split("=", 1) for item in service["environment"])
        return model


Checkout = Callable[..., Path]
