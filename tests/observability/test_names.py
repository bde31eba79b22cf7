"""The catalogue against the classes that export: the pinned LMCache in the image, and this project's own."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from kvstrata.observe.catalog import Kind, all_metrics
from kvstrata.proof.prom import parse
from kvstrata.store.metrics import StoreMetrics
from kvstrata.store.store import Usage
from tests import in_image

_KINDS = {Kind.COUNTER: "counter", Kind.GAUGE: "gauge", Kind.HISTOGRAM: "histogram", Kind.NATIVE: "histogram"}


def _of(prefix: str) -> dict[str, str]:
    return {metric.name: _KINDS[metric.kind] for metric in all_metrics() if metric.name.startswith(prefix)}


@pytest.mark.docker
@pytest.mark.slow
def test_lmcaches_names_and_kinds_are_those_that_the_pinned_version_registers() -> None:
    done = in_image.run(
        in_image.build(), Path(__file__).parent, "--noconftest", "-s", "/tests/inside_names.py", env=("HOME=/tmp",)
    )
    assert done.returncode == 0, done.stdout + done.stderr
    line = next(line for line in done.stdout.splitlines() if "NAMES " in line)
    seen = json.loads(line.split("NAMES ", 1)[1])
    observable = {name.replace(".", "_").removesuffix("_total") for name in seen["mentioned"]}
    wrong = {}
    for name, kind in _of("lmcache_").items():
        if name not in seen["exported"]:
            if name.removesuffix("_total") not in observable:
                wrong[name] = "nothing registers it"
        elif seen["exported"][name] != kind:
            wrong[name] = f"a {seen['exported'][name]}, not a {kind}"
    assert not wrong
    shown = {name for name in seen["exported"] if not name.startswith("lmcache_blend_")}
    assert shown <= set(_of("lmcache_")), "registered, and in no table"


def test_the_stores_names_are_in_the_catalogue_and_the_other_way_round() -> None:
    registry = CollectorRegistry()
    store = StoreMetrics(registry)
    store.on_load(1, 0.1, "miss", "gone")
    store.on_store(1, 0.1, "failed", "full")
    store.on_evict("normal", 1, 1)
    fields = dict.fromkeys(Usage.__dataclass_fields__, 0)
    store.watch(lambda: Usage(**fields))  # type: ignore[arg-type]
    text = generate_latest(registry).decode()
    shown = {words[2]: words[3] for line in text.splitlines() if (words := line.split())[:2] == ["#", "TYPE"]}
    assert shown == _of("kvstrata_store_")
    assert parse(text).has("kvstrata_store_store_failures_total")
