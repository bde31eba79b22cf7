"""The start-up scan: what lies in the root, to the byte, without what cannot be a block."""

from __future__ import annotations

import contextlib
import errno
import gc
import json
import logging
import os
import re
import stat
from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from kvstrata.store.entries import LONGEST_CHUNK, Entries
from kvstrata.store.errors import StoreError
from kvstrata.store.folders import NAMESPACE_FILE, SALT_FILE
from kvstrata.store.format import HEADER_BYTES, BadBlock, parse_header
from kvstrata.store.keys import BlockKey, namespace_folder, parse_name, salt_folder
from kvstrata.store.recency import LATEST_NS
from kvstrata.store.root import FORMAT_FILE, LOCK_FILE, NAMESPACE_FOLDER
from kvstrata.store.settings import CLASSES, StoreSettings

__all__ = ["Found", "scan_root", "size_on_disk"]

_SALT_FOLDER = re.compile("-|[0-9a-f]{32}")
_SHELF = re.compile("[0-9a-f]{2}")
_JSON_LIMIT = 4 << 20
_STEP = 10_000
_PIN_MODE, _MODE = 0o400, 0o600
_REGULAR = stat.S_IFREG | _MODE
_DAMAGED = (errno.EIO, errno.EUCLEAN, errno.EBADMSG)

log = logging.getLogger(__name__)


@dataclass(slots=True)
class Found:
    """Blocks in columns: `entries`, `sizes` in bytes on disk, last `uses` in ns; the `pinned` ones; `shelves`: (number,
    blocks, bytes) a directory of blocks. `extras`: bytes on disk of everything else, by path relative to the root (""
    is the root itself). `foreign`: bytes of what is not ours. `removed`: files deleted.
    """

    entries: list[bytes] = field(default_factory=list)
    sizes: array[int] = field(default_factory=lambda: array("q"))
    uses: array[int] = field(default_factory=lambda: array("q"))
    pinned: set[bytes] = field(default_factory=set)
    shelves: list[tuple[int, int, int]] = field(default_factory=list)
    extras: dict[str, int] = field(default_factory=dict)
    foreign: int = 0
    removed: int = 0


def size_on_disk(status: os.stat_result) -> int:
    """Bytes that `du` counts."""
    return status.st_blocks * 512


def scan_root(
    root: Path, names: Entries, settings: StoreSettings, progress: Callable[[int], None] | None = None
) -> Found:
    """Read an owned root. `progress` gets the number of blocks seen so far, every 10,000 and at the end.

    Deleted are, inside folders that are ours by their shape (ns/salt/hh): files whose name is no block's or belongs
    elsewhere, or that are shorter than a header, and what is no regular file; and our own folders when they are empty.
    Left alone and counted are files anywhere else and directories of other shapes. StoreError: it cannot be read.
    """
    scan = _Scan(root, names, settings, progress)
    collecting = gc.isenabled()
    # 400,000 stat results would set it off again and again, for nothing: no cycle can arise here.
    gc.disable()
    try:
        scan.run()
    except OSError as error:
        raise StoreError(
            f"{error.filename or root}: {error.strerror} (errno {error.errno}) while reading the store",
            "a folder that can be read to the end",
            "check the disk and the owner of the files below the root",
        ) from error
    finally:
        if collecting:
            gc.enable()
    return scan.found


