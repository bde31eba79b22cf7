"""The start: books from the catalog, in step with what really lies on the disks."""

from __future__ import annotations

import logging
import time
from itertools import islice

from kvstrata.engine.books import NAMESPACE, Ref, Tier, block_key
from kvstrata.engine.branches import Branches
from kvstrata.engine.catalog import WRITTEN, Statement, drop_ref
from kvstrata.engine.core import Core
from kvstrata.engine.names import Names

__all__ = ["load"]

_STEP = 5000

log = logging.getLogger(__name__)


def load(core: Core, branches: Branches, names: Names) -> None:
    """Fill the books. References whose bytes are gone go; blocks that nothing means (a put that a crash cut off) go."""
    began = time.monotonic()
    with core.lock:
        _counters(core)
        lost = _references(core)
        branches.load()
        orphans = _orphans(core)
        names.fit()
        core.catalog.shrink()
    for of in core.books.tenants.values():
        of.changed.clear()
    log.info(
        "engine: %d keys, %d of them lost, %d blocks without a key, in %.2f s",
        sum(len(of.refs) for of in core.books.tenants.values()),
        lost,
        orphans,
        time.monotonic() - began,
    )


def _counters(core: Core) -> None:
    for tenant, name, value in core.catalog.rows("SELECT tenant, name, value FROM counters WHERE tenant<>''"):
        assert isinstance(tenant, str) and isinstance(name, str) and isinstance(value, int)
        of = core.books.of(tenant)
        of.counters[name] = value
        if name == "version":
            of.version = value


def _references(core: Core) -> int:
    rows = core.catalog.rows("SELECT tenant, key, digest, size, version, expires FROM refs")
    now, lost = time.time(), 0
    while some := list(islice(rows, _STEP)):
        names = [block_key(str(row[0]), row[2] if isinstance(row[2], bytes) else b"") for row in some]
        gone: list[Statement] = []
        for row, name, tier in zip(some, names, core.tiers.find(names), strict=True):
            tenant, key, _, size, version, expires = row
            assert isinstance(tenant, str) and isinstance(key, bytes) and isinstance(size, int)
            of = core.books.of(tenant)
            stale = isinstance(version, int) and version < of.version
            over = isinstance(expires, float) and expires <= now
            if tier is None or stale or over:
                lost += 1
                gone.append(drop_ref(tenant, key))
                continue
            content = core.books.content(tenant, name.chunk, size, tier)
            ends = expires if isinstance(expires, float) else 0.0
            core.books.name(of, key, Ref(content, version if isinstance(version, int) else -1, ends, WRITTEN))
        core.catalog.forget(gone)
    return lost


def _orphans(core: Core) -> int:
    """Blocks that nothing means, and second copies of those that a crash caught between two disks."""
    found = 0
    for tier, store in core.tiers.stores.items():
        for info in store.scan():
            if info.key.namespace != NAMESPACE:
                continue
            of = core.books.tenants.get(info.key.salt)
            content = of.contents.get(info.key.chunk) if of is not None else None
            if content is None or content.tier is not tier:
                core.orphan(Tier(tier), info.key)
                found += 1
    return found
