"""Counts of the remote door, on the same page as LMCache's own (store/metrics.py says how)."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from prometheus_client import REGISTRY, CollectorRegistry, Counter, Histogram
from prometheus_client.core import GaugeMetricFamily, Metric

__all__ = ["RemoteMetrics"]

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)


class RemoteMetrics:
    """`calls` by operation and outcome: hit, miss, stored, present, corrupt, refused, down, late."""

    def __init__(self, is_open: Callable[[], bool], registry: CollectorRegistry = REGISTRY) -> None:
        own = self._own = CollectorRegistry()
        self._registry, self._is_open = registry, is_open
        self.calls = Counter("kvstrata_remote_blocks", "Blocks asked of the engine.", ["op", "outcome"], registry=own)
        self.bytes = Counter("kvstrata_remote_bytes", "Bytes of blocks moved.", ["op"], registry=own)
        self.faults = Counter("kvstrata_remote_faults", "Calls without a usable answer.", ["reason"], registry=own)
        self.seconds = Histogram("kvstrata_remote_seconds", "One call.", ["op"], buckets=_SECONDS, registry=own)
        for op, outcomes in {"get": "hit miss corrupt", "set": "stored present refused", "exists": "hit miss"}.items():
            for outcome in outcomes.split():
                self.calls.labels(op, outcome)
        registry.register(self)

    def close(self) -> None:
        self._registry.unregister(self)

    def describe(self) -> Iterable[Metric]:
        return ()

    def collect(self) -> Iterable[Metric]:
        """Called by the registry at each scrape."""
        for metric in self._own.collect():
            metric.samples = [sample for sample in metric.samples if not sample.name.endswith("_created")]
            yield metric
        text = "1 while the engine is not asked because it does not answer."
        yield GaugeMetricFamily("kvstrata_remote_down", text, value=int(self._is_open()))
