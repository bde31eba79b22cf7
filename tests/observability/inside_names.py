"""Runs with the pinned LMCache (in the image): prints what its server registers, for test_names.py to read.

Each instrument is made by LMCache's own classes and moved once: the exporter shows a counter after its first event.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import lmcache.v1.mp_observability.subscribers.metrics as package
from opentelemetry import metrics
from opentelemetry.exporter.prometheus import PrometheusMetricReader
from opentelemetry.sdk.metrics import MeterProvider
from prometheus_client import REGISTRY, generate_latest

_NAMED = re.compile(r'"(lmcache_mp\.[a-z0-9_.]+)"')


def test_prints_names() -> None:
    metrics.set_meter_provider(MeterProvider(metric_readers=[PrometheusMetricReader()]))
    for name in dir(package):
        made = getattr(package, name)
        # the event bus' own metrics are observable: they want a running bus, and stand in `mentioned`
        if isinstance(made, type) and name.endswith("Subscriber") and name != "EventBusSelfMetricsSubscriber":
            for instrument in list(vars(made()).values()):
                if hasattr(instrument, "record"):
                    instrument.record(1.0)
                elif type(instrument).__name__.endswith("Counter") and hasattr(instrument, "add"):
                    instrument.add(1)
    lines = [line.split() for line in generate_latest(REGISTRY).decode().splitlines()]
    exported = {words[2]: words[3] for words in lines if words[:2] == ["#", "TYPE"] and words[2].startswith("lmcache_")}
    sources = Path(package.__file__).parents[3].rglob("*.py")
    mentioned = {name for path in sources for name in _NAMED.findall(path.read_text(encoding="utf-8"))}
    print("NAMES " + json.dumps({"exported": exported, "mentioned": sorted(mentioned)}))
