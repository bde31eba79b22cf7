"""The catalog: one SQLite file with what cannot be read off the blocks (names, forks, counters). docs/format.md."""

from __future__ import annotations

import logging
import sqlite3
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path

from kvstrata.engine.errors import Full
from kvstrata.store.errors import StoreError

__all__ = ["Catalog", "Statement", "put_aside"]

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
_FAILURES_KEPT = 256
FORGETS = "DELETE FROM refs"
"""What statements begin with that are carried out in the end, though their commit failed."""

log = logging.getLogger(__name__)

Statement = tuple[str, tuple[object, ...]]


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
        self._owed: dict[tuple[object, ...], Statement] = {}
        self._owed_first: list[Statement] = []
        self._queue: list[Statement] = []
        self._queued = self._done = 0
        self._queueing = threading.Lock()
        self._committing = threading.Lock()
        self._reading = threading.Lock()
        self._failures: deque[tuple[int, int, sqlite3.Error]] = deque(maxlen=_FAILURES_KEPT)

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

    def queue(self, statements: Iterable[Statement]) -> int:
        """Take statements in; the ticket to wait for."""
        with self._queueing:
            self._queue += statements
            self._queued += 1
            return self._queued

    def commit(self, ticket: int) -> None:
        """Wait until the statements of this ticket are committed. Full: they are not, and will not be."""
        if self._done < ticket:
            with self._committing:
                if self._done < ticket:
                    self._commit_queue()
        for first, last, error in list(self._failures):
            if first <= ticket <= last:
                raise Full(f"the catalog takes nothing: {error}", retry=True) from error

    def is_committed(self, ticket: int) -> bool:
        """True once `commit` would return at once, without Full."""
        return self._done >= ticket and not any(first <= ticket <= last for first, last, _ in list(self._failures))

    def _commit_queue(self) -> None:
        with self._queueing:
            statements, self._queue = self._queue, []
            first, last = self._done + 1, self._queued
        # What a failed commit could not forget, or write of the counters, is owed to the next one.
        statements = self._owed_first + statements
        self._owed.update((values[:2], (sql, values)) for sql, values in self._counters())
        try:
            self._db.execute("BEGIN IMMEDIATE")
            for sql, values in statements:
                self._db.execute(sql, values)
            for sql, values in self._owed.values():
                self._db.execute(sql, values)
            self._db.execute("COMMIT")
            self._owed.clear()
            self._owed_first = []
        except sqlite3.Error as error:
            with suppress(sqlite3.Error):
                self._db.execute("ROLLBACK")
            log.warning("engine: %s: %s", self.path, error)
            self._failures.append((first, last, error))
            # A key that is gone from memory must not be back after a restart.
            self._owed_first = [it for it in statements if it[0].startswith(FORGETS)]
        self._done = last

    def tend(self) -> None:
        """Commit what nobody waits for (counters too), and merge the log where it has grown. From one thread."""
        with suppress(Full):
            self.commit(self.queue(()))
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
            self.commit(self.queue(()))
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
