"""The stack with the KV engine as L2: its target, its alerts, and the contract on its panels."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstrata.deploy import settings
from tests.observability.stories import Recorder, hurry, load, read_only
from tests.observability.test_up import JOBS
from tests.observability.watched import Watched
from tests.stack.harness import free_ports, prompt, wait_until

pytestmark = [pytest.mark.docker, pytest.mark.slow, pytest.mark.stack]

ALERTS = ("ConnectorFellBackToPickle", "EngineInTrouble")


def switch(watched: Watched, layers: str, **knobs: str) -> None:
    watched.set(KV_LAYERS=f"{layers},hook", **knobs)
    watched.ok("up", "--no-proof")
    watched.wait_ready()


@pytest.fixture(scope="module")
def recorder(watched: Watched) -> Iterator[Recorder]:
    """One switch to the engine serves both: it begins in a mode of transfer that is an alert.

    The rules are hurried before it, so that the switch back finds them as they are and leaves Alertmanager alone.
    """
    try:
        with hurry(watched), Recorder(watched.alertmanager) as made:
            with made.story("ConnectorFellBackToPickle") as until_it_fires:
                switch(watched, "engine,path-a", KV_ENGINE_PORT=str(free_ports(1)[0]), KV_TRANSFER_MODE="pickle")
                until_it_fires()
                refuse(watched, made)
                switch(watched, "engine,path-a", KV_TRANSFER_MODE="auto")
            with load(lambda number: watched.ask(prompt(f"taken {number}", 400), tokens=1)):
                made.wait_resolved()
            for name, one in made.seen.items():
                print(f"{name}: {one.line()} {one.error}")
        yield made
    finally:
        switch(watched, "nvme", KV_TRANSFER_MODE="auto")


def refuse(watched: Watched, recorder: Recorder) -> None:
    """The engine's disk takes nothing."""
    blocks = settings.load(watched.root, environ={}).engine_dir / "engine" / "blocks"
    with (
        recorder.story("EngineInTrouble") as until_it_fires,
        read_only(blocks),
        load(lambda number: watched.ask(prompt(f"refused {number}", 400), tokens=1)),
    ):
        until_it_fires()


@pytest.mark.parametrize("alert", ALERTS)
def test_it_fires_in_alertmanager_and_resolves_after_the_repair(recorder: Recorder, alert: str) -> None:
    seen = recorder.seen[alert]
    assert seen.fired and seen.resolved and not seen.error, f"{seen.line()} {seen.error}"


def test_the_engine_is_a_target_with_a_token_that_only_reads(watched: Watched, recorder: Recorder) -> None:
    wait_until(watched.all_up, 90, "every target is up")
    assert watched.jobs() == dict.fromkeys((*JOBS, "engine"), "up")
    current = settings.load(watched.root, environ={})
    token = (current.secrets_dir / "prometheus" / "engine_token").read_text().strip()
    url, headers = f"http://127.0.0.1:{current.engine_port}", {"Authorization": f"Bearer {token}"}
    assert watched.client.get(f"{url}/metrics").status_code == 401
    assert watched.client.get(f"{url}/metrics", headers=headers).status_code == 200
    assert watched.client.put(f"{url}/kv/mine", headers=headers, content=b"x").status_code == 403


def test_after_the_scenario_every_name_is_live_and_no_panel_is_empty(
    watched: Watched, recorder: Recorder, tmp_path: Path
) -> None:
    print(watched.patiently("observe", "scenario"))
    found = tmp_path / "check.json"
    done = watched.cli("observe", "check", "--minutes", "30", "--changing", "--json", str(found))
    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr
    seen = json.loads(found.read_text())
    engine = {name: count for name, count in seen["samples"].items() if name.startswith("kvstrata-storage")}
    assert not seen["gaps"] and any(engine.values())
