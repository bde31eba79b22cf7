"""The engine: values under keys, a namespace a tenant, on disk once for each content (docs/engine.md)."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Callable, Sequence
from contextlib import closing

from blake3 import blake3

from kvstrata.engine.block import Block
from kvstrata.engine.branches import Branches
from kvstrata.engine.catalog_file import put_aside
from kvstrata.engine.core import CATALOG, Core
from kvstrata.engine.errors import NoSuchBranchKey
from kvstrata.engine.expiries import Expiries
from kvstrata.engine.folders import own_folders, sync_entries
from kvstrata.engine.globs import glob
from kvstrata.engine.leases import Leases
from kvstrata.engine.names import Names
from kvstrata.engine.receiving import Put
from kvstrata.engine.settings import EngineSettings
from kvstrata.engine.start import load
from kvstrata.engine.stats import stats
from kvstrata.engine.tender import Tender
from kvstrata.engine.writing import Writing

__all__ = ["Engine", "Put"]

_SCAN = "SELECT key FROM refs WHERE tenant=? AND key>? ORDER BY key LIMIT ?"
_SCAN_MOST, _SCAN_BYTES = 10_000, 1 << 20
# A block that moves from one disk to another is found at the second look.
_TRIES = 3


class Engine:
    """Thread-safe. `put`, `delete` and what changes forks return when it is acknowledged: it survives the end of the
    process, and with durability=fsync of the machine. Calls block on the disk in the caller's thread.
    """

    def __init__(self, settings: EngineSettings, tenants: Callable[[], int]) -> None:
        """Use `open`."""
        self.settings = settings
        own_folders(settings)
        self._core = core = Core(settings)
        self._lock = core.lock
        self._leases = Leases(core, tenants)
        self._branches = branches = Branches(core, tenants)
        self._expiries = Expiries(core)
        self._tender = Tender(core, self._leases, branches, self._expiries)
        self._names = Names(core, tenants)
        self._writing = writing = Writing(core, self._expiries, self._names)
        self.put, self.receive, self.present = writing.put, writing.receive, writing.present
        self.delete, self.version, self.bump_version = writing.delete, writing.version, writing.bump_version
        self.snapshot = branches.snapshot
        self.fork = branches.fork
        self.drop_snapshot = branches.drop_snapshot
        self.drop_branch = branches.drop_branch
        self.fork_stats = branches.stats
        self._closed = False

    @classmethod
    def open(cls, settings: EngineSettings, tenants: Callable[[], int] = lambda: 1) -> Engine:
        """Own the folders and bring books and disks in step. A catalog that turns out to be damaged is put aside.
        StoreError.

        `tenants`: how many there may be, for what is divided among them.
        """
        try:
            engine = cls._loaded(settings, tenants)
        except sqlite3.OperationalError:
            raise
        except sqlite3.DatabaseError as error:
            put_aside(settings.root / CATALOG, error)
            engine = cls._loaded(settings, tenants)
        engine._tender.start()
        engine._core.mover.start()
        engine._core.tiers.begin_evicting()
        return engine

    @classmethod
    def _loaded(cls, settings: EngineSettings, tenants: Callable[[], int]) -> Engine:
        engine = cls(settings, tenants)
        try:
            sync_entries(settings)
            load(engine._core, engine._branches, engine._names)
            engine._expiries.load()
        except BaseException:
            engine._core.catalog.close()
            engine._core.tiers.close(1.0)
            raise
        return engine

    def close(self, timeout_s: float = 5.0) -> None:
        """Write what is left and give the folders up. Idempotent; no other call may be under way."""
        if self._closed:
            return
        self._closed = True
        self._tender.stop(timeout_s)
        self._core.mover.stop(timeout_s)
        self._core.sweep()
        self._core.catalog.close()
        self._core.tiers.close(timeout_s)

    # -- reading

    def open_block(self, tenant: str, key: bytes, *, count: bool = True) -> Block | None:
        """The value, to be sent; None: a miss. Counts as a hit or a miss unless told otherwise."""
        content = None
        for _ in range(_TRIES):
            with self._lock:
                of = self._core.books.of(tenant)
                ref = self._core.live(of, tenant, key)
                content = ref.content if ref is not None else None
            block = self._core.open(content, count=count) if content is not None else None
            if block is not None:
                if count:
                    with self._lock:
                        of.count("get_hits")
                return block
            if content is None:
                break
        if count:
            with self._lock:
                of.count("get_misses")
        return None

    def exists(self, tenant: str, keys: Sequence[bytes], lease_s: float | None = None) -> list[bool]:
        """Which keys are there. With `lease_s` each yes is a promise for so long (but for a delete and a TTL), and
        counts as a use; where that cannot be promised the answer is no.
        """
        answer = []
        with self._lock:
            of = self._core.books.of(tenant)
            for key in keys:
                ref = self._core.live(of, tenant, key)
                there = ref is not None
                if ref is not None and lease_s is not None:
                    there = self._leases.grant(ref.content, lease_s)
                    self._core.tiers.touch(ref.content)
                answer.append(there)
        return answer

    def about(self, tenant: str, key: bytes) -> tuple[int, str] | None:
        """Bytes of the value, and its BLAKE3 in hex."""
        with self._lock:
            ref = self._core.live(self._core.books.of(tenant), tenant, key)
            return None if ref is None else (ref.content.size, ref.content.digest.hex())

    def size(self, tenant: str, key: bytes) -> int | None:
        """Bytes of the value."""
        about = self.about(tenant, key)
        return None if about is None else about[0]

    def ttl(self, tenant: str, key: bytes) -> float | None:
        """Seconds that it has left, -1.0 if it does not expire, None if it is not there."""
        with self._lock:
            ref = self._core.live(self._core.books.of(tenant), tenant, key)
            if ref is None:
                return None
            return max(ref.expires - time.time(), 0.0) if ref.expires else -1.0

    def count(self, tenant: str) -> int:
        """How many keys."""
        with self._lock:
            self._expiries.end(time.time())
            return len(self._core.books.of(tenant).refs)

    def expiring(self, tenant: str) -> int:
        """How many of them end by themselves."""
        with self._lock:
            return self._core.books.of(tenant).ends

    def scan(
        self, tenant: str, cursor: bytes = b"", match: bytes | None = None, count: int = 10
    ) -> tuple[bytes, list[bytes]]:
        """Keys in their order behind `cursor` (b"": from the start) that fit a glob, and the next cursor (b"": that
        was all). `count`: how many are looked at, if they have a MiB together at most.
        """
        count = max(1, min(count, _SCAN_MOST))
        fits = glob(match) if match is not None else None
        keys: list[bytes] = []
        nbytes = 0
        with closing(self._core.catalog.rows(_SCAN, (tenant, cursor, count))) as rows:
            for (key,) in rows:
                assert isinstance(key, bytes)
                keys.append(key)
                nbytes += len(key)
                if nbytes >= _SCAN_BYTES:
                    break
        after = keys[-1] if len(keys) == count or nbytes >= _SCAN_BYTES else b""
        with self._lock:
            of = self._core.books.of(tenant)
            keys = [key for key in keys if self._core.live(of, tenant, key) is not None]
        return after, [key for key in keys if fits is None or fits.fullmatch(key)]

    def stats(self, tenant: str | None = None) -> dict[str, object]:
        """One tenant's, or the sums of all. Only what can be served is counted."""
        with self._lock:
            self._expiries.end(time.time())
            return stats(self._core, tenant)

    # -- branches (the rest of them: see __init__)

    def branch_open(self, tenant: str, branch: int, key: bytes) -> Block:
        """What the key means in the branch: what it wrote, else the snapshot's. NoSuchBranch, NoSuchBranchKey."""
        block = self._core.open(self._branches.find(tenant, branch, key), count=False)
        if block is None:
            raise NoSuchBranchKey(f"the page of branch {branch} cannot be read")
        return block

    def branch_put(self, tenant: str, branch: int, key: bytes, body: memoryview) -> Put:
        """Write into the branch alone. NoSuchBranch, Full, TooLarge, Refused."""
        self._writing.check(tenant, key, len(body), None)
        digest = blake3(body).digest()
        return Put(self._branches.put(tenant, branch, key, digest, body), digest.hex())
