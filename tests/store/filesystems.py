"""Folders on file systems of each kind, for tests that are about the kind."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

_MEBIBYTES = {"ext4": 64, "xfs": 320, "btrfs": 128}
KINDS = ("here", "tmpfs", *(pytest.param(kind, marks=pytest.mark.slow) for kind in _MEBIBYTES))


@contextmanager
def folder_on(kind: str, tmp_path: Path) -> Iterator[Path]:
    """A folder on a file system of that kind; skips where it cannot be made."""
    if kind == "here":
        yield tmp_path
    elif os.geteuid() != 0:
        pytest.skip(f"only root can mount a {kind}")
    elif kind == "tmpfs":
        yield from _mounted(tmp_path, ["-t", "tmpfs", "-o", "size=64m", "tmpfs"])
    elif shutil.which(f"mkfs.{kind}") is None:
        pytest.skip(f"mkfs.{kind} is not installed")
    else:
        image = tmp_path / "image"
        with image.open("wb") as file:
            file.truncate(_MEBIBYTES[kind] << 20)
        subprocess.run([f"mkfs.{kind}", str(image)], check=True, capture_output=True)
        yield from _mounted(tmp_path, ["-t", kind, "-o", "loop", str(image)])


def _mounted(tmp_path: Path, what: list[str]) -> Iterator[Path]:
    target = tmp_path / "mounted"
    target.mkdir()
    done = subprocess.run(["mount", *what, str(target)], capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"this machine does not mount it: {done.stderr.strip()}")
    try:
        yield target
    finally:
        subprocess.run(["umount", str(target)], check=True)