class _Scan:
    def __init__(
        self, root: Path, names: Entries, settings: StoreSettings, progress: Callable[[int], None] | None
    ) -> None:
        self.found = Found()
        self._root = str(root)
        self._names = names
        self._settings = settings
        self._progress = progress
        self._told = 0
        self._heads: dict[int, dict[str, bytes]] = {}

    def run(self) -> None:
        for entry in self._list(""):
            if entry.is_dir(follow_symlinks=False) and NAMESPACE_FOLDER.fullmatch(entry.name):
                self._namespace(entry.name)
            else:
                self._other(entry, entry.name, ours=entry.name in (LOCK_FILE, FORMAT_FILE))
        self._measure("")
        self._tell(0)

    def _namespace(self, ns: str) -> None:
        namespace, ns_cls = self._spelled(f"{ns}/{NAMESPACE_FILE}", "namespace", ns, namespace_folder)
        if namespace is not None and ns_cls is not None:
            self._names.namespace_classes[namespace] = ns_cls
        for entry in self._list(ns):
            path = f"{ns}/{entry.name}"
            if entry.is_dir(follow_symlinks=False) and _SALT_FOLDER.fullmatch(entry.name):
                self._salt(path, namespace, ns_cls)
            else:
                self._other(entry, path, ours=entry.name == NAMESPACE_FILE)
        self._close_folder(ns, NAMESPACE_FILE, keep=ns_cls not in (None, CLASSES.index("normal")))

    def _salt(self, path: str, namespace: str | None, ns_cls: int | None) -> None:
        salt, salt_cls = self._spelled(f"{path}/{SALT_FILE}", "salt", path[33:], salt_folder)
        shelves = []
        for entry in self._list(path):
            if entry.is_dir(follow_symlinks=False) and _SHELF.fullmatch(entry.name):
                shelves.append(entry.name)
            else:
                self._other(entry, f"{path}/{entry.name}", ours=entry.name == SALT_FILE)
        if namespace is None or salt is None:
            namespace, salt = self._names_from_a_block(path, shelves)
        by_rule = self._settings.class_number(namespace or "", salt or "")
        cls = next((cls for cls in (salt_cls, by_rule, ns_cls) if cls is not None), CLASSES.index("normal"))
        number = self._names.found(path, namespace, salt, cls)
        for shelf in shelves:
            self._shelf(number, path, shelf)
        self._close_folder(path, SALT_FILE, keep=salt_cls is not None)

    def _shelf(self, number: int, folder: str, shelf: str) -> None:
        path, found, before = f"{folder}/{shelf}", self.found, len(self.found.entries)
        try:
            self._blocks(number, path, shelf)
        except OSError as error:
            # One bad sector must not cost the whole cache. What cannot be listed is not found, and not counted.
            if error.errno not in _DAMAGED:
                raise
            log.error("block store: %s: %s. Its blocks are lost: check the disk (fsck)", path, error.strerror)
        self._tell(_STEP)
        blocks = len(found.entries) - before
        if blocks:
            found.shelves.append((self._names.shelf(found.entries[-1]), blocks, sum(found.sizes[before:])))
        else:
            with contextlib.suppress(OSError):
                os.rmdir(f"{self._root}/{path}")  # noqa: PTH106
                return
        self._measure(path)

    def _blocks(self, number: int, path: str, shelf: str) -> None:
        """Take in the blocks of a directory."""
        found, heads = self.found, self._heads.setdefault(number, {})
        # The loop that runs 400,000 times: names are checked by taking them apart and putting them together again.
        with os.scandir(f"{self._root}/{path}") as entries:
            for entry in entries:
                name = entry.name
                status = entry.stat(follow_symlinks=False)
                mode, size = status.st_mode, status.st_blocks * 512
                chunk_hex, _, tail = name.partition(".")
                head = heads.get(tail)
                try:
                    chunk = bytes.fromhex(chunk_hex)
                except ValueError:
                    chunk = b""
                if head is None or chunk.hex() != chunk_hex or not 1 <= len(chunk) <= LONGEST_CHUNK:
                    packed = self._entry(number, name, heads)
                else:
                    packed = head + chunk
                if (
                    packed is None
                    or status.st_size < HEADER_BYTES
                    or not name.startswith(shelf, 1 if name[0] == "~" else 0)
                    or not stat.S_ISREG(mode)
                ):
                    self._no_block(entry, f"{path}/{name}", status)
                    continue
                if mode != _REGULAR:
                    mode &= 0o7777
                    if mode != _PIN_MODE:
                        self._tighten(entry.path, status.st_uid)
                    else:
                        found.pinned.add(packed)
                found.entries.append(packed)
                found.sizes.append(size)
                # A use in the far future is none: taken at its word it would stop the clock, and never grow old.
                found.uses.append(status.st_mtime_ns if status.st_mtime_ns < LATEST_NS else 0)

    def _tighten(self, path: str, uid: int) -> None:
        try:
            os.chmod(path, _MODE)  # noqa: PTH101
        except PermissionError:
            # Restored or copied by somebody else. It is checked when it is read, and the evictor can remove it.
            log.warning("block store: %s belongs to uid %d, its mode stays as it is: chown it", path, uid)

    def _entry(self, number: int, name: str, heads: dict[str, bytes]) -> bytes | None:
        """The entry of a name, taken apart with all care; remembers how entries with its ranks and groups begin."""
        parsed = parse_name(name)
        if parsed is None:
            return None
        chunk, rank, group = parsed
        if chunk is None:
            return self._names.pack(number, bytes.fromhex(name[1:65]), rank, group, digest=True)
        head = heads[name.partition(".")[2]] = self._names.pack(number, b"", rank, group)
        return head + chunk

    def _no_block(self, entry: os.DirEntry[str], path: str, status: os.stat_result) -> None:
        if stat.S_ISDIR(status.st_mode):
            self._other(entry, path, ours=False)
            return
        try:
            os.unlink(entry.path)  # noqa: PTH108
            self.found.removed += 1
            log.warning("block store: removed %s, which cannot be a block", path)
        except OSError:
            self.found.extras[path] = size_on_disk(status)

    def _other(self, entry: os.DirEntry[str], path: str, *, ours: bool) -> None:
        """Something that is no block: it takes room, and it stays."""
        waiting = [(entry, path)]
        while waiting:
            entry, path = waiting.pop()
            size = size_on_disk(entry.stat(follow_symlinks=False))
            self.found.extras[path] = size
            if not ours:
                self.found.foreign += size
            if not entry.is_dir(follow_symlinks=False):
                continue
            try:
                waiting += [(inner, f"{path}/{inner.name}") for inner in self._list(path)]
            except PermissionError:
                # lost+found is root's alone.
                log.warning("block store: %s is closed to this user: what is in it is not counted", path)

    def _close_folder(self, path: str, own_file: str, *, keep: bool) -> None:
        """Remove one of our folders if nothing but its JSON file is left (nobody writes yet), else count it. `keep`:
        somebody gave it a class, which outlives its blocks.
        """
        full = Path(self._root, path)
        if not keep and {entry.name for entry in self._list(path)} <= {own_file}:
            with contextlib.suppress(OSError):
                (full / own_file).unlink(missing_ok=True)
                self.found.extras.pop(f"{path}/{own_file}", None)
                full.rmdir()
                return
        self._measure(path)

    def _spelled(
        self, path: str, member: str, folder: str, hashed: Callable[[str], str]
    ) -> tuple[str | None, int | None]:
        """What a JSON file says: (name, class number), None where it says nothing that fits the folder."""
        try:
            with open(f"{self._root}/{path}", "rb") as file:  # noqa: PTH123
                content = json.loads(file.read(_JSON_LIMIT))
            name, cls = content[member], content.get("class")
            if not isinstance(name, str) or hashed(name) != folder:
                return None, None
            return name, CLASSES.index(cls) if cls in CLASSES else None
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
            return None, None

    def _names_from_a_block(self, path: str, shelves: list[str]) -> tuple[str | None, str | None]:
        """A lost JSON file: the first sound header tells."""
        for key in self._some_keys(path, shelves):
            if "/".join(key.folder) == path:
                return key.namespace, key.salt
        return None, None

    def _some_keys(self, path: str, shelves: list[str], limit: int = 8) -> Iterator[BlockKey]:
        files = (entry for shelf in shelves for entry in self._list(f"{path}/{shelf}"))
        for _, entry in zip(range(limit), files, strict=False):
            with contextlib.suppress(OSError, BadBlock):
                if entry.is_file(follow_symlinks=False):
                    with open(entry.path, "rb") as file:  # noqa: PTH123
                        key = parse_header(file.read(HEADER_BYTES), None, entry.stat(follow_symlinks=False).st_size).key
                    if key is not None:
                        yield key

    def _list(self, path: str) -> Iterator[os.DirEntry[str]]:
        with os.scandir(f"{self._root}/{path}") as entries:
            yield from entries

    def _measure(self, path: str) -> None:
        self.found.extras[path] = size_on_disk(os.lstat(f"{self._root}/{path}"))

    def _tell(self, step: int) -> None:
        blocks = len(self.found.entries)
        if self._progress is not None and blocks >= self._told + step:
            self._told = blocks
            self._progress(blocks)
