"""Runs inside the image (test_in_image.py): LMCache's own exporters, after a collector was away for long."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
from lmcache.v1.mp_observability import otel_init
from opentelemetry import trace

from kvstrata.launch import lmcache_telemetry


class Collector(grpc.GenericRpcHandler):
    """Takes what is pushed."""

    def __init__(self) -> None:
        self.came: dict[str, list[float]] = {"Metrics": [], "Trace": []}

    def service(self, details: Any) -> Any:
        kind = next(kind for kind in self.came if kind in details.method)

        def take(_request: bytes, _context: Any) -> bytes:
            self.came[kind].append(time.monotonic())
            return b""

        return grpc.unary_unary_rpc_method_handler(take)


def test_lmcaches_exporters_never_pause_for_long(tmp_path: Path, monkeypatch: Any) -> None:
    """Both kinds come once there is somebody, and every channel, those made anew too, knows its longest pause."""
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "3")
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "1000")
    lmcache_telemetry.keep_page()
    lmcache_telemetry.reconnect_soon()
    made: list[dict[str, Any]] = []
    real = grpc.insecure_channel

    def seen(*args: Any, **rest: Any) -> Any:
        made.append(dict(rest["options"]))
        return real(*args, **rest)

    from opentelemetry.exporter.otlp.proto.grpc import exporter

    monkeypatch.setattr(exporter, "insecure_channel", seen)
    path = tmp_path / "otlp.sock"
    otel_init.init_otel_metrics(f"unix://{path}", resource_attributes={})
    otel_init.init_otel_tracing(f"unix://{path}")
    assert len(made) == 2 and all(options["grpc.max_reconnect_backoff_ms"] == 2000 for options in made)
    over = threading.Event()

    def work() -> None:
        while not over.wait(0.5):
            trace.get_tracer("x").start_span("s").end()

    thread = threading.Thread(target=work)
    thread.start()
    collector, server = Collector(), grpc.server(ThreadPoolExecutor(4))
    try:
        time.sleep(15)
        assert len(made) > 2, "a channel that failed was made anew"
        server.add_generic_rpc_handlers((collector,))
        server.add_insecure_port(f"unix://{path}")
        server.start()
        end = time.monotonic() + 60
        while not all(collector.came.values()) and time.monotonic() < end:
            time.sleep(0.1)
        assert all(collector.came.values()), collector.came
        assert all(options["grpc.max_reconnect_backoff_ms"] == 2000 for options in made)
    finally:
        over.set()
        thread.join(5)
        server.stop(0)
