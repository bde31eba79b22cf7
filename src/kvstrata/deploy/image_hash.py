"""Content hashes: the tag of a local image says what went into it, so that `up` sees a change and only a change."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from pathlib import Path

__all__ = ["allowed", "content_hash", "context_files"]

_SKIP = ("__pycache__", ".pyc")


def allowed(dockerignore: str) -> list[str]:
    """The patterns that an allow-list .dockerignore (first `*`, then `!path` lines) lets in."""
    return [line[1:].strip() for line in dockerignore.splitlines() if line.startswith("!")]


def context_files(root: Path, patterns: Iterable[str]) -> list[Path]:
    """The files under `root` that the patterns let in, sorted; bytecode left out, as the .dockerignore does."""
    found: set[Path] = set()
    for pattern in patterns:
        for path in root.glob(pattern):
            found.update(p for p in path.rglob("*") if p.is_file()) if path.is_dir() else found.add(path)
    return sorted(p for p in found if not any(skip in str(p.relative_to(root)) for skip in _SKIP))


def content_hash(root: Path, files: Iterable[Path], extra: Mapping[str, str]) -> str:
    """12 hex digits over the files' relative names, execute bits and bytes, and over `extra` (build arguments)."""
    digest = hashlib.sha256()
    for path in files:
        data = path.read_bytes()
        executable = bool(path.stat().st_mode & 0o100)
        digest.update(f"{path.relative_to(root)}\0{executable}\0{len(data)}\0".encode())
        digest.update(data)
    for key in sorted(extra):
        digest.update(f"\0{key}={extra[key]}".encode())
    return digest.hexdigest()[:12]
