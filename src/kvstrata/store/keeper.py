"""The background: last uses into the files' timestamps, sizes that settle late, and books that somebody made wrong."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress

from kvstrata.store.capacity import Device
from kvstrata.store.index import Index
from kvstrata.store.removal import Remover
from kvstrata.store.root import Root
from kvstrata.store.scan import size_on_disk
from kvstrata.store.surroundings import Surroundings

__all__ = ["Keeper"]

_TICK_S = 1.0
# Write-back is over by then (dirty_expire_centisecs is 30 s), and extent blocks are counted.
_SETTLED_S = 45.0

log = logging.getLogger(__name__)


class Keeper:
    """One thread. What it has not done yet when the process dies costs a second of recency and nothing else."""

    def __init__(
        self,
        root: Root,
        index: Index,
        clock: Callable[[], int],
        device: Device,
        remover: Remover,
        surroundings: Surroundings,
    ) -> None:
        self._owned = root
        self._root = str(root.path)
        self._remover = remover
        self._surroundings = surroundings
        self._audit_folders = self._audit_blocks = False
        self._index = index
        self._clock = clock
        self._device = device
        self._dirty: set[bytes] = set()
        self._fresh: deque[tuple[float, bytes]] = deque()
        self._swap = threading.Lock()
        self._stopped = threading.Event()
        self._free = device.free()
        self._thread = threading.Thread(target=self._run, name="kvstrata-keeper", daemon=True)

    @property
    def free_on_device(self) -> int:
        """Bytes, as of the last tick."""
        return self._free

    def touch(self, entry: bytes) -> None:
        """The block was used now. Memory only; the disk learns of it within a second, once for many uses."""
        if self._index.touch(entry, self._clock()):
            with self._swap:
                self._dirty.add(entry)

    def new(self, entry: bytes) -> None:
        """A block was written: look at its size again later."""
        self._fresh.append((time.monotonic() + _SETTLED_S, entry))

    def audit(self, *, blocks: bool) -> None:
        """Somebody took files away behind our back: compare the books with the disk at the next tick."""
        self._audit_folders = True
        self._audit_blocks = self._audit_blocks or blocks

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def stop(self, timeout_s: float) -> bool:
        """Write the last uses and end; False if the disk did not let it in time."""
        self._stopped.set()
        if self._thread.is_alive():
            self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def flush(self) -> None:
        """Write the last uses that the disk does not know yet."""
        with self._swap:
            dirty, self._dirty = self._dirty, set()
        while dirty:
            entry = dirty.pop()
            facts = self._index.facts(entry)
            if facts is None:
                continue
            try:
                os.utime(f"{self._root}/{self._index.names.path(entry)}", ns=(facts[1], facts[1]))
            except FileNotFoundError:
                continue
            except OSError:
                # A disk that takes no writes now: keep them for a better time.
                with self._swap:
                    self._dirty |= dirty | {entry}
                return

    def _run(self) -> None:
        stopping = False
        while not stopping:
            stopping = self._stopped.wait(_TICK_S)
            try:
                self.flush()
                self._settle()
                self._audit()
                self._free = self._device.free()
            except OSError as error:
                log.debug("block store: %s", error)
            except Exception:
                log.exception("block store: the keeper failed")

    def _settle(self) -> None:
        now = time.monotonic()
        while self._fresh and self._fresh[0][0] <= now:
            entry = self._fresh.popleft()[1]
            with suppress(OSError):
                self._index.resized(entry, size_on_disk(os.lstat(f"{self._root}/{self._index.names.path(entry)}")))

    def _audit(self) -> None:
        if self._owned.heal():
            self.audit(blocks=True)
        if not self._audit_folders:
            return
        blocks, self._audit_folders, self._audit_blocks = self._audit_blocks, False, False
        try:
            self._surroundings.everything()
        except OSError:
            self.audit(blocks=blocks)
            raise
        for entry in self._index.entries() if blocks else ():
            birth = self._index.birth(entry)
            if not os.path.lexists(f"{self._root}/{self._index.names.path(entry)}"):
                self._remover.forget(self._index.take_bad(entry, birth))
