"""Block store and kv engine: what the disk does, and for whom."""

from __future__ import annotations

from kvstrata.observe.dashboards.panels import (
    CACHE_DISK,
    Board,
    Panel,
    Query,
    Row,
    average,
    by_rate,
    growth,
    host,
    lines,
    quantile,
    rate,
    ratio,
    stat,
    zero,
)  # fmt: skip

__all__ = ["BOARD"]


def _store() -> tuple[Panel, ...]:
    return (
        lines(
            "Throughput",
            by_rate("kvstrata_store_loaded_bytes_total", host(), "read"),
            by_rate("kvstrata_store_stored_bytes_total", host(), "written"), unit="Bps",
            tells="Bytes that readers got and writers gave, a second.", normal="Follows the traffic.",
            otherwise="nothing written under new prompts: stores fail.", runbook="l2-stores-fail",
        ),
        lines(
            "Lookups",
            Query(rate("kvstrata_store_lookup_blocks_total", host(), "result"), "{{result}}"), unit="cps",
            tells="Blocks asked for, by what the index said.",
            normal="Misses are new prompts.", otherwise="only misses under old prompts: identity or tenant changed.",
            runbook="hit-rate-zero",
        ),
        lines(
            "Loads by outcome",
            by_rate("kvstrata_store_hits_total", host(), "hit"),
            by_rate("kvstrata_store_misses_total", host(), "miss: {{reason}}", "reason", zeroed=True),
            by_rate("kvstrata_store_corrupt_total", host(), "corrupt"), unit="cps",
            tells="What loads gave.", normal="Hits; a miss now and then where a block went between lookup and load.",
            otherwise="misses for a deadline: the disk is slow or hangs. Corrupt: the disk lies.",
            runbook="corrupt-blocks",
        ),
        lines(
            "Corrupt blocks by reason",
            Query(growth("kvstrata_store_corrupt_total", host(), "reason"), "{{reason}}"),
            tells="Blocks of the shown time that were refused and removed.", normal="0.",
            otherwise="the reason says which check failed (docs/format.md).", runbook="corrupt-blocks",
        ),
        lines(
            "Stores by outcome",
            by_rate("kvstrata_store_stores_total", host(), "written"),
            by_rate("kvstrata_store_stores_present_total", host(), "there already"),
            by_rate("kvstrata_store_store_failures_total", host(), "failed: {{reason}}", "reason", zeroed=True),
            unit="cps",
            tells="What stores did.", normal="No failures.",
            otherwise="failed for room: cap or disk is full of blocks in use. Failed for an error: see the log.",
            runbook="l2-stores-fail",
        ),
        lines(
            "Time of one block",
            Query(quantile(0.5, "kvstrata_store_load_seconds", host()), "load, median"),
            Query(quantile(0.95, "kvstrata_store_load_seconds", host()), "load, 95 %"),
            Query(quantile(0.5, "kvstrata_store_store_seconds", host()), "store, median"),
            Query(quantile(0.95, "kvstrata_store_store_seconds", host()), "store, 95 %"), unit="s",
            tells="From the call to the end of one block's load or store, waiting included.",
            normal="Milliseconds on an NVMe disk.", otherwise="near the deadline: the disk is overloaded.",
            runbook="l2-stores-fail",
        ),
        lines(
            "Speed of one block",
            Query(average("kvstrata_store_load_bytes_per_second", host()), "load, mean"),
            Query(average("kvstrata_store_store_bytes_per_second", host()), "store, mean"),
            Query(quantile(0.1, "kvstrata_store_load_bytes_per_second", host()), "load, slowest tenth"),
            Query(quantile(0.1, "kvstrata_store_store_bytes_per_second", host()), "store, slowest tenth"), unit="Bps",
            tells="Bytes of a block over its seconds.", normal="Near `make bench-store`.",
            otherwise="far below: something else uses the disk.", runbook="disk-filling",
        ),
        lines(
            "Evictions by class",
            Query(zero(rate("kvstrata_store_evictions_total", host(), "class")), "{{class}} blocks"),
            Query(rate("kvstrata_store_removed_blocks_total", host()), "removed for any reason"), unit="cps",
            tells="Blocks that made room for others, by class of their tenant or model.",
            normal="None below the watermark.", otherwise="more than hits: the cap is too small.", runbook="near-cap",
        ),
        lines(
            "Bytes freed by eviction",
            Query(zero(rate("kvstrata_store_evicted_bytes_total", host(), "class")), "{{class}}"), unit="Bps",
            tells="Bytes on disk that evictions freed, a second.", normal="At most what is written.",
            otherwise="as much as is written, for long: the working set is larger than the cap.", runbook="near-cap",
        ),
        lines(
            "Usage and cap",
            Query(f"sum(kvstrata_store_used_bytes{host()})", "used"),
            Query(f"sum(kvstrata_store_reserved_bytes{host()})", "reserved by stores under way"),
            Query(f"sum(kvstrata_store_capacity_bytes{host()})", "cap"), unit="bytes",
            tells="Bytes below the root, as du counts them.", normal="Below the cap, always.",
            otherwise="at the cap: eviction works all the time.", runbook="near-cap",
        ),
        lines(
            "Disk",
            Query(f"min(kvstrata_store_device_free_bytes{host()})", "free, as the store sees it"),
            Query(f"min(node_filesystem_avail_bytes{host(CACHE_DISK)})", "free, as the machine sees it"),
            Query(f"max(node_filesystem_size_bytes{host(CACHE_DISK)})", "size"), unit="bytes",
            tells="The disk that the store lies on.", normal="Free stays above the floor (KV_STORE_FREE_FLOOR_GB).",
            otherwise="falls while the store does not grow: something else fills it.", runbook="disk-filling",
        ),
        lines(
            "Blocks", Query(f"sum(kvstrata_store_blocks{host()})", "blocks"),
            tells="Blocks in the store.", normal="Grows to the cap, then stays.",
            otherwise="falls at a start: the scan removed what no longer fits; see the log.", runbook="near-cap",
        ),
        stat(
            "Scan at start", f"max(kvstrata_store_scan_seconds{host()})", unit="s", width=4,
            tells="How long the last start read the folder.", normal="Seconds for a million blocks.",
            otherwise="minutes: a cold or slow disk.", no_value="none",
        ),
        stat(
            "Blocks found", f"sum(kvstrata_store_scan_blocks{host()})", width=4,
            tells="What that scan found: the cache that survived the restart.", normal="What was there before.",
            otherwise="0 with a full folder: another root (KV_CACHE_PATH).", no_value="none",
        ),
        stat(
            "Disk answers", f"max(kvstrata_store_suspect{host()})", width=4, words={"0": "yes", "1": "NO"},
            steps=((None, "green"), (1, "red")),
            tells="Whether the disk answers within its deadline.", normal="Yes.",
            otherwise="everything is a miss until it does.", runbook="l2-stores-fail", no_value="none",
        ),
    )  # fmt: skip


