"""What lies in a root, read without owning it: for the command line, beside a running store or without one.

Nothing here changes a file, and nothing that can lie in a folder makes it fail: what is no block is told as odd.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import NamedTuple

from .errors import StoreError
from .format import FORMAT
from .keys import NO_SALT, namespace_folder, parse_name, salt_folder
from .settings import CLASSES, ClassRule

__all__ = ["Block", "Folder", "Odd", "Survey", "Totals", "check_root", "matching", "totals"]

#: What the store itself keeps beside the namespace folders.
_OWN = {".lock", "FORMAT.json"}
_HEX = set("0123456789abcdef")
_JSON_MOST = 1 << 20


class Block(NamedTuple):
    """One block's file. `path`: relative to the root; `disk`: allocated bytes; `length`: of the file."""

    path: str
    disk: int
    length: int
    last_use_ns: int
    pinned: bool


class Odd(NamedTuple):
    """Something that is no block, and why."""

    path: str
    why: str


@dataclass(frozen=True)
class Folder:
    """One namespace and salt. The names are None where their JSON file is missing or not believable."""

    ns: str
    salt_dir: str
    namespace: str | None
    salt: str | None
    ns_class: str
    salt_class: str | None
    rule_class: str | None = None

    @property
    def path(self) -> str:
        return f"{self.ns}/{self.salt_dir}"

    @property
    def cls(self) -> str:
        """The salt's own class, else that of the first rule of KV_STORE_CLASSES, else its namespace's."""
        return self.salt_class or self.rule_class or self.ns_class

    def cls_of(self, block: Block) -> str:
        return "pin" if block.pinned else self.cls

    def named(self, text: str) -> bool:
        """Whether `text` is its path, its namespace's folder, or a glob that the namespace's name matches."""
        return text in (self.ns, self.path) or fnmatchcase(self.namespace or "", text)


@dataclass
class Totals:
    """Sums of one folder, or of a whole root. Times are ns since the epoch, None without a block."""

    blocks: int = 0
    disk: int = 0
    pinned: int = 0
    newest_ns: int | None = None
    oldest_ns: int | None = None

    def add(self, block: Block) -> None:
        self.blocks += 1
        self.disk += block.disk
        self.pinned += block.pinned
        used = block.last_use_ns
        if self.newest_ns is None or used > self.newest_ns:
            self.newest_ns = used
        if self.oldest_ns is None or used < self.oldest_ns:
            self.oldest_ns = used


