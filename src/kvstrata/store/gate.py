"""What may be asked of the disk now, and what was asked and has not been answered yet."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from kvstrata.store.deadline import Batch, Outcome, Result, Watch
from kvstrata.store.entries import Entries
from kvstrata.store.events import Events
from kvstrata.store.health import Health
from kvstrata.store.keys import BlockKey
from kvstrata.store.pool import LOAD, STORE
from kvstrata.store.settings import StoreSettings
from kvstrata.store.stuck import Stuck

__all__ = ["Gate"]


class Gate:
    """Makes batches and ends them by their deadlines; refuses them while the disk is suspect, and once closed.

    `reads`, `writes`: to be held around disk calls of callers' own threads. `closed`: nothing is admitted any more.
    """

    def __init__(self, root: Path, settings: StoreSettings, names: Entries, events: Events) -> None:
        self._names = names
        self._events = events
        self._health = Health(root)
        self._watch = Watch(self._late)
        self.closed = False
        self.reads, self.writes = Stuck(settings.load_deadline_s), Stuck(settings.store_deadline_s)

    @property
    def suspect(self) -> bool:
        """The disk does not answer in time."""
        return self._health.suspect or bool(self.reads)

    @property
    def no_loads(self) -> str:
        """Why nothing may be asked of the disk: closed, suspect; else empty."""
        if self.closed:
            return "closed"
        return "suspect" if self.suspect else ""

    @property
    def no_puts(self) -> str:
        """Why nothing may be written: closed, suspect; else empty."""
        return self.no_loads or ("suspect" if self._health.puts_suspect or self.writes else "")

    def admit(
        self, keys: Sequence[BlockKey], buffers: Sequence[memoryview], deadline_s: float, kind: int | None
    ) -> Batch:
        """A batch to begin with, if its future is not done: then it was refused. `kind`: LOAD, STORE; None: of neither,
        without buffers.
        """
        if kind is not None and len(keys) != len(buffers):
            raise ValueError(f"found: {len(keys)} keys and {len(buffers)} buffers; needed: one buffer a key")
        if not all(buffer.c_contiguous for buffer in buffers):
            raise ValueError("found: a buffer with gaps; needed: contiguous ones")
        plain = [buffer if buffer.format == "B" and buffer.ndim == 1 else buffer.cast("B") for buffer in buffers]
        entry_of = self._names.entry if kind == STORE else self._names.known
        batch = Batch(list(keys), [entry_of(key) for key in keys], plain, deadline_s, kind, self._tell)
        # Watched before the question: a close() in between either sees it there or is seen here.
        self._watch.add(batch)
        reason = self.no_loads if kind == LOAD else self.no_puts
        if reason or not keys:
            batch.expire(Outcome.ERROR, reason)
        return batch

    def close(self, timeout_s: float) -> None:
        """Admit no more, and wait for what was; what is not done by then is reported as EXPIRED."""
        self.closed = True
        self._watch.drain(timeout_s)
        for batch in self._watch.waiting():
            batch.expire(Outcome.EXPIRED, "closed")
        self._health.stop()

    def stop(self) -> None:
        """End the threads."""
        self._watch.stop(1.0)

    def _tell(self, kind: int | None, nbytes: int, seconds: float, result: Result) -> None:
        if kind == LOAD:
            self._events.on_load(nbytes, seconds, result.outcome, result.reason)
        elif kind == STORE:
            self._events.on_store(nbytes, seconds, result.outcome, result.reason)

    def _late(self, batch: Batch) -> None:
        if batch.future.done():
            return
        # Suspect first: who sees the EXPIRED result must not be promised the same block again.
        self._health.late(LOAD if batch.kind == LOAD else STORE, batch)
        batch.expire(Outcome.EXPIRED, "deadline")
