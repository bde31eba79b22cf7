"""Ctrl-C is no failure: it is said, with the way on, and ends with 130."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from rich.console import Console
from tests.unit.test_compose_wrapper import Fake, fake  # noqa: F401 - a fixture

from kvstrata import cli
from kvstrata.deploy import shell, turn, up
from kvstrata.deploy.compose import Compose
from kvstrata.deploy.steps import Steps


@pytest.fixture(autouse=True)
def ctrl_c_counts() -> Iterator[None]:
    """Whoever runs the tests in the background may have had SIGINT ignored, for every child as well."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("end", ["exit 130", "kill -INT $$"])
def test_an_interrupted_compose_is_no_unhealthy_service(fake: Fake, end: str) -> None:  # noqa: F811
    compose: Compose = fake(f'case "$1" in up) {end};; ps) echo "[]";; esac')
    with pytest.raises(KeyboardInterrupt):
        compose.up(5)


def test_an_interrupted_child_is_no_failed_command() -> None:
    with pytest.raises(KeyboardInterrupt):
        shell.run_lines(["sh", "-c", "exit 130"], lambda _: None)


def test_the_step_says_interrupted() -> None:
    shown = io.StringIO()
    with pytest.raises(KeyboardInterrupt), Steps(Console(file=shown)).step("Start"):
        raise KeyboardInterrupt
    assert "interrupted" in shown.getvalue() and "failed" not in shown.getvalue()


def test_up_says_how_to_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*_: object, **__: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(up, "up", interrupted)
    monkeypatch.setenv("KVSTRATA_ROOT", str(tmp_path))
    monkeypatch.setattr(sys, "argv", ["kvstrata", "up"])
    assert cli.main() == 130
    said = capsys.readouterr().err
    assert "interrupted; what was started keeps starting; `make up` goes on from here" in said


def test_kill_ends_a_command_as_ctrl_c_does(tmp_path: Path) -> None:
    code = (
        "import sys, time; from kvstrata import cli; from kvstrata.deploy import up\n"
        "up.up = lambda *a, **k: time.sleep(60)\nsys.argv = ['kvstrata', 'up']\nsys.exit(cli.main())"
    )
    env = {**os.environ, "KVSTRATA_ROOT": str(tmp_path), "PYTHONPATH": str(Path(__file__).parents[2] / "src")}
    child = subprocess.Popen([sys.executable, "-c", code], env=env, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 60
    while not turn.holder(tmp_path) and time.monotonic() < deadline:
        time.sleep(0.05)
    child.send_signal(signal.SIGTERM)
    _, said = child.communicate(timeout=60)
    assert child.returncode == 130 and "`make up` goes on from here" in said
