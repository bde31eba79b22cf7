"""What vLLM can run on here, found by looking."""

from __future__ import annotations

import json
import platform
import shutil
from dataclasses import dataclass

from kvstrata.deploy.shell import run

__all__ = ["Device", "detect"]


@dataclass(frozen=True)
class Device:
    """`name` is a value of KV_DEVICE; `why` says what was seen."""

    name: str
    why: str


def detect() -> Device:
    """`nvidia` (or `gb10`) if nvidia-smi and the container runtime both answer, else `cpu`."""
    if shutil.which("nvidia-smi") is None:
        return Device("cpu", "no nvidia-smi")
    seen = run(["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"], check=False, timeout=30)
    names = [line.strip() for line in seen.stdout.splitlines() if line.strip()]
    if seen.returncode != 0 or not names:
        return Device("cpu", "nvidia-smi finds no GPU")
    if not _runtime_has_gpus():
        return Device(
            "cpu", f"{names[0]} is there, but docker has no nvidia runtime (install nvidia-container-toolkit)"
        )
    if platform.machine() == "aarch64" and "GB10" in names[0]:
        return Device("gb10", names[0])
    return Device("nvidia", ", ".join(sorted(set(names))))


def _runtime_has_gpus() -> bool:
    info = run(["docker", "info", "--format", "{{json .}}"], check=False, timeout=30)
    try:
        data = json.loads(info.stdout)
    except json.JSONDecodeError:
        return False
    devices = data.get("DiscoveredDevices") or []
    return "nvidia" in (data.get("Runtimes") or {}) or any("nvidia" in str(d) for d in devices)
