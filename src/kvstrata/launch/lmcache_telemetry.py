"""What LMCache 0.5.3 lacks where it pushes by OTLP: its own page of metrics, its spans in the request's trace, and
figures soon after a long absence of the collector.

Call before the server is built. Nothing here is called where no endpoint is set.
"""

from __future__ import annotations

from functools import partial
from typing import Any

__all__ = ["join_traces", "keep_page", "reconnect_soon"]

_LONGEST_PAUSE_MS = 2000


def keep_page() -> None:
    """GET /metrics stays as full as without a push: status and the proof must not depend on a collector.

    LMCache makes a provider with one reader, either (mp_observability/otel_init.py:84); it gets the other as well.
    """
    from opentelemetry.exporter.prometheus import PrometheusMetricReader
    from opentelemetry.sdk import metrics

    real = metrics.MeterProvider

    class BothWays(real):  # type: ignore[misc, valid-type]
        def __init__(self, metric_readers: Any = (), **rest: Any) -> None:
            super().__init__(metric_readers=[*metric_readers, PrometheusMetricReader()], **rest)

    metrics.MeterProvider = BothWays


def reconnect_soon() -> None:
    """gRPC tries an address that does not answer ever more seldom, in the end every two minutes. An exporter that fails
    begins anew with a channel of its own, but LMCache has two, and each finds the other's pause: a minute and more
    without figures once the collector is there, as after the first build of its image.
    """
    from opentelemetry.exporter.otlp.proto.grpc import metric_exporter, trace_exporter

    options = (("grpc.max_reconnect_backoff_ms", _LONGEST_PAUSE_MS),)
    for module, name in ((metric_exporter, "OTLPMetricExporter"), (trace_exporter, "OTLPSpanExporter")):
        setattr(module, name, partial(getattr(module, name), channel_options=options))


def join_traces() -> None:
    """LMCache's span of a request becomes a child of the span that vLLM's side opened (`trace_ids`)."""
    from lmcache.v1.mp_observability.subscribers.tracing.mp_server import MPServerTracingSubscriber as Subscriber
    from opentelemetry import context

    from kvstrata.launch.trace_ids import parent_of

    original = Subscriber._get_or_create_request_span

    def joined(self: Any, session_id: str, ts: float) -> Any:
        parent = parent_of(session_id)
        if parent is None:
            return original(self, session_id, ts)
        token = context.attach(parent)
        try:
            return original(self, session_id, ts)
        finally:
            context.detach(token)

    Subscriber._get_or_create_request_span = joined
