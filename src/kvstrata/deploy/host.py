"""The machine's memory and disks, as the plan and preflight need them."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

__all__ = ["GIB", "Host", "existing_parent"]

GIB = 1 << 30


@dataclass(frozen=True)
class Host:
    """Bytes. `mem_total` sizes the plan: it is the same at each start, so that a second `up` changes nothing;
    `mem_available` is only compared with it."""

    mem_total: int
    mem_available: int
    cpus: int = 1

    @staticmethod
    def read(meminfo: Path = Path("/proc/meminfo")) -> Host:
        """This machine, from /proc/meminfo. Raises OSError or KeyError where there is none."""
        fields = dict(line.split(":", 1) for line in meminfo.read_text(encoding="ascii").splitlines() if ":" in line)
        kib = {name: int(fields[name].split()[0]) for name in ("MemTotal", "MemAvailable")}
        return Host(kib["MemTotal"] << 10, kib["MemAvailable"] << 10, os.cpu_count() or 1)


def existing_parent(path: Path) -> Path:
    """`path`, or the nearest folder above it that exists: its file system is where `path` will be."""
    path = path.absolute()
    while not path.exists() and path != path.parent:
        path = path.parent
    return path
