"""Identity of a model folder: one digest over every file that decides the bytes of its KV cache.

The digest covers names and contents, never the place of the folder, its times or its owner: the same model in another
folder has the same identity, and one changed byte gives another one. Both the CLI (on the host) and the launcher
(in the container) compute it and must agree, so this module imports the standard library only.

Hashing is the cost of a first start; a JSON file keeps each file's SHA-256 under its (size, mtime, ctime, inode), so
that later starts read only `stat`. ctime and inode are in that key because a copy that keeps the modification time
(`cp -p`, `rsync -t`) and the size would otherwise pass for the old weights.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

__all__ = ["FileDigest", "Identity", "compute", "relevant_files"]

Progress = Callable[[int, int], None]
"""Called with (bytes done, bytes in all); never from two threads at once."""

_DIGEST_FORMAT = "kvstrata-model-identity-v1"
_CACHE_FORMAT = 1
_READ_SIZE = 4 << 20
#: A file changed this recently may change again within the same tick of its file system's clock, unseen by `stat`.
_SETTLED_NS = 1_000_000_000

_WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".npz", ".index.json")
_TOKENIZER_SUFFIXES = (".model", ".tiktoken", ".jinja", ".py")
_NAMES = frozenset(
    {
        "config.json",
        "params.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "special_tokens_map.json",
        "added_tokens.json",
        "vocab.json",
        "vocab.txt",
        "merges.txt",
        "tekken.json",
        "chat_template.json",
        "preprocessor_config.json",
        "processor_config.json",
        "video_preprocessor_config.json",
        "quantize_config.json",
        "quantization_config.json",
        "hf_quant_config.json",
        "adapter_config.json",
        "modules.json",
    }
)
# generation_config.json is left out on purpose: sampling defaults change what is said, never the KV of given tokens.
# A trainer's own state is megabytes of noise that no server reads.
_IGNORED_BIN = frozenset({"training_args.bin", "optimizer.bin", "optimizer.pt", "scheduler.pt", "scheduler.bin"})


@dataclass(frozen=True, slots=True)
class FileDigest:
    """One file of the model: `name` relative to the folder with `/`, `size` in bytes, `sha256` as 64 hex digits."""

    name: str
    size: int
    sha256: str


@dataclass(frozen=True, slots=True)
class Identity:
    """`digest` (64 hex digits) names the whole; `hashed_bytes` had to be read (0 = all known from the cache)."""

    digest: str
    files: tuple[FileDigest, ...]
    hashed_bytes: int = 0


def relevant_files(model_path: Path) -> list[Path]:
    """Files below `model_path` that decide the KV bytes, sorted by relative name. Hidden folders are skipped.

    Links are followed (a Hugging Face snapshot is a folder of links into `blobs/`); a broken one raises OSError.
    """
    found = [path for path in _walk(model_path) if _is_relevant(path.relative_to(model_path).as_posix())]
    return sorted(found, key=lambda path: path.relative_to(model_path).as_posix())


def compute(model_path: Path, cache_file: Path | None = None, progress: Progress | None = None) -> Identity:
    """Identity of the model in `model_path`.

    `cache_file`: JSON with known hashes; missing, damaged or read-only is fine, it only costs reading time.
    Raises FileNotFoundError when the folder holds nothing to identify, OSError when a file cannot be read, and
    RuntimeError when a file changes while it is read.
    """
    model_path = Path(model_path)
    names = relevant_files(model_path)
    if not names:
        raise FileNotFoundError(f"{model_path}: no weights, config.json or tokenizer in this folder")
    known = _load_cache(cache_file)
    stats = [path.stat() for path in names]
    keys = [_stat_key(stat) for stat in stats]
    started = time.time_ns()
    todo = [index for index, key in enumerate(keys) if key not in known]
    total = sum(stats[index].st_size for index in todo)
    meter = _Meter(total, progress)

    fresh: dict[str, str] = {}
    if todo:
        # hashlib lets go of the interpreter lock while it works, so threads are enough to use every core.
        with ThreadPoolExecutor(max_workers=min(len(todo), os.cpu_count() or 1)) as pool:
            digests = pool.map(lambda index: _hash_file(names[index], keys[index], meter), todo)
            fresh = {keys[index]: digest for index, digest in zip(todo, digests, strict=True)}

    files = tuple(
        FileDigest(path.relative_to(model_path).as_posix(), stat.st_size, known.get(key) or fresh[key])
        for path, stat, key in zip(names, stats, keys, strict=True)
    )
    if cache_file is not None and fresh:
        # Only what this folder has now is kept: a model that was replaced leaves nothing behind.
        settled = [key for key, stat in zip(keys, stats, strict=True) if stat.st_ctime_ns + _SETTLED_NS < started]
        _save_cache(cache_file, {key: known.get(key) or fresh[key] for key in settled})
    return Identity(_combine(files), files, total)


def _walk(folder: Path) -> Iterator[Path]:
    for base, folders, names in os.walk(folder, followlinks=False):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        yield from (Path(base, name) for name in names)


def _is_relevant(name: str) -> bool:
    base = name.rsplit("/", 1)[-1]
    if base.startswith(".") or base in _IGNORED_BIN:
        return False
    if "/" in name and not base.endswith(_WEIGHT_SUFFIXES):
        # Additional chat templates live in a subfolder; anything else down there is not read by the server.
        return base.endswith(".jinja")
    return base in _NAMES or base.endswith(_WEIGHT_SUFFIXES) or base.endswith(_TOKENIZER_SUFFIXES)


def _stat_key(stat: os.stat_result) -> str:
    return f"{stat.st_ino}:{stat.st_size}:{stat.st_mtime_ns}:{stat.st_ctime_ns}"


def _combine(files: tuple[FileDigest, ...]) -> str:
    # JSON with every string quoted: no name can imitate the border between two entries.
    body = json.dumps([_DIGEST_FORMAT, [[f.name, f.size, f.sha256] for f in files]], ensure_ascii=True)
    return hashlib.sha256(body.encode("ascii")).hexdigest()


def _hash_file(path: Path, key: str, meter: _Meter) -> str:
    digest = hashlib.sha256()
    buffer = memoryview(bytearray(_READ_SIZE))
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(buffer):
            digest.update(buffer[:count])
            meter.add(count)
        if _stat_key(os.fstat(file.fileno())) != key:
            raise RuntimeError(f"{path} changed while it was read: wait until the copy is complete, then try again")
    return digest.hexdigest()


class _Meter:
    """Adds up the bytes of all hashing threads and reports them one at a time."""

    def __init__(self, total: int, progress: Progress | None) -> None:
        self._total, self._progress, self._done, self._lock = total, progress, 0, threading.Lock()

    def add(self, count: int) -> None:
        if self._progress is None:
            return
        with self._lock:
            self._done += count
            self._progress(self._done, self._total)


def _load_cache(cache_file: Path | None) -> dict[str, str]:
    if cache_file is None:
        return {}
    try:
        data = json.loads(cache_file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    if not isinstance(data, dict) or data.get("format") != _CACHE_FORMAT or not isinstance(data.get("sha256"), dict):
        return {}
    return {key: value for key, value in data["sha256"].items() if isinstance(value, str) and _is_sha256(value)}


def _is_sha256(text: str) -> bool:
    return len(text) == 64 and all(char in "0123456789abcdef" for char in text)


def _save_cache(cache_file: Path, known: dict[str, str]) -> None:
    """Whole or not at all; 0644 because the container that reads it may run under another user id."""
    body = json.dumps({"format": _CACHE_FORMAT, "sha256": known}, indent=0, sort_keys=True)
    temporary: Path | None = None
    try:
        cache_file.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(prefix=".identity-", dir=cache_file.parent)
        temporary = Path(name)
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(body)
            os.fchmod(file.fileno(), 0o644)
        temporary.replace(cache_file)
    except OSError as error:
        # A read-only state folder is normal in the container; the next start hashes again, nothing else is lost.
        print(f"identity: hash cache {cache_file} not written ({error.strerror})", file=sys.stderr)
        if temporary:
            with contextlib.suppress(OSError):
                temporary.unlink()
