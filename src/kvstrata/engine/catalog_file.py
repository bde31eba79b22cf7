"""The catalog's file: one SQLite database, its log, and the bytes that both may take (docs/format.md)."""

from __future__ import annotations

import logging
import os
import sqlite3
import threading
from collections.abc import Generator
from contextlib import suppress
from pathlib import Path

from kvstrata.engine.room import PAGE, Room
from kvstrata.store.errors import StoreError

__all__ = ["CatalogFile", "Statement", "put_aside"]

SCHEMA = 1
_TABLES = """
CREATE TABLE refs(tenant TEXT, key BLOB, digest BLOB, size INTEGER, version INTEGER, expires REAL,
                  PRIMARY KEY(tenant, key)) WITHOUT ROWID;
CREATE TABLE counters(tenant TEXT, name TEXT, value INTEGER, PRIMARY KEY(tenant, name)) WITHOUT ROWID;
CREATE TABLE forks(id INTEGER PRIMARY KEY, tenant TEXT, parent INTEGER, used REAL);
CREATE TABLE pages(fork INTEGER, key BLOB, digest BLOB, size INTEGER, PRIMARY KEY(fork, key)) WITHOUT ROWID;
"""
# Pages that one transaction may want.
_NEAR = 64

log = logging.getLogger(__name__)

Statement = tuple[str, tuple[object, ...]]


