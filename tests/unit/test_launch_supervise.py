"""The launcher's supervisor with real child processes: restarts, limit, failed state, signals."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvstrata.launch import health
from kvstrata.launch.config import Paths

DRIVER = """
import sys
from pathlib import Path
from kvstrata.launch.supervise import Limits, Supervisor
limits = Limits(restarts=int(sys.argv[2]), window=60, first=0.02, longest=0.05)
raise SystemExit(Supervisor("server", [sys.executable, "-c", sys.argv[3]], Path(sys.argv[1]), limits=limits).run())
"""
Start = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Run a supervisor over `python -c child`; its output goes to tmp_path/log."""
    running: list[subprocess.Popen[str]] = []

    def run(child: str, restarts: int = 2) -> subprocess.Popen[str]:
        argv = [sys.executable, "-c", DRIVER, str(tmp_path / "failed"), str(restarts), child]
        with (tmp_path / "log").open("w") as log:
            process = subprocess.Popen(argv, stdout=log, stderr=log, text=True)
        running.append(process)
        return process

    yield run
    for process in running:
        process.kill()
        process.wait()


def wait_for(condition: Callable[[], bool], seconds: float = 10.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "not within the time"
        time.sleep(0.02)


def log_of(tmp_path: Path) -> str:
    return (tmp_path / "log").read_text()


def test_a_crashing_child_is_restarted_up_to_the_limit_and_then_sleeps_in_the_failed_state(
    start: Start, tmp_path: Path
) -> None:
    marks = tmp_path / "marks"
    process = start(f"open({str(marks)!r}, 'a').write('x'); raise SystemExit(3)", restarts=2)
    wait_for((tmp_path / "failed").exists)
    assert marks.read_text() == "xxx", "one start and two restarts"
    assert process.poll() is None, "the container must stay up, or the restart policy starts the loop again"
    assert log_of(tmp_path).count("kvstrata failed: ") == 1
    assert "exit code 3" in (tmp_path / "failed").read_text()
    process.send_signal(signal.SIGTERM)
    assert process.wait(5) in (0, -signal.SIGTERM)


def test_arguments_that_the_server_refuses_are_not_tried_again(start: Start, tmp_path: Path) -> None:
    marks = tmp_path / "marks"
    start(f"open({str(marks)!r}, 'a').write('x'); raise SystemExit(2)", restarts=5)
    wait_for((tmp_path / "failed").exists)
    assert marks.read_text() == "x"


def test_a_killed_child_comes_back_and_an_old_failure_is_forgotten(start: Start, tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    (tmp_path / "failed").write_text("kvstrata failed: yesterday\n")
    process = start(f"import os, time; open({str(pids)!r}, 'a').write(f'{{os.getpid()}} '); time.sleep(60)")
    wait_for(lambda: pids.exists() and len(pids.read_text().split()) == 1)
    assert not (tmp_path / "failed").exists()
    os.kill(int(pids.read_text().split()[0]), signal.SIGKILL)
    wait_for(lambda: len(pids.read_text().split()) == 2)
    assert process.poll() is None
    assert "killed by SIGKILL" in log_of(tmp_path)


def test_nothing_of_a_crashed_server_outlives_it(start: Start, tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    child = (
        "import os, subprocess, sys, time\n"
        "engine = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])\n"
        f"open({str(pids)!r}, 'a').write(f'{{os.getpid()}} {{engine.pid}}\\n')\n"
        "time.sleep(60)"
    )
    start(child)
    wait_for(lambda: pids.exists() and pids.read_text().endswith("\n"))
    server, engine = map(int, pids.read_text().split())
    os.kill(server, signal.SIGKILL)
    wait_for(lambda: not alive(engine))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_stop_reaches_the_child_and_ends_the_launcher_with_0(
    start: Start, tmp_path: Path, number: signal.Signals
) -> None:
    got = tmp_path / "got"
    child = (
        "import signal, sys, time\n"
        f"def stop(n, f): open({str(got)!r}, 'w').write(str(n)); sys.exit(0)\n"
        f"signal.signal({int(number)}, stop)\n"
        f"open({str(tmp_path / 'ready')!r}, 'w').close()\n"
        "time.sleep(60)"
    )
    process = start(child)
    wait_for((tmp_path / "ready").exists)
    process.send_signal(number)
    assert process.wait(5) == 0
    assert got.read_text() == str(int(number))
    assert "restart" not in log_of(tmp_path)


def test_a_stop_during_the_pause_before_a_restart_is_obeyed(tmp_path: Path) -> None:
    driver = DRIVER.replace("first=0.02, longest=0.05", "first=30, longest=30")
    with (tmp_path / "log").open("w") as log:
        argv = [sys.executable, "-c", driver, str(tmp_path / "failed"), "5", "raise SystemExit(1)"]
        process = subprocess.Popen(argv, stdout=log, stderr=log)
    wait_for(lambda: "restart 1 of 5" in log_of(tmp_path))
    process.send_signal(signal.SIGTERM)
    assert process.wait(5) == 0


def test_a_program_that_is_missing_is_a_failed_state_not_a_loop(start: Start, tmp_path: Path) -> None:
    driver = DRIVER.replace('[sys.executable, "-c", sys.argv[3]]', '["/no/such/program"]')
    with (tmp_path / "log").open("w") as log:
        process = subprocess.Popen(
            [sys.executable, "-c", driver, str(tmp_path / "failed"), "5", ""], stdout=log, stderr=log
        )
    wait_for((tmp_path / "failed").exists)
    assert "/no/such/program" in log_of(tmp_path)
    process.kill()
    process.wait()


def test_health_gives_the_reason_of_a_failed_state_first(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = Paths(run=tmp_path)
    paths.failed.write_text("kvstrata failed: identity mismatch\n")
    for service in ("vllm", "lmcache", "hold"):
        assert health.check(service, paths) == 1
        assert capsys.readouterr().out == "kvstrata failed: identity mismatch\n"


def alive(pid: int) -> bool:
    """False for a zombie too: it holds neither memory nor ports."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False
