"""The engine's Prometheus metrics: what HTTP answered, what the engine counts, what memory and connections are used."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.process_collector import ProcessCollector
from prometheus_client.registry import Collector

from kvstrata.engine.buffers import Budget

__all__ = ["EngineMetrics", "ListenerFigures"]

_SECONDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0, 60.0)
_PREFIX = "kvstrata_engine"

# Of the stats: name there, and what it says. Those that only grow are counters.
_GAUGES = {
    "unique_blocks": "Different contents that are kept.",
    "total_refs": "Keys that can be served.",
    "resident_bytes": "Bytes that the contents take, each counted once.",
    "logical_bytes": "Bytes that the keys stand for, each key counted.",
    "dedup_savings_bytes": "Logical bytes that take no room.",
    "capacity_bytes": "Bytes on disk that may be taken.",
}
_COUNTERS = {
    "dedup_hits": "Puts of a key or a content that was there already.",
    "get_hits": "Gets that found their block.",
    "get_misses": "Gets that did not.",
    "put_new": "Puts that stored something.",
    "evictions": "Blocks that made room for others.",
    "stale_retired": "Entries that an older data version took away.",
    "keys_retired": "Keys that went because there were too many.",
    "corrupt": "Blocks that were found damaged, and removed.",
    "demotions": "Blocks that went to the cold tier.",
    "promotions": "Blocks that came back from it.",
}


class ListenerFigures(Protocol):
    """What is shown of a listener."""

    accepted: int
    refused: int
    timeouts: int

    @property
    def open_connections(self) -> int:
        """Connections now."""

    @property
    def busy_connections(self) -> int:
        """Those that are being served."""


class EngineMetrics(Collector):
    """One instance an engine; thread-safe. `watch` says where the figures come from that are read on demand."""

    def __init__(self) -> None:
        registry = self._registry = CollectorRegistry()
        self._requests = Counter(f"{_PREFIX}_requests", "HTTP requests answered.", ("op", "code"), registry=registry)
        self._seconds = Histogram(
            f"{_PREFIX}_request_seconds", "From the end of a request's head to the end of its answer.", ("op",),
            buckets=_SECONDS, registry=registry,
        )  # fmt: skip
        self._received = Counter(f"{_PREFIX}_received_bytes", "Bytes of request bodies.", registry=registry)
        self._sent = Counter(f"{_PREFIX}_sent_bytes", "Bytes of answers' bodies.", registry=registry)
        self._unauthorized = Counter(f"{_PREFIX}_unauthorized", "Requests without a good token.", registry=registry)
        self._children: dict[tuple[str, int], Counter] = {}
        self._timers: dict[str, Histogram] = {}
        self._stats: Callable[[], Mapping[str, Any]] = dict
        self._budget: Budget | None = None
        self._listeners: Mapping[str, ListenerFigures] = {}
        ProcessCollector(namespace=_PREFIX, registry=registry)
        registry.register(self)

    def watch(
        self, stats: Callable[[], Mapping[str, Any]], budget: Budget, listeners: Mapping[str, ListenerFigures]
    ) -> None:
        """Read these whenever somebody asks. `listeners`: protocol to listener."""
        self._stats, self._budget, self._listeners = stats, budget, listeners

    def request(self, op: str, code: int, seconds: float, received: int, sent: int) -> None:
        """One HTTP request was answered; code 499 where the client went away."""
        child = self._children.get((op, code))
        if child is None:
            child = self._children[op, code] = self._requests.labels(op, str(code))
            self._timers.setdefault(op, self._seconds.labels(op))
        child.inc()
        self._timers[op].observe(seconds)
        if received:
            self._received.inc(received)
        if sent:
            self._sent.inc(sent)

    def unauthorized(self) -> None:
        """One was refused with 401."""
        self._unauthorized.inc()

    def page(self) -> bytes:
        """All of it in Prometheus' text format."""
        return generate_latest(self._registry)

    def collect(self) -> Iterable[Metric]:
        """Called by the registry: what is not counted here but read where it is kept."""
        stats = self._stats()
        for name, text in _GAUGES.items():
            if name in stats:
                yield _gauge(name, text, float(stats[name]))
        for name, text in _COUNTERS.items():
            if name in stats:
                yield CounterMetricFamily(f"{_PREFIX}_{name}", text, value=float(stats[name]))
        tiers = stats.get("tiers", {})
        for field, text in (
            ("bytes", "Bytes in a tier."), ("blocks", "Blocks in a tier."), ("capacity_bytes", "What a tier may take."),
        ):  # fmt: skip
            yield _labelled(f"tier_{field}", text, "tier", [(tier, one.get(field, 0)) for tier, one in tiers.items()])
        if self._budget is not None:
            yield _gauge("memory_used_bytes", "Connection buffers in use.", float(self._budget.used))
            yield _gauge("memory_limit_bytes", "What they may take together.", float(self._budget.total))
            yield _gauge("memory_waiting", "Requests that wait for a buffer.", float(self._budget.waiting))
        yield from self._connections()

    def _connections(self) -> Iterable[Metric]:
        listeners = self._listeners.items()
        yield _labelled(
            "connections", "Open now.", "protocol", [(name, one.open_connections) for name, one in listeners]
        )
        yield _labelled(
            "busy_connections", "Served now.", "protocol", [(name, one.busy_connections) for name, one in listeners]
        )
        for name, text, values in (
            ("connections_accepted", "Since the start.", [(name, one.accepted) for name, one in listeners]),
            ("connections_refused", "Beyond max_connections.", [(name, one.refused) for name, one in listeners]),
            ("deadlines_passed", "Requests cut for being slow.", [(name, one.timeouts) for name, one in listeners]),
        ):
            family = CounterMetricFamily(f"{_PREFIX}_{name}", text, labels=["protocol"])
            for protocol, value in values:
                family.add_metric([protocol], value)
            yield family


def _gauge(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(f"{_PREFIX}_{name}", text, value=value)


def _labelled(name: str, text: str, label: str, values: Sequence[tuple[str, float]]) -> Metric:
    family = GaugeMetricFamily(f"{_PREFIX}_{name}", text, labels=[label])
    for key, value in values:
        family.add_metric([key], value)
    return family
