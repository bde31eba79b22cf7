"""What `status` calls a problem: not a rollback that was wanted, not a server that is starting."""

from __future__ import annotations

import io
import json
import os
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from kvstrata.deploy import settings, status, turn
from kvstrata.deploy.compose_ps import ServiceState
from kvstrata.deploy.dotenv import BEGIN, END
from kvstrata.deploy.errors import KvError
from kvstrata.proof.checks import GuardFacts
from kvstrata.proof.docker_control import running_stack
from kvstrata.proof.prom import Samples

CACHE = "compose/vllm.yaml:compose/lmcache.yaml:compose/cpu.yaml"
PLAIN = "compose/vllm.yaml:compose/cpu.yaml"


def service(name: str, health: str = "healthy") -> ServiceState:
    return ServiceState(name, f"p-{name}-1", "id", "image", "running", health, 0, ())


class FakeCompose:
    services: tuple[ServiceState, ...] = ()

    def __init__(self, *_: Any) -> None: ...

    def ps(self) -> tuple[ServiceState, ...]:
        return self.services

    def logs(self, *_: Any, **__: Any) -> str:
        return ""


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A stack whose vLLM reports no guard and maps nothing."""
    monkeypatch.setattr(status, "Compose", FakeCompose)
    monkeypatch.setattr(status, "read_guard", lambda _: GuardFacts({}))
    monkeypatch.setattr(status, "look_inside", lambda *_: None)
    monkeypatch.setattr(status, "_lmcache", lambda _: ({"chunk_size": 256}, Samples(())))
    monkeypatch.setattr(status, "_vllm", lambda _: ("0.28.0", Samples(())))
    for name in ("log_bytes", "image_bytes"):
        monkeypatch.setattr(status, name, lambda _: 0)
    return tmp_path


def look(root: Path, files: str, *services: ServiceState, persist: str = "1") -> tuple[status.Status, str]:
    (root / ".env").write_text(f"KV_PERSIST={persist}\n{BEGIN}\nCOMPOSE_FILE={files}\n{END}\n")
    FakeCompose.services = services
    state = status.collect(settings.load(root, {}), root)
    shown = io.StringIO()
    status.render(state, Console(file=shown, width=200))
    return state, shown.getvalue()


@pytest.mark.parametrize(("persist", "why"), [("1", "rollback"), ("0", "KV_PERSIST=0")])
def test_plain_vllm_that_was_wanted_is_no_problem(root: Path, persist: str, why: str) -> None:
    state, shown = look(root, PLAIN, service("vllm"), persist=persist)
    assert state.ok and state.plain and state.problems == ()
    assert f"plain vLLM ({why})" in shown and "`make up`" in shown
    assert "transfer" not in shown and "lookups" not in shown
    with pytest.raises(KvError) as caught:
        running_stack(settings.load(root, {}), root)
    assert caught.value.exit_code == 2 and why in caught.value.found and "make up" in caught.value.fix


def test_a_server_that_is_starting_is_said_to_be_starting_and_nothing_else(root: Path) -> None:
    state, _ = look(root, CACHE, service("vllm", "starting"), service("lmcache"), service("proxy"))
    assert len(state.problems) == 1
    assert "vllm: found: running, starting" in state.problems[0] and "wait" in state.problems[0]


def test_a_vllm_without_our_connector_is_a_problem(root: Path) -> None:
    state, _ = look(root, CACHE, service("vllm"), service("lmcache"), service("proxy"))
    assert any("no report of the scheduler" in problem for problem in state.problems)


def test_the_command_that_is_at_work_is_shown(root: Path) -> None:
    with turn.take(root, "up"):
        _, shown = look(root, PLAIN, service("vllm"))
    assert "busy" in shown and "`up` (pid" in shown


def test_a_proof_is_shown_from_its_start_to_its_end(root: Path) -> None:
    reports = root / "data" / "reports"
    reports.mkdir(parents=True)
    file = reports / "verify-1.json"
    began = datetime(2026, 11, 30, 3, 26, 28).astimezone()
    file.write_text(json.dumps({"passed": False, "worth_it": False, "live": False, "started_at": began.isoformat()}))
    os.utime(file, (began.timestamp() + 103,) * 2)
    _, shown = look(root, CACHE, service("vllm"))
    assert "proof     FAILED, 2026-11-30 03:26 to 2026-11-30 03:28:" in shown
