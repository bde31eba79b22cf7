"""vLLM: requests, latency, its own cache, the connector's guard, the machine."""

from __future__ import annotations

from kvstrata.observe.dashboards.panels import (
    Board,
    Panel,
    Query,
    Row,
    by_rate,
    host,
    lines,
    model,
    quantile,
    rate,
    ratio,
)  # fmt: skip

__all__ = ["BOARD"]


def _spread(name: str) -> tuple[Query, ...]:
    return tuple(
        Query(quantile(q, name, model()), text) for q, text in ((0.5, "median"), (0.95, "95 %"), (0.99, "99 %"))
    )


def _requests() -> tuple[Panel, ...]:
    return (
        lines(
            "Requests", Query(f"sum(vllm:num_requests_running{model()})", "running"),
            Query(f"sum(vllm:num_requests_waiting{model()})", "waiting"),
            tells="Requests in the engine now.", normal="Waiting goes back to 0.",
            otherwise="waiting grows: more load than the device can serve.",
        ),
        lines(
            "Waiting by reason",
            Query(f"sum by (reason) (vllm:num_requests_waiting_by_reason{model()})", "{{reason}}"),
            tells="Why requests wait: for room (capacity) or for KV from the cache (deferred).",
            normal="Deferred for as long as a load takes.",
            otherwise="deferred for long: the cache server or its disk is slow.", runbook="l2-stores-fail",
        ),
        lines(
            "Ended requests", Query(rate("vllm:request_success_total", model(), "finished_reason"),
            "{{finished_reason}}"),
            unit="reqps",
            tells="Requests that ended, by reason.", normal="stop and length.",
            otherwise="abort: clients went away. error: see the log of vllm.",
        ),
        lines("TTFT", *_spread("vllm:time_to_first_token_seconds"), unit="s",
              tells="From a request's arrival to its first token.", normal="Falls when the cache hits.",
              otherwise="see queue and prefill below for the part that takes the time."),
        lines("Between tokens", *_spread("vllm:inter_token_latency_seconds"), unit="s",
              tells="Between two tokens of an answer.", normal="Steady.",
              otherwise="peaks: large prefills beside it; lower --max-num-batched-tokens."),
        lines("Whole request", *_spread("vllm:e2e_request_latency_seconds"), unit="s",
              tells="From arrival to the last token.", normal="Follows the length of answers.",
              otherwise="see which part grew."),
        lines(
            "Tokens a second", by_rate("vllm:prompt_tokens_total", model(), "prompt"),
            by_rate("vllm:generation_tokens_total", model(), "generated"), unit="cps",
            tells="Throughput. Prompt tokens from the cache count as well.", normal="Follows the traffic.",
            otherwise="falls under the same load: preemptions, or another user of the device.",
        ),
        lines("Prompt length", *_spread("vllm:request_prompt_tokens"),
              tells="Tokens of prompts.", normal="What clients send.",
              otherwise="shorter than a chunk (256): such prompts cannot hit L1 or L2."),
        lines("Answer length", *_spread("vllm:request_generation_tokens"),
              tells="Tokens of answers.", normal="What clients ask for.", otherwise="see max_tokens."),
    )  # fmt: skip


