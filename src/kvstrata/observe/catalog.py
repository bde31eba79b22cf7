"""Every metric that a dashboard, a rule or a page of docs may name: kind, unit, meaning, source.

The table is ours; that the names are real is shown by tests: `tests/observability` compares them with what the pinned
LMCache registers, with the classes of this package, and with a live Prometheus (`kvstrata observe check`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from functools import cache
from typing import Literal

__all__ = ["LMCACHE_HISTOGRAMS", "Kind", "Metric", "Needs", "all_metrics", "by_series", "find", "series_of", "table"]

#: How Prometheus holds LMCache's histograms. 0.5.3's own buckets are the SDK's defaults (0, 5, 10 ... 10000), for
#: seconds and for GB/s alike: all that happens here falls into the first ones, and a collector cannot refine a bucket
#: afterwards. Exponential ones, asked of the SDK by environment, become native histograms, with no buckets to fit.
LMCACHE_HISTOGRAMS: Literal["native", "classic"] = "native"


class Kind(Enum):
    """How a metric is to be read."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"
    """Classic: series NAME_bucket, NAME_sum, NAME_count."""
    NATIVE = "native histogram"
    """One series NAME, whose samples are histograms: no `le`, no _sum, no _count."""


class Needs(Enum):
    """What has to be in the stack for a metric to exist at all."""

    NOTHING = ""
    STORE = "the block store as L2 (layer nvme)"
    REMOTE = "Path A (layer path-a)"
    ENGINE = "the kv engine (layer engine)"
    GPU = "an NVIDIA GPU and the DCGM exporter"
    HANDLE = "a GPU: there the cache server moves the blocks itself and measures it; on a CPU vLLM does"
    MOMENT = "work that is under way at the very moment of a push (every 10 s)"
    EVENT = "an event that a healthy run does not have"


@dataclass(frozen=True)
class Metric:
    """`name` as Prometheus stores it: counters with `_total`, classic histograms without `_bucket`."""

    name: str
    kind: Kind
    unit: str
    meaning: str
    source: str
    labels: tuple[str, ...] = ()
    lazy: bool = False
    """True where the series appears with the first event: absent means zero."""
    needs: Needs = Needs.NOTHING


@cache
def all_metrics() -> tuple[Metric, ...]:
    """The whole catalogue, by source. Names are unique."""
    from kvstrata.observe import names_kvstrata, names_lmcache, names_machine, names_vllm

    return (*names_lmcache.METRICS, *names_vllm.METRICS, *names_kvstrata.METRICS, *names_machine.METRICS)


def series_of(metric: Metric) -> tuple[str, ...]:
    """Names of the series that Prometheus keeps for it."""
    if metric.kind is Kind.HISTOGRAM:
        return tuple(f"{metric.name}_{suffix}" for suffix in ("bucket", "sum", "count"))
    return (metric.name,)


@cache
def by_series() -> Mapping[str, Metric]:
    """Series name to metric."""
    return {series: metric for metric in all_metrics() for series in series_of(metric)}


def find(series: str) -> Metric | None:
    """The metric that a series name of a query belongs to; None for one that nobody here knows."""
    return by_series().get(series)


def table(
    source: str, rows: Iterable[tuple[str, Kind, str, str]], *, labels: Mapping[str, tuple[str, ...]] | None = None,
    lazy: frozenset[str] = frozenset(), needs: Mapping[str, Needs] | None = None, all_need: Needs = Needs.NOTHING,
) -> tuple[Metric, ...]:  # fmt: skip
    """Rows of (name, kind, unit, meaning) of one source, with what differs from row to row beside it."""
    return tuple(
        Metric(
            name, kind, unit, meaning, source, (labels or {}).get(name, ()), name in lazy,
            (needs or {}).get(name, all_need),
        )
        for name, kind, unit, meaning in rows
    )  # fmt: skip
