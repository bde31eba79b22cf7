"""Whether it makes sense to ask the engine. One that does not answer is asked by a single thread, now and then."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

__all__ = ["Breaker"]

logger = logging.getLogger("lmcache.kvstrata.remote")

#: So many calls in a row that failed, or one that took its whole deadline.
_FAILURES = 3
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.5, 15.0


class Breaker:
    """closed: ask. open: do not. half-open: `probe` runs, in a thread of its own, so that no request pays for it.

    `probe` returns "" when the engine serves, else why not. Thread-safe.
    """

    def __init__(self, probe: Callable[[], str], where: str) -> None:
        self._probe, self._where = probe, where
        self._lock = threading.Lock()
        self._failures = 0
        self._why = ""
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    @property
    def open(self) -> bool:
        return bool(self._why)

    @property
    def why(self) -> str:
        return self._why

    def success(self) -> None:
        self._failures = 0

    def failure(self, why: str, *, at_once: bool = False) -> None:
        with self._lock:
            self._failures += 1
            if self._why or self._stop.is_set() or not (at_once or self._failures >= _FAILURES):
                return
            self._why = why or "unknown"
            self._thread = threading.Thread(target=self._watch, name="kvstrata-remote-probe", daemon=True)
            self._thread.start()
        self._say(why)

    def _say(self, why: str) -> None:
        logger.warning("kvstrata: the engine at %s is not asked until it answers again: %s", self._where, why)

    def close(self) -> None:
        """Ends the watch; `probe` must have been made to return."""
        self._stop.set()
        with self._lock:
            thread = self._thread
        if thread is not None:
            thread.join()

    def _watch(self) -> None:
        pause = _FIRST_PAUSE_S
        while not self._stop.wait(pause):
            why = self._probe()
            if not why:
                with self._lock:
                    self._why, self._failures, self._thread = "", 0, None
                logger.warning("kvstrata: the engine at %s answers again", self._where)
                return
            if why != self._why:
                self._say(why)
            self._why = why
            pause = min(2 * pause, _LONGEST_PAUSE_S)
