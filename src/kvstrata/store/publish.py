"""The end of every put: the file is written and named, and the books say what it takes."""

from __future__ import annotations

import errno
import logging
import os
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from kvstrata.store.blockfile import Written
from kvstrata.store.capacity import Capacity
from kvstrata.store.index import Index
from kvstrata.store.keeper import Keeper
from kvstrata.store.root import Root
from kvstrata.store.scan import size_on_disk
from kvstrata.store.surroundings import Surroundings

__all__ = ["Publisher"]

_TRIES = 3
_PAUSE_S = 0.002
_FULL = (errno.ENOSPC, errno.EDQUOT)

log = logging.getLogger(__name__)


class Publisher:
    """Thread-safe; of claimed entries only."""

    def __init__(
        self, root: Root, index: Index, capacity: Capacity, surroundings: Surroundings, keeper: Keeper
    ) -> None:
        self._root = root
        self._index = index
        self._capacity = capacity
        self._surroundings = surroundings
        self._keeper = keeper

    def write(self, entry: bytes, size: int, write: Callable[[], Written]) -> Written:
        """Call `write`, which makes the block of `size` bytes, again where a folder went away meanwhile; count what it
        made or let grow around it. What it raises; an OSError was logged, and a full disk makes room for the next one.
        """
        try:
            return self._try(write)
        except OSError as error:
            if error.errno in _FULL:
                self._capacity.short(size)
            log.warning("block store: cannot store a block: %s", error)
            raise
        finally:
            self._surroundings.around(entry)

    def facts(self, entry: bytes, done: Written) -> tuple[int | None, int]:
        """(bytes on disk, last use) for Index.written; None where there is no block after all."""
        if not done.existed:
            return done.allocated, done.mtime_ns
        # Somebody put the file there by hand. It is checked when it is read, like any other.
        with suppress(OSError):
            status = os.lstat(Path(self._root.path, self._index.names.path(entry)))
            return size_on_disk(status), status.st_mtime_ns
        return None, 0

    def _try(self, write: Callable[[], Written]) -> Written:
        for left in reversed(range(_TRIES)):
            try:
                return write()
            except OSError as error:
                # EPERM: ext4's word for a directory that was removed after it was found (the evictor tidies).
                if not left or error.errno not in (errno.ENOENT, errno.EPERM):
                    raise
                if self._root.heal():
                    self._keeper.audit(blocks=True)
                time.sleep(_PAUSE_S)  # for who is just removing the folder, and may not get a core
        raise AssertionError("unreachable")
