"""vLLM: what the dashboards use of its /metrics (0.25.1 and 0.28.0 spell these alike; v1/metrics/loggers.py)."""

from __future__ import annotations

from kvstrata.observe.catalog import Kind, table

__all__ = ["METRICS"]

_C, _G, _H = Kind.COUNTER, Kind.GAUGE, Kind.HISTOGRAM

_ROWS = (
    ("vllm:num_requests_running", _G, "requests", "Requests that are being computed."),
    ("vllm:num_requests_waiting", _G, "requests", "Requests that wait for their turn."),
    ("vllm:num_requests_waiting_by_reason", _G, "requests",
     "The same by reason: `capacity`, or `deferred` (waits for KV from the cache)."),
    ("vllm:kv_cache_usage_perc", _G, "0-1", "Share of vLLM's own KV memory (L0) that running requests hold."),
    ("vllm:prefix_cache_queries_total", _C, "tokens", "Tokens that L0 was asked for."),
    ("vllm:prefix_cache_hits_total", _C, "tokens", "Tokens that L0 had."),
    ("vllm:external_prefix_cache_queries_total", _C, "tokens", "Tokens that the connector was asked for."),
    ("vllm:external_prefix_cache_hits_total", _C, "tokens", "Tokens that the connector promised beyond L0."),
    ("vllm:num_preemptions_total", _C, "requests",
     "Requests that were thrown out for want of KV memory and start again."),
    ("vllm:prompt_tokens_total", _C, "tokens", "Prompt tokens of requests that were started."),
    ("vllm:prompt_tokens_by_source_total", _C, "tokens",
     "The same by source: `local_compute`, `local_cache_hit` (L0), `external_kv_transfer` (L1 or L2)."),
    ("vllm:prompt_tokens_cached_total", _C, "tokens", "Prompt tokens that were not computed, from L0, L1 or L2."),
    ("vllm:generation_tokens_total", _C, "tokens", "Tokens that were generated."),
    ("vllm:request_success_total", _C, "requests", "Requests that ended, by reason."),
    ("vllm:request_prompt_tokens", _H, "tokens", "Length of prompts."),
    ("vllm:request_generation_tokens", _H, "tokens", "Length of answers."),
    ("vllm:iteration_tokens_total", _H, "tokens",
     "Tokens of one step of the engine. A histogram, whatever its name says."),
    ("vllm:time_to_first_token_seconds", _H, "seconds", "From a request's arrival to its first token (TTFT)."),
    ("vllm:inter_token_latency_seconds", _H, "seconds", "Between two tokens of an answer."),
    ("vllm:e2e_request_latency_seconds", _H, "seconds", "From a request's arrival to its end."),
    ("vllm:request_queue_time_seconds", _H, "seconds",
     "Time a request waited; loading KV from L1 or L2 is part of it."),
    ("vllm:request_prefill_time_seconds", _H, "seconds", "Time of a request's prefill, cached tokens left out."),
    ("vllm:request_decode_time_seconds", _H, "seconds", "Time from a request's first token to its last."),
    ("vllm:request_inference_time_seconds", _H, "seconds", "Prefill and decode together."),
    ("vllm:request_prefill_kv_computed_tokens", _H, "tokens", "Prompt tokens of a request that were computed."),
)  # fmt: skip

_LABELS = {
    **{name: ("model_name", "engine") for name, *_ in _ROWS},
    "vllm:num_requests_waiting_by_reason": ("model_name", "engine", "reason"),
    "vllm:prompt_tokens_by_source_total": ("model_name", "engine", "source"),
    "vllm:request_success_total": ("model_name", "engine", "finished_reason"),
}

METRICS = table("vLLM", _ROWS, labels=_LABELS)