def _cache() -> tuple[Panel, ...]:
    def hits(what: str) -> str:
        return ratio(rate(f"vllm:{what}_hits_total", model()), rate(f"vllm:{what}_queries_total", model()))

    return (
        lines(
            "Hit rates as vLLM counts them", Query(hits("prefix_cache"), "L0"),
            Query(hits("external_prefix_cache"), "connector, of what L0 did not have"), unit="percentunit", maximum=1,
            tells="Tokens found, of tokens asked for.", normal="Steady while the traffic is.",
            otherwise="zero after non-zero: see the runbook.", runbook="hit-rate-zero",
        ),
        lines(
            "Prompt tokens by source", Query(rate("vllm:prompt_tokens_by_source_total", model(), "source"),
            "{{source}}"),
            kind="stack", unit="cps",
            tells="Computed here, from L0, or from L1 and L2.", normal="local_compute is what is new.",
            otherwise="see the runbook.", runbook="hit-rate-zero",
        ),
        lines(
            "L0 memory in use", Query(f"max(vllm:kv_cache_usage_perc{model()})", "in use"), unit="percentunit",
            maximum=1,
            tells="Share of vLLM's KV memory that running requests hold.", normal="Below 1.",
            otherwise="at 1: requests wait or are preempted.",
        ),
        lines(
            "Preemptions", by_rate("vllm:num_preemptions_total", model(), "preempted"), unit="cps",
            tells="Requests that were thrown out for want of KV memory.", normal="0.",
            otherwise="fewer parallel requests, or a shorter --max-model-len.",
        ),
        lines(
            "Guard", Query(f"min by (role) (kvstrata_guard_healthy{host()})", "{{role}} uses the cache (0/1)"),
            by_rate("kvstrata_guard_lost_total", host(), "{{what}} without answer, a second", "what"),
            tells="Whether vLLM uses the cache server, and calls that it did not answer.",
            normal="1, and no lost calls.",
            otherwise="the cache server is away; vLLM computes everything.", runbook="heartbeat-lost",
        ),
        lines(
            "Heartbeat age", Query(f"time() - max by (role) (kvstrata_guard_heartbeat_timestamp_seconds{host()})",
            "{{role}}"),
            unit="s",
            tells="Since when the cache server has not answered the guard.", normal="Below the interval (10 s).",
            otherwise="grows: the server hangs or is away.", runbook="heartbeat-lost",
        ),
    )  # fmt: skip


def _machine() -> tuple[Panel, ...]:
    return (
        lines("Step size", *_spread("vllm:iteration_tokens_total"),
              tells="Tokens of one step of the engine.", normal="Large steps are prefills.",
              otherwise="always small under load: --max-num-batched-tokens is low."),
        lines(
            "Memory of the servers", Query(f"sum by (job) (process_resident_memory_bytes{host()})", "{{job}}"),
            unit="bytes",
            tells="Resident memory by part. Of vLLM, the API server's: the model's process has no page.",
            normal="Steady after warm-up.",
            otherwise="grows for hours: a leak; the container's limit ends it.",
        ),
        lines(
            "CPU of the servers", Query(rate("process_cpu_seconds_total", host(), "job"), "{{job}}"),
            tells="Cores in use by part. Of vLLM, the API server's: the model's process has no page.",
            normal="Follows the traffic.",
            otherwise="busy without traffic: see the log.",
        ),
        lines(
            "Up since", Query(f"time() - min by (job) (process_start_time_seconds{host()})", "{{job}}"), unit="s",
            tells="Age of each part's process.", normal="Grows.",
            otherwise="falls back to 0: it restarted; see the log.",
            runbook="target-down",
        ),
        lines(
            "Memory of the machine", Query(f"sum(node_memory_MemAvailable_bytes{host()})", "available"),
            Query(f"sum(node_memory_MemTotal_bytes{host()})", "all"), unit="bytes",
            tells="What programs can still have.", normal="Above a tenth.",
            otherwise="lower KV_L1_GB, or the memory of vLLM.",
        ),
        lines(
            "CPU of the machine", Query(rate("node_cpu_seconds_total", host('mode!="idle"'), "mode"), "{{mode}}"),
            kind="stack", tells="Cores in use by mode.", normal="Follows the traffic.",
            otherwise="iowait: the disk is the limit.",
        ),
        lines(
            "GPU", Query(f"avg by (gpu) (DCGM_FI_DEV_GPU_UTIL{host()})", "GPU {{gpu}}"), unit="percent", maximum=100,
            no_value="no GPU",
            tells="How busy each GPU is.", normal="Follows the traffic.",
            otherwise="idle while requests wait: they wait for KV from the cache.", runbook="l2-stores-fail",
        ),
        lines(
            "GPU memory", Query(f"sum by (gpu) (DCGM_FI_DEV_FB_USED{host()})", "GPU {{gpu}} used"),
            Query(f"sum by (gpu) (DCGM_FI_DEV_FB_FREE{host()})", "GPU {{gpu}} free"), unit="decmbytes",
            no_value="no GPU",
            tells="Memory of each GPU.", normal="Steady: vLLM takes its share at the start.",
            otherwise="no room free: LMCache's copies need some; lower --gpu-memory-utilization.",
        ),
    )  # fmt: skip


BOARD = Board(
    "kvstrata-vllm", "kvstrata: vLLM",
    "Requests, latency, its own cache, the guard, the machine.",
    (Row("Requests", _requests()), Row("Cache", _cache()), Row("Machine", _machine())),
)  # fmt: skip
