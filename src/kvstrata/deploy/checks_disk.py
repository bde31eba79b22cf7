"""Checks of folders and disks."""

from __future__ import annotations

import os
import tempfile
from dataclasses import dataclass
from pathlib import Path

from kvstrata.deploy.finding import Finding
from kvstrata.deploy.folders import owner_problem
from kvstrata.deploy.host import GIB, existing_parent
from kvstrata.deploy.model import ModelInfo
from kvstrata.deploy.settings import Settings
from kvstrata.deploy.status_disk import folder_bytes
from kvstrata.store.errors import StoreError
from kvstrata.store.mounts import file_system, objection
from kvstrata.store.settings import StoreSettings

__all__ = ["Need", "disk_findings", "folder_findings", "space_findings"]

#: Images are about 3 GiB unpacked on a CPU and 25 on a GPU; a build holds its layers twice for a moment.
_IMAGES = {"cpu": 8 * GIB, "nvidia": 40 * GIB, "gb10": 40 * GIB}
_PRUNE = "docker system df shows what can go; or move the engine's data-root"
_LARGER = "set KV_CACHE_DIR in .env to a larger disk"
_ENGINE_RUNNING = 2 * GIB
_CACHE_LEAST = 4 * GIB
#: Wheel, its GGUF and the folder made of it: 93 + 98 + 271 MB.
_DEMO_MODEL = GIB


@dataclass(frozen=True)
class Need:
    """`size` bytes free where `path` is (or will be), `what` for."""

    what: str
    path: Path
    size: int
    fix: str


def disk_findings(settings: Settings, model: ModelInfo, docker_root: str | None, *, started: bool) -> list[Finding]:
    """Free space for the engine's folder, the cache and a demo model. `started`: the images are there already."""
    needs = []
    if docker_root and Path(docker_root).is_dir():
        size = _ENGINE_RUNNING if started else _IMAGES.get(settings.device, _IMAGES["cpu"])
        needs.append(Need("images and containers", Path(docker_root), size, _PRUNE))
    if settings.persist:
        needs.append(
            Need("the KV cache", settings.l2_dir, _CACHE_LEAST, _LARGER.replace("KV_CACHE_DIR", settings.l2_knob))
        )
    if model.is_demo and not model.path.exists():
        needs.append(Need("the demo model", model.path, _DEMO_MODEL, "set KV_DATA_DIR or MODEL_DIR in .env"))
    return space_findings(needs)


def space_findings(needs: list[Need]) -> list[Finding]:
    """Needs on one device are added up before they are compared with what is free there."""
    by_device: dict[int, list[Need]] = {}
    for need in needs:
        by_device.setdefault(existing_parent(need.path).stat().st_dev, []).append(need)
    result = []
    for group in by_device.values():
        stat = os.statvfs(existing_parent(group[0].path))
        free, wanted = stat.f_bavail * stat.f_frsize, sum(need.size for need in group)
        if free >= wanted:
            continue
        places = ", ".join(dict.fromkeys(str(need.path) for need in group))
        parts = " + ".join(f"{need.size / GIB:g} for {need.what}" for need in group)
        result.append(
            Finding(
                "disk", "error", f"{free / GIB:.1f} GiB free on the disk of {places}",
                f"{wanted / GIB:g} GiB: {parts}", "; or ".join(dict.fromkeys(need.fix for need in group)),
            )
        )  # fmt: skip
    return result


def folder_findings(settings: Settings, model: ModelInfo) -> list[Finding]:
    """Folders that the services or the CLI cannot write, or cannot read, and file systems that do not suit a cache."""
    result = []
    folders = {"KV_DATA_DIR": settings.data_dir} | ({settings.l2_knob: settings.l2_dir} if settings.persist else {})
    for knob, folder in folders.items():
        if problem := _not_writable(folder):
            fix = f"chown it, or set {knob} in .env to another"
            result.append(Finding("folder", "error", f"{knob}: {problem}", "a folder that you can write", fix))
    if settings.persist:
        result += _owner(settings)
        if "nvme" in settings.layers or settings.has_engine:
            result += _file_system(settings) + _cap(settings)
        if "nvme" in settings.layers:
            result += _classes(settings)
    result += _readable(settings, model)
    return result