def _engine() -> tuple[Panel, ...]:
    no = "no engine"
    return (
        lines(
            "Requests", Query(rate("kvstrata_engine_requests_total", host(), "op, code"), "{{op}} {{code}}"),
            unit="reqps",
            no_value=no,
            tells="HTTP requests by operation and status.", normal="2xx, and 404 for what is not there.",
            otherwise="503 and 507: no memory or no room. 401: a wrong token.", runbook="engine-trouble",
        ),
        lines(
            "Time of a request",
            Query(quantile(0.5, "kvstrata_engine_request_seconds", host(), "op"), "{{op}}, median"),
            Query(quantile(0.95, "kvstrata_engine_request_seconds", host(), "op"), "{{op}}, 95 %"), unit="s",
            no_value=no,
            tells="From the end of a request's head to the end of its answer.", normal="Milliseconds.",
            otherwise="slow peers, or a slow disk.", runbook="engine-trouble",
        ),
        lines(
            "Bytes", by_rate("kvstrata_engine_received_bytes_total", host(), "received"),
            by_rate("kvstrata_engine_sent_bytes_total", host(), "sent"), unit="Bps", no_value=no,
            tells="Bodies, a second.", normal="Follows the traffic.", otherwise="nothing received: nobody stores.",
            runbook="engine-trouble",
        ),
        lines(
            "Hits and misses",
            by_rate("kvstrata_engine_get_hits_total", host(), "hits"),
            by_rate("kvstrata_engine_get_misses_total", host(), "misses"),
            Query(ratio(rate("kvstrata_engine_get_hits_total", host()),
                        f"({rate('kvstrata_engine_get_hits_total', host())} + "
                        f"{rate('kvstrata_engine_get_misses_total', host())})"), "hit rate (0-1)"),
            unit="short", no_value=no,
            tells="Gets that found their block.", normal="LMCache asks first, so that its gets hit.",
            otherwise="misses after a lookup said yes: evicted in between; the engine is too small.",
            runbook="engine-trouble",
        ),
        lines(
            "Puts and dedup",
            by_rate("kvstrata_engine_put_new_total", host(), "new"),
            by_rate("kvstrata_engine_dedup_hits_total", host(), "there already"),
            by_rate("kvstrata_engine_evictions_total", host(), "evicted"), unit="cps", no_value=no,
            tells="What puts did, and what made room for them.", normal="Evicted below new.",
            otherwise="evicted follows new: the engine is too small.", runbook="near-cap",
        ),
        lines(
            "Tiers",
            Query(f"sum by (tier) (kvstrata_engine_tier_bytes{host()})", "{{tier}}"),
            Query(f"sum by (tier) (kvstrata_engine_tier_capacity_bytes{host()}) > 0", "{{tier}} cap"), unit="bytes",
            no_value=no,
            tells="Bytes in RAM (hot), on the fast disk (warm) and on the slow one (cold), with their caps.",
            normal="Below the caps.", otherwise="warm at its cap without a cold tier: blocks are dropped.",
            runbook="near-cap",
        ),
        lines(
            "What dedup saves",
            Query(f"sum(kvstrata_engine_logical_bytes{host()})", "what the keys stand for"),
            Query(f"sum(kvstrata_engine_resident_bytes{host()})", "what it takes"),
            Query(f"sum(kvstrata_engine_dedup_savings_bytes{host()})", "saved"),
            Query(f"sum(kvstrata_engine_capacity_bytes{host()})", "cap"), unit="bytes", no_value=no,
            tells="Equal bytes under several keys of a tenant are kept once.", normal="Saved is what forks share.",
            otherwise="nothing to do: without forks and repeated contents it is 0.",
        ),
        lines(
            "Keys and contents",
            Query(f"sum(kvstrata_engine_total_refs{host()})", "keys"),
            Query(f"sum(kvstrata_engine_unique_blocks{host()})", "contents"), no_value=no,
            tells="Keys that can be served, and different contents behind them.", normal="Keys at least contents.",
            otherwise="both fall: evictions.", runbook="near-cap",
        ),
        lines(
            "Connections",
            Query(f"sum by (protocol) (kvstrata_engine_connections{host()})", "{{protocol}} open"),
            Query(f"sum by (protocol) (kvstrata_engine_busy_connections{host()})", "{{protocol}} busy"),
            Query(rate("kvstrata_engine_connections_refused_total", host(), "protocol"),
            "{{protocol}} refused a second"),
            Query(rate("kvstrata_engine_deadlines_passed_total", host(), "protocol"), "{{protocol}} cut a second"),
            no_value=no,
            tells="Clients of the engine.", normal="Nothing refused, nothing cut.",
            otherwise="refused: more clients than KV_ENGINE_MAX_CONNECTIONS. Cut: slow peers.",
            runbook="engine-trouble",
        ),
        lines(
            "Buffers",
            Query(f"sum(kvstrata_engine_memory_used_bytes{host()})", "in use"),
            Query(f"sum(kvstrata_engine_memory_limit_bytes{host()})", "limit"), unit="bytes", no_value=no,
            tells="Memory of the connections together.", normal="Below the limit.",
            otherwise="at the limit: requests wait, then get 503.", runbook="engine-trouble",
        ),
        lines(
            "Waiting and refused",
            Query(f"sum(kvstrata_engine_memory_waiting{host()})", "wait for a buffer"),
            by_rate("kvstrata_engine_unauthorized_total", host(), "without a good token, a second"), no_value=no,
            tells="Requests that wait for memory, and requests with a wrong token.", normal="0.",
            otherwise="tokens: a client was not told of a new one (docs/engine.md).", runbook="engine-trouble",
        ),
        lines(
            "Path A", Query(rate("kvstrata_remote_blocks_total", host(), "op, outcome"), "{{op}} {{outcome}}"),
            Query(f"max(kvstrata_remote_down{host()})", "engine away (0/1)"), unit="short", no_value="no Path A",
            tells="Blocks that LMCache's adapter for the engine asked for, by outcome.", normal="No corrupt ones.",
            otherwise="engine away: everything is a miss until it answers.", runbook="engine-trouble",
        ),
    )  # fmt: skip


BOARD = Board(
    "kvstrata-storage", "kvstrata: block store and engine",
    "What the disk does, and for whom.",
    (Row("Block store", _store()), Row("kv engine", _engine())),
)  # fmt: skip
