"""Is a model folder complete? Found out in milliseconds, before anything is started.

A half-copied model fails minutes later, deep in a server's log. The checks read names, sizes and the first bytes only.
"""

from __future__ import annotations

import json
import struct
from pathlib import Path

from kvstrata.deploy.errors import KvError

__all__ = ["Problem", "check_complete", "problems", "weight_bytes"]

_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "tekken.json", "vocab.json", "vocab.txt")
_WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*.pth", "*.gguf")
_LFS = b"version https://git-lfs"
_MAX_HEADER = 100 << 20  # the safetensors format's own limit

Problem = tuple[str, str]
"""(what was found, what is needed)."""


def check_complete(path: Path) -> None:
    """Raises one KvError that lists everything that is wrong with the folder."""
    if found := problems(path):
        raise KvError(
            "; ".join(what for what, _ in found),
            "; ".join(dict.fromkeys(need for _, need in found)),
            f"copy or download the model again into {path} (git lfs pull, where it came by git), "
            "or set MODEL_DIR in .env to a complete folder",
        )


def problems(path: Path) -> list[Problem]:
    """Everything that keeps a server from loading the folder; empty when nothing was found."""
    if not path.is_dir():
        return [(f"{path} is not a folder", "the folder of the model (config.json, tokenizer, weights)")]
    result = [*_config(path), *_tokenizer(path), *_shards(path)]
    for file in sorted({file for pattern in _WEIGHTS for file in path.glob(pattern)}):
        result += _weight_file(file)
    return result


def weight_bytes(path: Path) -> int:
    """Bytes of all weight files: about what the model takes in memory in its own dtype."""
    safetensors = list(path.glob("*.safetensors"))
    # A folder that ships the same weights twice (.safetensors and .bin) is loaded once, from the former.
    files = safetensors or [file for pattern in _WEIGHTS for file in path.glob(pattern)]
    return sum(file.stat().st_size for file in files if file.exists())


def _config(path: Path) -> list[Problem]:
    file = path / "config.json"
    if not file.is_file():
        return [(f"{file} is missing", "config.json of a Hugging Face model folder")]
    return [] if _json(file) is not None else [(f"{file} is not a JSON object", "a readable config.json")]


def _json(file: Path) -> dict[str, object] | None:
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return data if isinstance(data, dict) else None


def _tokenizer(path: Path) -> list[Problem]:
    present = [path / name for name in _TOKENIZERS if (path / name).is_file()]
    if not present:
        return [(f"{path} has no tokenizer", f"one of {', '.join(_TOKENIZERS)}")]
    empty = [file for file in present if file.stat().st_size == 0 or _is_pointer(file)]
    return [(f"{file} is empty or only a Git LFS pointer", "the tokenizer's real bytes") for file in empty]


def _shards(path: Path) -> list[Problem]:
    index = next(iter(sorted(path.glob("*.safetensors.index.json"))), None)
    if index is None:
        if any(file for pattern in _WEIGHTS for file in path.glob(pattern)):
            return []
        return [(f"{path} has no weights", "*.safetensors")]
    data = _json(index)
    table = data.get("weight_map") if data else None
    if not isinstance(table, dict) or not table:
        return [(f"{index} has no weight_map", "a readable index of the shards")]
    names = sorted({str(name) for name in table.values()})
    missing = [name for name in names if not (path / name).is_file()]
    if not missing:
        return []
    shown = ", ".join(missing[:5]) + (f" and {len(missing) - 5} more" if len(missing) > 5 else "")
    return [(f"{len(missing)} of {len(names)} shards missing: {shown}", f"every shard that {index.name} names")]


def _weight_file(file: Path) -> list[Problem]:
    if not file.exists():
        return [(f"{file} is a link to nothing", "the file that it points to")]
    size = file.stat().st_size
    if size == 0:
        return [(f"{file} is empty", "the weights' real bytes")]
    if _is_pointer(file):
        return [(f"{file} is only a Git LFS pointer", "the weights' real bytes")]
    return _safetensors(file, size) if file.suffix == ".safetensors" else []


def _is_pointer(file: Path) -> bool:
    try:
        with file.open("rb") as handle:
            return handle.read(len(_LFS)) == _LFS
    except OSError:
        return False


def _safetensors(file: Path, size: int) -> list[Problem]:
    """The header says where the last tensor ends: a shorter file was cut off, a longer one is something else."""
    need = "a whole safetensors file"
    try:
        with file.open("rb") as handle:
            start = handle.read(8)
            length = struct.unpack("<Q", start)[0] if len(start) == 8 else 0
            if not 2 <= length <= min(_MAX_HEADER, size - 8):
                return [(f"{file} is cut off or no safetensors file ({size} bytes)", need)]
            header = json.loads(handle.read(length))
        end = max(
            (int(entry["data_offsets"][1]) for name, entry in header.items() if name != "__metadata__"), default=0
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        return [(f"{file}: unreadable header ({error})", need)]
    wanted = 8 + length + end
    return [] if size == wanted else [(f"{file} has {size} bytes", f"{wanted} bytes, as its header says")]