def _not_writable(folder: Path) -> str:
    if folder.exists() and not folder.is_dir():
        return f"{folder} is a file"
    place = existing_parent(folder)
    if not place.is_dir():
        return f"{place} is a file"
    try:
        with tempfile.TemporaryFile(dir=place):
            return ""
    except OSError as error:
        return f"{place} cannot be written ({error.strerror})"


def _owner(settings: Settings) -> list[Finding]:
    """An existing cache folder belongs to the user id that the services run under: it is 0700."""
    found = owner_problem(settings.l2_dir, settings, settings.l2_knob)
    return [Finding("folder", "error", *found)] if found else []


def _readable(settings: Settings, model: ModelInfo) -> list[Finding]:
    """The model is read by KV_UID inside the container; the CLI, often root, may see more than that."""
    if settings.uid in (None, 0) or not model.path.is_dir():
        return []
    closed = [path for path in (model.path, *sorted(model.path.iterdir())) if not _can_read(path, settings)]
    if not closed:
        return []
    more = f" and {len(closed) - 1} more" if len(closed) > 1 else ""
    return [
        Finding(
            "model", "error", f"{closed[0]}{more} cannot be read by uid {settings.uid}",
            f"readable for KV_UID={settings.uid}", f"chmod -R a+rX {model.path}",
        )
    ]  # fmt: skip


def _can_read(path: Path, settings: Settings) -> bool:
    try:
        stat = path.stat()
    except OSError:
        return True  # a broken link: the model's own check says so
    shift = 6 if stat.st_uid == settings.uid else 3 if stat.st_gid == settings.gid else 0
    wanted = 0o5 if path.is_dir() else 0o4
    return (stat.st_mode >> shift) & wanted == wanted


def _file_system(settings: Settings) -> list[Finding]:
    """What the store itself would refuse in the container (store/root.py), said before anything is started."""
    folder, knob = settings.l2_dir, settings.l2_knob
    kind = file_system(existing_parent(folder).resolve())
    why = objection(kind)
    if not why:
        return []
    allowed = kind in settings.cache_allow_fs
    return [
        Finding("file system", "warning" if allowed else "error", f"{knob}={folder} is on {kind}, {why}",
                "a local disk (ext4, xfs)",
                f"set {knob} in .env to a folder on a local NVMe disk, or KV_CACHE_ALLOW_FS={kind}")
    ]  # fmt: skip


def _cap(settings: Settings) -> list[Finding]:
    """KV_L2_GB against the disk that it is on. A cap below what is free is the plan's own business."""
    if settings.l2_gb is None:
        return []
    folder, knob = settings.l2_dir, settings.l2_knob
    stat = os.statvfs(existing_parent(folder))
    disk, free = stat.f_blocks * stat.f_frsize / GIB, stat.f_bavail * stat.f_frsize / GIB
    fix = f"lower KV_L2_GB in .env, leave it blank, or set {knob} to a larger disk"
    if settings.l2_gb > disk:
        found = f"KV_L2_GB={settings.l2_gb:g}, and the disk of {folder} has {disk:.0f} GiB in all"
        return [Finding("disk", "error", found, f"a disk of {settings.l2_gb:g} GiB or more", fix)]
    own = folder if settings.has_engine else settings.store_root
    room = free + (folder_bytes(own) or 0) / GIB
    if settings.l2_gb > room:
        found = f"KV_L2_GB={settings.l2_gb:g}, and {room:.1f} GiB are free on the disk of {folder}"
        return [Finding("disk", "warning", found, f"{settings.l2_gb:g} GiB free", fix)]
    return []


def _classes(settings: Settings) -> list[Finding]:
    """The table of retention classes, as the store will read it."""
    file, fix = settings.store_classes, "mend the file, or leave KV_STORE_CLASSES blank in .env"
    try:
        StoreSettings.from_env(
            {"KV_STORE_ROOT": "/cache", "KV_STORE_CAPACITY_BYTES": str(GIB), "KV_STORE_CLASSES": str(file)}
        )
    except StoreError as error:
        return [Finding("classes", "error", error.found, error.needed, fix)]
    if settings.uid not in (None, 0) and not _can_read(file, settings):
        return [Finding("classes", "error", f"KV_STORE_CLASSES={file} cannot be read by uid {settings.uid}",
                        f"readable for KV_UID={settings.uid}", f"chmod a+r {file}")]  # fmt: skip
    return []
