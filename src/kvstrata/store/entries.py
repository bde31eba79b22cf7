"""Short names for blocks in memory: folder numbers, and entries that give path and key back."""

from __future__ import annotations

import struct
import threading
from collections.abc import Callable
from dataclasses import dataclass
from hashlib import sha256

from kvstrata.store.keys import BlockKey, namespace_folder, salt_folder
from kvstrata.store.settings import CLASSES

__all__ = ["LONGEST_CHUNK", "Entries", "SaltFolder"]

_SHORT = struct.Struct("<IIH")
_LONG = struct.Struct("<IQQ")
_IS_LONG = 1 << 31
_IS_DIGEST = 1 << 30
_NUMBER = _IS_DIGEST - 1
LONGEST_CHUNK = 64
_NORMAL = CLASSES.index("normal")


@dataclass(slots=True)
class SaltFolder:
    """One salt's folder below one namespace's, what its JSON files say, and its sums.

    `namespace` or `salt` None: the JSON file is lost. Its blocks are counted and age out like any other; the names come
    back with the first request for them.
    """

    path: str
    namespace: str | None
    salt: str | None
    cls: int
    blocks: int = 0
    nbytes: int = 0


class Entries:
    """Numbers the (namespace, salt) pairs and packs block keys into entries.

    An entry is folder, rank, group and chunk in ~42 bytes: small enough to keep 400,000 of them, and complete enough
    to rebuild the path and (but for `~` names) the key without opening the file.
    """

    def __init__(self, cls_of: Callable[[str, str], int | None]) -> None:
        """`cls_of`: the class that a rule gives a namespace and salt; else `namespace_classes` says it, else normal."""
        self._cls_of = cls_of
        self._lock = threading.Lock()
        self._by_names: dict[tuple[str, str], int] = {}
        self._by_path: dict[str, int] = {}
        self.namespace_classes: dict[str, int] = {}
        self.folders: list[SaltFolder] = []

    def found(self, path: str, namespace: str | None, salt: str | None, cls: int) -> int:
        """The number of a folder, new or known, with its names as far as they are known."""
        with self._lock:
            number = self._by_path.setdefault(path, len(self.folders))
            if number == len(self.folders):
                self.folders.append(SaltFolder(path, namespace, salt, cls))
            folder = self.folders[number]
            if namespace is not None and salt is not None:
                folder.namespace, folder.salt = namespace, salt
                self._by_names[namespace, salt] = number
            return number

    def number(self, namespace: str, salt: str) -> int:
        """The number of a key's folder; a new one if it was never met."""
        number = self._by_names.get((namespace, salt))
        if number is None:
            path = f"{namespace_folder(namespace)}/{salt_folder(salt)}"
            cls = self._cls_of(namespace, salt)
            if cls is None:
                cls = self.namespace_classes.get(namespace, _NORMAL)
            number = self.found(path, namespace, salt, cls)
        return number

    def entry(self, key: BlockKey) -> bytes:
        """The packed key."""
        number, chunk = self.number(key.namespace, key.salt), key.chunk
        if 1 <= len(chunk) <= LONGEST_CHUNK:
            return self.pack(number, chunk, key.rank, key.group)
        return self.pack(number, sha256(chunk).digest(), key.rank, key.group, digest=True)

    def known(self, key: BlockKey) -> bytes:
        """The packed key for a question, which leaves nothing behind: b"", no block's, where its folder was never met.

        Salts are as many as clients like to send.
        """
        names = key.namespace, key.salt
        if names not in self._by_names and f"{namespace_folder(names[0])}/{salt_folder(names[1])}" not in self._by_path:
            return b""
        return self.entry(key)

    @staticmethod
    def pack(number: int, chunk: bytes, rank: int, group: int, *, digest: bool = False) -> bytes:
        """The entry of a file's name: `chunk` is what stands there in hex, `digest` says that a `~` is before it."""
        if digest:
            number |= _IS_DIGEST
        if rank < 1 << 32 and group < 1 << 16:
            return _SHORT.pack(number, rank, group) + chunk
        return _LONG.pack(number | _IS_LONG, rank, group) + chunk

    @staticmethod
    def shelf(entry: bytes) -> int:
        """Folder number and `hh` (the first byte of the name) as one number: one per directory of blocks."""
        first = int.from_bytes(entry[:4], "little")
        return (first & _NUMBER) << 8 | entry[_LONG.size if first & _IS_LONG else _SHORT.size]

    def folder(self, entry: bytes) -> SaltFolder:
        """Where an entry belongs."""
        return self.folders[int.from_bytes(entry[:4], "little") & _NUMBER]

    def shelf_path(self, entry: bytes) -> str:
        """The directory of an entry, relative to the root."""
        return f"{self.folder(entry).path}/{self.shelf(entry) & 255:02x}"

    def path(self, entry: bytes) -> str:
        """The file of an entry, relative to the root."""
        flags, rank, group, chunk = _unpack(entry)
        name = chunk.hex()
        tilde = "~" if flags & _IS_DIGEST else ""
        return f"{self.folders[flags & _NUMBER].path}/{name[:2]}/{tilde}{name}.{rank:x}.{group:x}"

    def key(self, entry: bytes) -> BlockKey | None:
        """The key of an entry; None where the chunk's hash only is known, or the folder's JSON file is lost."""
        flags, rank, group, chunk = _unpack(entry)
        folder = self.folders[flags & _NUMBER]
        if flags & _IS_DIGEST or folder.namespace is None or folder.salt is None:
            return None
        return BlockKey(folder.namespace, folder.salt, chunk, rank, group)


def _unpack(entry: bytes) -> tuple[int, int, int, bytes]:
    layout = _LONG if int.from_bytes(entry[:4], "little") & _IS_LONG else _SHORT
    flags, rank, group = layout.unpack_from(entry)
    return flags, rank, group, entry[layout.size :]
