"""LMCache 0.5.3: the panels of its official dashboard whose metrics exist, remapped where they do not.

Gone without a replacement: CacheBlend (not switched on here), MP transfer phases and in-flight GPU copies (0.5.3 does
not measure them). L0's reuse gap exists and cannot move beside vLLM's prefix cache, which reports new blocks only.
"""

from __future__ import annotations

from kvstrata.observe.dashboards.panels import (
    Board,
    Panel,
    Query,
    Row,
    average,
    by_rate,
    growth,
    host,
    lines,
    model,
    quantile,
    rate,
    ratio,
    tenant,
    zero,
)  # fmt: skip

__all__ = ["BOARD"]

_TENANT_MODEL = model('cache_salt=~"$tenant"')


def _quantiles(name: str, select: str, by: str = "", legend: str = "") -> tuple[Query, ...]:
    behind = f" {legend}" if legend else ""
    return (
        Query(quantile(0.5, name, select, by), f"median{behind}"),
        Query(quantile(0.95, name, select, by), f"95 %{behind}"),
        Query(average(name, select, by), f"mean{behind}"),
    )


def _health() -> tuple[Panel, ...]:
    return (
        lines(
            "Failures",
            by_rate("lmcache_mp_l1_allocation_failure_chunks_total", host(), "L1 had no room", zeroed=True),
            by_rate("lmcache_mp_l1_read_failure_chunks_total", host(), "L1 read of what was gone", zeroed=True),
            by_rate("lmcache_mp_l2_prefetch_failure_chunks_total", host(), "L2 did not give", zeroed=True),
            by_rate("lmcache_mp_timeouts_total", host(), "time-outs", zeroed=True),
            unit="cps",
            tells="What went wrong inside the cache server, a second. Each is a miss or a store that did not happen.",
            normal="0; L1 without room in bursts, where more is stored at once than L1 holds.",
            otherwise="L2 that does not give: a slow or broken disk. L1 without room for long: too small.",
            runbook="l1-thrash",
        ),
        lines(
            "L1 eviction loop",
            by_rate("lmcache_mp_l1_eviction_loop_ticks_total", host(), "rounds"),
            by_rate("lmcache_mp_l1_eviction_loop_triggered_total", host(), "rounds that evicted", zeroed=True),
            unit="cps",
            tells="The loop that keeps L1 below its watermark.",
            normal="Rounds steady; few of them evict.",
            otherwise="no rounds: the server hangs. Every round evicts: L1 is too small.", runbook="l1-thrash",
        ),
        lines(
            "L1 memory", Query(f"max by (host) (lmcache_mp_l1_memory_usage_bytes{host()})", "{{host}}"), unit="bytes",
            tells="RAM that L1 holds.", normal="Up to 80 % of KV_L1_GB.",
            otherwise="at the cap for long: see evictions and the gap from eviction to reuse.", runbook="l1-thrash",
        ),
        lines(
            "L1 operations",
            by_rate("lmcache_mp_l1_read_chunks_total", tenant(), "read"),
            by_rate("lmcache_mp_l1_write_chunks_total", tenant(), "written"),
            by_rate("lmcache_mp_l1_evicted_chunks_total", tenant(), "evicted", zeroed=True), unit="cps",
            tells="Chunks that go in and out of RAM, a second.",
            normal="Written is what was computed or came from L2; evicted stays below written.",
            otherwise="evicted follows written: everything is thrown out again.", runbook="l1-thrash",
        ),
        lines(
            "L2 store pipeline",
            by_rate("lmcache_mp_l2_store_submitted_requests_total", host(), "submitted"),
            by_rate("lmcache_mp_l2_store_completed_requests_total", host(), "completed"),
            by_rate("lmcache_mp_l2_store_submitted_objects_chunks_total", tenant(), "chunks submitted"),
            by_rate("lmcache_mp_l2_store_completed_objects_chunks_total", tenant(), "chunks completed"), unit="cps",
            tells="Stores handed to L2, and their end. One that fails completes as a task, but none of its chunks do.",
            normal="The lines of a pair lie on each other.",
            otherwise="chunks completed stay below chunks submitted: stores fail, though the server is healthy.",
            runbook="l2-stores-fail",
        ),
        lines(
            "L2 prefetch pipeline",
            by_rate("lmcache_mp_l2_prefetch_lookup_objects_chunks_total", tenant(), "asked for"),
            by_rate("lmcache_mp_l2_prefetch_hit_chunks_total", host(), "found"),
            by_rate("lmcache_mp_l2_prefetch_load_submitted_objects_chunks_total", tenant(), "load started"),
            by_rate("lmcache_mp_l2_prefetch_load_completed_chunks_total", tenant(), "loaded"), unit="cps",
            tells="What L1 did not have, step by step.",
            normal="Found, started and loaded lie on each other.",
            otherwise="loaded below found: loads fail or take too long; look at the block store.",
            runbook="l2-stores-fail",
        ),
        lines(
            "Under way",
            Query(zero(f"sum(lmcache_mp_num_inflight_l2_stores{host()})"), "stores to L2"),
            Query(zero(f"sum(lmcache_mp_num_inflight_l2_loads{host()})"), "loads from L2"),
            Query(f"sum(lmcache_mp_active_prefetch_jobs{host()})", "lookups that wait for L2"),
            tells="Work that has begun and not ended.", normal="Goes back to 0.",
            otherwise="a step that stays: a disk that does not answer.", runbook="l2-stores-fail",
        ),
        lines(
            "L1 memory of loads under way", Query(zero(f"sum(lmcache_mp_inflight_load_memory_usage_bytes{host()})"),
            "reserved"),
            unit="bytes",
            tells="L1 memory that loads from L2 have reserved.", normal="Goes back to 0.",
            otherwise="stays: the loads of requests that are gone hold room; see failures.", runbook="l1-thrash",
        ),
        lines(
            "Event bus",
            Query(f"max(lmcache_mp_event_bus_queue_depth{host()})", "events waiting"),
            by_rate("lmcache_mp_event_bus_dropped_events_total", host(), "dropped a second"),
            by_rate("lmcache_mp_event_bus_subscriber_exceptions_total", host(), "errors a second", zeroed=True),
            tells="The queue behind all figures of this dashboard.", normal="Nothing dropped.",
            otherwise="dropped events: counters here are too low from then on.",
        ),
        lines(
            "Event bus lag", Query(f"max(lmcache_mp_event_bus_drain_lag_seconds{host()})", "lag"), unit="s",
            tells="How late events are counted.", normal="Milliseconds.",
            otherwise="seconds: the server has no CPU left.",
        ),
        lines(
            "L2 adapters",
            Query(f"sum by (state) (lmcache_mp_l2_store_adapters{host()})", "stores: {{state}}"),
            Query(f"sum by (state) (lmcache_mp_l2_prefetch_adapters{host()})", "lookups: {{state}}"),
            tells="L2 adapters in use.", normal="One active, none draining.",
            otherwise="none active: the server runs without L2; its log says why.", runbook="l2-stores-fail",
        ),
    )  # fmt: skip


