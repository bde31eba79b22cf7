"""Healthy traffic for some minutes, during which no alert may fire: `kvstrata observe silence`."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import httpx

from kvstrata.deploy.errors import KvError
from kvstrata.deploy.settings import Settings
from kvstrata.observe.scenario import Script
from kvstrata.proof.client import LmcacheClient, VllmClient
from kvstrata.proof.docker_control import running_stack

__all__ = ["Silence", "firing", "run"]

_EVERY_S = 5.0
_NEW_EVERY = 12
"""One request in so many is a new prompt, the others repeat old ones."""
_CHUNKS = 2


@dataclass
class Silence:
    """What was seen. `fired`, `pending`: alert to the second at which it was first seen so."""

    minutes: float
    requests: int = 0
    fired: dict[str, float] = field(default_factory=dict)
    pending: dict[str, float] = field(default_factory=dict)

    def look(self, alerts: Mapping[str, str], second: float) -> None:
        """Note one look: alert to its state."""
        for name, state in alerts.items():
            (self.fired if state == "firing" else self.pending).setdefault(name, second)


def firing(http: httpx.Client, prometheus: str, alertmanager: str) -> dict[str, str]:
    """Alert to `pending` or `firing`, by Prometheus and by Alertmanager; the worse of both. Raises KvError."""
    try:
        rows = http.get(f"{prometheus}/api/v1/alerts").raise_for_status().json()["data"]["alerts"]
        told = http.get(f"{alertmanager}/api/v2/alerts").raise_for_status().json()
    except (httpx.HTTPError, ValueError, KeyError) as error:
        raise KvError(
            f"no alerts to be had: {type(error).__name__}: {error}", "Prometheus and Alertmanager", "make status"
        ) from error
    # `pending` sorts behind `firing`, so that the worse one of an alert with several series stays
    states = sorted(((str(row["state"]), str(row["labels"]["alertname"])) for row in rows), reverse=True)
    return {name: state for state, name in states} | {str(row["labels"]["alertname"]): "firing" for row in told}


def run(settings: Settings, root: Path, minutes: float, note: Callable[[str], None]) -> Silence:
    """Traffic on the running stack, and a look at the alerts with each request. KvError where one fires already."""
    target = running_stack(settings, root)
    alertmanager = f"http://127.0.0.1:{settings.watch_ports['KV_ALERTMANAGER_PORT']}"
    vllm, lmcache = VllmClient(target.vllm_url), LmcacheClient(target.lmcache_url)
    seen = Silence(minutes)
    with httpx.Client(timeout=10.0, trust_env=False) as http:
        states = firing(http, settings.prometheus_url, alertmanager)
        if before := sorted(name for name, state in states.items() if state == "firing"):
            raise KvError(f"alerts fire already: {', '.join(before)}", "a healthy stack", "docs/runbooks, by name")
        script = Script(target, vllm, lmcache, None, note)
        try:
            prompts = [script.prompt(_CHUNKS)]
            began = time.monotonic()
            while (second := time.monotonic() - began) < minutes * 60:
                if seen.requests % _NEW_EVERY == 1:
                    prompts.append(script.prompt(_CHUNKS))
                script.ask([prompts[seen.requests % len(prompts)]])
                seen.requests += 1
                seen.look(firing(http, settings.prometheus_url, alertmanager), second)
                note(f"{second / 60:.0f} of {minutes:g} minutes, {seen.requests} requests, fired: {len(seen.fired)}")
                time.sleep(_EVERY_S)
        finally:
            script.tidy()
            vllm.close()
            lmcache.close()
    return seen
