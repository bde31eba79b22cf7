"""A target that exposes the whole catalogue, in Prometheus' protobuf format: text cannot carry native histograms.

Counters grow and gauges move with each scrape. Every label has two values, but for those that rules select on.
"""

from __future__ import annotations

import struct
import threading
import time
from collections.abc import Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import product

from kvstrata.observe.catalog import Kind, Metric

#: Values of labels, where not two made-up ones.
LABELS: Mapping[str, tuple[str, ...]] = {
    "cache_salt": ("", "0123456789abcdef"),
    "mountpoint": ("/cache",),
    "model_name": ("small", "small--0011223344556677"),
    "kind": ("shm", "pickle"),
    "role": ("scheduler", "worker"),
    "engine": ("0",),
    "phase": ("cold", "warm_l0"),
    "source": ("local_compute", "local_cache_hit", "external_kv_transfer"),
}
_BUCKETS = (0.001, 0.01, 0.1, 1.0, 10.0, 1e9)
_TYPE = {Kind.COUNTER: 0, Kind.GAUGE: 1, Kind.HISTOGRAM: 4, Kind.NATIVE: 4}
_NOW = {"timestamp_seconds", "start_time_seconds"}


class Target:
    """Serves `metrics`. `without(name)` takes one away, `still()` stops all movement."""

    def __init__(self, metrics: tuple[Metric, ...]) -> None:
        self.metrics = [metric for metric in metrics if metric.name not in ("up", "ALERTS")]
        self._gone: set[str] = set()
        self._tick = 0
        self._lock = threading.Lock()
        target = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                body = target.page()
                self.send_response(200)
                kind = "application/vnd.google.protobuf; proto=io.prometheus.client.MetricFamily; encoding=delimited"
                self.send_header("Content-Type", kind)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self._server.server_address[1]}"

    def without(self, *names: str) -> None:
        self._gone = set(names)

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def page(self) -> bytes:
        with self._lock:
            self._tick += 1
            return b"".join(_delimited(_family(m, self._tick)) for m in self.metrics if m.name not in self._gone)


def _family(metric: Metric, tick: int) -> bytes:
    made = b"".join(
        _bytes(4, labels + _sample(metric, tick + at)) for at, labels in enumerate(_label_sets(metric.labels))
    )
    return _bytes(1, metric.name.encode()) + _bytes(2, metric.meaning.encode()) + _int(3, _TYPE[metric.kind]) + made


def _label_sets(names: tuple[str, ...]) -> Iterator[bytes]:
    for values in product(*(LABELS.get(name, (f"{name}-1", f"{name}-2")) for name in names)):
        pairs = sorted(zip(names, values, strict=True))
        yield b"".join(_bytes(1, _bytes(1, name.encode()) + _bytes(2, value.encode())) for name, value in pairs)


def _sample(metric: Metric, tick: int) -> bytes:
    if metric.kind is Kind.COUNTER:
        return _bytes(3, _double(1, float(tick * 7)))
    if metric.kind is Kind.GAUGE:
        moving = time.time() if any(metric.name.endswith(end) for end in _NOW) else 1.0 + tick % 5 * 0.1
        return _bytes(2, _double(1, moving))
    count = tick * 4
    body = _int(1, count) + _double(2, count * 0.5)
    if metric.kind is Kind.HISTOGRAM:
        for at, bound in enumerate(_BUCKETS):
            body += _bytes(3, _int(1, tick * min(at, 4)) + _double(2, bound))
    else:
        # schema 0: buckets (0.5, 1], (1, 2]; two deltas: half of the observations each
        body += _int(5, 0) + _double(6, 1e-128) + _int(7, 0)
        body += _bytes(12, _int(1, 0) + _int(2, 2)) + _bytes(13, _varint(_zigzag(tick * 2)) + _varint(_zigzag(0)))
    return _bytes(7, body)


def _varint(value: int) -> bytes:
    out = bytearray()
    while True:
        value, low = value >> 7, value & 0x7F
        out.append(low | (0x80 if value else 0))
        if not value:
            return bytes(out)


def _zigzag(value: int) -> int:
    return value << 1 if value >= 0 else (-value << 1) - 1


def _int(number: int, value: int) -> bytes:
    return _varint(number << 3) + _varint(value)


def _double(number: int, value: float) -> bytes:
    return _varint(number << 3 | 1) + struct.pack("<d", value)


def _bytes(number: int, value: bytes) -> bytes:
    return _varint(number << 3 | 2) + _varint(len(value)) + value


def _delimited(message: bytes) -> bytes:
    return _varint(len(message)) + message
