"""What changes keys: put, receive, delete, and the data version. Acknowledged when it is in the catalog."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import NamedTuple

from blake3 import blake3

from kvstrata.engine.books import Ref, Tenant, block_key
from kvstrata.engine.catalog import WRITTEN, put_ref
from kvstrata.engine.core import Core
from kvstrata.engine.errors import Absent, Full, Refused, StaleVersion, TooLarge
from kvstrata.engine.expiries import Expiries
from kvstrata.engine.names import Names
from kvstrata.engine.receiving import Put, Receiving
from kvstrata.store.keys import BlockKey

__all__ = ["LONGEST_KEY", "Writing"]

LONGEST_KEY = 4096


class _Terms(NamedTuple):
    """On which a value is stored: see Writing.put."""

    version: int | None
    replace: bool
    over: bool
    ttl_s: float | None


class Writing:
    """Thread-safe. The engine gives these calls out as its own."""

    def __init__(self, core: Core, expiries: Expiries, names: Names) -> None:
        self._core = core
        self._lock = core.lock
        self._settings = core.settings
        self._expiries = expiries
        self._names = names

    def put(
        self,
        tenant: str,
        key: bytes,
        body: memoryview,
        *,
        version: int | None = None,
        replace: bool = False,
        over: bool = False,
        ttl_s: float | None = None,
    ) -> Put:
        """Store a value. A key that is there stays as it is (the first writer wins), unless `replace`; one that is not
        there is Absent with `over`.

        `version`: the entry goes when the tenant's version passes it; `ttl_s`: it goes after that. Refused, TooLarge,
        Full.
        """
        self.check(tenant, key, len(body), version)
        if not replace and (digest := self._repeated(tenant, key)) is not None:
            return Put(False, digest)
        name = block_key(tenant, blake3(body).digest())
        terms = _Terms(version, replace, over, ttl_s)
        with self._core.stored(name, body):
            return self._name(name, key, len(body), terms)

    def receive(
        self,
        tenant: str,
        key: bytes,
        size: int,
        *,
        version: int | None = None,
        replace: bool = False,
        ttl_s: float | None = None,
    ) -> Receiving:
        """put, for a value whose bytes are still coming: they are hashed, summed and written as they come, so that no
        buffer has to hold it. What is left before `done` was never there. Refused, TooLarge, Full.
        """
        self.check(tenant, key, size, version)

        def name_it(name: BlockKey, replace: bool, over: bool, ttl: float | None) -> Put:
            return self._name(name, key, size, _Terms(version, replace, over, ttl))

        return Receiving(self._core, tenant, size, name_it, replace=replace, ttl_s=ttl_s)

    def _name(self, name: BlockKey, key: bytes, size: int, terms: _Terms) -> Put:
        """The key means the block that is `stored` now; wait until that is written down. Full, Absent, StaleVersion."""
        try:
            return self._try_to_name(name, key, size, terms)
        except Full:
            if not self._core.catalog.crowded:
                raise
        # Older keys go before a new one is refused. What this one meant before has gone with the first try.
        return self._try_to_name(name, key, size, terms._replace(over=False))

    def _try_to_name(self, name: BlockKey, key: bytes, size: int, terms: _Terms) -> Put:
        self._core.catalog.admit()
        with self._lock:
            of = self._core.books.of(name.salt)
            # Once more: it may have been moved while the bytes came in.
            if terms.version is not None and terms.version < of.version:
                raise StaleVersion(f"found: data version {terms.version}; needed: {of.version} (the current) or later")
            there = self._core.live(of, name.salt, key)
            if there is None and terms.over:
                raise Absent("the key is not there")
            # A content that something means already, whichever disk it is on.
            known = name.chunk in of.contents
            ref = there
            if ref is None or terms.replace:
                ref = self._enter(of, name, key, size, terms)
            else:
                known = True
            of.count("dedup_hits", known)
            of.count("put_new", there is None)
        try:
            self._core.catalog.commit(ref.ticket)
            ref.ticket = WRITTEN
        except Full:
            with self._lock:
                if of.refs.get(key) is ref:
                    of.count("dedup_hits", -known)
                    of.count("put_new", -(there is None))
                    self._core.settle(self._core.books.unname(of, key))
            raise
        return Put(there is None, ref.content.digest.hex())

    def _enter(self, of: Tenant, name: BlockKey, key: bytes, size: int, terms: _Terms) -> Ref:
        """The key means the block that is `stored` now. Under the lock. Full."""
        core, version = self._core, terms.version
        if key not in of.refs:
            self._names.make_room(name.salt, key)
        expires = time.time() + terms.ttl_s if terms.ttl_s is not None else 0.0
        content = core.adopt(name, size)
        ref = Ref(content, -1 if version is None else version, expires, WRITTEN)
        before = core.books.name(of, key, ref)
        ref.ticket = core.catalog.queue([put_ref(name.salt, key, name.chunk, size, version, expires or None)])
        if before is not content:
            core.settle(before)
        if expires:
            self._expiries.add(expires, name.salt, key)
        return ref

    def _repeated(self, tenant: str, key: bytes) -> str | None:
        with self._lock:
            of = self._core.books.of(tenant)
            ref = self._core.live(of, tenant, key)
            if ref is None:
                return None
            of.count("dedup_hits")
        # Who is told that it is there must not lose it because the first one's commit was still under way.
        self._core.catalog.commit(ref.ticket)
        return ref.content.digest.hex()

    def present(self, tenant: str, key: bytes) -> str | None:
        """The digest in hex of what is there if a put (without `replace`) would change nothing; it then counts as one.
        Memory only.
        """
        with self._lock:
            of = self._core.books.of(tenant)
            ref = self._core.live(of, tenant, key)
            if ref is None or not ref.ticket.committed:
                return None
            of.count("dedup_hits")
            return ref.content.digest.hex()

    def delete(self, tenant: str, keys: Sequence[bytes]) -> int:
        """How many of the keys were there. Full: it cannot be written down, also if they are gone from memory."""
        self._core.catalog.admit()
        with self._lock:
            of = self._core.books.of(tenant)
            gone = [key for key in dict.fromkeys(keys) if self._core.live(of, tenant, key) is not None]
            ticket = self._core.catalog.forget([it for key in gone for it in self._core.unname(of, tenant, key)])
        # Also those that were gone already: maybe by a change that failed, or that is not written down yet.
        if gone:
            self._core.catalog.commit(ticket)
        else:
            self._core.catalog.settle()
        return len(gone)

    def version(self, tenant: str) -> int:
        """The tenant's; 0 if it was never moved."""
        with self._lock:
            return self._core.books.of(tenant).version

    def bump_version(self, tenant: str, number: int) -> int:
        """Move it forward: entries with an older tag are gone. Back is not possible. The version now. Full."""
        with self._lock:
            of = self._core.books.of(tenant)
            if number > of.version:
                of.version = of.counters["version"] = number
                of.changed.add("version")
                old = [key for key, ref in of.refs.items() if 0 <= ref.version < number]
                self._core.catalog.forget([it for key in old for it in self._core.unname(of, tenant, key)])
                of.count("stale_retired", len(old))
            ticket = self._core.catalog.queue_counters()
            version = of.version
        self._core.catalog.commit(ticket)
        return version

    def check(self, tenant: str, key: bytes, size: int, version: int | None) -> None:
        if not 1 <= len(key) <= LONGEST_KEY:
            raise Refused(f"found: a key of {len(key)} bytes; needed: 1 to {LONGEST_KEY}")
        most = max(self._settings.max_value, self._settings.resp_max_value)
        if size > most:
            raise TooLarge(f"found: a value of {size} bytes; needed: at most {most}")
        now = self.version(tenant)
        if version is not None and not now <= version < 1 << 63:
            raise Refused(f"found: data version {version}; needed: {now} (the current one) or later")
