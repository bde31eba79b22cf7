"""How full the tiers are and how often they hit: one reading of both servers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvstrata.proof.prom import Samples

__all__ = ["Tiers", "l2_line", "size", "tiers_of"]


@dataclass(frozen=True)
class Tiers:
    """How full, and how often hit, since the servers started. Bytes; None = not known."""

    l0_hit_rate: float | None
    lookup_hit_rate: float | None
    """Tokens that LMCache had, of tokens that it was asked for."""
    l1_used: int | None
    l1_total: int | None
    l1_objects: int | None
    l2_adapters: tuple[str, ...]
    l2_disk: int | None
    """Bytes in the cache folder, whoever put them there."""
    l2_used: int | None = None
    l2_total: int | None = None
    """The store's own figures, as the next five; None for an L2 that is not the block store."""
    l2_objects: int | None = None
    l2_corrupt: int | None = None
    l2_suspect: bool | None = None
    l2_failing: str | None = None
    """Why the last store wrote nothing; empty when it did."""
    l2_reader: str | None = None
    l2_path: str = ""
    """path-a or path-b where a KV engine or a Redis holds the blocks."""
    l2_down: bool = False
    """Path A asks the engine no more, because it does not answer."""
    engine: Mapping[str, Any] | None = None
    """The KV engine's own statistics (/kv/stats); None where there is none, or it gives none."""


def tiers_of(
    server: Mapping[str, Any] | None, lmcache: Samples, vllm: Samples, l2_disk: int | None,
    path: str = "", engine: Mapping[str, Any] | None = None,
) -> Tiers:  # fmt: skip
    """Usage and hit rates: LMCache's /status, both servers' counters, the bytes in the folder, the KV engine."""
    manager = (server or {}).get("storage_manager", {})
    l1 = manager.get("l1_manager", {})
    adapters = manager.get("l2_adapters", ())
    store: Mapping[str, Any] = next((adapter for adapter in adapters if "capacity_bytes" in adapter), {})
    return Tiers(
        l0_hit_rate=_ratio(vllm.sum("vllm:prefix_cache_hits_total"), vllm.sum("vllm:prefix_cache_queries_total")),
        lookup_hit_rate=_ratio(
            lmcache.sum("lmcache_mp_lookup_hit_tokens_total"), lmcache.sum("lmcache_mp_lookup_requested_tokens_total")
        ),
        l1_used=l1.get("memory_used_bytes"),
        l1_total=l1.get("memory_total_bytes"),
        l1_objects=l1.get("total_object_count"),
        l2_adapters=tuple(str(adapter.get("type")) for adapter in adapters),
        l2_disk=l2_disk if adapters else None,
        l2_used=store.get("used_bytes"),
        l2_total=store.get("capacity_bytes"),
        l2_objects=store.get("blocks"),
        l2_corrupt=store.get("corrupt"),
        l2_suspect=store.get("suspect"),
        l2_failing=store.get("store_failing"),
        l2_reader=store.get("reader"),
        l2_path=path,
        l2_down=lmcache.sum("kvstrata_remote_down") > 0,
        engine=engine,
    )


def l2_line(tiers: Tiers) -> str:
    """L2 for people, in one line."""
    if not tiers.l2_adapters:
        return "none"
    if tiers.l2_path:
        return _engine_line(tiers)
    if tiers.l2_total is None:
        return f"{size(tiers.l2_disk)} on disk ({', '.join(tiers.l2_adapters)})"
    text = f"{size(tiers.l2_used)} of {size(tiers.l2_total)}, {tiers.l2_objects} blocks"
    if tiers.l2_reader:
        text += f", {tiers.l2_reader} reader"
    if tiers.l2_corrupt:
        text += f", {tiers.l2_corrupt} found corrupt and removed since lmcache started"
    if tiers.l2_failing:
        text += f", NOTHING IS STORED: {tiers.l2_failing}"
    return text + (", DISK DOES NOT ANSWER: computing instead" if tiers.l2_suspect else "")


_WIRES = {
    "path-a": "path A: HTTP, each block checked from end to end",
    "path-b": "path B: RESP, NOT checked from end to end (LMCache's own client)",
}


def _engine_line(tiers: Tiers) -> str:
    text = _WIRES.get(tiers.l2_path, tiers.l2_path)
    if (stats := tiers.engine) is not None:
        hits, misses = int(stats.get("get_hits", 0)), int(stats.get("get_misses", 0))
        rate = f"{hits / (hits + misses) * 100:.0f} %" if hits + misses else "unknown"
        text = (
            f"{size(stats.get('resident_bytes'))} of {size(stats.get('capacity_bytes'))}, "
            f"{stats.get('total_refs')} blocks, hit rate {rate}; {text}"
        )
    return text + (", ENGINE DOES NOT ANSWER: computing instead" if tiers.l2_down else "")


def size(count: int | None) -> str:
    """Bytes for people."""
    if count is None:
        return "unknown"
    return f"{count / 2**30:.2f} GiB" if count >= 2**28 else f"{count / 2**20:.1f} MiB"


def _ratio(part: float, whole: float) -> float | None:
    return part / whole if whole else None
