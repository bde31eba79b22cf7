"""The connector guard's state as a Prometheus page, from the reports that it writes (connector/report.py).

Served by the launcher and not by vLLM: the guard lives in engine and worker processes, which must not open ports or
start exporters (they fork). A report that is not there gives no series, so a guard that is not loaded is an absent one.
"""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from kvstrata.launch.config import ConfigError, Paths

__all__ = ["page", "start"]

_KINDS = ("shm", "pickle", "handle", "none")
_LOST = ("store", "retrieve", "lookup")
_METRICS = {
    "kvstrata_guard_info": ("gauge", "1; what the guard was loaded for."),
    "kvstrata_guard_healthy": ("gauge", "1 while this side uses lmcache, 0 while it goes on without it."),
    "kvstrata_guard_transfer": ("gauge", "1 for the way in which KV moves now."),
    "kvstrata_guard_heartbeat_timestamp_seconds": ("gauge", "When lmcache answered last, seconds since 1970."),
    "kvstrata_guard_lost_total": ("counter", "Calls that lmcache did not answer; counted as misses."),
}
_Row = tuple[str, Mapping[str, str], float]


def start(env: Mapping[str, str], paths: Paths) -> None:
    """Serve the page at KV_GUARD_METRICS (host:port) from a thread; nothing where it is not set.

    A port that cannot be had is said and gone without: no metric is worth a vLLM that does not start.
    """
    address = env.get("KV_GUARD_METRICS", "").strip()
    if not address:
        return
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal():
        raise ConfigError(f"KV_GUARD_METRICS={address}, needed host:port")
    try:
        server = ThreadingHTTPServer((host, int(port)), _handler(paths.run))
    except OSError as error:
        print(f"kvstrata-launch: no page of the guard's metrics at {address}: {error}", file=sys.stderr, flush=True)
        return
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, name="guard-metrics", daemon=True).start()


def _handler(folder: Path) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        timeout = 5.0  # of the socket: a client that says nothing holds no thread
        protocol_version = "HTTP/1.0"

        def do_GET(self) -> None:  # http.server's name
            if self.path != "/metrics":
                self.send_error(404)
                return
            body = page(folder).encode()
            self.send_response(200)
            self.send_header("Content-Type", "text/plain; version=0.0.4; charset=utf-8")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_args: Any) -> None:
            """Every scrape would be a line."""

    return Handler


def page(folder: Path) -> str:
    """The text of the page: of each report in `folder`, whatever of it can be read."""
    rows = [row for path in sorted(folder.glob("guard-*.json")) for row in _rows(path)]
    lines = []
    for name, (kind, text) in _METRICS.items():
        lines += [f"# HELP {name} {text}", f"# TYPE {name} {kind}"]
        lines += [f"{name}{{{_labels(labels)}}} {value:.15g}" for row, labels, value in rows if row == name]
    return "\n".join(lines) + "\n"


def _rows(path: Path) -> Iterator[_Row]:
    try:
        report = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return
    role = {"role": str(report.get("role", ""))}
    info = {key: str(report.get(key, "")) for key in ("pair", "chunk_size", "identity")}
    yield "kvstrata_guard_info", {**role, **info}, 1.0
    yield "kvstrata_guard_healthy", role, float(bool(report.get("healthy")))
    if "transfer" in report:
        for kind in _KINDS:
            yield "kvstrata_guard_transfer", {**role, "kind": kind}, float(report["transfer"] == kind)
    if "beat" in report:
        yield "kvstrata_guard_heartbeat_timestamp_seconds", role, float(report["beat"])
    lost = report.get("lost", {})
    for what in _LOST:
        yield "kvstrata_guard_lost_total", {**role, "what": what}, float(lost.get(what, 0))


def _labels(labels: Mapping[str, str]) -> str:
    quoted = {key: value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n") for key, value in labels.items()}
    return ",".join(f'{key}="{value}"' for key, value in quoted.items())
