"""Requests and traces: from a slow request to the part that took the time."""

from __future__ import annotations

from kvstrata.observe.dashboards.panels import (
    Board,
    Panel,
    Query,
    Row,
    TraceQuery,
    average,
    growth,
    host,
    lines,
    model,
    quantile,
    stat,
)  # fmt: skip

__all__ = ["BOARD"]


def _where() -> tuple[Panel, ...]:
    return (
        lines(
            "Mean time by part",
            Query(average("vllm:request_queue_time_seconds", model()), "queue, loads from the cache included"),
            Query(average("vllm:request_prefill_time_seconds", model()), "prefill"),
            Query(average("vllm:request_decode_time_seconds", model()), "decode"), kind="stack", unit="s", width=12,
            tells="Where a request's time goes.",
            normal="Prefill shrinks when the cache hits; the queue holds the load instead.",
            otherwise="queue larger than the prefill it saves: the disk is too slow to be worth it.",
            runbook="l2-stores-fail",
        ),
        lines(
            "Slowest twentieth by part",
            Query(quantile(0.95, "vllm:request_queue_time_seconds", model()), "queue"),
            Query(quantile(0.95, "vllm:request_prefill_time_seconds", model()), "prefill"),
            Query(quantile(0.95, "vllm:request_decode_time_seconds", model()), "decode"),
            Query(quantile(0.95, "vllm:request_inference_time_seconds", model()), "prefill and decode"), unit="s",
            width=12,
            tells="95 % of requests took at most this.", normal="Near the mean.",
            otherwise="queue: the cache or the load. Prefill: long new prompts.", runbook="l2-stores-fail",
        ),
        lines(
            "Prompt tokens that were computed",
            Query(quantile(0.5, "vllm:request_prefill_kv_computed_tokens", model()), "median"),
            Query(quantile(0.95, "vllm:request_prefill_kv_computed_tokens", model()), "95 %"),
            Query(average("vllm:request_prompt_tokens", model()), "mean length of prompts"), width=12,
            tells="What was left to compute of a prompt.",
            normal="Far below the length of prompts, where prompts repeat.",
            otherwise="equal to it: nothing hits.", runbook="hit-rate-zero",
        ),
        lines(
            "Blocks: time from the disk",
            Query(quantile(0.95, "kvstrata_store_load_seconds", host()), "one block, 95 %"),
            Query(f"sum(lmcache_mp_active_prefetch_jobs{host()})", "lookups that wait now"), unit="s", width=12,
            tells="What a hit on disk waits for.", normal="Milliseconds a block.",
            otherwise="see the block store's dashboard.", runbook="l2-stores-fail",
        ),
    )  # fmt: skip


def _counts() -> tuple[Panel, ...]:
    counted = (
        ("Requests", growth("vllm:request_success_total", model()), "Requests of the shown time that ended."),
        ("Lost calls", growth("kvstrata_guard_lost_total", host()), "Calls to the cache server without an answer."),
        ("Preempted", growth("vllm:num_preemptions_total", model()), "Requests that had to start again."),
    )
    return tuple(
        stat(title, expr, width=8, tells=tells, normal="Lost and preempted: 0.",
             otherwise="lost calls: the cache server was away.", runbook="heartbeat-lost")
        for title, expr, tells in counted
    )  # fmt: skip


def _traces() -> tuple[Panel, ...]:
    def search(title: str, tells: str, normal: str, otherwise: str, query: str) -> Panel:
        return Panel(
            title, (), tells, normal, otherwise, kind="traces", width=24, height=9, traces=(TraceQuery(query),)
        )  # fmt: skip

    return (
        search(
            "Slow requests", "vLLM's requests of more than a second. Open one: its spans say what it waited for.",
            "Long prompts without a hit, long answers.",
            "look at lookup_prefetch (waits for the disk), retrieve (copies into vLLM), and what is left (prefill).",
            '{resource.service.name="vllm" && duration > 1s}',
        ),
        search(
            "Lookups that waited for L2", "Lookups of the cache server; they last as long as the loads from L2.",
            "Milliseconds.", "seconds: the disk is slow; see the block store's dashboard.",
            '{resource.service.name="lmcache" && name="mp.lookup_prefetch"}',
        ),
        search(
            "Retrieves", "Copies from L1 into vLLM.", "Milliseconds.", "tens of them: blocks travel by pickle.",
            '{resource.service.name="lmcache" && name="mp.retrieve"}',
        ),
    )  # fmt: skip


BOARD = Board(
    "kvstrata-requests", "kvstrata: requests and traces",
    "From a slow request to the part that took the time.",
    (Row("Where the time goes", _where()), Row("How many", _counts()), Row("Traces", _traces())),
)  # fmt: skip
