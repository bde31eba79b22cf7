"""The machine that figures belong to. Nothing that names it or its owner."""

from __future__ import annotations

import os
import platform
import time
from importlib import metadata
from pathlib import Path
from typing import Any

__all__ = ["describe"]


def describe(work: Path, lmcache: bool) -> dict[str, Any]:
    """Processor, memory, kernel, the file system and disk of `work`, and versions."""
    cpu = next((line.split(":", 1)[1].strip() for line in _lines("/proc/cpuinfo") if line.startswith("model name")), "")
    memory = next((int(line.split()[1]) for line in _lines("/proc/meminfo") if line.startswith("MemTotal")), 0)
    stat = work.stat()
    device = f"{os.major(stat.st_dev)}:{os.minor(stat.st_dev)}"
    kind, source = next(
        (
            (tail.split()[0], Path(tail.split()[1]).name)
            for line in reversed(_lines("/proc/self/mountinfo"))
            if (tail := line.partition(" - ")[2]) and line.split()[2] == device
        ),
        ("", ""),
    )
    block = Path("/sys/dev/block") / device
    return {
        "cpu": cpu, "cores": len(os.sched_getaffinity(0)), "memory_gib": round(memory / (1 << 20), 1),
        "kernel": platform.release(), "python": platform.python_version(), "file_system": kind, "device": source,
        "read_ahead_kb": _read(block / "queue/read_ahead_kb") or _read(block / ".." / "queue/read_ahead_kb"),
        "lmcache": metadata.version("lmcache") if lmcache else None,
        "zlib_ng": metadata.version("zlib-ng"), "at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }  # fmt: skip


def _lines(path: str) -> list[str]:
    return (_read(Path(path)) or "").splitlines()


def _read(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return None
