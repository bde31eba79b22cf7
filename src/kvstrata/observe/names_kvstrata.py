"""What this project's own parts expose: block store, kv engine, Path A, connector guard, proof."""

from __future__ import annotations

from kvstrata.observe.catalog import Kind, Needs, table

__all__ = ["METRICS"]

_C, _G, _H = Kind.COUNTER, Kind.GAUGE, Kind.HISTOGRAM

_STORE = (
    ("kvstrata_store_lookup_blocks_total", _C, "blocks", "Blocks asked for, by what the index said: `hit` or `miss`."),
    ("kvstrata_store_hits_total", _C, "blocks", "Blocks that were loaded and found sound."),
    ("kvstrata_store_misses_total", _C, "blocks", "Loads that gave nothing, by reason; corrupt ones left out."),
    ("kvstrata_store_corrupt_total", _C, "blocks",
     "Blocks that a load refused and removed, by what was wrong with them."),
    ("kvstrata_store_loaded_bytes_total", _C, "bytes", "Bytes handed to readers, decoded."),
    ("kvstrata_store_stores_total", _C, "blocks", "Blocks that were written."),
    ("kvstrata_store_stores_present_total", _C, "blocks", "Stores of blocks that were there already: nothing to do."),
    ("kvstrata_store_store_failures_total", _C, "blocks", "Stores that wrote nothing, by reason."),
    ("kvstrata_store_stored_bytes_total", _C, "bytes", "Bytes taken from writers, before encoding."),
    ("kvstrata_store_evictions_total", _C, "blocks", "Blocks that made room for others, by class."),
    ("kvstrata_store_evicted_bytes_total", _C, "bytes", "Bytes on disk that evictions freed, by class."),
    ("kvstrata_store_removed_blocks_total", _C, "blocks", "Blocks that went, for any reason."),
    ("kvstrata_store_load_seconds", _H, "seconds", "From the call to the end of one block's load."),
    ("kvstrata_store_store_seconds", _H, "seconds", "From the call to the end of one block's store."),
    ("kvstrata_store_load_bytes_per_second", _H, "bytes/s", "Bytes of a loaded block over its seconds."),
    ("kvstrata_store_store_bytes_per_second", _H, "bytes/s", "Bytes of a stored block over its seconds."),
    ("kvstrata_store_scan_seconds", _G, "seconds", "How long the scan at the last start took."),
    ("kvstrata_store_scan_blocks", _G, "blocks", "Blocks that it found."),
    ("kvstrata_store_blocks", _G, "blocks", "Blocks in the store."),
    ("kvstrata_store_used_bytes", _G, "bytes", "Bytes on disk below the root, as du counts them."),
    ("kvstrata_store_reserved_bytes", _G, "bytes", "Bytes that stores under way may still take."),
    ("kvstrata_store_capacity_bytes", _G, "bytes", "The cap: used and reserved bytes never pass it."),
    ("kvstrata_store_device_free_bytes", _G, "bytes", "Bytes free on the disk of the root."),
    ("kvstrata_store_suspect", _G, "0/1", "1 while the disk does not answer and everything is a miss."),
)  # fmt: skip

_ENGINE = (
    ("kvstrata_engine_requests_total", _C, "requests",
     "HTTP requests answered, by operation and status code (499: the client went away)."),
    ("kvstrata_engine_request_seconds", _H, "seconds", "From the end of a request's head to the end of its answer."),
    ("kvstrata_engine_received_bytes_total", _C, "bytes", "Bytes of request bodies."),
    ("kvstrata_engine_sent_bytes_total", _C, "bytes", "Bytes of answers' bodies."),
    ("kvstrata_engine_unauthorized_total", _C, "requests", "Requests without a good token."),
    ("kvstrata_engine_unique_blocks", _G, "blocks", "Different contents that are kept."),
    ("kvstrata_engine_total_refs", _G, "keys", "Keys that can be served."),
    ("kvstrata_engine_resident_bytes", _G, "bytes", "Bytes that the contents take, each counted once."),
    ("kvstrata_engine_logical_bytes", _G, "bytes", "Bytes that the keys stand for, each key counted."),
    ("kvstrata_engine_dedup_savings_bytes", _G, "bytes", "Logical bytes that take no room."),
    ("kvstrata_engine_capacity_bytes", _G, "bytes", "What the warm tier may take."),
    ("kvstrata_engine_dedup_hits_total", _C, "puts", "Puts of a key or a content that was there already."),
    ("kvstrata_engine_get_hits_total", _C, "gets", "Gets that found their block."),
    ("kvstrata_engine_get_misses_total", _C, "gets", "Gets that did not."),
    ("kvstrata_engine_put_new_total", _C, "puts", "Puts that stored something."),
    ("kvstrata_engine_evictions_total", _C, "blocks", "Blocks that made room for others."),
    ("kvstrata_engine_corrupt_total", _C, "blocks", "Blocks that were found damaged, and removed."),
    ("kvstrata_engine_tier_bytes", _G, "bytes", "Bytes in a tier: `hot` (RAM), `warm`, `cold`."),
    ("kvstrata_engine_tier_capacity_bytes", _G, "bytes", "What a tier may take; 0 for one that is off."),
    ("kvstrata_engine_memory_used_bytes", _G, "bytes", "Connection buffers in use."),
    ("kvstrata_engine_memory_limit_bytes", _G, "bytes", "What they may take together."),
    ("kvstrata_engine_memory_waiting", _G, "requests", "Requests that wait for a buffer."),
    ("kvstrata_engine_connections", _G, "connections", "Connections open now, by protocol."),
    ("kvstrata_engine_busy_connections", _G, "connections", "Connections served now, by protocol."),
    ("kvstrata_engine_connections_refused_total", _C, "connections", "Connections beyond the limit, by protocol."),
    ("kvstrata_engine_deadlines_passed_total", _C, "requests", "Requests cut for being slow, by protocol."),
)  # fmt: skip

