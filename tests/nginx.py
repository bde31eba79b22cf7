"""A real nginx for tests: this machine's, or Debian's package unpacked below data/tools. Nothing is installed."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from contextlib import suppress
from pathlib import Path

import pytest

__all__ = ["nginx"]

_TOOLS = Path(__file__).parents[1] / "data" / "tools"


def nginx() -> str:
    """The program. Skips the test where there is none and no apt that has one."""
    found = shutil.which("nginx", path=f"{os.environ.get('PATH', '')}:/usr/sbin")
    own = _TOOLS / "nginx" / "usr" / "sbin" / "nginx"
    if found or own.is_file():
        return found or str(own)
    if not shutil.which("apt-get"):
        pytest.skip("no nginx here, and no apt-get to fetch one")
    _TOOLS.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=_TOOLS) as folder:
        for command in (["apt-get", "-qq", "download", "nginx"], ["sh", "-c", "dpkg -x nginx_*.deb nginx"]):
            done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
            if done.returncode != 0:
                pytest.skip(f"no nginx here, and `{' '.join(command)}` failed: {done.stderr[-300:]}")
        with suppress(OSError):  # another worker was first
            Path(folder, "nginx").rename(_TOOLS / "nginx")
    return str(own)
