"""What a block is called: the key, its canonical bytes, and the path that it gives (docs/format.md)."""

from __future__ import annotations

import re
import struct
from dataclasses import dataclass
from functools import lru_cache
from hashlib import sha256

__all__ = ["NO_SALT", "BlockKey", "namespace_folder", "parse_name", "salt_folder"]

NO_SALT = "-"
"""The folder of the empty salt."""

_LONGEST_CHUNK = 64
_FOLDER_DIGITS = 32
_RANKS = 1 << 64
_GROUPS = 1 << 32
_LENGTH = struct.Struct("<I")
_TAIL = struct.Struct("<QQ")
_NAME = re.compile(
    rf"(?:((?:[0-9a-f]{{2}}){{1,{_LONGEST_CHUNK}}})|~[0-9a-f]{{64}})"
    r"\.(0|[1-9a-f][0-9a-f]{0,15})\.(0|[1-9a-f][0-9a-f]{0,7})"
)


def _text(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


# A server knows a handful of namespaces; salts are as many as tenants.
@lru_cache(maxsize=256)
def namespace_folder(namespace: str) -> str:
    """The folder of a namespace: 32 hex digits."""
    return sha256(_text(namespace)).hexdigest()[:_FOLDER_DIGITS]


@lru_cache(maxsize=1024)
def salt_folder(salt: str) -> str:
    """The folder of a salt below its namespace: "-" or 32 hex digits."""
    return sha256(_text(salt)).hexdigest()[:_FOLDER_DIGITS] if salt else NO_SALT


@dataclass(frozen=True, slots=True)
class BlockKey:
    """Names one block. `namespace`: model, layout and whatever else makes KV bytes differ; `salt`: the tenant's;
    `chunk`: the hash of the tokens; `rank` (0 to 2**64 - 1), `group` (0 to 2**32 - 1): which part of the model's KV.
    ValueError for other numbers.
    """

    namespace: str
    salt: str
    chunk: bytes
    rank: int = 0
    group: int = 0

    def __post_init__(self) -> None:
        if not (0 <= self.rank < _RANKS and 0 <= self.group < _GROUPS):
            raise ValueError(
                f"found: rank {self.rank}, group {self.group}; needed: below 2**64 and 2**32, not negative"
            )

    def encode(self) -> bytes:
        """The canonical bytes: different keys have different ones."""
        name, salt, chunk, size = _text(self.namespace), _text(self.salt), self.chunk, _LENGTH.pack
        return b"".join((
            size(len(name)), name, size(len(salt)), salt, size(len(chunk)), chunk, _TAIL.pack(self.rank, self.group),
        ))  # fmt: skip

    @classmethod
    def decode(cls, data: bytes) -> BlockKey:
        """The inverse of encode. ValueError for anything that encode does not give."""
        parts, at = [], 0
        for _ in range(3):
            length = int.from_bytes(data[at : at + _LENGTH.size], "little")
            part = data[at + _LENGTH.size : at + _LENGTH.size + length]
            if len(data) < at + _LENGTH.size + length:
                raise ValueError("an encoded key that ends too early")
            parts.append(part)
            at += _LENGTH.size + length
        if len(data) - at != _TAIL.size:
            raise ValueError("an encoded key of a wrong length")
        rank, group = _TAIL.unpack_from(data, at)
        namespace, salt = (part.decode("utf-8", "surrogatepass") for part in parts[:2])
        return cls(namespace, salt, parts[2], rank, group)

    @property
    def digest(self) -> bytes:
        """SHA-256 of the canonical bytes."""
        return sha256(self.encode()).digest()

    @property
    def folder(self) -> tuple[str, str]:
        """Its namespace's and its salt's folder."""
        return namespace_folder(self.namespace), salt_folder(self.salt)

    @property
    def name(self) -> str:
        """The file's name: at most 154 characters of 0-9 a-f . ~"""
        return f"{self._chunk_name()}.{self.rank:x}.{self.group:x}"

    @property
    def path(self) -> str:
        """Relative to the root."""
        chunk = self._chunk_name()
        first = chunk[1:3] if chunk[0] == "~" else chunk[:2]
        namespace, salt = self.folder
        return f"{namespace}/{salt}/{first}/{chunk}.{self.rank:x}.{self.group:x}"

    def _chunk_name(self) -> str:
        if 1 <= len(self.chunk) <= _LONGEST_CHUNK:
            return self.chunk.hex()
        return "~" + sha256(self.chunk).hexdigest()


def parse_name(name: str) -> tuple[bytes | None, int, int] | None:
    """(chunk, rank, group) of a block's file name; chunk None where only its digest is in the name; None for any
    name that `BlockKey.name` does not give.
    """
    match = _NAME.fullmatch(name)
    if match is None:
        return None
    chunk, rank, group = match.groups()
    return bytes.fromhex(chunk) if chunk else None, int(rank, 16), int(group, 16)
