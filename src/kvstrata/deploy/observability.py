"""Observability of a deployment: which layers, what is to be scraped, the files and secrets it needs.

Images are observability_images' business, starting them observability_up's. Whatever goes wrong here never keeps the
rest of the stack from running.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import secrets
import socket
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from kvstrata.deploy import kv_engine, layers
from kvstrata.deploy.settings import Settings

__all__ = ["FOLDERS", "SERVICES", "Target", "folder", "host_name", "managed", "prepare", "targets"]

#: Every service of the observability layers: what `up` starts after the rest.
SERVICES = (
    "otlp", "otelcol", "prometheus", "alertmanager", "traces", "node-exporter", "grafana", "gpu-exporter",
)  # fmt: skip
#: Folders of data/observability, each for one service; `textfile` is what the CLI says of itself (the last proof).
FOLDERS = ("targets", "prometheus", "alertmanager", "traces", "grafana", "textfile")
#: Traces: command and metrics port of Tempo's image, and of the Jaeger that is built here.
_TRACES = {
    "pull": ("/tempo -config.file=/etc/traces/tempo.yaml", 3200),
    "build": ("/jaeger --config=/etc/traces/jaeger.yaml", 8888),
}
_SCRAPE = {"pull": "native", "build": "flag"}
#: Seen by Prometheus alone: a token that may read the engine's pages and blocks, nothing else.
_TOKEN = Path("prometheus/engine_token")
_PASSWORD = Path("grafana/admin_password")


@dataclass(frozen=True)
class Target:
    """What Prometheus asks: `job` is its name for people, `kind` the file of targets (prometheus.yaml) it stands in."""

    job: str
    address: str
    kind: str = "plain"


def targets(names: Iterable[str], source: str) -> tuple[Target, ...]:
    """What is to be up, from the names of the layers that run; `source`: "pull" or "build"."""
    table = {
        "vllm": (Target("vllm", "vllm:8000"),),
        "lmcache": (Target("lmcache-store", "proxy:8080", "store"),),
        "engine": (Target("engine", "engine:9130", "engine"),),
        "observability": (
            Target("guard", "vllm:9131"),
            Target("lmcache", "otelcol:8889", "pushed"),
            Target("collector", "otelcol:8888"),
            Target("prometheus", "prometheus:9090"),
            Target("alertmanager", "alertmanager:9093"),
            Target("traces", f"traces:{_TRACES[source][1]}"),
            Target("node", "node-exporter:9100"),
        ),
        "grafana": (Target("grafana", "grafana:3000"),),
        "gpu-metrics": (Target("gpu", "gpu-exporter:9400"),),
    }
    found = [target for name in names for target in table.get(name, ())]
    return tuple(found) if "observability" in set(names) else ()


def folder(settings: Settings) -> Path:
    """Where observability keeps its files on this host."""
    return settings.data_dir / "observability"


def host_name() -> str:
    """This machine's name as a label: without what OTEL_RESOURCE_ATTRIBUTES would split at."""
    return re.sub(r"[^A-Za-z0-9._-]", "-", socket.gethostname()) or "localhost"


def managed(settings: Settings) -> Mapping[str, str]:
    """The keys of .env's managed block, the images' left out."""
    source = settings.image_source or "build"
    disk = settings.l2_dir if settings.l2_dir.is_dir() else settings.data_dir
    return {
        "KV_HOST_NAME": host_name(),
        "KV_OBSERVABILITY_PATH": str(folder(settings)),
        "KV_OBSERVABILITY_HASH": _hash(settings.root / "observability"),
        "KV_OBSERVED_DISK": str(disk),
        "KV_PROMETHEUS_SCRAPE": _SCRAPE[source],
        "KV_TRACES_COMMAND": _TRACES[source][0],
    }


def _hash(root: Path) -> str:
    """Of what the services read when they start. Dashboards and targets are read again while they run."""
    digest = hashlib.sha256()
    for path in sorted(root.rglob("*.yaml")):
        digest.update(f"{path.relative_to(root)}\0".encode() + path.read_bytes() + b"\0")
    return digest.hexdigest()[:12]


def prepare(settings: Settings) -> None:
    """Make the folders, the list of targets and the secrets; safe to repeat. Only where observability runs."""
    root = folder(settings)
    for path in (root, *(root / name for name in FOLDERS)):
        if not path.exists():
            path.mkdir(mode=0o755)
            _own(path, settings)
    if settings.has_engine:
        _engine_token(settings)
    else:
        _secret(settings, _TOKEN, lambda: "none\n")
    _secret(settings, _PASSWORD, lambda: secrets.token_urlsafe(18) + "\n")
    _write_targets(settings)


def _write_targets(settings: Settings) -> None:
    found = targets([path.stem for path in layers.resolve(settings)], settings.image_source or "build")
    for kind in ("plain", "store", "engine", "pushed"):
        rows = [
            {"targets": [target.address], "labels": {"job": target.job, "host": host_name()}}
            for target in found
            if target.kind == kind
        ]
        _write(folder(settings) / "targets" / f"{kind}.json", json.dumps(rows, indent=1) + "\n", settings, 0o644)


def _engine_token(settings: Settings) -> None:
    """A token of its own for /metrics alone, in the engine's list and in Prometheus' folder."""
    path, listed = settings.secrets_dir / _TOKEN, kv_engine.server_dir(settings) / "tokens"
    token = path.read_text(encoding="ascii").strip() if path.exists() else ""
    known = listed.read_text(encoding="utf-8") if listed.exists() else ""
    digest = hashlib.sha256(token.encode()).hexdigest()
    if not known:
        return
    if digest in known:
        # Those of before could read blocks as well.
        before, now = (f"prometheus {scope} default sha256:{digest}" for scope in ("ro", "metrics"))
        if before in known:
            _write(listed, known.replace(before, now), settings, 0o600)
        return
    token = secrets.token_urlsafe(32)
    lines = [line for line in known.splitlines() if not line.startswith("prometheus ")]
    lines.append(f"prometheus metrics default sha256:{hashlib.sha256(token.encode()).hexdigest()}")
    path.unlink(missing_ok=True)
    _secret(settings, _TOKEN, lambda: token + "\n")
    _write(listed, "\n".join(lines) + "\n", settings, 0o600)


def _secret(settings: Settings, name: Path, make: Callable[[], str]) -> None:
    path = settings.secrets_dir / name
    if path.exists():
        return
    if not path.parent.exists():
        path.parent.mkdir(mode=0o700)
        _own(path.parent, settings)
    _write(path, make(), settings, 0o600)


def _write(path: Path, text: str, settings: Settings, mode: int) -> None:
    """Whole or not at all, and not at all where nothing changed."""
    if path.exists() and path.read_text(encoding="utf-8") == text:
        return
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_text(text, encoding="utf-8")
    temporary.chmod(mode)
    _own(temporary, settings)
    temporary.replace(path)


def _own(path: Path, settings: Settings) -> None:
    if os.geteuid() == 0 and settings.uid is not None and settings.gid is not None:
        os.chown(path, settings.uid, settings.gid)
