"""The images of the observability layers: upstream's, by digest, where images are pulled; built here otherwise."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from kvstrata.deploy import images
from kvstrata.deploy.errors import KvError
from kvstrata.deploy.image_hash import allowed, content_hash, context_files
from kvstrata.deploy.lock import Lock, load
from kvstrata.deploy.settings import Settings
from kvstrata.deploy.steps import Step

__all__ = ["BAKE_FILE", "NONE", "Wanted", "ensure", "wanted"]

_FOLDER = "images/observability"
BAKE_FILE = f"{_FOLDER}/docker-bake.hcl"
#: Managed key -> (name in versions.lock, image that is built here instead; "" = there is no other source).
_IMAGES = {
    "KV_IMAGE_OTELCOL": ("otelcol", "otelcol"),
    "KV_IMAGE_PROMETHEUS": ("prometheus", "monitor"),
    "KV_IMAGE_ALERTMANAGER": ("alertmanager", "monitor"),
    "KV_IMAGE_NODE_EXPORTER": ("node-exporter", "monitor"),
    "KV_IMAGE_TRACES": ("tempo", "traces"),
    "KV_IMAGE_GRAFANA": ("grafana", ""),
    "KV_IMAGE_GPU_EXPORTER": ("dcgm-exporter", ""),
}
#: The managed keys where nothing observes.
NONE = dict.fromkeys(_IMAGES, "")


@dataclass(frozen=True)
class Wanted:
    """References by managed key ("" = not in this stack), and for a build the tag of each bake target."""

    refs: Mapping[str, str]
    builds: Mapping[str, str] = field(default_factory=dict)
    base: str = ""


def wanted(settings: Settings, step: Step) -> Wanted:
    """What this stack's observability needs, without fetching it. KvError where versions.lock has no digest for it."""
    lock = load(settings.root)
    if settings.image_source == "pull":
        return Wanted(_pulled(lock, settings.device))
    base = images.base_image(settings, lock, lock.pair_for(settings.device), step)
    patterns = allowed((settings.root / _FOLDER / "Dockerfile.dockerignore").read_text())
    tag = content_hash(settings.root, context_files(settings.root, patterns), {"base": base})
    builds = {name: f"kvstrata/{name}:{tag}" for _, name in _IMAGES.values() if name}
    return Wanted({key: builds.get(name, "") for key, (_, name) in _IMAGES.items()}, builds, base)


def _pulled(lock: Lock, device: str) -> dict[str, str]:
    known = {image.name: image for image in lock.upstream}
    found = {}
    for key, (name, _) in _IMAGES.items():
        needed = device != "cpu" or key != "KV_IMAGE_GPU_EXPORTER"
        if needed and name not in known:
            raise KvError(f"versions.lock has no upstream image {name}", "one entry", "restore the file from git")
        found[key] = known[name].pinned() if needed else ""
    return found


def ensure(settings: Settings, found: Wanted, note: Callable[[str], None]) -> list[str]:
    """Pull or build what is not there; the names of what was. KvError where that fails."""
    if not found.builds:
        return [ref for ref in sorted(set(found.refs.values())) if ref and images.pull_one(ref, note)]
    missing = [name for name, tag in found.builds.items() if not images.present(tag)]
    if missing:
        variables = {f"{name.upper()}_TAG": tag for name, tag in found.builds.items()}
        variables |= {"BASE_IMAGE": found.base, "GOPROXY": os.environ.get("GOPROXY", "")}
        images.run_bake(settings, BAKE_FILE, variables, missing, note)
    return missing
