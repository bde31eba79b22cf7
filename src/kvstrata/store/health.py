"""Whether the disk answers: what is late makes the store suspect until the disk is seen to work again."""

from __future__ import annotations

import logging
import os
import threading
import time
from contextlib import suppress
from pathlib import Path

from kvstrata.store.deadline import Batch
from kvstrata.store.pool import LOAD, STORE
from kvstrata.store.root import FORMAT_FILE

__all__ = ["Health"]

_PAUSE_S = 0.25

log = logging.getLogger(__name__)


class Health:
    """A late load makes everything suspect, a late put only the puts: what the page cache holds can still be read.

    It ends when every call of the late tasks has come back and a small file can be read from the device.
    """

    def __init__(self, root: Path) -> None:
        self._file = root / FORMAT_FILE
        self._root = root
        self._late: tuple[list[Batch], list[Batch]] = ([], [])
        self._lock = threading.Lock()
        self._probing = False
        self._stopped = threading.Event()

    @property
    def suspect(self) -> bool:
        """Nothing should be asked of the disk now."""
        return bool(self._late[LOAD])

    @property
    def puts_suspect(self) -> bool:
        """Nothing should be written now."""
        return bool(self._late[LOAD] or self._late[STORE])

    def late(self, kind: int, batch: Batch) -> None:
        """A batch ran into its deadline."""
        with self._lock:
            self._late[kind].append(batch)
            if self._probing or self._stopped.is_set():
                return
            self._probing = True
        log.warning("block store: %s does not answer in time; it is left alone until it does", self._root)
        threading.Thread(target=self._probe, name="kvstrata-probe", daemon=True).start()

    def stop(self) -> None:
        """No more probing, and no more hold on anybody's buffers."""
        self._stopped.set()
        with self._lock:
            for batches in self._late:
                batches.clear()

    def _probe(self) -> None:
        began = time.monotonic()
        while not self._stopped.wait(_PAUSE_S):
            with self._lock:
                late = [*self._late[LOAD], *self._late[STORE]]
            if any(batch.running for batch in late) or not self._reads():
                continue
            with self._lock:
                for batches in self._late:
                    batches[:] = [batch for batch in batches if batch not in late]
                if any(self._late):
                    continue
                self._probing = False
            log.warning("block store: %s answers again after %.1f s", self._root, time.monotonic() - began)
            return

    def _reads(self) -> bool:
        """True once a read from the device came back, whatever it said: an error is an answer."""
        with suppress(OSError):
            fd = os.open(self._file, os.O_RDONLY | os.O_CLOEXEC)
            try:
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
                os.pread(fd, 4096, 0)
            finally:
                os.close(fd)
        return True
