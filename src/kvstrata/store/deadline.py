"""Tasks that end in time, whatever the disk does: the lease on the caller's buffers, the batch, and who watches."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from enum import StrEnum
from types import TracebackType

from kvstrata.store.keys import BlockKey
from kvstrata.store.lease import Expired

__all__ = ["Batch", "Outcome", "Result", "TaskLease", "Watch"]

log = logging.getLogger(__name__)


class Outcome(StrEnum):
    """How it went for one key."""

    HIT = "hit"
    STORED = "stored"
    PRESENT = "present"
    MISS = "miss"
    CORRUPT = "corrupt"
    ERROR = "error"
    EXPIRED = "expired"
    DELETED = "deleted"


@dataclass(frozen=True, slots=True)
class Result:
    """The outcome, a reason word where it is a bad one, and bytes: of the buffer for HIT, on disk for the others."""

    outcome: Outcome
    reason: str = ""
    nbytes: int = 0


class TaskLease:
    """The right of all threads of one batch to touch its buffers. A context manager of itself: `touching` is hot."""

    __slots__ = ("_changed", "_ended", "_lock", "_stops", "_touching")

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._ended = False
        self._touching = 0
        self._stops: list[Callable[[], None]] = []

    @property
    def ended(self) -> bool:
        """True once the task was reported."""
        return self._ended

    def touching(self) -> AbstractContextManager[None]:
        """See Lease."""
        return self

    def __enter__(self) -> None:
        with self._lock:
            if self._ended:
                raise Expired
            self._touching += 1

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._lock:
            self._touching -= 1
            if self._ended and not self._touching:
                self._changed.notify_all()

    @contextmanager
    def ending(self, stop: Callable[[], None]) -> Iterator[None]:
        """See Lease."""
        with self._lock:
            if self._ended:
                raise Expired
            self._stops.append(stop)
        try:
            yield
        finally:
            with self._lock:
                self._stops.remove(stop)

    def publish(self) -> bool:
        """False once the task was reported: what was written must not become visible."""
        return not self._ended

    def end(self) -> None:
        """Nobody may begin to touch any more; returns when nobody does: memory copies only, so in no time."""
        with self._changed:
            self._ended = True
            for stop in self._stops:
                stop()
            while self._touching:
                self._changed.wait()


class Batch:
    """One call: a result a key, and a future that gets them all, at the deadline at the latest."""

    def __init__(
        self,
        keys: Sequence[BlockKey],
        entries: Sequence[bytes],
        buffers: Sequence[memoryview],
        deadline_s: float,
        kind: int | None,
        on_result: Callable[[int | None, int, float, Result], None],
    ) -> None:
        self.keys = keys
        self.entries = entries
        self.buffers = buffers
        self.kind = kind
        self.began = time.monotonic()
        self.deadline = self.began + deadline_s
        self.lease = TaskLease()
        self.future: Future[list[Result]] = Future()
        # Nobody cancels it: a task that has begun ends by itself.
        self.future.set_running_or_notify_cancel()
        self._results: list[Result | None] = [None] * len(keys)
        self._left = len(keys)
        self._lock = threading.Lock()
        self._on_result = on_result
        self.on_done: Callable[[Batch], None] | None = None
        self.running = 0

    def enter(self) -> None:
        """A thread begins I/O for this batch."""
        with self._lock:
            self.running += 1

    def leave(self) -> None:
        """That thread is back, reported or not."""
        with self._lock:
            self.running -= 1

    @property
    def over(self) -> bool:
        """True once the future has its result (or is about to get it)."""
        return self.lease.ended

    def settle(self, at: int, result: Result) -> bool:
        """The end of one key; False if the batch was reported before. The last one completes the future."""
        with self._lock:
            if self._left == 0 or self._results[at] is not None:
                return False
            self._results[at] = result
            self._left -= 1
            last = self._left == 0
        self._tell(at, result)
        if last:
            self._complete()
        return True

    def expire(self, outcome: Outcome, reason: str) -> bool:
        """Report now: keys without a result get this one. True if there were any."""
        # First the lease, so that nobody touches a buffer any more when its result can be seen.
        self.lease.end()
        with self._lock:
            open_ones = [at for at, result in enumerate(self._results) if result is None]
            for at in open_ones:
                self._results[at] = Result(outcome, reason)
            self._left = 0
        for at in open_ones:
            self._tell(at, Result(outcome, reason))
        if open_ones or (not self._results and not self.future.done()):
            self._complete()
        return bool(open_ones)

    def _tell(self, at: int, result: Result) -> None:
        with suppress(Exception):
            self._on_result(
                self.kind, len(self.buffers[at]) if self.buffers else 0, time.monotonic() - self.began, result
            )

    def _complete(self) -> None:
        self.lease.end()
        # Not by a callback of the future: who keeps that would keep the buffers. Before its result: a callback may
        # close the store, which waits for open batches.
        if self.on_done is not None:
            self.on_done(self)
        self.future.set_result([result for result in self._results if result is not None])


class Watch:
    """A thread that ends batches at their deadlines."""

    def __init__(self, on_late: Callable[[Batch], None]) -> None:
        self._on_late = on_late
        self._batches: set[Batch] = set()
        self._changed = threading.Condition()
        self._stopped = False
        self._next = float("inf")
        self._thread = threading.Thread(target=self._run, name="kvstrata-watch", daemon=True)
        self._thread.start()

    def add(self, batch: Batch) -> None:
        """Watch over a batch until its future is done."""
        batch.on_done = self._drop
        with self._changed:
            self._batches.add(batch)
            if batch.deadline < self._next:
                # All: close() may wait on the same condition.
                self._changed.notify_all()

    def waiting(self) -> list[Batch]:
        """Batches whose future is not done."""
        with self._changed:
            return list(self._batches)

    def stop(self, timeout_s: float) -> None:
        """End the thread."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()
        if self._thread is not threading.current_thread():
            self._thread.join(timeout_s)

    def _drop(self, batch: Batch) -> None:
        with self._changed:
            self._batches.discard(batch)
            if not self._batches:
                self._changed.notify_all()

    def drain(self, timeout_s: float) -> bool:
        """Wait until no batch is open; False if some still are at the timeout."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._batches, timeout_s)

    def _run(self) -> None:
        while True:
            with self._changed:
                if self._stopped:
                    return
                now = time.monotonic()
                late = [batch for batch in self._batches if batch.deadline <= now]
                if not late:
                    self._next = min((batch.deadline for batch in self._batches), default=float("inf"))
                    self._changed.wait(None if self._next == float("inf") else self._next - now)
                    continue
            for batch in late:
                try:
                    self._on_late(batch)
                except Exception:
                    log.exception("block store: reporting a late task failed")
                finally:
                    self._drop(batch)
