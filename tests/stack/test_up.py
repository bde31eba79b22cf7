"""`up`: from nothing to a proven stack, again without touching anything, back to plain vLLM, and forth."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path

import pytest

from tests.stack.harness import Stack, chunks, prompt

pytestmark = pytest.mark.stack

PHASES = ["cold", "warm_l0", "unseen", "other_salt", "restart_vllm", "restart_lmcache", "restart_both"]


def last_report(stack: Stack) -> dict[str, object]:
    newest = max((stack.root / "data" / "reports").glob("verify-*.json"), key=lambda p: p.stat().st_mtime)
    return dict(json.loads(newest.read_text()))


def test_the_first_up_ends_with_the_proof(stack: Stack, up_output: dict[str, str]) -> None:
    text = up_output["first"]
    for needed in (*PHASES, "docker compose up -d --wait", "curl -s http://127.0.0.1:", "make rollback", "make status"):
        assert needed in text
    reports = sorted((stack.root / "data" / "reports").glob("verify-*.json"))
    report = json.loads(reports[0].read_text())
    assert report["passed"] is True and report["worth_it"] is True
    assert [p["name"] for p in report["phases"]] == PHASES
    assert report["prompt_tokens"] > 2500 and report["chunk_size"] == 256 and report["device"] == "cpu"
    for phase in report["phases"]:
        assert phase["hit_tokens"] == phase["expected_hit_tokens"] and phase["equal"] is True
        assert phase["ttft_s"] > 0 and len(phase["text_sha256"]) == 64
    sources = {p["name"]: p["source"] for p in report["phases"]}
    assert sources == {
        "cold": "none", "warm_l0": "l0", "unseen": "none", "other_salt": "none",
        "restart_vllm": "l1", "restart_lmcache": "l2", "restart_both": "l2",
    }  # fmt: skip


def test_a_second_up_changes_nothing_and_disturbs_nobody(stack: Stack) -> None:
    """Nor does it go through a proxy that answers nothing, or leave blocks of its proof behind."""
    dead = "http://127.0.0.1:9"
    proxies = dict.fromkeys(("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "all_proxy"), dead)
    files = [stack.root / ".env", stack.root / "data" / "secrets" / "salt_key"]

    def snapshot() -> tuple[object, ...]:
        ids = {name: (c["Id"], c["Image"], c["State"]["StartedAt"]) for name, c in stack.containers().items()}
        return ids, [f.stat().st_mtime_ns for f in files]

    failures: list[object] = []
    asked = [0]
    stop = threading.Event()

    def client() -> None:
        while not stop.is_set():
            try:
                answer = stack.client.post(
                    stack.url + "/v1/completions",
                    json={"model": model, "prompt": f"Say {asked[0]}:", "max_tokens": 1, "temperature": 0},
                )
                if answer.status_code != 200:
                    failures.append(answer.text)
            except Exception as error:
                failures.append(error)
            asked[0] += 1
            stop.wait(0.2)

    stack.wait_stored()
    blocks = {path.name for path in stack.blocks()}
    model, before = stack.model(), snapshot()
    thread = threading.Thread(target=client)
    thread.start()
    started = time.monotonic()
    try:
        output = stack.ok("up", **proxies, NO_PROXY="", no_proxy="")
    finally:
        stop.set()
        thread.join()
    assert time.monotonic() - started < 300  # a hang, not a timing: the figure is in the README
    assert snapshot() == before
    assert not failures and asked[0] > 10
    assert "live" in output and "proof passed" in output and last_report(stack)["passed"] is True
    stack.wait_stored()
    assert {path.name for path in stack.blocks()} == blocks


def test_plain_docker_compose_works_from_the_root(stack: Stack) -> None:
    rows = stack.compose("ps", "--format", "json")
    assert all(f'"Service":"{s}"' in rows for s in ("vllm", "lmcache", "proxy"))
    assert "vllm" in stack.compose("logs", "--tail", "5")
    assert stack.compose("config", "--services").split()


def test_rollback_switch_down_and_back_to_hits(stack: Stack) -> None:
    """Rollback, the same by KV_PERSIST=0, down, and up again: the cache on disk waits through all of it."""
    cold = stack.store(prompt("rollback"))
    on_disk = {p: p.stat().st_ino for p in stack.blocks()}
    stack.ok("rollback")
    assert set(stack.containers()) == {"vllm"}, "orphans"
    container = stack.containers()["vllm"]
    assert container["Config"]["Entrypoint"] == ["vllm"]
    assert "kv-transfer-config" not in " ".join([container["Path"], *container["Args"]])
    pids = stack.docker("top", container["Id"], "-eo", "pid").split()[1:]
    assert not any("kvstrata" in Path(f"/proc/{pid}/maps").read_text() for pid in pids)
    assert not any("kvstrata-launch" in Path(f"/proc/{pid}/cmdline").read_text() for pid in pids)
    plain = stack.ask(prompt("rollback"))
    assert plain.status == 200 and plain.text == cold.text
    assert stack.cli("verify", "--live").returncode != 0, "a proof without a connector"

    stack.set(KV_PERSIST="0")
    try:
        stack.ok("up")
        assert stack.containers()["vllm"]["Id"] == container["Id"], "KV_PERSIST=0 is another stack than rollback"
        assert "KV_PERSIST=0" in stack.cli("verify").stderr
        stack.ok("down")
        assert stack.containers() == {}
        assert stack.docker("network", "ls", "-q", "--filter", f"name={stack.project}_") == ""
        assert on_disk and {p: p.stat().st_ino for p in stack.blocks()} == on_disk
    finally:
        stack.set(KV_PERSIST="1")
        stack.ok("up", "--no-proof")
        stack.wait_ready()
    warm = stack.ask(prompt("rollback"))
    assert warm.text == cold.text and warm.lmcache == chunks(cold.prompt_tokens)


def test_status_tells_what_runs(stack: Stack) -> None:
    text = stack.ok("status")
    for needed in ("vllm 0.28.0", "lmcache 0.5.3", "KvstrataConnector", "shm", "nvme", "cpu"):
        assert needed in text, needed
    data = json.loads(stack.ok("status", "--json"))
    assert data["guard"]["loaded"] is True and data["transfer"]["mode"] == "shm"


def test_two_projects_on_one_host_and_pickle_is_seen(stack: Stack, tmp_path: Path) -> None:
    """The other one takes the slow path that LMCache falls back to in silence."""
    (tmp_path / "data" / "hook").mkdir(parents=True)
    model = next((stack.root / "data" / "models").iterdir())
    knobs = {"KV_LAYERS": "nvme,hook", "KV_L1_GB": "1", "KV_TRANSFER_MODE": "pickle"}
    other = Stack(tmp_path, f"{stack.project}b", MODEL_DIR=str(model), **knobs)
    try:
        before = {name: c["Id"] for name, c in stack.containers().items()}
        other.ok("up", "--no-proof")
        other.wait_ready()
        cold = other.store(prompt("two"))
        assert {name: c["Id"] for name, c in stack.containers().items()} == before
        assert stack.ask(prompt("two")).lmcache == 0, "projects share blocks"
        other.drop_l0()
        warm = other.ask(prompt("two"))
        assert warm.text == cold.text and warm.lmcache == chunks(cold.prompt_tokens)
        assert other.transfer()["mode"] == "pickle"
    finally:
        other.close()
    assert stack.healthy()