_REMOTE = (
    ("kvstrata_remote_blocks_total", _C, "blocks",
     "Blocks that Path A asked the engine for, by operation and outcome."),
    ("kvstrata_remote_down", _G, "0/1", "1 while the engine does not answer and everything is a miss."),
)  # fmt: skip

_GUARD = (
    ("kvstrata_guard_healthy", _G, "0/1",
     "1 while the guard has the cache server in use; by role, the scheduler's or a worker's."),
    ("kvstrata_guard_transfer", _G, "0/1",
     "1 for the way that blocks travel now: `shm`, `handle` (CUDA IPC), `pickle` (slow) or `none`."),
    ("kvstrata_guard_heartbeat_timestamp_seconds", _G, "unix time",
     "When the cache server last answered the guard's heartbeat."),
    ("kvstrata_guard_lost_total", _C, "calls",
     "Stores, retrieves and lookups that the cache server did not answer; counted as misses."),
)  # fmt: skip

_PROOF = (
    ("kvstrata_proof_timestamp_seconds", _G, "unix time", "When the last proof (`verify`) ended."),
    ("kvstrata_proof_passed", _G, "0/1", "1 if it passed."),
    ("kvstrata_proof_worth_it", _G, "0/1", "1 if hits were faster than the cold run."),
    ("kvstrata_proof_ttft_seconds", _G, "seconds", "Time to first token of each phase of the last proof."),
    ("kvstrata_proof_hit_tokens", _G, "tokens", "Tokens that were not computed, by phase and source."),
)  # fmt: skip

_LABELS = {
    "kvstrata_store_lookup_blocks_total": ("result",),
    "kvstrata_store_misses_total": ("reason",),
    "kvstrata_store_corrupt_total": ("reason",),
    "kvstrata_store_store_failures_total": ("reason",),
    "kvstrata_store_evictions_total": ("class",),
    "kvstrata_store_evicted_bytes_total": ("class",),
    "kvstrata_engine_requests_total": ("op", "code"),
    "kvstrata_engine_request_seconds": ("op",),
    "kvstrata_engine_tier_bytes": ("tier",),
    "kvstrata_engine_tier_capacity_bytes": ("tier",),
    "kvstrata_engine_connections": ("protocol",),
    "kvstrata_engine_busy_connections": ("protocol",),
    "kvstrata_engine_connections_refused_total": ("protocol",),
    "kvstrata_engine_deadlines_passed_total": ("protocol",),
    "kvstrata_remote_blocks_total": ("op", "outcome"),
    "kvstrata_guard_healthy": ("role",),
    "kvstrata_guard_transfer": ("role", "kind"),
    "kvstrata_guard_heartbeat_timestamp_seconds": ("role",),
    "kvstrata_guard_lost_total": ("role", "what"),
    "kvstrata_proof_ttft_seconds": ("phase",),
    "kvstrata_proof_hit_tokens": ("phase", "source"),
}
#: Counters whose series appear with the first event of a kind.
_LAZY = frozenset(
    {"kvstrata_store_misses_total", "kvstrata_store_store_failures_total", "kvstrata_store_evictions_total",
     "kvstrata_store_evicted_bytes_total", "kvstrata_engine_requests_total", "kvstrata_engine_request_seconds"}
)  # fmt: skip
_RARE = {"kvstrata_store_store_failures_total": Needs.EVENT, "kvstrata_store_misses_total": Needs.EVENT}

METRICS = (
    *table("block store", _STORE, labels=_LABELS, lazy=_LAZY, needs=_RARE, all_need=Needs.STORE),
    *table("kv engine", _ENGINE, labels=_LABELS, lazy=_LAZY, all_need=Needs.ENGINE),
    *table("Path A", _REMOTE, labels=_LABELS, all_need=Needs.REMOTE),
    *table("connector guard", _GUARD, labels=_LABELS),
    *table("proof", _PROOF, labels=_LABELS),
)
