"""Finished tasks of one kind: deposit the result, then signal; a result is handed out once."""

from __future__ import annotations

import contextlib
import os
import threading
from typing import Generic, TypeVar

__all__ = ["Completions"]

_T = TypeVar("_T")


class Completions(Generic[_T]):
    """Results by task id behind an eventfd of their own. Thread-safe.

    LMCache polls the descriptor and then asks for results, so a signal before its result would be lost
    (lmcache 0.5.3 v1/distributed/l2_adapters/base.py).
    """

    def __init__(self) -> None:
        self._fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._lock = threading.Lock()
        self._done: dict[int, _T] = {}
        self._open = True

    def fileno(self) -> int:
        return self._fd

    def deposit(self, task: int, result: _T) -> None:
        """Never blocks, never raises. After `close` it does nothing: the number may be somebody else's file by then."""
        with self._lock:
            if not self._open:
                return
            self._done[task] = result
            with contextlib.suppress(OSError):
                os.eventfd_write(self._fd, 1)

    def pop(self, task: int) -> _T | None:
        """The result of `task` once; None before it is there and ever after."""
        with self._lock:
            return self._done.pop(task, None)

    def pop_all(self) -> dict[int, _T]:
        with self._lock:
            done, self._done = self._done, {}
            return done

    def close(self) -> None:
        """Idempotent."""
        with self._lock:
            if self._open:
                self._open = False
                os.close(self._fd)
