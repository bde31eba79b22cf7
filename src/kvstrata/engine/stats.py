"""The one shape of the engine's statistics."""

from __future__ import annotations

from collections import Counter

from kvstrata.engine.books import Tier
from kvstrata.engine.core import Core

__all__ = ["stats"]

_COUNTED = (
    "dedup_hits",
    "get_hits",
    "get_misses",
    "put_new",
    "evictions",
    "stale_retired",
    "keys_retired",
    "corrupt",
    "demotions",
    "promotions",
)


def stats(core: Core, tenant: str | None) -> dict[str, object]:
    """Of one tenant, or of all. Under the lock. Bytes are bytes of values, but for `capacity_bytes`, `disk_bytes`
    and `catalog_bytes`, which are on disk.

    A content is counted in one tier, the fastest that has it; those of snapshots and branches alone count there too,
    and nowhere else.
    """
    books, settings = core.books, core.settings
    found = books.tenants.get(tenant) if tenant is not None else None
    chosen = list(books.tenants.values()) if tenant is None else [found] if found is not None else []
    counters: Counter[str] = Counter()
    for of in chosen:
        counters.update({name: of.counters[name] for name in _COUNTED})
    logical, resident = sum(of.logical for of in chosen), sum(of.resident for of in chosen)
    asked = counters["get_hits"] + counters["get_misses"]
    capacities = {Tier.HOT: settings.hot, Tier.WARM: settings.blocks, Tier.COLD: settings.cold_capacity}
    tiers: dict[str, dict[str, int]] = {}
    for tier in (Tier.HOT, Tier.WARM, Tier.COLD):
        nbytes, blocks = (sum(of.places[tier][at] for of in chosen) for at in (0, 1))
        tiers[tier.name.lower()] = {"bytes": nbytes, "blocks": blocks, "capacity_bytes": capacities[tier]}
        if tier in core.tiers.stores and tenant is None:
            usage = core.tiers.stores[tier].usage()
            tiers[tier.name.lower()]["disk_bytes"] = usage.used
    return {
        "backend": "kvstrata",
        "durable": True,
        "durability": settings.durability,
        "unique_blocks": sum(of.unique for of in chosen),
        "total_refs": sum(len(of.refs) for of in chosen),
        "resident_bytes": resident,
        "logical_bytes": logical,
        "dedup_savings_bytes": logical - resident,
        "hit_rate": counters["get_hits"] / asked if asked else 0.0,
        **{name: counters[name] for name in _COUNTED},
        "capacity_bytes": core.tiers.capacity,
        **({"catalog_bytes": core.catalog.file.disk_bytes()} if tenant is None else {}),
        "tiers": tiers,
    }
