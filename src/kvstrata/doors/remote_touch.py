"""Tells the engine which blocks LMCache's RAM has served, so that the hottest prefix is not the oldest there.

L1 answers a hot prefix alone; without this it would age out of the engine and die with L1. Keys are gathered and asked
for together, now and then: being asked for is a use.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakMethod

__all__ = ["Touches"]

logger = logging.getLogger("lmcache.kvstrata.remote")

_EVERY_S = 10.0
_AT_ONCE = 2000
_KEPT = 100_000


class Touches:
    """Gathers LMCache's L1_KEYS_ACCESSED. `ask` gets the names, at most every `every_s`; it may raise nothing."""

    def __init__(self, ask: Callable[[Sequence[str]], None], every_s: float = _EVERY_S) -> None:
        self._ask, self._every_s = ask, every_s
        self._lock = threading.Lock()
        self._names: dict[str, None] = {}
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def listen(self) -> None:
        """Subscribe to LMCache's event bus; without LMCache in this process there is nothing to hear."""
        try:
            from lmcache.v1.distributed.l2_adapters.native_connector_l2_adapter import _object_key_to_string
            from lmcache.v1.mp_observability.event import EventType
            from lmcache.v1.mp_observability.event_bus import get_event_bus
        except ImportError:
            return
        self._spell = _object_key_to_string
        heard = WeakMethod(self._heard)  # the bus has no unsubscribe: it must not keep a closed client alive
        get_event_bus().subscribe(EventType.L1_KEYS_ACCESSED, lambda event: (f := heard()) and f(event))
        self._thread = threading.Thread(target=self._run, name="kvstrata-remote-touch", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join()

    def _heard(self, event: Any) -> None:
        names = [self._spell(key) for key in event.metadata.get("keys", ())]
        with self._lock:
            if len(self._names) < _KEPT:
                self._names.update(dict.fromkeys(names))

    def _run(self) -> None:
        while not self._stop.wait(self._every_s):
            with self._lock:
                names, self._names = list(self._names), {}
            for at in range(0, len(names), _AT_ONCE):
                self._ask(names[at : at + _AT_ONCE])
