"""What a scrape shows of a store: names, units, and that each event is counted once."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from kvstrata.proof.prom import Samples, parse
from kvstrata.store.keys import BlockKey
from kvstrata.store.metrics import CORRUPT_REASONS, StoreMetrics
from kvstrata.store.settings import StoreSettings
from kvstrata.store.store import BlockStore

SIZE = 128 << 10
KEYS = [BlockKey("m--0", "", bytes([n]) * 32) for n in range(4)]


class Scraped:
    """A store, its metrics, and a registry of their own."""

    def __init__(self, root: Path) -> None:
        self.root, self.registry = root, CollectorRegistry()
        self.metrics = StoreMetrics(self.registry)
        settings = StoreSettings(root, 64 << 20, free_floor=0, allow_fs=("tmpfs", "overlay"))
        self.store = BlockStore.open(settings, events=self.metrics)
        self.metrics.watch(self.store.usage)

    def put(self, *keys: BlockKey) -> None:
        self.store.put(list(keys), [memoryview(bytearray(SIZE)) for _ in keys]).result(30)

    def get(self, *keys: BlockKey) -> None:
        self.store.get_into(list(keys), [memoryview(bytearray(SIZE)) for _ in keys]).result(30)

    def scrape(self) -> Samples:
        return parse(generate_latest(self.registry).decode())


@pytest.fixture
def scraped(tmp_path: Path) -> Iterator[Scraped]:
    made = Scraped(tmp_path / "store")
    yield made
    made.store.close()


def test_names_follow_the_fields_rules(scraped: Scraped) -> None:
    text = generate_latest(scraped.registry).decode()
    kinds = {line.split()[2]: line.split()[3] for line in text.splitlines() if line.startswith("# TYPE")}
    assert kinds and all(name.startswith("kvstrata_store_") for name in kinds)
    assert all(name.endswith("_total") == (kind == "counter") for name, kind in kinds.items())
    units = ("_seconds", "_bytes", "_bytes_per_second")
    assert all(name.endswith(units) for name, kind in kinds.items() if kind == "histogram")
    assert "_created" not in text


def test_zeros_are_shown_before_anything_happened(scraped: Scraped) -> None:
    samples = scraped.scrape()
    for reason in CORRUPT_REASONS:
        assert any(labels.get("reason") == reason for _, labels, _ in samples.rows)
    assert samples.sum("kvstrata_store_capacity_bytes") == 64 << 20
    assert samples.has("kvstrata_store_scan_seconds") and samples.sum("kvstrata_store_suspect") == 0


def test_a_store_a_hit_a_miss_and_a_corrupt_block_are_counted_once_each(scraped: Scraped) -> None:
    scraped.put(*KEYS[:2])
    scraped.put(KEYS[0])
    path = scraped.root / KEYS[1].path
    path.write_bytes(b"\xff" * path.stat().st_size)
    scraped.get(*KEYS[:3])
    samples = scraped.scrape()
    expected = {
        "stores_total": 2, "stores_present_total": 1, "stored_bytes_total": 2 * SIZE, "hits_total": 1,
        "misses_total": 1, "corrupt_total": 1, "loaded_bytes_total": SIZE, "removed_blocks_total": 1, "blocks": 1,
        "load_seconds_count": 3, "store_seconds_count": 3,
    }  # fmt: skip
    assert {name: samples.sum(f"kvstrata_store_{name}") for name in expected} == expected
    assert samples.sum("kvstrata_store_corrupt_total", reason="magic") == 1
    totals = scraped.metrics.totals()
    assert (totals["hits"], totals["corrupt"], totals["corrupt_reasons"]) == (1, 1, {"magic": 1})


def test_evictions_are_counted_by_class_with_their_bytes(scraped: Scraped) -> None:
    scraped.put(*KEYS)
    freed = scraped.store.evict(2 * SIZE)
    samples = scraped.scrape()
    assert samples.sum("kvstrata_store_evictions_total") == scraped.metrics.totals()["evictions"] >= 2
    assert samples.sum("kvstrata_store_evicted_bytes_total") == freed
    assert any(labels.get("class") == "normal" for name, labels, _ in samples.rows if "evict" in name)


def test_a_block_of_any_size_finds_its_buckets() -> None:
    """3 to 36 MiB in 1 ms to 10 s: 300 KB/s to 36 GB/s."""
    registry = CollectorRegistry()
    metrics = StoreMetrics(registry)
    metrics.watch(lambda: None)  # type: ignore[arg-type, return-value]
    for seconds in (0.0005, 0.02, 3.0, 60.0):
        metrics.on_load(3 << 20, seconds, "hit", "")
    samples = parse(generate_latest(registry).decode())
    for name in ("load_seconds", "load_bytes_per_second"):
        counts = [value for row, _, value in samples.rows if row == f"kvstrata_store_{name}_bucket"]
        assert counts[-1] == 4 and len(set(counts)) >= 3


def test_why_nothing_is_stored_is_said_until_something_is() -> None:
    metrics = StoreMetrics(CollectorRegistry())
    told = []
    for outcome, reason in [
        ("stored", ""), ("error", "eacces"), ("error", "suspect"), ("expired", "deadline"), ("present", ""),
        ("expired", "deadline"), ("error", "full"), ("stored", ""),
    ]:  # fmt: skip
        metrics.on_store(1, 0.1, outcome, reason)
        told.append(metrics.totals()["store_failing"])
    assert told == ["", "eacces", "eacces", "eacces", "", "", "full", ""]


def test_what_is_no_longer_watched_is_no_longer_shown(scraped: Scraped) -> None:
    scraped.metrics.unwatch()
    scraped.metrics.unwatch()
    assert generate_latest(scraped.registry) == b""
