"""The catalog: one SQLite file with what cannot be read off the blocks (names, forks, counters). docs/format.md."""

from __future__ import annotations

import logging
import sqlite3
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from itertools import islice
from pathlib import Path

from kvstrata.engine.errors import Full
from kvstrata.store.errors import StoreError

__all__ = ["OWED_MOST", "WRITTEN", "Catalog", "Statement", "Ticket", "drop_ref", "forget_ref", "put_aside", "put_ref"]

SCHEMA = 1
_TABLES = """
CREATE TABLE refs(tenant TEXT, key BLOB, digest BLOB, size INTEGER, version INTEGER, expires REAL,
                  PRIMARY KEY(tenant, key)) WITHOUT ROWID;
CREATE TABLE counters(tenant TEXT, name TEXT, value INTEGER, PRIMARY KEY(tenant, name)) WITHOUT ROWID;
CREATE TABLE forks(id INTEGER PRIMARY KEY, tenant TEXT, parent INTEGER, used REAL);
CREATE TABLE pages(fork INTEGER, key BLOB, digest BLOB, size INTEGER, PRIMARY KEY(fork, key)) WITHOUT ROWID;
"""
# Pages of the log; beyond it, it is merged into the file, which is the only time that the file itself is written.
_LOG_PAGES = 2048
# Statements of one transaction, unless they belong together.
_TOGETHER = 1000
OWED_MOST = 100_000
"""Deletions that are owed: beyond it, nothing that could add to them is begun."""
_PUT = "INSERT OR REPLACE INTO refs VALUES(?,?,?,?,?,?)"
_DROP = "DELETE FROM refs WHERE tenant=? AND key=?"
_FORGET = f"{_DROP} AND digest=?"

log = logging.getLogger(__name__)

