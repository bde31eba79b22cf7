"""What is on disk around the blocks (folders, JSON files): measured, counted, and tidied, one at a time."""

from __future__ import annotations

import errno
import json
import os
import threading
from contextlib import suppress
from pathlib import Path

from kvstrata.store.entries import SaltFolder
from kvstrata.store.folders import NAMESPACE_FILE, SALT_FILE, SALT_MEMBER, spell_out
from kvstrata.store.index import Index
from kvstrata.store.root import FORMAT_FILE, LOCK_FILE
from kvstrata.store.scan import size_on_disk

__all__ = ["Surroundings"]


class Surroundings:
    """Looking and writing down happen under one lock: of two who look at a folder, the later look is what stays.

    Used by those who do I/O anyway; nobody waits for it whose answer must not depend on the disk.
    """

    def __init__(self, root: Path, index: Index) -> None:
        self._root = str(root)
        self._index = index
        self._looking = threading.Lock()

    def around(self, entry: bytes) -> None:
        """Count what a put of this entry made or let grow, out of its reservation."""
        names, known = self._index.names, self._index.known_extra
        shelf, folder = names.shelf_path(entry), names.folder(entry).path
        with self._looking, suppress(OSError):
            # What is new lets its folder grow, which may be new as well.
            paths = [shelf] if known(shelf) else [shelf, folder]
            # Whatever is known of the shelf: two writers of a new folder both write its JSON file, and who looked while
            # the second one put its own in place saw none.
            if not (known(folder) and known(f"{folder}/{SALT_FILE}")):
                ns = folder[: folder.index("/")]
                paths = [
                    shelf,
                    folder,
                    "",
                    LOCK_FILE,
                    FORMAT_FILE,
                    ns,
                    f"{ns}/{NAMESPACE_FILE}",
                    f"{folder}/{SALT_FILE}",
                ]
            for path in paths:
                self._index.measured(path, self._size(path), entry)

    def everything(self) -> None:
        """Measure all that is counted anew. OSError."""
        for path in self._index.extras():
            with self._looking:
                self._index.measured(path, self._size(path))

    def tidy(self, entry: bytes) -> None:
        """Directories of many salts would fill the disk: where an entry was its last block, its directory goes, and
        its salt's folder. A writer makes them again.
        """
        shelf = self._index.names.shelf_path(entry)
        with self._looking, suppress(OSError):
            try:
                os.rmdir(f"{self._root}/{shelf}")  # noqa: PTH106
            except OSError as error:
                if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOENT):
                    raise
            self._index.measured(shelf, self._size(shelf))
            number = self._index.names.shelf(entry) >> 8
            if self._index.empty(number):
                self._tidy_salt(self._index.names.folders[number])

    def _tidy_salt(self, folder: SaltFolder) -> None:
        """A salt's folder without directories, unless somebody gave it a class: that outlives its blocks."""
        file = f"{folder.path}/{SALT_FILE}"
        place, spelled = Path(self._root, folder.path), Path(self._root, file)
        if folder.namespace is None or folder.salt is None or os.listdir(place) != [SALT_FILE]:  # noqa: PTH208
            return
        with suppress(ValueError, AttributeError):
            if json.loads(spelled.read_bytes()).get("class") is not None:
                return
        spelled.unlink()
        try:
            place.rmdir()
        except OSError:
            # A writer was quicker: its blocks want the file back.
            spell_out(str(place), SALT_FILE, {SALT_MEMBER: folder.salt, "class": None}, SALT_MEMBER)
        for path in (folder.path, file):
            self._index.measured(path, self._size(path))

    def _size(self, path: str) -> int:
        """Bytes on disk; 0 if there is nothing. OSError."""
        try:
            return size_on_disk(os.lstat(f"{self._root}/{path}"))
        except (FileNotFoundError, NotADirectoryError):
            return 0
