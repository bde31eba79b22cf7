"""Are all targets up that ought to be: asked of Prometheus, compared with the layers that run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from kvstrata.deploy import observability
from kvstrata.deploy.settings import Settings

__all__ = ["Watched", "look"]

_TIMEOUT_S = 5.0


@dataclass(frozen=True)
class Watched:
    """`targets`: job -> "up", "down: <why>" or "missing"; `alerts`: names of those that fire."""

    targets: Mapping[str, str]
    alerts: tuple[str, ...] = ()
    problem: str = ""
    """Why Prometheus could not be asked."""

    @property
    def problems(self) -> tuple[str, ...]:
        if self.problem:
            return (f"prometheus: found: {self.problem}; needed: an answer (docker compose logs prometheus)",)
        return tuple(
            f"target {job}: found: {state}; needed: up" for job, state in self.targets.items() if state != "up"
        )

    def line(self) -> str:
        """For people, in one line."""
        if self.problem:
            return f"Prometheus does not answer: {self.problem}"
        good = [job for job, state in self.targets.items() if state == "up"]
        bad = [f"{job} {state}" for job, state in self.targets.items() if state != "up"]
        text = f"{len(good)} of {len(self.targets)} targets up ({', '.join(good)})"
        text += f"; {', '.join(bad)}" if bad else ""
        return text + (f"; ALERTS: {', '.join(self.alerts)}" if self.alerts else "")

    def to_json(self) -> dict[str, Any]:
        return {"targets": dict(self.targets), "alerts": list(self.alerts), "problem": self.problem}


def look(settings: Settings) -> Watched:
    """One look. Names no target where the observability layers are not among those that were started."""
    names = [Path(name).stem for name in settings.managed.get("COMPOSE_FILE", "").split(":") if name]
    expected = observability.targets(names, settings.image_source or "build")
    if not expected:
        return Watched({})
    try:
        with httpx.Client(base_url=settings.prometheus_url, timeout=_TIMEOUT_S, trust_env=False) as client:
            active = client.get("/api/v1/targets", params={"state": "active"}).raise_for_status().json()["data"]
            alerts = client.get("/api/v1/alerts").raise_for_status().json()["data"]["alerts"]
    except (httpx.HTTPError, ValueError, KeyError) as error:
        return Watched(dict.fromkeys((target.job for target in expected), "unknown"), (), str(error) or repr(error))
    seen = {str(row["labels"]["job"]): row for row in active["activeTargets"]}
    firing = sorted({str(alert["labels"]["alertname"]) for alert in alerts if alert["state"] == "firing"})
    return Watched({target.job: _state(seen.get(target.job)) for target in expected}, tuple(firing))


def _state(row: Mapping[str, Any] | None) -> str:
    if row is None:
        return "missing"
    if row["health"] == "up":
        return "up"
    return f"down: {row['lastError']}" if row["lastError"] else "not asked yet"
