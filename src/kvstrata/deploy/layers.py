"""Which compose files make a stack: one file a layer, chosen by KV_PERSIST, KV_LAYERS and KV_DEVICE.

A layer file says in its header what it needs (`# needs: lmcache`). A new storage or observability layer is a new file
in compose/; nothing here has to change for it.
"""

from __future__ import annotations

import dataclasses
import difflib
import itertools
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from kvstrata.deploy.errors import KvError
from kvstrata.deploy.settings import Settings

__all__ = [
    "DEVICE_LAYERS",
    "OBSERVABILITY",
    "Layer",
    "all_combinations",
    "check",
    "compose_file",
    "load",
    "plain",
    "resolve",
    "runs_plain",
    "selectable",
]

BASE, CACHE = "vllm", "lmcache"

#: Not for KV_LAYERS: KV_OBSERVABILITY chooses them. The first runs everywhere; the others only where images are pulled.
OBSERVABILITY = ("observability", "grafana", "gpu-metrics")

#: Device -> (layer for vLLM alone, layers that are added when the cache runs).
DEVICE_LAYERS: dict[str, tuple[str, tuple[str, ...]]] = {
    "cpu": ("cpu", ()),
    "nvidia": ("nvidia", ("nvidia-lmcache",)),
    "gb10": ("gb10", ("nvidia-lmcache",)),
}

_HEADER = re.compile(r"^# (purpose|adds|needs|not with|undo):[ \t]*(.*)$", re.M)


@dataclass(frozen=True)
class Layer:
    """One compose file with its header. `needs` are names of layers that must stand before it, `without` of those that
    must not be there at all (`# not with:`, the one line of the header that may be left out)."""

    name: str
    path: Path
    purpose: str
    adds: str
    needs: tuple[str, ...]
    undo: str
    without: tuple[str, ...] = ()


def load(path: Path) -> Layer:
    """Read the header. Raises KvError when one of the four lines is missing."""
    found = dict(_HEADER.findall(path.read_text(encoding="utf-8")))
    missing = [key for key in ("purpose", "adds", "needs", "undo") if key not in found]
    if missing:
        raise KvError(f"{path}: header without {', '.join(missing)}", "# purpose: / # adds: / # needs: / # undo: lines",
                      "write the missing lines at the top of that file")  # fmt: skip
    needs, without = (tuple(re.split(r"[,\s]+", found.get(key, "").strip())) for key in ("needs", "not with"))
    needs, without = (tuple(filter(None, names)) for names in (needs, without))
    return Layer(path.stem, path, found["purpose"], found["adds"], needs, found["undo"], without)


def selectable(root: Path) -> tuple[str, ...]:
    """Names that KV_LAYERS may hold: every file of compose/ that is neither the base, the cache nor a device."""
    fixed = {BASE, CACHE, *OBSERVABILITY}.union(*({own, *extra} for own, extra in DEVICE_LAYERS.values()))
    return tuple(sorted(p.stem for p in (root / "compose").glob("*.yaml") if p.stem not in fixed))


def resolve(settings: Settings) -> list[Path]:
    """Absolute compose files in the order in which compose has to read them.

    KV_PERSIST=0 gives vLLM and its device layer only, whatever KV_LAYERS says; an unknown name is refused all the same.
    Raises KvError for an unknown layer, an undecided device or a layer without what it needs.
    """
    known = selectable(settings.root)
    for name in settings.layers:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            raise KvError(
                f"KV_LAYERS={','.join(settings.layers)}: no layer {name!r}",
                "layers out of: " + (", ".join(known) or "(none)"),
                f"write {near[0]} for {name} in .env" if near else f"take {name} out of KV_LAYERS in .env",
            )
    if settings.device not in DEVICE_LAYERS:
        raise KvError("KV_DEVICE is blank", "one of " + ", ".join(DEVICE_LAYERS),
                      "run `make up`, which looks and stores it, or set KV_DEVICE in .env")  # fmt: skip
    names = _names(settings.device, settings.persist, settings.layers, _observability(settings))
    files = [settings.root / "compose" / f"{name}.yaml" for name in names]
    check(files)
    return files


def plain(settings: Settings) -> list[Path]:
    """The files of plain vLLM on this device, whatever KV_PERSIST says: what a rollback runs."""
    return resolve(dataclasses.replace(settings, persist=False))


def runs_plain(settings: Settings) -> bool:
    """Plain vLLM is what was started last, whatever KV_PERSIST says: `rollback` changes no knob."""
    names = [Path(name).stem for name in settings.managed.get("COMPOSE_FILE", "").split(":") if name]
    return bool(names) and CACHE not in names


def check(files: Iterable[Path]) -> list[Layer]:
    """The layers of `files`; raises KvError when a file is missing, stands twice or comes before what it needs."""
    layers: list[Layer] = []
    for path in files:
        if not path.is_file():
            raise KvError(f"no {path}", "every layer's file", "git checkout -- compose")
        layer, before = load(path), {done.name for done in layers}
        if layer.name in before:
            raise KvError(f"layer {layer.name} is named twice", "each layer once", "take one out of KV_LAYERS in .env")
        lacking = [need for need in layer.needs if need not in before]
        if lacking:
            raise KvError(
                f"layer {layer.name} without {', '.join(lacking)}",
                f"what {path.name} needs: {', '.join(layer.needs)}",
                f"put {', '.join(lacking)} before {layer.name} in KV_LAYERS in .env",
            )
        clash = next((f"{a} and {b}" for a, b in _pairs(layer, layers)), "")
        if clash:
            raise KvError(
                f"layers {clash} together", "one place for the blocks", "take one of them out of KV_LAYERS in .env"
            )
        layers.append(layer)
    return layers


def _pairs(layer: Layer, before: Iterable[Layer]) -> Iterable[tuple[str, str]]:
    return ((o.name, layer.name) for o in before if o.name in layer.without or layer.name in o.without)


def compose_file(root: Path, files: Iterable[Path]) -> str:
    """Value of COMPOSE_FILE. Relative to the root: .env is read from there only, and the checkout may be moved."""
    return ":".join(str(path.relative_to(root)) for path in files)


def all_combinations(root: Path) -> list[list[Path]]:
    """Every stack that settings can ask for: each device, without the cache and with each subset of the storage layers,
    unwatched and watched.

    Subsets that lack what one of their layers needs are left out: `resolve` refuses them.
    """
    found: list[list[Path]] = []
    names = selectable(root)
    subsets = [s for size in range(len(names) + 1) for s in itertools.combinations(names, size)]
    for device in DEVICE_LAYERS:
        watched = OBSERVABILITY if device != "cpu" else OBSERVABILITY[:2]
        stacks = [_names(device, False, ())]
        stacks += [_names(device, True, subset) for subset in subsets]
        # The device layers touch nothing of observability's: with one storage each is enough.
        stacks += [_names(device, True, subset, watched) for subset in subsets if device == "cpu" or not subset]
        for stack in stacks:
            files = [root / "compose" / f"{name}.yaml" for name in stack]
            try:
                check(files)
            except KvError:
                continue
            found.append(files)
    return found


def _observability(settings: Settings) -> tuple[str, ...]:
    if not settings.observes:
        return ()
    if settings.image_source != "pull":
        return OBSERVABILITY[:1]
    return OBSERVABILITY[:2] if settings.device == "cpu" else OBSERVABILITY


def _names(device: str, persist: bool, chosen: Iterable[str], watched: Iterable[str] = ()) -> list[str]:
    own, extra = DEVICE_LAYERS[device]
    return [BASE, CACHE, *chosen, *watched, own, *extra] if persist else [BASE, own]
