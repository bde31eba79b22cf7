"""What a data folder of the settings must not be. Looks only, so that a refused run has changed nothing."""

from __future__ import annotations

import os
from pathlib import Path

from kvstrata.deploy.errors import KvError
from kvstrata.deploy.settings import Settings

__all__ = ["check", "is_shared", "owner_problem"]

#: Neither these nor what is in them.
_SYSTEM = frozenset(("bin", "boot", "dev", "etc", "lib", "lib32", "lib64", "libx32", "proc", "sbin", "sys", "usr"))
#: Not these themselves; a folder in one of them is fine.
_TOP = frozenset(("home", "media", "mnt", "opt", "root", "run", "srv", "tmp", "var"))


def check(knob: str, folder: Path, settings: Settings, *, private: bool) -> None:
    """Raise KvError unless `folder` exists and is one, or can be made. `knob` is the setting that leads to it.

    private: only the services may enter it, so it must belong to them or be new.
    """
    other = f"set {knob} in .env to another folder, or leave it blank"
    named = f"{knob}={folder}"
    try:
        there = _lowest_that_is_there(folder)
        if not there.exists():  # of a link, its end
            raise KvError(f"{named}: {there} is a link to nothing ({there.readlink()})", "a folder, or a place for one",
                          f"make what the link names, or remove the link; or {other}")  # fmt: skip
        if not there.is_dir():
            raise KvError(f"{named}: {there} is a file", "a folder, or a place for one", other)
        if _is_system(Path(os.path.realpath(folder))):
            raise KvError(f"{named} is a folder of the system", "a folder of its own",
                          f"{knob}=/srv/kvstrata in .env, for example, or leave it blank")  # fmt: skip
        found = owner_problem(folder, settings, knob) if private else None
    except OSError as error:
        raise KvError(f"{named}: {error.filename or folder} cannot be looked at ({error.strerror})",
                      "a folder that you can enter", other) from None  # fmt: skip
    if found:
        raise KvError(*found)


def owner_problem(folder: Path, settings: Settings, knob: str) -> tuple[str, str, str] | None:
    """(found, needed, fix) when an existing `folder` is not that of the user id that the services run under."""
    if settings.uid in (None, 0) or not folder.is_dir():
        return None
    owner = folder.stat().st_uid
    if owner == settings.uid:
        return None
    fix = f"{knob}={folder / 'kvstrata'} in .env"
    if not is_shared(folder):
        fix += f"; or, if it is this cache's own folder: sudo chown -R {settings.uid}:{settings.gid} {folder}"
    return f"{folder} belongs to uid {owner}", f"uid {settings.uid} (KV_UID): the services write there", fix


def is_shared(folder: Path) -> bool:
    """A mount point, or a folder right below /: its owner and mode are others' business as well."""
    real = os.path.realpath(folder)
    return len(Path(real).parts) <= 2 or os.path.ismount(real)


def _lowest_that_is_there(path: Path) -> Path:
    """`path` or the nearest one above it of which there is anything, be it a broken link."""
    path = path.absolute()
    while not os.path.lexists(path) and path != path.parent:
        path = path.parent
    return path


def _is_system(real: Path) -> bool:
    parts = real.parts[1:]
    if not parts or (len(parts) == 1 and parts[0] in _TOP):
        return True
    return parts[0] in _SYSTEM and parts[:2] != ("dev", "shm")
