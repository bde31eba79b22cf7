"""The engine's own folders: made, closed to others, and their entries brought to the device where that was promised."""

from __future__ import annotations

import os
from pathlib import Path

from kvstrata.engine.settings import EngineSettings
from kvstrata.store.errors import StoreError

__all__ = ["own_folders", "sync_entries"]


def own_folders(settings: EngineSettings) -> None:
    """Make them where they are not there. What users wrote lies in the first one. StoreError."""
    try:
        _make(settings.root, settings)
        settings.root.chmod(0o700)
        if settings.cold_root is not None:
            _make(settings.cold_root, settings)
    except OSError as error:
        raise StoreError(
            f"{error.filename}: {error.strerror}",
            f"a folder that user {os.geteuid()} owns",
            "chown it, or set KV_ENGINE_ROOT and KV_ENGINE_COLD_ROOT",
        ) from error


def sync_entries(settings: EngineSettings) -> None:
    """What was just made in the first folder stays there after a power failure. StoreError."""
    try:
        _sync(settings.root, settings)
    except OSError as error:
        raise StoreError(f"{settings.root}: {error.strerror}", "a disk that takes it", "look at the disk") from error


def _make(path: Path, settings: EngineSettings) -> None:
    missing = [one for one in (path, *path.parents) if not one.exists()]
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    for one in missing:
        _sync(one.parent, settings)


def _sync(folder: Path, settings: EngineSettings) -> None:
    if settings.durability != "fsync":
        return
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
