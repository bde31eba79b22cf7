"""A running stack with observability on, and what its pages say. The fixture is for conftest.py to import."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from kvstrata.deploy import engine
from kvstrata.deploy.steps import Steps
from tests.stack.harness import Stack, free_ports, wait_until

__all__ = ["Watched", "watched"]

PORTS = ("KV_PROMETHEUS_PORT", "KV_ALERTMANAGER_PORT", "KV_TRACES_PORT")
KEEP = "KVSTRATA_KEEP_WATCHED"
SIZES = {"KV_L1_GB": "0.5", "KV_L2_GB": "1"}
"""45 and 91 chunks of the demo model: the scenario and the alerts want every tier to evict within a minute or two."""


class Watched(Stack):
    """A stack of its own, with the pages of Prometheus, Alertmanager and the traces."""

    def __init__(self, root: Path, project: str, **knobs: str) -> None:
        ports = dict(zip(PORTS, map(str, free_ports(len(PORTS))), strict=True))
        if (root / ".env").exists():  # kept from an earlier session
            lines = (line.split("=", 1) for line in (root / ".env").read_text().splitlines() if "=" in line)
            ports = {key: value for key, value in lines if key in PORTS}
        super().__init__(root, project, KV_OBSERVABILITY="1", **ports, **knobs)
        self.prometheus, self.alertmanager, self.traces = (f"http://127.0.0.1:{ports[key]}" for key in PORTS)

    def patiently(self, *args: str) -> str:
        """`ok`, for what takes longer than other commands."""
        done = self.cli(*args, timeout=3600)
        assert done.returncode == 0, f"kvstrata {' '.join(args)}: {done.returncode}\n{done.stdout}\n{done.stderr}"
        return done.stdout

    def query(self, expression: str) -> list[dict[str, Any]]:
        """An instant query: rows of {"metric": labels, "value": [time, text]}."""
        reply = self.client.get(f"{self.prometheus}/api/v1/query", params={"query": expression})
        reply.raise_for_status()
        return list(reply.json()["data"]["result"])

    def value(self, expression: str) -> float | None:
        """The one number of a query, None for no data."""
        rows = self.query(expression)
        return float(rows[0]["value"][1]) if rows and "value" in rows[0] else None

    def jobs(self) -> dict[str, str]:
        """Job -> "up", or what is wrong, as `status` says it."""
        return dict(json.loads(self.cli("status", "--json").stdout)["observability"]["targets"])

    def all_up(self) -> bool:
        states = self.jobs()
        return bool(states) and set(states.values()) == {"up"}

    def scraped(self, since: float) -> None:
        """Wait until LMCache has pushed (every 10 s), and everything was scraped (every 10 s), after `since`."""
        time.sleep(max(0.0, since + 21 - time.time()))

    def trace(self, trace_id: str) -> list[dict[str, Any]]:
        """Spans of a trace, from Jaeger's API (Tempo's has the same path): name, service, start and seconds."""
        reply = self.client.get(f"{self.traces}/api/traces/{trace_id}")
        if reply.status_code != 200 or not reply.json().get("data"):
            return []
        data = reply.json()["data"][0]
        services = {key: process["serviceName"] for key, process in data["processes"].items()}
        return [
            {
                "name": span["operationName"],
                "service": services[span["processID"]],
                "start": span["startTime"] / 1e6,
                "seconds": span["duration"] / 1e6,
                "parent": next((r["spanID"] for r in span["references"]), ""),
                "id": span["spanID"],
                "tags": {tag["key"]: tag["value"] for tag in span["tags"]},
            }
            for span in data["spans"]
        ]


@pytest.fixture(scope="session")
def watched(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watched]:
    """Brought up by `kvstrata up`, every target up. KVSTRATA_KEEP_WATCHED=FOLDER: made once there and left running."""
    engine.ensure(True, Steps())
    kept = os.environ.get(KEEP)
    root = Path(kept) if kept else tmp_path_factory.mktemp("watched")
    (root / "data" / "hook").mkdir(parents=True, exist_ok=True)
    (root / "data" / "hook").chmod(0o777)
    made = Watched(root, "kvwatchkept" if kept else f"kvwatch{os.getpid()}", KV_LAYERS="nvme,hook", **SIZES)
    try:
        print(made.patiently("up"))  # the first one builds the images
        made.wait_ready()
        wait_until(made.all_up, 60, "every target is up")
        yield made
    finally:
        if not kept:
            made.close()


def reachable(url: str) -> bool:
    """Something answers there."""
    try:
        return httpx.get(url, timeout=5, trust_env=False).status_code < 500
    except httpx.HTTPError:
        return False
