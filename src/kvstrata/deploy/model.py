"""Which model this deployment serves, and whether its folder is complete.

The choice, first match wins: MODEL_DIR (a folder), KV_MODEL (configs/models/<name>.toml), the only TOML there is. Two
TOMLs and no choice is refused: guessing would fill a cache under the wrong model. Nothing here downloads: a `demo`
model whose folder is not there yet is made by `demo_model`.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from kvstrata.deploy.errors import KvError
from kvstrata.deploy.model_files import check_complete

__all__ = ["ModelConfig", "ModelInfo", "ModelKnobs", "load_config", "resolve"]

_NAME = re.compile(r"[a-z0-9](?:[a-z0-9._-]{0,62}[a-z0-9])?")
_KEYS = {"name", "family", "source", "path", "max_model_len", "note", "device"}
_DEVICES = ("cpu", "nvidia", "gb10")
_FAMILIES = ("dense", "sliding", "hybrid", "compressed")


class ModelKnobs(Protocol):
    """The part of Settings that chooses a model."""

    @property
    def model(self) -> str | None: ...
    @property
    def model_dir(self) -> Path | None: ...
    @property
    def data_dir(self) -> Path: ...


@dataclass(frozen=True)
class ModelConfig:
    """One configs/models/<name>.toml; configs/models/README.md has the schema. `args` = vLLM flags by device."""

    name: str
    source: str
    file: Path | None = None
    family: str | None = None
    path: str | None = None
    max_model_len: int | None = None
    args: Mapping[str, Mapping[str, str | int | bool]] = field(default_factory=dict)
    note: str = ""


@dataclass(frozen=True)
class ModelInfo:
    """`name` is the short name (served name, and first half of the name that LMCache sees); `path` is absolute."""

    name: str
    path: Path
    config_file: Path | None
    is_demo: bool
    config: ModelConfig


def resolve(settings: ModelKnobs, root: Path, *, must_exist: bool = True) -> ModelInfo:
    """The chosen model, checked for completeness unless `must_exist` is false (a demo model is made later).

    Raises KvError: nothing or too much to choose from, a wrong TOML, a folder that is missing or incomplete.
    """
    folder = root / "configs" / "models"
    if settings.model_dir is not None:
        info = _from_folder(settings, folder, _absolute(Path(settings.model_dir), root))
    else:
        info = _from_config(_choose(settings, folder), root, _absolute(Path(settings.data_dir), root))
    if must_exist:
        check_complete(info.path)
    return info


def load_config(file: Path) -> ModelConfig:
    """Read and check one TOML. Raises KvError that names the file, the key and the value."""
    try:
        data = tomllib.loads(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise KvError(f"{file}: {error}", "a readable TOML file", f"mend {file}; configs/models/README.md") from error
    if unknown := sorted(set(data) - _KEYS):
        raise _bad(file, unknown[0], "an unknown key", f"one of {', '.join(sorted(_KEYS))}")
    name = data.get("name")
    if name != file.stem or not _NAME.fullmatch(str(name)):
        raise _bad(file, "name", repr(name), f"the name of the file, {file.stem!r}: lower case, digits and . _ -")
    source = data.get("source")
    if source not in ("demo", "dir"):
        raise _bad(file, "source", repr(source), "'demo' or 'dir'")
    if data.get("family") not in (None, *_FAMILIES):
        raise _bad(file, "family", repr(data["family"]), " | ".join(_FAMILIES))
    path = data.get("path")
    if not isinstance(path, str) and (source == "dir" or path is not None):
        raise _bad(file, "path", repr(path), "the folder of the model, as text")
    length = data.get("max_model_len")
    if length is not None and (not isinstance(length, int) or isinstance(length, bool) or length < 1):
        raise _bad(file, "max_model_len", repr(length), "a whole number of tokens > 0")
    return ModelConfig(
        name=file.stem,
        source=source,
        file=file,
        family=data.get("family"),
        path=path,
        max_model_len=length,
        args=_device_args(file, data.get("device", {})),
        note=str(data.get("note", "")),
    )


def _device_args(file: Path, table: Any) -> dict[str, dict[str, str | int | bool]]:
    if not isinstance(table, dict):
        raise _bad(file, "device", repr(table), "tables [device.cpu], [device.nvidia], [device.gb10]")
    result: dict[str, dict[str, str | int | bool]] = {}
    for device, args in table.items():
        if device not in _DEVICES or not isinstance(args, dict):
            raise _bad(file, f"device.{device}", repr(args), f"a table for one of {', '.join(_DEVICES)}")
        for key, value in args.items():
            if not re.fullmatch(r"[a-z][a-z0-9-]*", key) or not isinstance(value, (str, int, bool)):
                raise _bad(file, f"device.{device}.{key}", repr(value), "a vLLM flag without its dashes")
        result[device] = dict(args)
    return result


def _bad(file: Path, key: str, found: str, needed: str) -> KvError:
    return KvError(f"{file}: {key} = {found}", f"{key}: {needed}", f"mend {file}; configs/models/README.md")


def _choose(settings: ModelKnobs, folder: Path) -> ModelConfig:
    files = sorted(folder.glob("*.toml"))
    names = ", ".join(file.stem for file in files) or "none"
    if settings.model:
        wanted = folder / f"{settings.model}.toml"
        if wanted not in files:
            raise KvError(
                f"KV_MODEL={settings.model}, but {folder} has: {names}",
                "the name of one of these files",
                "set KV_MODEL in .env to one of them, or add the file (configs/models/README.md), or set MODEL_DIR",
            )
        return load_config(wanted)
    if len(files) != 1:
        raise KvError(
            f"no MODEL_DIR, no KV_MODEL, and {len(files)} files in {folder}: {names}",
            "one model; it is never guessed",
            "set KV_MODEL=<name> or MODEL_DIR=<folder> in .env",
        )
    return load_config(files[0])


def _from_config(config: ModelConfig, root: Path, data_dir: Path) -> ModelInfo:
    if config.source == "demo":
        path = data_dir / "models" / (config.path or config.name)
    else:
        path = _absolute(Path(config.path or "."), root)
    return ModelInfo(config.name, path, config.file, config.source == "demo", config)


def _from_folder(settings: ModelKnobs, folder: Path, path: Path) -> ModelInfo:
    """MODEL_DIR wins over any `path`; a TOML that KV_MODEL names, or one named like the folder, adds its flags."""
    if settings.model:
        config = _choose(settings, folder)
        return ModelInfo(config.name, path, config.file, False, config)
    name = short_name(path)
    file = folder / f"{name}.toml"
    config = load_config(file) if file.is_file() else ModelConfig(name=name, source="dir", path=str(path))
    return ModelInfo(config.name, path, config.file, False, config)


def short_name(path: Path) -> str:
    """A served name from a folder's name: lower case, every odd character a dash, at most 64 long.

    In a Hugging Face cache (models--ORG--NAME/snapshots/REVISION) the folder's own name is only a hash.
    """
    base = path.name
    for parent in path.parents:
        if parent.name.startswith("models--"):
            base = parent.name.rsplit("--", 1)[-1]
            break
    name = re.sub(r"-{2,}", "-", re.sub(r"[^a-z0-9._-]+", "-", base.lower())).strip("-._")[:64].strip("-._")
    return name or "model"


def _absolute(path: Path, root: Path) -> Path:
    path = path.expanduser()
    return path if path.is_absolute() else (root / path).absolute()
