"""LMCache 0.5.3: what the pinned server registers (v1/mp_observability/subscribers/metrics, and its gauges).

Pulled by the Python exporter or pushed through the collector, the spelling is the same: both append the unit and then
`_total`. Left out: CacheBlend (`lmcache_blend_*`) and peer to peer, which this deployment does not switch on.
"""

from __future__ import annotations

from kvstrata.observe.catalog import LMCACHE_HISTOGRAMS, Kind, Needs, table

__all__ = ["METRICS"]

_C, _G = Kind.COUNTER, Kind.GAUGE
_H = Kind.NATIVE if LMCACHE_HISTOGRAMS == "native" else Kind.HISTOGRAM

_ROWS = (
    ("lmcache_mp_lookup_requested_tokens_total", _C, "tokens",
     "Tokens that vLLM asked for, in whole chunks: the lower half of the hit rate."),
    ("lmcache_mp_lookup_hit_tokens_total", _C, "tokens",
     "Tokens of the unbroken prefix that L1 or L2 had: the upper half of the hit rate. Not split by tier in 0.5.3."),
    ("lmcache_mp_num_chunks_loaded_total", _C, "chunks", "Chunks that were handed to vLLM."),
    ("lmcache_mp_l1_read_chunks_total", _C, "chunks", "Chunks read from RAM (L1), by vLLM or by the store to L2."),
    ("lmcache_mp_l1_write_chunks_total", _C, "chunks", "Chunks written to RAM (L1), by vLLM or loaded from L2."),
    ("lmcache_mp_l1_evicted_chunks_total", _C, "chunks", "Chunks that L1 dropped to make room."),
    ("lmcache_mp_l1_allocation_failure_chunks_total", _C, "chunks", "Chunks for which L1 had no room."),
    ("lmcache_mp_l1_read_failure_chunks_total", _C, "chunks",
     "Chunks that a lookup had found and a read did not: evicted in between, or still being written."),
    ("lmcache_mp_l1_eviction_loop_ticks_total", _C, "loops",
     "Rounds of the loop that watches L1. It stands still when the server hangs."),
    ("lmcache_mp_l1_eviction_loop_triggered_total", _C, "loops",
     "Rounds in which L1 was above its watermark and evicted."),
    ("lmcache_mp_l1_memory_usage_bytes", _G, "bytes", "RAM that L1 holds. 0 with an allocator that is not lazy."),
    ("lmcache_mp_l1_usage_ratio", _G, "0-1", "The same as a share of the pool."),
    ("lmcache_mp_l1_chunk_lifetime_seconds", _H, "seconds", "From a chunk's arrival in L1 to its eviction."),
    ("lmcache_mp_l1_chunk_idle_before_evict_seconds", _H, "seconds",
     "From the last use of a chunk to its eviction from L1."),
    ("lmcache_mp_l1_chunk_reuse_gap_seconds", _H, "seconds", "Between two uses of a chunk in L1."),
    ("lmcache_mp_l1_chunk_evict_reuse_gap_seconds", _H, "seconds",
     "From a chunk's eviction from L1 to its next use, up to 300 s. Short gaps: L1 is too small."),
    ("lmcache_mp_l0_block_lifetime_seconds", _H, "seconds",
     "From the allocation of a block of vLLM's own cache to its reuse for other tokens."),
    ("lmcache_mp_l0_block_idle_before_evict_seconds", _H, "seconds", "From a block's last use to that."),
    ("lmcache_mp_l0_block_reuse_gap_seconds", _H, "seconds", "Between two uses of a block by different requests."),
    ("lmcache_mp_real_reuse_gap_seconds", _H, "seconds",
     "Between a chunk's last use and the next read of it, wherever it lay."),
    ("lmcache_mp_real_reuse_gap_objects", _H, "chunks",
     "The same, in chunks used in between: how large a cache has to be to catch that use."),
    ("lmcache_mp_l0_l1_store_throughput_GB_per_second", _H, "GB/s",
     "Speed of copies from vLLM to L1, one value a request."),
    ("lmcache_mp_l0_l1_load_throughput_GB_per_second", _H, "GB/s",
     "Speed of copies from L1 to vLLM, one value a request."),
    ("lmcache_mp_l2_store_throughput_GB_per_second", _H, "GB/s", "Speed of stores from L1 to L2, one value a task."),
    ("lmcache_mp_l2_load_throughput_GB_per_second", _H, "GB/s", "Speed of loads from L2 to L1, one value a task."),
    ("lmcache_mp_l2_store_submitted_requests_total", _C, "tasks", "Stores that were handed to L2."),
    ("lmcache_mp_l2_store_completed_requests_total", _C, "tasks",
     "Stores to L2 that ended, those that failed as well. Submitted minus these: under way."),
    ("lmcache_mp_l2_store_submitted_objects_chunks_total", _C, "chunks", "Chunks in those submitted stores."),
    ("lmcache_mp_l2_store_completed_objects_chunks_total", _C, "chunks",
     "Chunks in stores that succeeded. Submitted minus these: under way or failed; 0.5.3 counts no failed store."),
    ("lmcache_mp_l2_prefetch_lookup_requests_total", _C, "lookups", "Times that L2 was asked what it has of a prompt."),
    ("lmcache_mp_l2_prefetch_lookup_objects_chunks_total", _C, "chunks",
     "Chunks that L2 was asked for: what L1 did not have."),
    ("lmcache_mp_l2_prefetch_hit_chunks_total", _C, "chunks", "Chunks of the unbroken prefix that L2 had."),
    ("lmcache_mp_l2_prefetch_load_submitted_requests_total", _C, "tasks", "Loads from L2 that were started."),
    ("lmcache_mp_l2_prefetch_load_submitted_objects_chunks_total", _C, "chunks", "Chunks in them."),
    ("lmcache_mp_l2_prefetch_load_completed_chunks_total", _C, "chunks", "Chunks that came from L2 into L1."),
    ("lmcache_mp_l2_prefetch_failure_chunks_total", _C, "chunks", "Chunks that L2 had promised and did not give."),
    ("lmcache_mp_l2_load_completed_requests_total", _C, "tasks", "Loads from L2 that ended, by adapter."),
    ("lmcache_mp_l2_evicted_objects_chunks_total", _C, "chunks",
     "Chunks that LMCache itself evicted from L2. The block store evicts by its own cap and is not counted here."),
    ("lmcache_mp_l2_usage_bytes", _G, "bytes", "Bytes that LMCache believes to be in L2, by adapter."),
    ("lmcache_mp_l2_store_adapters", _G, "adapters", "L2 adapters that take stores, by state."),
    ("lmcache_mp_l2_prefetch_adapters", _G, "adapters", "L2 adapters that are asked at lookups, by state."),
    ("lmcache_mp_num_inflight_l2_stores", _G, "tasks", "Stores to L2 under way."),
    ("lmcache_mp_num_inflight_l2_loads", _G, "tasks", "Loads from L2 under way."),
    ("lmcache_mp_inflight_load_memory_usage_bytes", _G, "bytes", "L1 memory that loads under way have reserved."),
    ("lmcache_mp_active_prefetch_jobs", _G, "jobs", "Lookups that wait for L2."),
    ("lmcache_mp_event_bus_queue_depth", _G, "events", "Events that wait to be counted."),
    ("lmcache_mp_event_bus_drain_lag_seconds", _G, "seconds", "How old the event is that is being counted."),
    ("lmcache_mp_event_bus_dropped_events_total", _C, "events",
     "Events that were thrown away: other counters are too low."),
    ("lmcache_mp_event_bus_subscriber_exceptions_total", _C, "errors", "Errors inside the counting."),
    ("lmcache_mp_timeouts_total", _C, "errors", "Time-outs inside the server, by exception."),
)  # fmt: skip

