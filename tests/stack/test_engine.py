"""The KV engine under the running stack: both paths proven, a switch, restarts, many prompts at once, a real Redis."""

from __future__ import annotations

import json
import os
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvstrata.deploy import settings
from kvstrata.proof import own_blocks
from kvstrata.proof.client import LmcacheClient
from kvstrata.proof.control import OwnBlocks, pack
from kvstrata.proof.docker_control import DockerControl, kv_engine
from kvstrata.proof.sources import stores_idle
from tests.interop.redis_tools import redis_server
from tests.stack.harness import CHUNK, Answer, Stack, chunks, free_ports, prompt, wait_until

pytestmark = pytest.mark.stack

ENGINE_GB = "1"


def switch(stack: Stack, layers: str, **knobs: str) -> str:
    stack.set(KV_LAYERS=f"{layers},hook", **knobs)
    said = stack.ok("up", "--no-proof")
    stack.wait_ready()
    return said


@pytest.fixture(scope="module")
def path_a(stack: Stack) -> Iterator[Stack]:
    switch(stack, "engine,path-a", KV_ENGINE_PORT=str(free_ports(1)[0]), KV_L2_GB=ENGINE_GB)
    yield stack
    stack.set(KV_LAYERS="nvme,hook", KV_L2_GB="")


def stats(stack: Stack) -> dict[str, Any]:
    client = kv_engine(settings.load(stack.root, environ={}))
    assert client is not None
    try:
        return dict(client.stats())
    finally:
        client.close()


def stored(stack: Stack) -> None:
    """What vLLM has computed lies in the engine: nothing is on its way for a second."""
    client, since = LmcacheClient(stack.metrics_url), [time.monotonic()]

    def still() -> bool:
        if not stores_idle(client)[0]:
            since[0] = time.monotonic()
        return time.monotonic() - since[0] > 1.0

    wait_until(still, 120, "stores done")
    client.close()


def store(stack: Stack, text: str, **fields: Any) -> Answer:
    answer = stack.ask(text, **fields)
    assert answer.status == 200, answer.text
    stored(stack)
    return answer


def forget(stack: Stack, text: str) -> None:
    """Only the engine has the prompt now: neither vLLM nor LMCache's RAM."""
    current = settings.load(stack.root, environ={})
    OwnBlocks(DockerControl(current, stack.root), CHUNK).drop_l1([stack.tokens(text)])
    stack.drop_l0()


def ids(stack: Stack) -> dict[str, str]:
    return {name: str(found["Id"]) for name, found in stack.containers().items()}


def prove(stack: Stack, file: Path) -> None:
    """The whole proof passes, and what is hit after both were killed comes from the engine."""
    before = stats(stack)["get_hits"]
    stack.ok("verify", "--json", str(file))
    report = json.loads(file.read_text())
    both = next(phase for phase in report["phases"] if phase["name"] == "restart_both")
    assert report["passed"] and report["l2"] == "engine" and both["source"] == "l2"
    assert both["hit_tokens"] >= 2 * CHUNK
    assert stats(stack)["get_hits"] - before >= 2 * both["hit_tokens"] // CHUNK, "restart_lmcache and restart_both"


def test_the_proof_passes_on_path_a(path_a: Stack, tmp_path: Path) -> None:
    prove(path_a, tmp_path / "report.json")


def test_a_switch_recreates_lmcache_alone_and_says_that_hits_begin_at_nothing_and_the_proof_passes_on_path_b(
    path_a: Stack, tmp_path: Path
) -> None:
    text = prompt("switched")
    cold = store(path_a, text)
    before = ids(path_a)
    said = switch(path_a, "engine,path-b")
    try:
        after = ids(path_a)
        assert {name for name in before if before[name] != after[name]} == {"lmcache"}
        assert "zero hits from L2 at first" in said
        path_a.drop_l0()
        again = path_a.ask(text)
        assert again.text == cold.text and again.lmcache == 0, "path A's blocks are not path B's"
        assert "NOT checked from end to end" in path_a.cli("status").stdout
        prove(path_a, tmp_path / "report.json")
    finally:
        said = switch(path_a, "engine,path-a")
    path_a.drop_l0()
    warm = path_a.ask(text)
    assert warm.text == cold.text and warm.lmcache == chunks(cold.prompt_tokens), "and they are used after the way back"


def test_an_engine_that_is_killed_costs_no_answer_and_is_used_again_when_it_is_back(path_a: Stack) -> None:
    text = prompt("engine-killed")
    cold = store(path_a, text)
    forget(path_a, text)
    answers: list[Answer] = []
    decoding = threading.Thread(target=lambda: answers.append(path_a.ask(prompt("decoding"), tokens=200)))
    decoding.start()
    wait_until(lambda: path_a.running() > 0, 60, "vLLM decodes")
    path_a.kill("engine")
    during = path_a.ask(text)
    assert during.text == cold.text and during.lmcache == 0
    path_a.ask(prompt("stored-nowhere"))
    wait_until(lambda: "does not answer lmcache" in path_a.cli("status").stdout, 60, "status says so")
    decoding.join()
    assert [answer.status for answer in answers] == [200]
    path_a.start("engine")

    def used_again() -> bool:
        forget(path_a, text)
        again = path_a.ask(text)
        assert again.text == cold.text
        return again.lmcache == chunks(cold.prompt_tokens)

    wait_until(used_again, 90, "what it had before is hit again")
    assert path_a.healthy() and path_a.cache_healthy()


