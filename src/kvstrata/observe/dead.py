"""Names that LMCache's documents and newer dashboards use and the pinned 0.5.3 never exports: refused everywhere."""

from __future__ import annotations

from fnmatch import fnmatchcase

__all__ = ["DEAD", "replacement"]

#: Pattern (fnmatch) of series names -> what 0.5.3 has instead.
DEAD = {
    "lmcache_mp_num_submitted_stores*": "lmcache_mp_l1_write_chunks_total counts chunks written to L1",
    "lmcache_mp_num_finished_stores*": "lmcache_mp_l1_write_chunks_total counts chunks written to L1",
    "lmcache_mp_num_submitted_retrieves*": "lmcache_mp_l1_read_chunks_total counts chunks read from L1",
    "lmcache_mp_num_finished_retrieves*": "lmcache_mp_num_chunks_loaded_total counts chunks handed to vLLM",
    "lmcache_mp_transfer_phase*": "nothing: phases of a transfer are not measured",
    "lmcache_mp_transfer_staging_throughput*": "lmcache_mp_l0_l1_store_throughput_GB_per_second and ..._load_...",
    "lmcache_mp_real_reuse_gap_objects_chunks*": "lmcache_mp_real_reuse_gap_objects: the exporter drops {chunks}",
    "lmcache_mp_lookup_hit_l1*": "nothing: hit tokens are not split by tier",
    "lmcache_mp_lookup_hit_l2*": "lmcache_mp_l2_prefetch_hit_chunks_total, in chunks",
    "lmcache_mp_lookups*": "nothing; lmcache_mp_lookup_requested_tokens_total counts tokens",
    "lmcache_mp_lookup_early_exit*": "nothing",
    "lmcache_mp_l2_store_fail*": "lmcache_mp_l2_store_submitted_objects_chunks_total minus ..._completed_...",
    "lmcache_coordinator_*": "nothing: 0.5.3's coordinator has no /metrics",
    "lmcache:*": "lmcache_mp_*: names of the single-process LMCache",
}


def replacement(series: str) -> str | None:
    """What to use instead of a dead name; None for one that is not dead."""
    return next((text for pattern, text in DEAD.items() if fnmatchcase(series, pattern)), None)
