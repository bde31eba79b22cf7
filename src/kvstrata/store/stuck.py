"""Whether a disk call of somebody's own thread does not come back."""

from __future__ import annotations

import threading
import time
from types import TracebackType

__all__ = ["Stuck"]

_LOOK_S = 0.1


class Stuck:
    """`with stuck:` around disk calls. While one of them takes longer than `limit_s` nobody else should begin one: a
    server would lose one thread after the other to a disk that hangs.
    """

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        # A thread has one call at a time, and its own place here: no lock is needed.
        self._since: dict[int, float] = {}
        self._looked = 0.0
        self._found = False

    def __enter__(self) -> None:
        self._since[threading.get_ident()] = time.monotonic()

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._since.pop(threading.get_ident(), None)

    def __bool__(self) -> bool:
        """True while a call hangs, as of the last tenth of a second."""
        now = time.monotonic()
        if now - self._looked > _LOOK_S:
            self._looked = now
            self._found = min(list(self._since.values()), default=now) < now - self._limit_s
        return self._found
