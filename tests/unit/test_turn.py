"""One changing verb at a time in a checkout: the second is told who is at it, and changes nothing."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from kvstrata import cli
from kvstrata.deploy import turn
from kvstrata.deploy.errors import KvError


def test_the_second_is_refused_at_once_with_pid_verb_and_time_of_the_first(tmp_path: Path) -> None:
    with turn.take(tmp_path, "up"):
        with pytest.raises(KvError) as caught, turn.take(tmp_path, "down"):
            pass
        said = str(caught.value)
        assert f"`up` (pid {os.getpid()}, since 20" in said and f"kill {os.getpid()}" in said
        assert caught.value.exit_code == 2
        with pytest.raises(KvError, match="`up`"):
            turn.refuse_while_taken(tmp_path)
        assert "`up`" in turn.holder(tmp_path)
    assert turn.holder(tmp_path) == ""
    turn.refuse_while_taken(tmp_path)
    with turn.take(tmp_path, "down"):
        pass


def test_who_died_holds_nothing(tmp_path: Path) -> None:
    code = "import os, sys; from pathlib import Path; from kvstrata.deploy import turn\n"
    code += "with turn.take(Path(sys.argv[1]), 'up'): os._exit(9)"
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=False, env={**os.environ, "PYTHONPATH": "src"})
    assert turn.holder(tmp_path) == ""
    with turn.take(tmp_path, "rollback"):
        pass


def test_a_child_that_outlives_the_verb_does_not_keep_the_lock(tmp_path: Path) -> None:
    with turn.take(tmp_path, "up"):
        child = subprocess.Popen(["sleep", "60"])
    try:
        with turn.take(tmp_path, "up"):
            pass
    finally:
        child.kill()
        child.wait()


@pytest.mark.parametrize("verb", ["up", "down", "rollback", "build", "pull", "bench", "verify", "verify --live"])
def test_changing_verbs_wait_for_nobody_and_touch_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], verb: str
) -> None:
    monkeypatch.setenv("KVSTRATA_ROOT", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))  # no docker: whoever gets that far fails otherwise
    monkeypatch.setattr(sys, "argv", ["kvstrata", *verb.split()])
    with turn.take(tmp_path, "other"):
        assert cli.main() == 2
    assert "`other` (pid" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == [turn.LOCK]
