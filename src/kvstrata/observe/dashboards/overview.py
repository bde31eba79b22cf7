"""Overview: is it working, is it worth it, how full is it. One screen."""

from __future__ import annotations

from kvstrata.observe.dashboards.panels import (
    CACHE_DISK,
    Board,
    Panel,
    Query,
    Row,
    growth,
    host,
    lines,
    model,
    quantile,
    rate,
    ratio,
    stat,
    tenant,
    zero,
)  # fmt: skip

__all__ = ["BOARD"]

_GOOD_IF_ZERO = ((None, "green"), (1, "red"))
_GOOD_IF_ONE = ((None, "red"), (1, "green"))


def _working() -> tuple[Panel, ...]:
    return (
        stat(
            "Targets down", f"sum(1 - up{host()})", width=3, steps=_GOOD_IF_ZERO,
            tells="Parts of the stack that do not answer Prometheus.",
            normal="0.",
            otherwise="`make status` names the part; figures of a part that is down are missing, not zero.",
            runbook="target-down",
        ),
        stat(
            "Guard", f"min(kvstrata_guard_healthy{host()})", width=3, steps=_GOOD_IF_ONE,
            words={"0": "cache off", "1": "cache in use"},
            tells="Whether vLLM uses the cache server now; the worst of scheduler and workers.",
            normal="Cache in use.",
            otherwise="vLLM computes everything itself until the cache server answers again.",
            runbook="heartbeat-lost",
        ),
        stat(
            "Transfer", f"sum by (kind) (kvstrata_guard_transfer{host()}) > 0", legend="{{kind}}", width=3,
            names_only=True, no_value="none",
            tells="How blocks travel between vLLM and the cache server.",
            normal="shm on a CPU, handle on a GPU.",
            otherwise="pickle is ten times slower: restart vLLM once the cache server is up.",
            runbook="pickle-fallback",
        ),
        stat(
            "Last proof", "min(kvstrata_proof_passed)", width=3, steps=_GOOD_IF_ONE, no_value="none yet",
            words={"0": "FAILED", "1": "passed"},
            tells="The last `make verify`: same text from every tier, hits where they were computed to be.",
            normal="Passed.",
            otherwise="read data/reports, then run `make verify`.",
            runbook="proof-stale-or-failed",
        ),
        stat(
            "Age of the proof", "time() - max(kvstrata_proof_timestamp_seconds)", unit="s", width=3,
            no_value="none yet", steps=((None, "green"), (86400, "red")),
            tells="Since when nobody has shown that the cache works.",
            normal="Less than a day.",
            otherwise="`make verify ARGS=--live` restarts nothing.",
            runbook="proof-stale-or-failed",
        ),
        stat(
            "Corrupt blocks", growth("kvstrata_store_corrupt_total", host()), width=3, steps=_GOOD_IF_ZERO,
            unit="short",
            tells="Blocks of the shown time that a read refused and removed; each was a miss, never a wrong answer.",
            normal="0.",
            otherwise="the disk or its memory lies: look at its SMART data and the kernel's log.",
            runbook="corrupt-blocks",
        ),
        stat(
            "Alerts firing", zero('count(ALERTS{alertstate="firing"})'), width=3, steps=_GOOD_IF_ZERO,
            tells="Alerts that fire now.",
            normal="0.",
            otherwise="Alertmanager lists them; each has a page in docs/runbooks.",
        ),
        stat(
            "Disk answers", f"max(kvstrata_store_suspect{host()})", width=3, steps=_GOOD_IF_ZERO,
            words={"0": "yes", "1": "NO"},
            tells="Whether the disk of the block store answers within its deadline.",
            normal="Yes.",
            otherwise="everything on it counts as a miss until it does.",
            runbook="l2-stores-fail",
        ),
    )  # fmt: skip


