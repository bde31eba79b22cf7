"""The store's Prometheus metrics, made from its events and its usage.

They are collected by the process-wide default registry, which is also where LMCache's OpenTelemetry exporter puts its
own (lmcache 0.5.3 v1/mp_observability/otel_init.py), so that one GET /metrics gives both. With OTLP on, LMCache pushes
and its part of that page is empty; ours stays there.
"""

from __future__ import annotations

import threading
from collections import Counter as Tally
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import GaugeMetricFamily, Metric

from kvstrata.store.keys import BlockKey

if TYPE_CHECKING:
    from kvstrata.store.store import Usage

__all__ = ["CORRUPT_REASONS", "StoreMetrics"]

#: What a reader refuses (docs/format.md); shown as zeros from the start, so that a rate has something to start from.
CORRUPT_REASONS = (
    "magic", "format", "header_crc", "codec", "key", "length", "truncated", "payload_crc", "decode",
)  # fmt: skip
#: Of a disk that does not answer now (the usage says so itself), a store that ends, a block that is just going.
_OF_THE_MOMENT = ("suspect", "deadline", "closed", "leaving")
_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
_BYTES_PER_SECOND = (10e6, 25e6, 50e6, 100e6, 250e6, 500e6, 1e9, 2.5e9, 5e9, 10e9, 20e9)
_PREFIX = "kvstrata_store"