def test_an_engine_that_hangs_costs_one_request_its_deadline_and_no_answer(path_a: Stack) -> None:
    texts = [prompt(f"engine-hung-{number}") for number in range(3)]
    cold = [store(path_a, text) for text in texts]
    for text in texts:
        forget(path_a, text)
    path_a.strike("engine", "STOP")
    try:
        for text, first in zip(texts, cold, strict=True):
            answer = path_a.ask(text)
            assert answer.text == first.text and answer.lmcache == 0
            assert answer.seconds < first.seconds * 3 + 5 + 10, "cold speed, the deadline, and a busy machine"
        assert path_a.healthy() and path_a.cache_healthy()
    finally:
        path_a.strike("engine", "CONT")
    wait_until(lambda: path_a.metric("kvstrata_remote_down") == 0, 60, "it is asked again")


def test_a_second_cache_server_has_what_the_first_one_stored(path_a: Stack) -> None:
    """The client of another container on the engine's network, at the same time: same bytes, each checked."""
    text = prompt("shared")
    cold = store(path_a, text)
    source = Path(own_blocks.__file__).read_text().partition("\nif __name__")[0]
    code = source + f"\nprint(json.dumps(chunk_hashes(decode(sys.argv[1]), {CHUNK})))"
    hashes = json.loads(path_a.compose("exec", "-T", "lmcache", "python3", "-c", code, pack(path_a.tokens(text))))
    model = path_a.guards()[0]["identity"]
    keys = [f"{model}@{1 << 24 | 1 << 8:08x}@0@{name}" for name in hashes]
    ask = (
        "import json, select, sys; from kvstrata.doors.l2_remote import KvstrataRemote\n"
        "client, keys = KvstrataRemote(), json.loads(sys.argv[1])\n"
        "client.submit_batch_exists(keys)\n"
        "select.select([client.event_fd()], [], [], 20)\n"
        "print(json.dumps(client.drain_completions()[0][3])); client.close()"
    )
    lmcache = path_a.containers()["lmcache"]
    done = subprocess.run(
        [
            "docker", "run", "--rm", "--network", f"{path_a.project}_store_internal-true", "--user",
            lmcache["Config"]["User"], "-v", f"{path_a.root}/data/secrets/engine-client:/run/kvstrata-l2:ro",
            "-e", "KV_REMOTE_URL=http://engine:9130", "-e", "KV_REMOTE_TOKEN_FILE=/run/kvstrata-l2/token",
            "--entrypoint", "python3", lmcache["Config"]["Image"], "-c", ask, json.dumps(keys),
        ],
        capture_output=True, text=True, check=False, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == [True] * (chunks(cold.prompt_tokens) // CHUNK)


def test_as_many_long_prompts_at_once_as_vllm_takes_leave_it_healthy_and_the_engine_within_its_memory(
    path_a: Stack,
) -> None:
    env = settings.load(path_a.root, environ={}).managed
    args = env["KV_VLLM_ARGS"].split()
    count = int(args[args.index("--max-num-seqs") + 1])
    before = stats(path_a)
    answers = path_a.ask_all([prompt(f"pressure-{number}", 1200) for number in range(count)], tokens=4, workers=count)
    assert [answer.status for answer in answers] == [200] * count
    stored(path_a)
    after = stats(path_a)
    assert after["put_new"] - before["put_new"] >= count * chunks(min(a.prompt_tokens for a in answers)) // CHUNK * 0.9
    assert after["resident_bytes"] <= after["capacity_bytes"]
    assert path_a.healthy() and path_a.cache_healthy()
    state = path_a.containers()["engine"]["State"]
    assert state["Running"] and not state["OOMKilled"] and path_a.containers()["engine"]["RestartCount"] == 0


def test_a_wrong_token_is_a_miss_that_status_explains_and_the_right_one_needs_no_restart(path_a: Stack) -> None:
    file = path_a.root / "data" / "secrets" / "engine-client" / "token"
    right, text = file.read_text(), prompt("token")
    cold = store(path_a, text)
    forget(path_a, text)
    file.write_text("not-the-token-of-this-engine\n")
    try:
        path_a.kill("engine")  # so that connections are made anew, with the token as it is now
        path_a.start("engine")
        answer = path_a.ask(text)
        assert answer.text == cold.text and answer.lmcache == 0
    finally:
        file.write_text(right)

    def used_again() -> bool:
        forget(path_a, text)
        return path_a.ask(text).lmcache == chunks(cold.prompt_tokens)

    wait_until(used_again, 90, "the token is read again")


def test_path_b_reaches_a_real_redis(path_a: Stack, tmp_path: Path) -> None:
    gateway = json.loads(path_a.docker("network", "inspect", "bridge"))[0]["IPAM"]["Config"][0]["Gateway"]
    secret = path_a.root / "data" / "secrets" / "engine-client" / "resp_password"
    with redis_server(tmp_path, "--bind", gateway, "127.0.0.1", "--requirepass", "of-the-redis") as port:
        secret.write_text("of-the-redis\n")
        secret.chmod(0o600)
        owner = secret.parent.stat()
        os.chown(secret, owner.st_uid, owner.st_gid)
        switch(path_a, "path-b", KV_RESP_URL=f"redis://{gateway}:{port}")
        try:
            text = prompt("redis")
            cold = store(path_a, text)
            forget(path_a, text)
            warm = path_a.ask(text)
            assert warm.text == cold.text and warm.lmcache == chunks(cold.prompt_tokens)
        finally:
            path_a.set(KV_LAYERS="engine,path-a,hook", KV_RESP_URL="")
