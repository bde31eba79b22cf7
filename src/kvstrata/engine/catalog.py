"""The catalog: what cannot be read off the blocks (names, forks, counters). Changes wait here for their commit."""

from __future__ import annotations

import logging
import sqlite3
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from itertools import islice

from kvstrata.engine.catalog_file import CatalogFile, Statement
from kvstrata.engine.errors import Full

__all__ = ["OWED_MOST", "WRITTEN", "Catalog", "Statement", "Ticket", "drop_ref", "forget_ref", "put_ref"]

OWED_MOST = 100_000
"""Deletions that are owed: beyond it, nothing that could add to them is begun."""
_PUT = "INSERT OR REPLACE INTO refs VALUES(?,?,?,?,?,?)"
_DROP = "DELETE FROM refs WHERE tenant=? AND key=?"
_FORGET = f"{_DROP} AND digest=?"

log = logging.getLogger(__name__)


class Ticket:
    """What was queued together. `settled`: it was tried; `error`: why it failed."""

    __slots__ = ("error", "settled", "statements")

    def __init__(self, statements: list[Statement], *, settled: bool = False) -> None:
        self.statements = statements
        self.settled = settled
        self.error: Exception | None = None

    @property
    def committed(self) -> bool:
        """True once `commit` would return at once, without Full."""
        return self.settled and self.error is None


WRITTEN = Ticket([], settled=True)
"""The ticket of what was read from the catalog."""


def put_ref(tenant: str, key: bytes, digest: bytes, size: int, version: int | None, expires: float | None) -> Statement:
    """The key means that content."""
    return _PUT, (tenant, key, digest, size, version, expires)


def drop_ref(tenant: str, key: bytes) -> Statement:
    """The key means nothing any more."""
    return _DROP, (tenant, key)


def forget_ref(tenant: str, key: bytes, digest: bytes) -> Statement:
    """The key does not mean that content any more."""
    return _FORGET, (tenant, key, digest)


def _owed_for(statement: Statement) -> list[Statement]:
    """What has to be done in place of a statement that failed: a deletion must come true in the end, and a key whose
    new value was refused means nothing in memory, so its old row has to go.
    """
    sql, values = statement
    if sql == _PUT:
        return [(_DROP, values[:2])]
    return [statement] if sql.startswith("DELETE") else []


class Catalog:
    """Statements are queued in the order in which memory changed, and committed by whoever waits first, for all others
    as well (group commit). What `commit` returned for survives the end of the process; with `durable`, of the machine.
    """

    def __init__(
        self,
        file: CatalogFile,
        counters: Callable[[], list[Statement]],
        grown: Callable[[], object] = lambda: None,
    ) -> None:
        """`counters`: statements for what was counted since they were asked for last; `grown` is called when `tend`
        should be, soon.
        """
        self.file, self.room, self.rows = file, file.room, file.rows
        self._counters, self._grown = counters, grown
        self.crowded = False
        """The file is nearly as large as it may be: rows have to go."""
        self._counting = False
        self._late: dict[tuple[object, ...], Statement] = {}
        """Counters that a failed commit could not write."""
        self._owed: dict[Statement, None] = {}
        """What takes the place of changes that failed; before anything else is committed, all of these are."""
        self._queue: deque[Ticket] = deque()
        self._taken: list[Ticket] = []
        self._queueing = threading.Lock()
        self._committing = threading.Lock()

    def queue(self, statements: Iterable[Statement] = ()) -> Ticket:
        """Take statements in, to be committed together; the ticket to wait for."""
        ticket = Ticket(list(statements))
        with self._queueing:
            self._queue.append(ticket)
        return ticket

    def queue_counters(self) -> Ticket:
        """The ticket of what was counted up to now. Puts do not wait for that: it would be half of their commit."""
        self._counting = True
        return self.queue()

    def forget(self, statements: Sequence[Statement]) -> Ticket:
        """queue, for deletions that need not be one step: once this ticket is committed, all of them are."""
        step = self.room.together
        for at in range(step, len(statements), step):
            self.queue(statements[at - step : at])
        return self.queue(statements[max(len(statements) - 1, 0) // step * step :])

    def commit(self, ticket: Ticket) -> None:
        """Wait until its statements are committed. Full: they are not, and will not be (but for deletions)."""
        while not ticket.settled:
            with self._committing:
                if not ticket.settled:
                    self._commit_some()
        if ticket.error is not None:
            raise Full(f"the catalog takes nothing: {ticket.error}", retry=True) from ticket.error

    def settle(self) -> None:
        """Wait until nothing is queued or owed: what memory says is what the next start finds. Full."""
        with self._queueing:
            settled = not (self._queue or self._taken or self._owed)
        if not settled:
            self.commit(self.queue())

    def admit(self) -> None:
        """Full where so much is owed that more changes must wait until something can be written again."""
        if len(self._owed) >= OWED_MOST:
            self.commit(self.queue())

    def _commit_some(self) -> None:
        """Those that are in the queue now, or as many as go into one step. Under `_committing`."""
        with self._queueing:
            taken, count = self._taken, 0  # empty
            while self._queue and (not taken or count + len(self._queue[0].statements) <= self.room.together):
                taken.append(self._queue.popleft())
                count += len(taken[-1].statements)
        failed: Exception | None = None
        try:
            if self._counting:
                self._counting = False
                self._late.update((values[:2], (sql, values)) for sql, values in self._counters())
            while self._owed:
                some = list(islice(self._owed, self.room.together))
                self.file.write(some)
                for statement in some:
                    del self._owed[statement]
            self.file.write([it for ticket in taken for it in ticket.statements] + list(self._late.values()))
            self._late.clear()
        except Exception as error:  # whatever it is: those who wait must learn it
            failed = error
            self.crowded = self.crowded or self.file.at_its_end(error)
            log.warning("engine: %s: %s: %s", self.file.path, type(error).__name__, error)
            for ticket in taken:
                self._owed.update(dict.fromkeys(it for one in ticket.statements for it in _owed_for(one)))
        with self._queueing:
            self._taken = []
        for ticket in taken:
            ticket.statements, ticket.error = [], failed
            ticket.settled = True
        if self.file.log_bytes() > self.room.log // 4:
            self._grown()

    def tend(self) -> None:
        """Commit what nobody waits for (counters too), and merge the log where it has grown. From one thread."""
        with suppress(Full):
            self.commit(self.queue_counters())
        try:
            if self.file.log_bytes() > self.room.log // 4:
                self.file.merge_log()
                with self._committing:
                    self.file.empty_log()
            self.crowded = self.crowded or self.file.nearly_full()
        except (OSError, sqlite3.Error) as error:
            log.warning("engine: %s: cannot merge the log: %s", self.file.path, error)

    def shrink(self) -> None:
        """Write what is queued, and give back what the file takes beyond its room. At the start, alone."""
        with suppress(Full):  # later, then: a disk that takes nothing must not keep the engine from serving
            self.settle()
            self.file.shrink()

    def close(self) -> None:
        """Commit the rest and close."""
        with suppress(Full):
            self.commit(self.queue_counters())
        self.file.close()