@dataclass
class Survey:
    """One walk over a root. `rules`: those of KV_STORE_CLASSES. `odd` grows while `blocks` is read."""

    root: Path
    tick: Callable[[int], None] = lambda count: None
    rules: tuple[ClassRule, ...] = ()
    odd: list[Odd] = field(default_factory=list)

    def folders(self) -> Iterator[Folder]:
        """Namespaces and salts in the order of their folder names."""
        for ns in self._names("", {*_OWN}):
            if not _is_digest(ns):
                self.odd.append(Odd(ns, "not a namespace's folder"))
                continue
            data = self._json(f"{ns}/ns.json")
            namespace = _text(data, "namespace", ns, namespace_folder)
            for salt_dir in self._names(ns, {"ns.json"}):
                if salt_dir != NO_SALT and not _is_digest(salt_dir):
                    self.odd.append(Odd(f"{ns}/{salt_dir}", "not a salt's folder"))
                    continue
                inner = self._json(f"{ns}/{salt_dir}/salt.json")
                salt = _text(inner, "salt", salt_dir, salt_folder)
                rule = next((r.cls for r in self.rules if r.matches(namespace or "", salt or "")), None)
                yield Folder(ns, salt_dir, namespace, salt, _cls(data) or "normal", _cls(inner), rule)

    def blocks(self, folder: Folder, only: str = "") -> Iterator[Block]:
        """Blocks of one folder, in no order that means anything. `only`: of one two-digit folder."""
        for hh in [only] if only else self._names(folder.path, {"salt.json"}):
            place = f"{folder.path}/{hh}"
            if len(hh) != 2 or not set(hh) <= _HEX:
                self.odd.append(Odd(place, "not a folder of blocks"))
                continue
            found = 0
            for entry in self._entries(place):
                block = self._block(entry, place, hh)
                if block is not None:
                    found += 1
                    yield block
            self.tick(found)

    def all(self) -> Iterator[tuple[Folder, Block]]:
        for folder in self.folders():
            for block in self.blocks(folder):
                yield folder, block

    def _block(self, entry: os.DirEntry[str], place: str, hh: str) -> Block | None:
        name = entry.name
        if parse_name(name) is None or name.lstrip("~")[:2] != hh:
            self.odd.append(Odd(f"{place}/{name}", "not a block's name, or in the wrong folder"))
            return None
        try:
            info = entry.stat(follow_symlinks=False)
        except FileNotFoundError:
            return None  # evicted while we looked
        except OSError as error:
            self.odd.append(Odd(f"{place}/{name}", error.strerror or "unreadable"))
            return None
        if not stat.S_ISREG(info.st_mode):
            self.odd.append(Odd(f"{place}/{name}", "not a regular file"))
            return None
        return Block(
            f"{place}/{name}", info.st_blocks * 512, info.st_size, info.st_mtime_ns, stat.S_IMODE(info.st_mode) == 0o400
        )

    def _names(self, place: str, known: set[str]) -> list[str]:
        """Folders of `place`, sorted; anything else that is not `known` is odd. A gone folder is an empty one."""
        names = []
        for entry in self._entries(place):
            if entry.is_dir(follow_symlinks=False):
                names.append(entry.name)
            elif entry.name not in known:
                self.odd.append(Odd(f"{place}/{entry.name}".lstrip("/"), "not a file of the store"))
        return sorted(names)

    def _entries(self, place: str) -> list[os.DirEntry[str]]:
        try:
            with os.scandir(self.root / place) as entries:
                return list(entries)
        except FileNotFoundError:
            return []
        except OSError as error:
            self.odd.append(Odd(place or ".", error.strerror or "unreadable"))
            return []

    def _json(self, path: str) -> dict[str, object]:
        """{} for a file that is missing, no JSON object, or no plain file."""
        try:
            fd = os.open(self.root / path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
            with open(fd, "rb") as file:  # noqa: PTH123
                if not stat.S_ISREG(os.fstat(fd).st_mode):
                    raise ValueError("no regular file")
                data = json.loads(file.read(_JSON_MOST))
        except (OSError, ValueError, RecursionError) as error:
            self.odd.append(Odd(path, f"unreadable: {error}"))
            return {}
        if not isinstance(data, dict):
            self.odd.append(Odd(path, "no JSON object"))
            return {}
        return data


def _is_digest(name: str) -> bool:
    return len(name) == 32 and set(name) <= _HEX


def _text(data: dict[str, object], field_: str, folder: str, digest: Callable[[str], str]) -> str | None:
    """A name that a JSON file gives, believed only if the folder is called after it."""
    value = data.get(field_)
    return value if isinstance(value, str) and digest(value) == folder else None


def _cls(data: dict[str, object]) -> str | None:
    value = data.get("class")
    return value if isinstance(value, str) and value in CLASSES else None


def check_root(root: Path) -> Path:
    """`root`, if a block store is there and can be read. StoreError otherwise."""
    try:
        os.listdir(root)  # noqa: PTH208
        text = (root / "FORMAT.json").read_text(encoding="utf-8")
    except PermissionError as error:
        raise StoreError(
            f"{root} is closed to uid {os.geteuid()} ({_owner(root)})",
            "the owner's rights: the folders are 0700 and the files 0600",
            "run this as root (sudo) or as the owner; KV_UID in .env names it",
        ) from error
    except (FileNotFoundError, NotADirectoryError) as error:
        raise StoreError(
            f"no block store at {root}", "a folder with FORMAT.json in it",
            "name it with --root, or start the stack once (make up); KV_CACHE_DIR in .env is where it looks",
        ) from error  # fmt: skip
    except (OSError, UnicodeDecodeError) as error:
        raise StoreError(f"{root}: {error}", "a readable FORMAT.json", "look at that folder's disk") from error
    try:
        data = json.loads(text)
        version = data["format"]
    except (ValueError, KeyError, TypeError) as error:
        raise StoreError(
            f"{root}/FORMAT.json is not what a store writes", '{"format": N}', "name the right --root"
        ) from error
    if version != FORMAT:
        raise StoreError(
            f"{root} has format {version}", f"format {FORMAT}", "use the version of kvstrata that wrote it"
        )
    return root


def _owner(root: Path) -> str:
    try:
        return f"it belongs to uid {root.stat().st_uid}"
    except OSError:
        return "so is a folder above it"


def totals(survey: Survey) -> dict[Folder, Totals]:
    """Sums by folder, empty folders included."""
    result: dict[Folder, Totals] = {}
    for folder in survey.folders():
        sums = result[folder] = Totals()
        for block in survey.blocks(folder):
            sums.add(block)
    return result


def matching(survey: Survey, text: str) -> Iterator[tuple[Folder, Block]]:
    """Blocks that `text` names: a path (absolute or relative to the root) of a file or folder, a glob of namespace
    names, or the beginning of a chunk hash (4 hex digits at least).
    """
    wanted = text.removeprefix(f"{survey.root}/").strip("/")
    digits = wanted.removeprefix("~")
    by_hash = "/" not in wanted and len(digits) >= 4 and set(digits.split(".", maxsplit=1)[0]) <= _HEX
    for folder in survey.folders():
        if folder.named(wanted):
            yield from ((folder, block) for block in survey.blocks(folder))
        elif wanted.startswith(f"{folder.path}/"):
            hh = wanted[len(folder.path) + 1 :].split("/")[0]
            for block in survey.blocks(folder, only=hh):
                if block.path == wanted or block.path.startswith(f"{wanted}/"):
                    yield folder, block
        elif by_hash:
            for block in survey.blocks(folder, only=digits[:2]):
                if block.path.rsplit("/", 1)[1].startswith(wanted):
                    yield folder, block