def _performance() -> tuple[Panel, ...]:
    return (
        lines(
            "Copies between vLLM and L1",
            *_quantiles("lmcache_mp_l0_l1_store_throughput_GB_per_second", model(), legend="to L1")[:2],
            *_quantiles("lmcache_mp_l0_l1_load_throughput_GB_per_second", model(), legend="from L1")[:2],
            unit="GBs",
            tells="Speed of the copies, one value a request.",
            normal="GB/s: memory speed on a CPU, PCIe speed on a GPU.",
            otherwise="tens of MB/s: blocks travel by pickle.", runbook="pickle-fallback",
        ),
        lines(
            "Copies between L1 and L2",
            *_quantiles("lmcache_mp_l2_store_throughput_GB_per_second", host(), legend="to L2")[:2],
            *_quantiles("lmcache_mp_l2_load_throughput_GB_per_second", host(), legend="from L2")[:2],
            unit="GBs",
            tells="Speed of L2 as LMCache sees it, one value a task, waiting included.",
            normal="Near what `make bench-store` measured on this disk.",
            otherwise="far below: the disk is shared or worn; see the block store's dashboard.",
            runbook="l2-stores-fail",
        ),
        lines(
            "Lookups and loads",
            by_rate("lmcache_mp_lookup_requested_tokens_total", _TENANT_MODEL, "tokens asked for"),
            by_rate("lmcache_mp_lookup_hit_tokens_total", _TENANT_MODEL, "tokens found"),
            by_rate("lmcache_mp_num_chunks_loaded_total", host(), "chunks handed to vLLM"), unit="cps",
            tells="What vLLM asks LMCache for and gets.",
            normal="Chunks times the chunk size is at most the tokens found: L0's part is not loaded again.",
            otherwise="tokens found, nothing loaded: L0 has it all, or retrieves fail (guard's calls without answer).",
            runbook="hit-rate-zero",
        ),
        lines(
            "Hit rate by model",
            Query(ratio(rate("lmcache_mp_lookup_hit_tokens_total", _TENANT_MODEL, "model_name"),
                        rate("lmcache_mp_lookup_requested_tokens_total", _TENANT_MODEL, "model_name")),
                        "{{model_name}}"),
            unit="percentunit", maximum=1,
            tells="Tokens found in L1 or L2, of those asked for. The name carries the identity digest.",
            normal="One line a model.",
            otherwise="a new digest begins at zero: weights, template, dtype or version changed.",
            runbook="hit-rate-zero",
        ),
        lines(
            "Hit rate by tenant",
            Query(ratio(rate("lmcache_mp_lookup_hit_tokens_total", _TENANT_MODEL, "cache_salt"),
                        rate("lmcache_mp_lookup_requested_tokens_total", _TENANT_MODEL, "cache_salt")),
                        "{{cache_salt}}"),
            unit="percentunit", maximum=1,
            tells="The same by tenant. Names are keyed digests of cache salts; the one without a name sent no salt.",
            normal="Tenants with repeated prompts lie high.",
            otherwise="one tenant at zero: its client sends a new salt with each request.", runbook="hit-rate-zero",
        ),
        lines(
            "L1 chunks a second",
            by_rate("lmcache_mp_l1_read_chunks_total", tenant(), "{{cache_salt}} read", "cache_salt"),
            by_rate("lmcache_mp_l1_write_chunks_total", tenant(), "{{cache_salt}} written", "cache_salt"), unit="cps",
            tells="L1's operations by tenant.", normal="Follows the traffic.",
            otherwise="one tenant alone fills L1: see the classes in docs/storage.md.", runbook="l1-thrash",
        ),
        lines(
            "L2 tasks a second",
            by_rate("lmcache_mp_l2_store_completed_requests_total", host(), "{{l2_name}} stores", "l2_name"),
            by_rate("lmcache_mp_l2_load_completed_requests_total", host(), "{{l2_name}} loads", "l2_name"),
            by_rate("lmcache_mp_l2_prefetch_load_submitted_requests_total", host(), "loads started"),
            by_rate("lmcache_mp_l2_prefetch_lookup_requests_total", host(), "lookups"), unit="cps",
            tells="Tasks of the L2 adapter.", normal="Follows the traffic.",
            otherwise="lookups without stores: stores fail.", runbook="l2-stores-fail",
        ),
        lines(
            "L2 as LMCache counts it",
            Query(f"sum by (l2_name) (lmcache_mp_l2_usage_bytes{host()})", "{{l2_name}}"), unit="bytes",
            tells="Bytes that LMCache believes to be in L2.",
            normal="Near what the block store says.",
            otherwise="far off after a restart: the block store's own figures are the true ones.",
        ),
        lines(
            "L2 evicted by LMCache",
            Query(zero(growth("lmcache_mp_l2_evicted_objects_chunks_total", tenant())), "chunks"),
            tells="Chunks that LMCache itself evicted from L2 in the shown time.",
            normal="0: the block store keeps its own cap.",
            otherwise="an adapter with LMCache's eviction is in use.",
        ),
    )  # fmt: skip


