"""Snapshots and branches: a snapshot keeps what some keys mean now, a branch writes over one without changing it."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kvstrata.engine.books import Content, Tier, block_key
from kvstrata.engine.catalog import Statement, Ticket
from kvstrata.engine.core import Core
from kvstrata.engine.errors import Full, NoSuchBranch, NoSuchBranchKey, NoSuchSnapshot, StillReferenced
from kvstrata.engine.holdings import Holdings

__all__ = ["Branches", "Fork"]

_FORK = "INSERT INTO forks VALUES(?,?,?,?)"
_PAGE = "INSERT OR REPLACE INTO pages VALUES(?,?,?,?)"
# Snapshots first.
_FORKS = "SELECT id, tenant, parent, used FROM forks ORDER BY parent IS NOT NULL"
# Numbers of JSON are exact up to here in every client.
_NUMBERS = (1 << 53) - 1
_USED = "UPDATE forks SET used=? WHERE id=?"
# A branch that lives is used often: its last use is written down when it is that much younger than the written one.
_USED_STEP_S = 30.0


@dataclass(slots=True)
class Fork:
    """A snapshot, or (with a `parent`) a branch of one. `used`: seconds since the epoch."""

    number: int
    tenant: str
    parent: Fork | None
    used: float
    written: float
    pages: dict[bytes, Content] = field(default_factory=dict)
    branches: int = 0


class Branches:
    """Thread-safe. What a snapshot or branch means is pinned on the disk, so that a living branch does not lose pages;
    a tenant may pin its part of a share of the capacity, beyond which new ones are refused (Full). Those that nobody
    used for a while end by themselves. Their numbers are drawn, so that none tells of another's.
    """

    def __init__(self, core: Core, tenants: Callable[[], int]) -> None:
        self._core = core
        self._forks: dict[int, Fork] = {}
        self._holdings = Holdings(core, tenants)

    # -- start

    def load(self) -> None:
        """Read them from the catalog, before anybody asks. Pages whose bytes are gone are not there any more."""
        core = self._core
        for number, tenant, parent, used in core.catalog.rows(_FORKS):
            assert isinstance(number, int) and isinstance(used, float)
            of = self._forks.get(parent) if isinstance(parent, int) else None
            if parent is not None and of is None:
                core.catalog.queue(_drop(number))
                continue
            self._add(Fork(number, str(tenant), of, used, used))
        rows = list(core.catalog.rows("SELECT fork, key, digest, size FROM pages"))
        for number, key, digest, size in rows:
            assert isinstance(number, int) and isinstance(key, bytes)
            assert isinstance(digest, bytes) and isinstance(size, int)
            fork = self._forks.get(number)
            if fork is None:
                core.catalog.queue(_drop(number))
                continue
            found = core.tiers.find([block_key(fork.tenant, digest)])[0]
            if found is not None:
                self._hold(fork, key, core.books.content(fork.tenant, digest, size, found))
            else:
                # Its page stays, as one that cannot be read: what is below it in the snapshot must not show.
                self._hold(fork, key, Content(fork.tenant, digest, size, Tier.WARM))

    # -- snapshots

    def snapshot(self, tenant: str, keys: Sequence[bytes]) -> tuple[int, int]:
        """(number, pages): those of the keys that are there. Full."""
        core = self._core
        with core.lock:
            self._room(tenant, None, core.settings.max_snapshots)
            of = core.books.of(tenant)
            refs = {key: ref for key in keys if (ref := core.live(of, tenant, key)) is not None}
            self._holdings.need(tenant, {ref.content for ref in refs.values()}, [b"", *refs])
            fork = self._new(tenant, None)
            for key, ref in refs.items():
                self._hold(fork, key, ref.content)
            pages = [(_PAGE, (fork.number, key, it.digest, it.size)) for key, it in fork.pages.items()]
            ticket = core.catalog.queue([*self._written(fork), *pages])
        self._commit(ticket, fork)
        return fork.number, len(fork.pages)

    def fork(self, tenant: str, snapshot: int) -> int:
        """A new branch's number. NoSuchSnapshot, Full."""
        with self._core.lock:
            parent = self._snapshot(tenant, snapshot)
            self._room(tenant, parent, self._core.settings.max_branches)
            self._holdings.need(tenant, keys=[b""])
            branch = self._new(tenant, parent)
            ticket = self._core.catalog.queue(self._written(branch))
        self._commit(ticket, branch)
        return branch.number

    def drop_snapshot(self, tenant: str, snapshot: int) -> None:
        """NoSuchSnapshot, StillReferenced, Full."""
        # One that is gone from memory alone must not be said to be gone.
        self._core.catalog.settle()
        with self._core.lock:
            fork = self._snapshot(tenant, snapshot)
            if fork.branches:
                raise StillReferenced(
                    f"found: {fork.branches} branches of snapshot {snapshot}; needed: none; to fix: DELETE them first"
                )
            ticket = self._core.catalog.queue(self._end(fork))
        self._core.catalog.commit(ticket)

    # -- branches

    def find(self, tenant: str, branch: int, key: bytes) -> Content:
        """What the key means in the branch. NoSuchBranch, NoSuchBranchKey."""
        with self._core.lock:
            fork = self._branch(tenant, branch)
            parent = fork.parent
            content = fork.pages.get(key) or (parent.pages.get(key) if parent is not None else None)
            if content is None or not self._core.books.has(content):
                raise NoSuchBranchKey(f"neither branch {branch} nor its snapshot has this key")
            return content

    def put(self, tenant: str, branch: int, key: bytes, digest: bytes, body: memoryview) -> bool:
        """Write into the branch alone; True if the key is new in its own pages. NoSuchBranch, Full, TooLarge."""
        core, name = self._core, block_key(tenant, digest)
        with core.lock:
            self._branch(tenant, branch)
            known = core.books.of(tenant).contents.get(digest)
            # Before the bytes are written as well.
            self._holdings.need(tenant, [known] if known else [], [key], 0 if known else len(body))
        with core.stored(name, body):
            with core.lock:
                fork = self._branch(tenant, branch)
                content = core.adopt(name, len(body))
                try:
                    self._holdings.need(tenant, [content], [] if key in fork.pages else [key])
                except Full:
                    core.settle(content)
                    raise
                before = fork.pages.get(key)
                if before is not None:
                    before.forks += 1  # until this one is written down
                self._hold(fork, key, content)
                ticket = core.catalog.queue([(_PAGE, (fork.number, key, digest, len(body)))])
            try:
                core.catalog.commit(ticket)
            except Full:
                with core.lock:
                    if fork.pages.get(key) is content:
                        # Back to the one before: what is below it in the snapshot must not show.
                        if before is not None:
                            self._hold(fork, key, before)
                        else:
                            self._let_go(fork, key)
                raise
            finally:
                if before is not None:
                    with core.lock:
                        self._holdings.release(before)
        return before is None

    def drop_branch(self, tenant: str, branch: int) -> None:
        """NoSuchBranch, Full."""
        self._core.catalog.settle()
        with self._core.lock:
            ticket = self._core.catalog.queue(self._end(self._branch(tenant, branch)))
        self._core.catalog.commit(ticket)

    # -- all

    def stats(self, tenant: str | None) -> dict[str, int]:
        """Contents are counted once, whoever shares them; `resident_fork_bytes` is what snapshots and branches pin."""
        with self._core.lock:
            forks = [fork for fork in self._forks.values() if tenant is None or fork.tenant == tenant]
            has = self._core.books.has
            shared = {it for fork in forks if fork.parent is None for it in fork.pages.values() if has(it)}
            overlay = {it for fork in forks if fork.parent is not None for it in fork.pages.values() if has(it)}
        return {
            "snapshots": sum(fork.parent is None for fork in forks),
            "branches": sum(fork.parent is not None for fork in forks),
            "shared_pages": len(shared),
            "shared_bytes": sum(content.size for content in shared),
            "overlay_pages": len(overlay),
            "overlay_bytes": sum(content.size for content in overlay),
            "resident_fork_bytes": sum(content.size for content in shared | overlay),
        }

    def end_idle(self) -> None:
        """End those that nobody used for too long; a snapshot lives as long as its last branch."""
        latest = time.time() - self._core.settings.fork_idle_s
        with self._core.lock:
            # Branches first: they keep their snapshot, and their uses were its uses.
            for fork in sorted(self._forks.values(), key=lambda fork: fork.parent is None):
                if fork.used < latest and not fork.branches:
                    self._core.catalog.queue(self._end(fork))
                elif fork.used - fork.written > _USED_STEP_S:
                    fork.written = fork.used
                    self._core.catalog.queue([(_USED, (fork.used, fork.number))])

    # -- under the lock

    def _snapshot(self, tenant: str, number: int) -> Fork:
        fork = self._forks.get(number)
        if fork is None or fork.tenant != tenant or fork.parent is not None:
            raise NoSuchSnapshot(f"no snapshot {number}")
        fork.used = time.time()
        return fork

    def _branch(self, tenant: str, number: int) -> Fork:
        fork = self._forks.get(number)
        if fork is None or fork.tenant != tenant or fork.parent is None:
            raise NoSuchBranch(f"no branch {number}")
        fork.used = fork.parent.used = time.time()
        return fork

    def _room(self, tenant: str, parent: Fork | None, most: int) -> None:
        kind = "snapshots" if parent is None else "branches"
        count = sum(
            fork.tenant == tenant and (fork.parent is None) == (parent is None) for fork in self._forks.values()
        )
        if count >= most:
            raise Full(
                f"found: {count} {kind}; needed: fewer than {most}; to fix: DELETE some, or wait until idle ones end"
            )

    def _new(self, tenant: str, parent: Fork | None) -> Fork:
        number, now = 0, time.time()
        while not number or number in self._forks:
            number = secrets.randbelow(_NUMBERS)
        return self._add(Fork(number, tenant, parent, now, now))

    def _add(self, fork: Fork) -> Fork:
        self._forks[fork.number] = fork
        self._holdings.name(fork.tenant, b"")
        if fork.parent is not None:
            fork.parent.branches += 1
        return fork

    @staticmethod
    def _written(fork: Fork) -> list[Statement]:
        parent = None if fork.parent is None else fork.parent.number
        return [(_FORK, (fork.number, fork.tenant, parent, fork.used))]

    def _hold(self, fork: Fork, key: bytes, content: Content) -> None:
        before = fork.pages.get(key)
        self._holdings.hold(content)
        fork.pages[key] = content
        if before is not None:
            self._holdings.release(before)
        else:
            self._holdings.name(fork.tenant, key)

    def _let_go(self, fork: Fork, key: bytes) -> None:
        self._holdings.release(fork.pages.pop(key))
        self._holdings.name(fork.tenant, key, -1)

    def _end(self, fork: Fork) -> list[Statement]:
        del self._forks[fork.number]
        if fork.parent is not None:
            fork.parent.branches -= 1
        self._holdings.name(fork.tenant, b"", -1)
        for key in list(fork.pages):
            self._let_go(fork, key)
        return _drop(fork.number)

    def _commit(self, ticket: Ticket, fork: Fork) -> None:
        try:
            self._core.catalog.commit(ticket)
        except Full:
            with self._core.lock:
                if fork.number in self._forks:
                    self._end(fork)
            raise


def _drop(number: int) -> list[Statement]:
    return [("DELETE FROM pages WHERE fork=?", (number,)), ("DELETE FROM forks WHERE id=?", (number,))]