Statement = tuple[str, tuple[object, ...]]


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

    def __init__(self, path: Path, *, durable: bool, counters: Callable[[], list[Statement]]) -> None:
        """Use `open`. `counters`: statements to add to each commit, for what changed since the last one."""
        self.path = path
        # SQLite gives its other files the mode of this one.
        path.touch(mode=0o600)
        path.chmod(0o600)
        self._db = sqlite3.connect(path, isolation_level=None, check_same_thread=False, timeout=10.0)
        self._other = sqlite3.connect(path, isolation_level=None, check_same_thread=False, timeout=10.0)
        for db in (self._db, self._other):
            db.execute("PRAGMA journal_mode=WAL")
            # NORMAL does not wait for the device, and the file is sound after a power failure all the same.
            db.execute(f"PRAGMA synchronous={'FULL' if durable else 'NORMAL'}")
            # Merging waits for the device: never in somebody's put, see `tend`.
            db.execute("PRAGMA wal_autocheckpoint=0")
        self._counters = counters
        self._late: dict[tuple[object, ...], Statement] = {}
        """Counters that a failed commit could not write."""
        self._owed: dict[Statement, None] = {}
        """What takes the place of changes that failed; before anything else is committed, all of these are."""
        self._queue: deque[Ticket] = deque()
        self._taken: list[Ticket] = []
        self._queueing = threading.Lock()
        self._committing = threading.Lock()
        self._reading = threading.Lock()

    @classmethod
    def open(cls, path: Path, *, durable: bool, counters: Callable[[], list[Statement]]) -> Catalog:
        """Create or open. A damaged file is put aside and an empty one begun. StoreError: another version's."""
        for last_try in (False, True):
            try:
                catalog = cls(path, durable=durable, counters=counters)
                catalog._prepare()
                return catalog
            except sqlite3.OperationalError as error:
                raise StoreError(
                    f"{path}: {error}", "a folder that can be written", "check the disk and the owner"
                ) from error
            except sqlite3.DatabaseError as error:
                if last_try:
                    raise
                put_aside(path, error)
        raise AssertionError("unreachable")

    def _prepare(self) -> None:
        version = self._db.execute("PRAGMA user_version").fetchone()[0]
        if version == 0:
            self._db.executescript(f"BEGIN; {_TABLES} PRAGMA user_version={SCHEMA}; COMMIT;")
        elif version != SCHEMA:
            raise StoreError(
                f"{self.path}: version {version}",
                f"version {SCHEMA}",
                "use the kvstrata that wrote it, or set KV_ENGINE_ROOT to a new folder",
            )

    # -- reading

    def rows(self, sql: str, values: tuple[object, ...] = ()) -> Iterator[tuple[object, ...]]:
        """Rows of a question, as of the last commit."""
        with self._reading:
            cursor = self._other.execute(sql, values)
            while some := cursor.fetchmany(1000):
                yield from some

    # -- writing

    def queue(self, statements: Iterable[Statement] = ()) -> Ticket:
        """Take statements in, to be committed together; the ticket to wait for."""
        ticket = Ticket(list(statements))
        with self._queueing:
            self._queue.append(ticket)
        return ticket

    def forget(self, statements: Sequence[Statement]) -> Ticket:
        """queue, for deletions that need not be one step: once this ticket is committed, all of them are."""
        for at in range(_TOGETHER, len(statements), _TOGETHER):
            self.queue(statements[at - _TOGETHER : at])
        return self.queue(statements[(len(statements) - 1) // _TOGETHER * _TOGETHER :])

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
            while self._queue and (not taken or count + len(self._queue[0].statements) <= _TOGETHER):
                taken.append(self._queue.popleft())
                count += len(taken[-1].statements)
        failed: Exception | None = None
        self._late.update((values[:2], (sql, values)) for sql, values in self._counters())
        try:
            while self._owed:
                some = list(islice(self._owed, _TOGETHER))
                self._write(some)
                for statement in some:
                    del self._owed[statement]
            self._write([it for ticket in taken for it in ticket.statements] + list(self._late.values()))
            self._late.clear()
        except Exception as error:  # whatever it is: those who wait must learn it
            failed = error
            log.warning("engine: %s: %s: %s", self.path, type(error).__name__, error)
            for ticket in taken:
                self._owed.update(dict.fromkeys(it for one in ticket.statements for it in _owed_for(one)))
        with self._queueing:
            self._taken = []
        for ticket in taken:
            ticket.statements, ticket.error = [], failed
            ticket.settled = True

    def _write(self, statements: list[Statement]) -> None:
        """All of them or none."""
        try:
            self._db.execute("BEGIN IMMEDIATE")
            for sql, values in statements:
                self._db.execute(sql, values)
            self._db.execute("COMMIT")
        except Exception:
            with suppress(sqlite3.Error):
                self._db.execute("ROLLBACK")
            raise

    def tend(self) -> None:
        """Commit what nobody waits for (counters too), and merge the log where it has grown. From one thread."""
        with suppress(Full):
            self.commit(self.queue())
        try:
            pages = self.path.with_name(self.path.name + "-wal").stat().st_size // 4096
            if pages > _LOG_PAGES:
                with self._reading:
                    self._other.execute("PRAGMA wal_checkpoint(PASSIVE)")
        except (OSError, sqlite3.Error) as error:
            log.warning("engine: %s: cannot merge the log: %s", self.path, error)

    def close(self) -> None:
        """Commit the rest and close."""
        with suppress(Full):
            self.commit(self.queue())
        for db in (self._other, self._db):
            with suppress(sqlite3.Error):
                db.close()


def put_aside(path: Path, error: sqlite3.DatabaseError) -> None:
    """Out of the way with a damaged catalog, which must be closed; OSError."""
    aside = path.with_name(path.name + ".damaged")
    log.error("engine: %s: %s. It is now %s; the cache begins empty", path, error, aside.name)
    path.replace(aside)
    for end in ("-wal", "-shm"):
        path.with_name(path.name + end).unlink(missing_ok=True)
