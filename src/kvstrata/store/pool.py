"""Worker threads for blocking I/O: loads before stores, and neither can keep the other from running."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable

__all__ = ["LOAD", "STORE", "Pool"]

LOAD, STORE = 0, 1

log = logging.getLogger(__name__)

Task = Callable[[], None]


class Pool:
    """`workers` + 1 daemon threads, of which at most `workers` load and at most `workers` store at a time.

    So a store storm leaves a thread to the first load, and a stream of loads leaves one to the stores.
    """

    def __init__(self, workers: int) -> None:
        self._most = workers
        self._queues: tuple[deque[Task], deque[Task]] = (deque(), deque())
        self._running = [0, 0]
        self._lock = threading.Lock()
        self._work = threading.Condition(self._lock)
        self._idle = 0
        self._stopped = False
        self._threads = [
            threading.Thread(target=self._run, name=f"kvstrata-io-{number}", daemon=True)
            for number in range(workers + 1)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, kind: int, tasks: Iterable[Task], *, first: bool = False) -> None:
        """Queue tasks; `first`: before those that wait. After stop() they are dropped."""
        with self._lock:
            if self._stopped:
                return
            queue, before = self._queues[kind], len(self._queues[kind])
            (queue.extendleft if first else queue.extend)(tasks)
            self._work.notify(min(len(queue) - before, self._idle))

    def stop(self, timeout_s: float) -> bool:
        """Drop what waits, join the threads; False if some did not return (a stuck disk: they are daemons)."""
        end = time.monotonic() + timeout_s
        with self._lock:
            self._stopped = True
            for queue in self._queues:
                queue.clear()
            self._work.notify_all()
        # A future's callback may be what closes the store.
        others = [thread for thread in self._threads if thread is not threading.current_thread()]
        for thread in others:
            thread.join(max(0.0, end - time.monotonic()))
        return not any(thread.is_alive() for thread in others)

    def _next(self) -> int | None:
        for kind in (LOAD, STORE):
            if self._queues[kind] and self._running[kind] < self._most:
                return kind
        return None

    def _run(self) -> None:
        while True:
            with self._lock:
                while (kind := self._next()) is None:
                    if self._stopped:
                        return
                    self._idle += 1
                    self._work.wait()
                    self._idle -= 1
                task = self._queues[kind].popleft()
                self._running[kind] += 1
            try:
                task()
            except Exception:
                log.exception("block store: a task failed")
            finally:
                with self._lock:
                    self._running[kind] -= 1
                del task