class StoreMetrics:
    """The `Events` of a store that counts. One instance a store; thread-safe.

    Args:
        registry: where the metrics are collected from; prometheus_client's default one unless a test says otherwise.
    """

    def __init__(self, registry: CollectorRegistry = REGISTRY) -> None:
        self._registry = registry
        self._usage: Callable[[], Usage] | None = None
        self._tally: Tally[str] = Tally()
        self._tally_lock = threading.Lock()
        self._failing = ""
        own = self._own = CollectorRegistry()

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"{_PREFIX}_{name}", text, labels, registry=own)

        def histogram(name: str, text: str, buckets: Sequence[float]) -> Histogram:
            return Histogram(f"{_PREFIX}_{name}", text, buckets=buckets, registry=own)

        self._lookups = counter("lookup_blocks", "Blocks asked for, by what the index said.", "result")
        self._hits = counter("hits", "Blocks that were loaded and found sound.")
        self._misses = counter("misses", "Blocks whose load gave nothing, corrupt ones left out.", "reason")
        self._corrupt = counter("corrupt", "Blocks that a load refused and removed.", "reason")
        self._loaded = counter("loaded_bytes", "Bytes handed to readers, decoded.")
        self._stores = counter("stores", "Blocks that were written.")
        self._present = counter("stores_present", "Stores of blocks that were there already.")
        self._failures = counter("store_failures", "Stores that wrote nothing.", "reason")
        self._stored = counter("stored_bytes", "Bytes taken from writers, before encoding.")
        self._evictions = counter("evictions", "Blocks that made room for others.", "class")
        self._evicted = counter("evicted_bytes", "Bytes on disk that evictions freed.", "class")
        self._removed = counter("removed_blocks", "Blocks that went, for any reason.")
        self._load_s = histogram("load_seconds", "From the call to the end of one block's load.", _SECONDS)
        self._store_s = histogram("store_seconds", "From the call to the end of one block's store.", _SECONDS)
        self._load_rate = histogram(
            "load_bytes_per_second", "Bytes of a loaded block over its seconds.", _BYTES_PER_SECOND
        )
        self._store_rate = histogram(
            "store_bytes_per_second", "Bytes of a stored block over its seconds.", _BYTES_PER_SECOND
        )
        self._scan_s = Gauge(f"{_PREFIX}_scan_seconds", "How long the scan at start took.", registry=own)
        self._scan_blocks = Gauge(f"{_PREFIX}_scan_blocks", "Blocks that the scan at start found.", registry=own)
        for reason in CORRUPT_REASONS:
            self._corrupt.labels(reason)
        for result in ("hit", "miss"):
            self._lookups.labels(result)

    # -- where they are collected -------------------------------------------------------------------------------

    def watch(self, usage: Callable[[], Usage]) -> None:
        """From now on the registry shows these metrics and what `usage` says at each scrape."""
        self._usage = usage
        self._registry.register(self)

    def unwatch(self) -> None:
        """The registry forgets them. Idempotent."""
        if self._usage is not None:
            self._usage = None
            self._registry.unregister(self)

    def describe(self) -> Iterable[Metric]:
        """Nothing, so that registering reads no usage."""
        return ()

    def collect(self) -> Iterable[Metric]:
        """Called by the registry at each scrape."""
        for metric in self._own.collect():
            # Creation times: twice the series, and nobody's question.
            metric.samples = [sample for sample in metric.samples if not sample.name.endswith("_created")]
            yield metric
        usage = self._usage() if self._usage else None
        if usage is None:
            return
        for name, text, value in (
            ("blocks", "Blocks in the store.", usage.blocks),
            ("used_bytes", "Bytes on disk below the root, as du counts them.", usage.used),
            ("reserved_bytes", "Bytes that stores under way may still take.", usage.reserved),
            ("capacity_bytes", "The cap: used and reserved bytes never pass it.", usage.capacity),
            ("device_free_bytes", "Bytes free on the disk of the root.", usage.free_on_device),
            ("suspect", "1 while the disk does not answer and everything is a miss.", int(usage.suspect)),
        ):
            yield GaugeMetricFamily(f"{_PREFIX}_{name}", text, value=value)

    def totals(self) -> Mapping[str, Any]:
        """Counts since start for a status page: loads, stores, evictions, and corrupt blocks by reason.

        `store_failing`: why the last store wrote nothing; empty if it did, or had no need to.
        """
        with self._tally_lock:
            corrupt = {k.removeprefix("corrupt:"): n for k, n in self._tally.items() if k.startswith("corrupt:")}
            names = ("hits", "misses", "stores", "store_failures", "evictions")
            counts = {n: self._tally[n] for n in names}
            failing = self._failing
        return {**counts, "store_failing": failing, "corrupt": sum(corrupt.values()), "corrupt_reasons": corrupt}

    def _count(self, name: str, amount: int = 1) -> None:
        with self._tally_lock:
            self._tally[name] += amount

    # -- events -------------------------------------------------------------------------------------------------

    def on_lookup(self, found: int, missing: int) -> None:
        """A batch was looked up in the index. The store has no event for it: its caller reports."""
        self._lookups.labels("hit").inc(found)
        self._lookups.labels("miss").inc(missing)

    def on_load(self, nbytes: int, seconds: float, outcome: str, reason: str) -> None:
        self._load_s.observe(seconds)
        if outcome == "hit":
            self._hits.inc()
            self._loaded.inc(nbytes)
            self._load_rate.observe(nbytes / max(seconds, 1e-9))
            self._count("hits")
        elif outcome == "corrupt":
            self._corrupt.labels(reason or "unknown").inc()
            self._count(f"corrupt:{reason or 'unknown'}")
        else:
            self._misses.labels(reason or outcome).inc()
            self._count("misses")

    def on_store(self, nbytes: int, seconds: float, outcome: str, reason: str) -> None:
        self._store_s.observe(seconds)
        if reason not in _OF_THE_MOMENT:
            self._failing = "" if outcome in ("stored", "present") else reason or outcome
        if outcome == "stored":
            self._stores.inc()
            self._stored.inc(nbytes)
            self._store_rate.observe(nbytes / max(seconds, 1e-9))
            self._count("stores")
        elif outcome == "present":
            self._present.inc()
        else:
            self._failures.labels(reason or outcome).inc()
            self._count("store_failures")

    def on_evicting(self, keys: Sequence[BlockKey]) -> None:
        """Counted when it is done."""

    def on_evict(self, cls: str, blocks: int, nbytes: int) -> None:
        self._evictions.labels(cls).inc(blocks)
        self._evicted.labels(cls).inc(nbytes)
        self._count("evictions", blocks)

    def on_removed(self, keys: Sequence[BlockKey], sizes: Sequence[int]) -> None:
        self._removed.inc(len(keys))

    def scan_done(self, blocks: int, seconds: float) -> None:
        self._scan_blocks.set(blocks)
        self._scan_s.set(seconds)