def _insight() -> tuple[Panel, ...]:
    def life(title: str, name: str, tells: str, normal: str, otherwise: str, runbook: str, select: str = "") -> Panel:
        return lines(
            title, *_quantiles(name, select or host()), unit="s", no_value="nothing yet",
            tells=tells, normal=normal, otherwise=otherwise, runbook=runbook,
        )  # fmt: skip

    small = "shorter than the time between turns of a conversation: too small for the working set (make size)."
    return (
        life("L0 block lifetime", "lmcache_mp_l0_block_lifetime_seconds",
             "How long a block stays in vLLM's own cache. LMCache sees new blocks only: an under-estimate.",
             "Minutes.", small, ""),
        life("L0 idle before eviction", "lmcache_mp_l0_block_idle_before_evict_seconds",
             "How long a block of vLLM lay unused before it went.", "Minutes.",
             "seconds: L0 holds little more than what runs.", ""),
        life("L1 chunk lifetime", "lmcache_mp_l1_chunk_lifetime_seconds",
             "How long a chunk stays in RAM.", "Minutes to hours.", small, "l1-thrash"),
        life("L1 idle before eviction", "lmcache_mp_l1_chunk_idle_before_evict_seconds",
             "How long a chunk lay unused in RAM before it went.", "Minutes.",
             "seconds: L1 throws out what is in use.", "l1-thrash"),
        life("L1 reuse gap", "lmcache_mp_l1_chunk_reuse_gap_seconds",
             "Time between two uses of a chunk in RAM.", "Depends on the traffic.",
             "longer than the lifetime: reuse comes too late for L1.", "l1-thrash"),
        life("L1 evict-to-reuse gap", "lmcache_mp_l1_chunk_evict_reuse_gap_seconds",
             "From a chunk's eviction to its next use, up to 300 s.", "Nothing, or minutes.",
             "under a minute: what is thrown out is wanted at once; give L1 more RAM.", "evict-to-reuse"),
        life("Real reuse gap", "lmcache_mp_real_reuse_gap_seconds",
             "From a chunk's last use to its next read, in whichever tier.", "Depends on the traffic.",
             "the 95 % line says how long a chunk has to be kept to be of use.", "near-cap", tenant()),
        lines("Real reuse gap in chunks", *_quantiles("lmcache_mp_real_reuse_gap_objects", tenant()),
              no_value="nothing yet",
              tells="The same, in chunks that were used in between.", normal="Depends on the traffic.",
              otherwise="times the bytes of a chunk: how large a tier has to be to catch that reuse.",
              runbook="near-cap"),
    )  # fmt: skip


BOARD = Board(
    "kvstrata-lmcache", "kvstrata: LMCache 0.5.3",
    "The cache server's own view. Every panel reads names that the pinned version exports.",
    (Row("Health", _health()), Row("Performance", _performance()), Row("Is it large enough?", _insight())),
)  # fmt: skip
