"""The compose wrapper without an engine: output of both versions, the environment it hands on, causes."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from kvstrata import cli
from kvstrata.deploy import causes, settings
from kvstrata.deploy.compose import Compose, StackFailed, parse_ps
from kvstrata.deploy.errors import CommandFailed, KvError

ROWS = [
    {"ID": "b2", "Name": "p-vllm-1", "Service": "vllm", "State": "running", "Health": "healthy",
     "ExitCode": 0, "Image": "i",
     "Publishers": [{"URL": "127.0.0.1", "TargetPort": 8000, "PublishedPort": 8000, "Protocol": "tcp"}]},
    {"ID": "a1", "Name": "p-lmcache-1", "Service": "lmcache", "State": "exited", "Health": "",
     "ExitCode": 137, "Publishers": None},
    {"ID": "c3", "Name": "p-proxy-1", "Service": "proxy", "State": "running", "Health": "starting",
     "ExitCode": 0, "Publishers": []},
]  # fmt: skip


@pytest.mark.parametrize("text", [json.dumps(ROWS), "\n".join(map(json.dumps, ROWS)) + "\n"])
def test_ps_of_both_forms_reads_the_same(text: str) -> None:
    states = parse_ps(text)
    assert [(s.service, s.ok, s.exit_code) for s in states] == [
        ("lmcache", False, 137),
        ("proxy", False, 0),
        ("vllm", True, 0),
    ]
    assert states[2].ports == (("127.0.0.1", 8000, 8000),)
    assert parse_ps("") == parse_ps("[]") == []


Fake = Callable[[str], Compose]


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Fake:
    """A `docker` on PATH that runs this shell text ("$@" without `compose`): the wrapper under test starts it."""

    def install(script: str) -> Compose:
        folder = tmp_path / "bin"
        folder.mkdir()
        (folder / "docker").write_text(f'#!/bin/sh\n[ "$1" = compose ] && shift\n{script}\n')
        (folder / "docker").chmod(0o755)
        monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
        return Compose(tmp_path, settings.load(tmp_path, {"COMPOSE_PROJECT_NAME": "mine"}))

    return install


def test_only_the_env_file_says_which_stack_is_meant(
    fake: Fake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    exported = {"COMPOSE_FILE": "/evil.yaml", "KV_IDENTITY": "x", "COMPOSE_PROFILES": "y", "KV_PORT": "8123"}
    for key, value in exported.items():
        monkeypatch.setenv(key, value)
    seen = fake("pwd; env | grep -E '^(COMPOSE|KV)_' | sort").logs().split()
    assert seen == [str(tmp_path), "COMPOSE_PROJECT_NAME=mine", "KV_PORT=8123"]


def test_the_printed_command_is_the_one_that_runs(fake: Fake, tmp_path: Path) -> None:
    compose = fake('echo "$@" >> calls; [ "$1" = volume ] || echo "[]"')
    assert compose.command_line(77) == "docker compose up -d --wait --wait-timeout 77 --remove-orphans"
    compose.up(77)
    calls = (tmp_path / "calls").read_text().splitlines()
    assert compose.command_line(77).removeprefix("docker compose ") in calls


def test_logs_to_a_file_are_plain_text(
    fake: Fake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    compose = fake(
        'echo "$@" >> calls; [ "$1" = config ] && echo vllm || printf "\\033[2K\\033[36mvllm  |\\033[0m ready\\n"'
    )
    compose.show_logs("vllm", tail=5)
    assert capsys.readouterr().out == "vllm  | ready\n"
    assert "--no-color" in (tmp_path / "calls").read_text()


def test_logs_of_a_service_that_is_none_are_refused_with_those_that_are(fake: Fake) -> None:
    compose = fake('[ "$1" = config ] && printf "vllm\\nnode-exporter\\n"')
    with pytest.raises(KvError) as refused:
        compose.show_logs("node")
    assert "node-exporter, vllm" in refused.value.needed


def test_down_says_what_went_and_what_stays(
    fake: Fake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fake(f"case \"$1\" in ps) echo '{json.dumps(ROWS)}';; esac")
    monkeypatch.setenv("KVSTRATA_ROOT", str(tmp_path))
    monkeypatch.setattr(sys, "argv", ["kvstrata", "down"])
    assert cli.main() == 0
    said = capsys.readouterr().out
    assert "removed: containers of lmcache, proxy, vllm" in said
    assert f"cache ({tmp_path / 'data' / 'cache'})" in said and "`make up`" in said


def test_a_failed_up_names_the_cause(fake: Fake) -> None:
    says = "Bind for 127.0.0.1:8000 failed: port is already allocated"
    compose = fake(f'case "$1" in ps) echo "[]";; *) echo "{says}" >&2; exit 1;; esac')
    with pytest.raises(StackFailed) as caught:
        compose.up(5)
    assert says in caught.value.found
    assert "KV_PORT" in caught.value.fix
    assert caught.value.exit_code == 1


def test_an_up_that_compose_calls_good_but_is_not_healthy_fails(fake: Fake) -> None:
    row = json.dumps({**ROWS[2], "Health": "starting"})
    compose = fake(f"case \"$1\" in ps) echo '{row}';; inspect) echo '[]';; logs) echo last words;; esac")
    with pytest.raises(StackFailed, match="proxy: is starting") as caught:
        compose.up(5)
    assert "last words" in caught.value.log


def test_shared_memory_of_an_earlier_size_is_removed_and_nothing_else(fake: Fake, tmp_path: Path) -> None:
    volumes = "mine_shm_1\nmine_kernels\nother_shm_1\n"
    compose = fake(
        f'echo "$@" >> calls; case "$1 $2" in "ps --all") echo "[]";; "volume ls") printf "{volumes}";; esac'
    )
    compose.up(5)
    removed = [call for call in (tmp_path / "calls").read_text().splitlines() if call.startswith("volume rm")]
    assert removed == ["volume rm mine_shm_1"]


def test_networks_that_nothing_uses_go_after_up_and_after_down(fake: Fake, tmp_path: Path) -> None:
    compose = fake('echo "$@" >> calls; case "$1 $2" in "ps --all") echo "[]";; "network ls") echo n1;; esac')
    for act in (lambda: compose.up(5), compose.down):
        act()
        lines = (tmp_path / "calls").read_text().splitlines()
        assert lines[-1] == "network rm n1"
        listed = next(line for line in reversed(lines) if line.startswith("network ls"))
        assert "dangling=true" in listed and "label=com.docker.compose.project=" in listed


def test_errors_carry_the_command_and_a_missing_one_says_so(fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    compose = fake("exit 3")
    with pytest.raises(CommandFailed, match="down"):
        compose.down()
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(KvError, match="no command"):
        compose.down()


@pytest.mark.parametrize(
    ("line", "word"),
    [
        ("listen tcp4 127.0.0.1:9400: bind: address already in use", "KV_METRICS_PORT"),
        ("lmcache was killed by SIGKILL (out of memory, if nobody sent it)", "KV_LMCACHE_MEM_GB"),
        ("kvstrata failed: identity mismatch: the model folder is ab…", "make up"),
        ("PermissionError: [Errno 13] Permission denied: '/cache/fs'", "KV_UID"),
        ("OSError: [Errno 28] No space left on device", "free space"),
        ("ValueError: Model architectures ['Foo'] are not supported for now", "MODEL_DIR"),
        ("vllm serve: error: unrecognized arguments: --foo", "KV_VLLM_EXTRA_ARGS"),
        ("could not select device driver nvidia with capabilities: [[gpu]]", "KV_DEVICE"),
        ("Error response from daemon: No such image: kvstrata/vllm:cpu-0", "make build"),
        ("kvstrata-launch: vllm ended with exit code 1; restart 1 of 5 in 1 s", "crashes"),
        ("nothing of the kind", "make logs"),
    ],
)
def test_known_log_lines_have_a_cause(line: str, word: str) -> None:
    assert word in causes.likely(line)
