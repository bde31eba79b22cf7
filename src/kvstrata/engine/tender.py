"""The engine's own thread, for what nobody waits for: ends, deletions from the disks, counters, the catalog's log."""

from __future__ import annotations

import logging
import threading
import time

from kvstrata.engine.branches import Branches
from kvstrata.engine.core import Core
from kvstrata.engine.expiries import Expiries
from kvstrata.engine.leases import Leases

__all__ = ["Tender"]

_TICK_S = 0.5
# However often it is woken: many small deletions are one round.
_REST_S = 0.05

log = logging.getLogger(__name__)


class Tender:
    """What it has not done yet when the process dies is found at the next start, but for half a second of counted hits
    and misses.
    """

    def __init__(self, core: Core, leases: Leases, branches: Branches, expiries: Expiries) -> None:
        self._core = core
        self._leases = leases
        self._branches = branches
        self._expiries = expiries
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvstrata-engine", daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def stop(self, timeout_s: float) -> None:
        """End after the round that is under way."""
        self._stopped.set()
        self._core.wake.set()
        if self._thread.is_alive():
            self._thread.join(timeout_s)

    def _run(self) -> None:
        while not self._stopped.is_set():
            self._core.wake.wait(_TICK_S)
            self._core.wake.clear()
            try:
                self._round()
            except Exception:
                log.exception("engine: the tender failed")
            self._stopped.wait(_REST_S)

    def _round(self) -> None:
        with self._core.lock:
            self._expiries.end(time.time())
            self._leases.end(time.monotonic())
        self._branches.end_idle()
        self._core.sweep()
        self._core.catalog.tend()
