"""Batches of calls over a few connections, each batch answered by its deadline, whatever the engine does.

A call that has begun ends by its own deadline, because its socket does; one that waits for a connection is cancelled at
that moment. So a task is reported when no thread touches a buffer of it, and never later than its deadline.
"""

from __future__ import annotations

import heapq
import itertools
import threading
import time
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from typing import Generic, TypeVar

__all__ = ["Lane", "Task", "Timer"]

_WAITING, _RUNNING, _DONE = range(3)
_C = TypeVar("_C")


class Task:
    """`count` parts, each True or False in the end. `report` is called once, with all, when the last is done."""

    def __init__(self, count: int, deadline: float, report: Callable[[list[bool]], None]) -> None:
        self.deadline = deadline
        self._report = report
        self._lock = threading.Lock()
        self._state = [_WAITING] * count
        self._result = [False] * count
        self._left = count
        self._expired = False

    def begin(self, parts: Sequence[int]) -> bool:
        """A thread takes `parts`; False when they have been given up, and then it must not touch their buffers."""
        with self._lock:
            if any(self._state[part] != _WAITING for part in parts):
                return False
            for part in parts:
                self._state[part] = _RUNNING
            return True

    def end(self, parts: Sequence[int], results: Sequence[bool]) -> None:
        with self._lock:
            for part, result in zip(parts, results, strict=True):
                self._state[part], self._result[part] = _DONE, result
            self._left -= len(parts)
            last = not self._left and bool(parts)
        if last:
            self._report(self._result)

    def release(self, parts: Sequence[int]) -> None:
        """Let other threads take what `begin` took: given up at once where the time is over."""
        with self._lock:
            for part in parts:
                self._state[part] = _WAITING
            expired = self._expired
        if expired:
            self.expire()

    def expire(self) -> None:
        """Give up what no thread has taken."""
        with self._lock:
            self._expired = True
            waiting = [part for part, state in enumerate(self._state) if state == _WAITING]
            for part in waiting:
                self._state[part] = _DONE
            self._left -= len(waiting)
            last = not self._left and bool(waiting)
        if last:
            self._report(self._result)


class Timer:
    """Expires tasks at their deadlines."""

    def __init__(self) -> None:
        self._tasks: list[tuple[float, int, Task]] = []
        self._count = itertools.count()
        self._wake = threading.Condition()
        self._open = True
        self._thread = threading.Thread(target=self._run, name="kvstrata-remote-timer", daemon=True)
        self._thread.start()

    def watch(self, task: Task) -> None:
        with self._wake:
            heapq.heappush(self._tasks, (task.deadline, next(self._count), task))
            self._wake.notify()

    def close(self) -> None:
        with self._wake:
            self._open = False
            self._wake.notify()
        self._thread.join()

    def _run(self) -> None:
        while True:
            with self._wake:
                if not self._open:
                    return
                now = time.monotonic()
                if not self._tasks or self._tasks[0][0] > now:
                    self._wake.wait(self._tasks[0][0] - now if self._tasks else None)
                    continue
                _, _, task = heapq.heappop(self._tasks)
            task.expire()


class Lane(Generic[_C]):
    """A thread for each of `connections`; jobs are begun in the order in which they came, and get the connection."""

    def __init__(self, name: str, connections: Sequence[_C]) -> None:
        self._jobs: SimpleQueue[Callable[[_C], None] | None] = SimpleQueue()
        self._threads = [
            threading.Thread(target=self._run, args=(connection,), name=f"kvstrata-{name}-{number}", daemon=True)
            for number, connection in enumerate(connections)
        ]
        for thread in self._threads:
            thread.start()

    def put(self, job: Callable[[_C], None]) -> None:
        self._jobs.put(job)

    def close(self) -> None:
        """Returns when no thread runs any more."""
        for _ in self._threads:
            self._jobs.put(None)
        for thread in self._threads:
            thread.join()

    def _run(self, connection: _C) -> None:
        while (job := self._jobs.get()) is not None:
            job(connection)
            del job  # it holds the caller's buffer