class CatalogFile:
    """One writes at a time, and nobody else writes while `empty_log` runs: the caller's business. Anybody may read."""

    def __init__(self, path: Path, *, durable: bool, room: Room) -> None:
        """Use `open`."""
        self.path, self.room = path, room
        self._durable = durable
        self._reading = threading.Lock()
        # Asked twice a commit: as text, which is quicker than a Path.
        self._log = str(self._beside("-wal"))
        self._connect()

    def _connect(self) -> None:
        # SQLite gives its other files the mode of this one.
        self.path.touch(mode=0o600)
        self.path.chmod(0o600)
        self.db = sqlite3.connect(self.path, isolation_level=None, check_same_thread=False, timeout=10.0)
        # It merges the log: a stranger who reads must not hold up those who wait for that.
        self._other = sqlite3.connect(self.path, isolation_level=None, check_same_thread=False, timeout=0.2)
        for db in (self.db, self._other):
            db.execute("PRAGMA journal_mode=WAL")
            # NORMAL does not wait for the device, and the file is sound after a power failure all the same.
            db.execute(f"PRAGMA synchronous={'FULL' if self._durable else 'NORMAL'}")
            # Merging waits for the device: not in somebody's put, if `tend` comes in time.
            db.execute("PRAGMA wal_autocheckpoint=0")
            db.execute(f"PRAGMA journal_size_limit={self.room.log // 2}")
            db.execute(f"PRAGMA max_page_count={self.room.file // PAGE}")

    @classmethod
    def open(cls, path: Path, *, durable: bool, room: Room) -> CatalogFile:
        """Create or open. A damaged file is put aside and an empty one begun. StoreError: another version's."""
        for last_try in (False, True):
            try:
                file = cls(path, durable=durable, room=room)
                file._prepare()
                return file
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
        try:
            self.empty_log()
        except sqlite3.OperationalError as error:  # a full disk is no reason not to serve what is there
            log.warning("engine: %s: its log cannot be merged: %s", self.path, error)
        version = _number(self.db, "user_version")
        if version == 0:
            self.db.executescript(f"BEGIN; {_TABLES} PRAGMA user_version={SCHEMA}; COMMIT;")
        elif version != SCHEMA:
            raise StoreError(
                f"{self.path}: version {version}",
                f"version {SCHEMA}",
                "use the kvstrata that wrote it, or set KV_ENGINE_ROOT to a new folder",
            )

    def rows(self, sql: str, values: tuple[object, ...] = ()) -> Generator[tuple[object, ...]]:
        """Rows of a question, as of the last commit."""
        with self._reading:
            cursor = self._other.execute(sql, values)
            while some := cursor.fetchmany(1000):
                yield from some

    def write(self, statements: list[Statement]) -> None:
        """All of them or none. sqlite3.Error and what else SQLite makes of wrong values."""
        size = self.log_bytes()
        if size > self.room.log // 2 and not self.empty_log():
            raise sqlite3.OperationalError(f"its log has {size} bytes and cannot be merged: who else reads the file?")
        try:
            if len(statements) == 1:  # a transaction of its own
                self.db.execute(*statements[0])
                return
            self.db.execute("BEGIN IMMEDIATE")
            for sql, values in statements:
                self.db.execute(sql, values)
            self.db.execute("COMMIT")
        except Exception:
            with suppress(sqlite3.Error):
                self.db.execute("ROLLBACK")
            raise

    def merge_log(self) -> None:
        """Most of it, while others write."""
        with self._reading:
            self._other.execute("PRAGMA wal_checkpoint(PASSIVE)")

    def disk_bytes(self) -> int:
        """Of the file, the log and its index."""
        return sum(_size(self._beside(end)) for end in ("", "-wal", "-shm"))

    def shrink(self) -> None:
        """Give back what a file takes that was allowed to be larger. At the start, alone."""
        most = self.room.file // PAGE
        if _number(self.db, "page_count") <= most:
            return
        new = self._beside(".new")
        new.unlink(missing_ok=True)
        new.touch(mode=0o600)
        try:
            if not self.empty_log():
                raise sqlite3.OperationalError("somebody else reads it")
            self.db.execute("VACUUM INTO ?", (str(new),))
            with new.open("rb") as file:
                os.fsync(file.fileno())
        except (OSError, sqlite3.Error) as error:
            log.warning("engine: %s stays larger than KV_ENGINE_CATALOG_BYTES allows: %s", self.path, error)
            new.unlink(missing_ok=True)
            return
        self.close()
        log.info("engine: %s: from %d to %d bytes", self.path, _size(self.path), _size(new))
        for end in ("-wal", "-shm"):
            self._beside(end).unlink(missing_ok=True)
        new.replace(self.path)
        self._connect()

    def log_bytes(self) -> int:
        """Of the log."""
        return _size(self._log)

    def empty_log(self) -> bool:
        """Empty the log into the file; False: somebody else reads it. Nobody may be writing."""
        with self._reading:
            busy, _, _ = self._other.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
        return not busy

    def nearly_full(self) -> bool:
        """A sixteenth of the pages that it may have is left."""
        with self._reading:
            used = _number(self._other, "page_count") - _number(self._other, "freelist_count")
        return used > self.room.file // PAGE * 15 // 16

    def at_its_end(self, error: Exception) -> bool:
        """The file has no room left; it is not the disk."""
        if getattr(error, "sqlite_errorcode", None) != sqlite3.SQLITE_FULL:
            return False
        with suppress(sqlite3.Error):
            # What was rolled back has freed its pages again: near enough.
            return _number(self.db, "page_count") + _NEAR > _number(self.db, "max_page_count")
        return False

    def _beside(self, end: str) -> Path:
        return self.path.with_name(self.path.name + end)

    def close(self) -> None:
        """Idempotent."""
        for db in (self._other, self.db):
            with suppress(sqlite3.Error):
                db.close()


def _number(db: sqlite3.Connection, pragma: str) -> int:
    return int(db.execute(f"PRAGMA {pragma}").fetchone()[0])


def _size(path: Path | str) -> int:
    try:
        return os.stat(path).st_size  # noqa: PTH116
    except FileNotFoundError:
        return 0


def put_aside(path: Path, error: sqlite3.DatabaseError) -> None:
    """Out of the way with a damaged catalog, which must be closed; OSError."""
    aside = path.with_name(path.name + ".damaged")
    log.error("engine: %s: %s. It is now %s; the cache begins empty", path, error, aside.name)
    path.replace(aside)
    for end in ("-wal", "-shm"):
        path.with_name(path.name + end).unlink(missing_ok=True)