_SALTED = ("cache_salt",)
_ADAPTER = ("l2_name",)
_LABELS = {
    "lmcache_mp_lookup_requested_tokens_total": ("model_name", "cache_salt"),
    "lmcache_mp_lookup_hit_tokens_total": ("model_name", "cache_salt"),
    "lmcache_mp_l2_store_submitted_objects_chunks_total": _SALTED,
    "lmcache_mp_l2_store_completed_objects_chunks_total": _SALTED,
    "lmcache_mp_l2_prefetch_lookup_objects_chunks_total": _SALTED,
    "lmcache_mp_l2_prefetch_load_submitted_objects_chunks_total": _SALTED,
    "lmcache_mp_l2_prefetch_load_completed_chunks_total": _SALTED,
    "lmcache_mp_l1_read_chunks_total": _SALTED,
    "lmcache_mp_l1_write_chunks_total": _SALTED,
    "lmcache_mp_l1_evicted_chunks_total": _SALTED,
    "lmcache_mp_real_reuse_gap_seconds": _SALTED,
    "lmcache_mp_real_reuse_gap_objects": _SALTED,
    "lmcache_mp_l2_store_completed_requests_total": _ADAPTER,
    "lmcache_mp_l2_load_completed_requests_total": _ADAPTER,
    "lmcache_mp_l2_usage_bytes": _ADAPTER,
    "lmcache_mp_l2_store_throughput_GB_per_second": _ADAPTER,
    "lmcache_mp_l2_load_throughput_GB_per_second": _ADAPTER,
    "lmcache_mp_num_inflight_l2_stores": _ADAPTER,
    "lmcache_mp_num_inflight_l2_loads": _ADAPTER,
    "lmcache_mp_inflight_load_memory_usage_bytes": _ADAPTER,
    "lmcache_mp_l2_store_adapters": ("state",),
    "lmcache_mp_l2_prefetch_adapters": ("state",),
    "lmcache_mp_l0_l1_store_throughput_GB_per_second": ("device", "engine_id", "model_name"),
    "lmcache_mp_l0_l1_load_throughput_GB_per_second": ("device", "engine_id", "model_name"),
    "lmcache_mp_event_bus_subscriber_exceptions_total": ("subscriber",),
    "lmcache_mp_timeouts_total": ("exception_type",),
}
#: These are there from the start; every other counter and histogram appears with its first event.
_EAGER = frozenset(
    {"lmcache_mp_l1_eviction_loop_ticks_total", "lmcache_mp_event_bus_dropped_events_total"}
    | {name for name, kind, _, _ in _ROWS if kind is _G}
)
_MOMENTARY = (
    "lmcache_mp_num_inflight_l2_stores", "lmcache_mp_num_inflight_l2_loads",
    "lmcache_mp_inflight_load_memory_usage_bytes",
)  # fmt: skip
_OF_HANDLES = (
    "lmcache_mp_l0_l1_store_throughput_GB_per_second", "lmcache_mp_l0_l1_load_throughput_GB_per_second",
    "lmcache_mp_num_chunks_loaded_total",
)  # fmt: skip
_RARE = dict.fromkeys(
    (
        "lmcache_mp_l1_allocation_failure_chunks_total", "lmcache_mp_l1_read_failure_chunks_total",
        "lmcache_mp_l2_prefetch_failure_chunks_total", "lmcache_mp_event_bus_subscriber_exceptions_total",
        "lmcache_mp_timeouts_total", "lmcache_mp_l2_evicted_objects_chunks_total",
    ),
    Needs.EVENT,
)  # fmt: skip

_NEEDS = _RARE | dict.fromkeys(_MOMENTARY, Needs.MOMENT) | dict.fromkeys(_OF_HANDLES, Needs.HANDLE)

METRICS = table(
    "LMCache 0.5.3",
    _ROWS,
    labels=_LABELS,
    lazy=frozenset(name for name, *_ in _ROWS if name not in _EAGER) | frozenset(_MOMENTARY),
    needs=_NEEDS,
)
