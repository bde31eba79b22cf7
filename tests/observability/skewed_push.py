"""Runs inside lmcache's container: pushes one counter as LMCache would, from a host whose clock is wrong.

Arguments: seconds that the clock is ahead, the counter's value, how often to push it (every 5 s).
"""

from __future__ import annotations

import sys
import time

ahead, value, pushes = (int(word) for word in sys.argv[1:])
real = time.time_ns
time.time_ns = lambda: real() + ahead * 10**9  # before the SDK takes it by name

from opentelemetry.exporter.otlp.proto.grpc.metric_exporter import OTLPMetricExporter  # noqa: E402
from opentelemetry.sdk.metrics import MeterProvider  # noqa: E402
from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader  # noqa: E402
from opentelemetry.sdk.resources import Resource  # noqa: E402

reader = PeriodicExportingMetricReader(
    OTLPMetricExporter(endpoint="unix:///run/otlp/otlp.sock", insecure=True), export_interval_millis=3_600_000
)
resource = Resource.create({"host.name": "skewed", "service.name": "lmcache"})
provider = MeterProvider(metric_readers=[reader], resource=resource)
provider.get_meter("skew").create_counter("kvskew").add(value)
for _ in range(pushes):
    assert provider.force_flush(10_000)
    time.sleep(5)
