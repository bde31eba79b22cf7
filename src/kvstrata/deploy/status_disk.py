"""Disk used by what the stack leaves behind: container logs, images, the cache. Unknown is said, never guessed."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path

from kvstrata.deploy.errors import KvError
from kvstrata.deploy.shell import run

__all__ = ["folder_bytes", "image_bytes", "log_bytes"]


def folder_bytes(folder: Path) -> int | None:
    """Bytes on disk below `folder` (blocks, not lengths; a hard link counts once); None when it cannot be read."""
    total, seen = 0, set()
    pending = [folder]
    while pending:
        try:
            with os.scandir(pending.pop()) as entries:
                for entry in entries:
                    if entry.is_dir(follow_symlinks=False):
                        pending.append(Path(entry.path))
                        continue
                    try:
                        stat = entry.stat(follow_symlinks=False)
                    except FileNotFoundError:
                        continue  # evicted while we looked
                    if stat.st_ino not in seen:
                        seen.add(stat.st_ino)
                        total += stat.st_blocks * 512
        except FileNotFoundError:
            continue
        except OSError:
            return None
    return total


def log_bytes(containers: Iterable[str]) -> int | None:
    """Bytes of the json-file logs, rotated ones too; None without docker or the right to read them (root's)."""
    total = 0
    names = list(containers)
    if not names:
        return 0
    try:
        done = run(["docker", "inspect", "--format", "{{.LogPath}}", *names], check=False, timeout=20)
    except KvError:
        return None
    for line in done.stdout.split():
        path = Path(line)
        try:
            total += sum((path.parent / name).stat().st_size for name in _starting(path))
        except OSError:
            return None
    return total


def image_bytes(images: Iterable[str]) -> int | None:
    """Bytes of the images that the stack uses, each image once (shared layers of different ones count twice)."""
    names = sorted(set(images))
    if not names:
        return 0
    try:
        done = run(["docker", "image", "inspect", *names], check=False, timeout=20)
        sizes = {image["Id"]: int(image["Size"]) for image in json.loads(done.stdout or "[]")}
    except (KvError, ValueError, KeyError):
        return None
    return sum(sizes.values()) if sizes else None


def _starting(path: Path) -> list[str]:
    return [name for name in os.listdir(path.parent) if name.startswith(path.name)]  # noqa: PTH208
