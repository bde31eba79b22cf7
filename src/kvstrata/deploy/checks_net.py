"""Checks of ports and proxies."""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Collection, Mapping

from kvstrata.deploy.finding import Finding
from kvstrata.deploy.settings import Settings

__all__ = ["port_findings", "proxy_findings"]

_LOOPBACK = ("127.0.0.1", "localhost")


def port_findings(settings: Settings, ours: Collection[int]) -> list[Finding]:
    """Ports that cannot be bound on 127.0.0.1. `ours`: those that this project's own containers hold now."""
    wanted = {"KV_PORT": settings.port}
    if settings.persist:
        wanted["KV_METRICS_PORT"] = settings.metrics_port
    if settings.has_engine:
        wanted["KV_ENGINE_PORT"] = settings.engine_port
    if settings.observes:
        no_grafana = settings.image_source != "pull"
        wanted |= {k: p for k, p in settings.watch_ports.items() if not (no_grafana and k == "KV_GRAFANA_PORT")}
    result = []
    for knob, port in wanted.items():
        if port in ours:
            continue
        if reason := _taken(port):
            result.append(
                Finding(
                    "port", "error", f"{knob}={port}: 127.0.0.1:{port} {reason}", "a free port",
                    f"set {knob} in .env to another port, or stop what holds it (ss -ltnp 'sport = :{port}')",
                )
            )  # fmt: skip
    return result


def _taken(port: int) -> str:
    """Why 127.0.0.1:`port` cannot be had, found by really binding it; "" when it can."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        # As servers do: connections that linger after a stop are no hindrance, a listener is.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
            probe.listen(1)
        except OSError as error:
            if error.errno == errno.EACCES:
                # Below 1024: the engine, which is root, binds it.
                return ""
            return "is in use" if error.errno == errno.EADDRINUSE else f"cannot be bound ({error.strerror})"
    return ""


def proxy_findings(env: Mapping[str, str] | None = None) -> list[Finding]:
    """A proxy variable without an exception for the loopback address catches local requests, curl's as well."""
    env = os.environ if env is None else env
    names = [name for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY") if env.get(name)]
    if not names:
        return []
    exempt = {entry.strip() for name in ("no_proxy", "NO_PROXY") for entry in env.get(name, "").split(",")}
    missing = [host for host in _LOOPBACK if host not in exempt and "*" not in exempt]
    if not missing:
        return []
    return [
        Finding(
            "proxy", "warning", f"{names[0]} is set, and NO_PROXY lacks {', '.join(missing)}",
            f"NO_PROXY with {', '.join(_LOOPBACK)}",
            "kvstrata asks its own services past the proxy, and its containers get NO_PROXY; for your own curl: "
            f"export NO_PROXY={','.join(_LOOPBACK)}",
        )
    ]  # fmt: skip