def _worth() -> tuple[Panel, ...]:
    cached = growth("vllm:prompt_tokens_cached_total", model())
    seconds = growth("vllm:request_prefill_time_seconds_sum", model())
    computed = growth("vllm:request_prefill_kv_computed_tokens_sum", model())
    return (
        stat(
            "Tokens not recomputed", cached, width=4, unit="short",
            tells="Prompt tokens of the shown time that came from L0, L1 or L2.",
            normal="Grows with every repeated prefix.",
            otherwise="compare with the hit rates beside it.", runbook="hit-rate-zero",
        ),
        stat(
            "Compute saved (estimate)", f"{cached} * {ratio(seconds, computed)}", width=4, unit="s",
            tells="Those tokens times what a computed token cost in prefill: device-seconds that were free for others.",
            normal="Well above zero on a machine that sees prompts again.",
            otherwise="a cache that saves nothing can be switched off: make rollback.", runbook="hit-rate-zero",
        ),
        stat(
            "Prompt tokens from cache", ratio(cached, growth("vllm:prompt_tokens_total", model())), width=4,
            unit="percentunit", maximum=1,
            tells="Share of all prompt tokens that were not computed.",
            normal="Depends on the traffic; it should not fall while the traffic stays the same.",
            otherwise="see which tier lost its hits.", runbook="hit-rate-zero",
        ),
        stat(
            "Proof: worth it", "min(kvstrata_proof_worth_it)", width=4, steps=_GOOD_IF_ONE, no_value="none yet",
            words={"0": "no", "1": "yes"},
            tells="Whether the last proof's hits were faster than its cold run.",
            normal="Yes.",
            otherwise="a slow disk or a small model: loading takes longer than computing.",
            runbook="proof-stale-or-failed",
        ),
        stat(
            "Median TTFT", quantile(0.5, "vllm:time_to_first_token_seconds", model()), width=4, unit="s",
            tells="Half of the requests had their first token within this time.",
            normal="Near the hit times of the proof for repeated prompts.",
            otherwise="see Requests & traces for the part that takes the time.",
        ),
        stat(
            "Requests", growth("vllm:request_success_total", model()), width=4, unit="short",
            tells="Requests of the shown time that ended.",
            normal="As many as clients sent.",
            otherwise="see the reasons on the vLLM dashboard.",
        ),
        lines(
            "Hit rate by tier",
            Query(ratio(rate("vllm:prefix_cache_hits_total", model()), rate("vllm:prefix_cache_queries_total",
            model())),
                  "L0: vLLM's own cache"),
            Query(ratio(rate("lmcache_mp_lookup_hit_tokens_total", model('cache_salt=~"$tenant"')),
                        rate("lmcache_mp_lookup_requested_tokens_total", model('cache_salt=~"$tenant"'))),
                  "L1 + L2: of what LMCache was asked"),
            Query(ratio(rate("lmcache_mp_l2_prefetch_load_completed_chunks_total", tenant()),
                        rate("lmcache_mp_l2_prefetch_lookup_objects_chunks_total", tenant())),
                  "L2: of what L1 did not have"),
            unit="percentunit", maximum=1,
            tells="Each tier's hits, of what that tier was asked for. The tiers overlap: L0's hits are in L1 as well.",
            normal="Steady while the traffic is.",
            otherwise="zero after non-zero: identity, tenant or a restart. Slowly falling: the cache is too small.",
            runbook="hit-rate-zero",
        ),
        lines(
            "Prompt tokens by source",
            Query(rate("vllm:prompt_tokens_by_source_total", model(), "source"), "{{source}}"),
            kind="stack", unit="short",
            tells="Prompt tokens: computed here, from L0 (local_cache_hit), from L1 or L2 (external_kv_transfer).",
            normal="local_compute is what is new.",
            otherwise="all local_compute under repeated prompts: the cache does not hit.", runbook="hit-rate-zero",
        ),
        lines(
            "TTFT, cold and hit (last proof)",
            Query("max by (phase) (kvstrata_proof_ttft_seconds)", "{{phase}}"), unit="s", no_value="none yet",
            tells="Time to first token of the proof's phases: cold, and from each tier.",
            normal="Every hit below cold.",
            otherwise="the tier whose line lies above cold costs more than it saves.", runbook="proof-stale-or-failed",
        ),
    )  # fmt: skip


def _room() -> tuple[Panel, ...]:
    return (
        lines(
            "L1 (RAM) fill", Query(f"max by (host) (lmcache_mp_l1_usage_ratio{host()})", "{{host}}"),
            unit="percentunit", maximum=1,
            tells="Share of the RAM pool that is in use.",
            normal="Up to 0.8, where eviction begins.",
            otherwise="above 0.9 for long: L1 is too small for what runs at once.", runbook="l1-thrash",
        ),
        lines(
            "L2 (disk) fill and cap",
            Query(f"sum by (host) (kvstrata_store_used_bytes{host()})", "used {{host}}"),
            Query(f"sum by (host) (kvstrata_store_capacity_bytes{host()})", "cap {{host}}"),
            Query(f"min by (host) (node_filesystem_avail_bytes{host(CACHE_DISK)})", "free on the disk {{host}}"),
            unit="bytes",
            tells="What the block store holds, what it may hold, and what the disk has left.",
            normal="Used below the cap, and room on the disk beside it.",
            otherwise="free falls while used does not: something else fills the disk.", runbook="disk-filling",
        ),
        lines(
            "L2: blocks evicted and hit",
            Query(zero(rate("kvstrata_store_evictions_total", host())), "evicted"),
            Query(rate("kvstrata_store_hits_total", host()), "hit"), unit="ops",
            tells="Whether what is thrown out is less than what is used.",
            normal="Hits above evictions, or no evictions at all.",
            otherwise="evictions above hits: the cap is too small for the working set (make size).",
            runbook="near-cap",
        ),
    )  # fmt: skip


BOARD = Board(
    "kvstrata-overview", "kvstrata: overview",
    "Is it working, is it worth it, how full is it. One screen.",
    (Row("Is it working?", _working()), Row("Is it worth it?", _worth()), Row("How full is it?", _room())),
)  # fmt: skip
