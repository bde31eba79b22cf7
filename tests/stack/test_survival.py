"""Any part dies, the answer stays the same, and hits come back by themselves."""

from __future__ import annotations

import contextlib
import math
import os
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.stack.harness import Answer, Stack, chunks, prompt, wait_until

pytestmark = pytest.mark.stack

ROUNDS = int(os.environ.get("KVSTRATA_ROUNDS", "1"))  # `make soak` runs 20


@dataclass
class Clock:
    """Times retrieves as status prints them: the figure that would show a slow path. Not asserted: machines differ."""

    stack: Stack
    before: float = math.nan

    def per_token(self, words: int) -> float:
        """Milliseconds for 1000 tokens, of several rounds the best of three; other words are other chunks in number."""
        cold = self.stack.store(prompt("timed", words))
        best = math.inf
        for _ in range(min(ROUNDS, 3)):
            self.stack.drop_l0()
            warm = self.stack.ask(prompt("timed", words))
            assert warm.text == cold.text and warm.lmcache == chunks(cold.prompt_tokens)
            seen = self.stack.transfer()
            assert seen["mode"] == "shm", seen
            assert seen["retrieved_tokens"] == warm.lmcache and seen["retrieve_s"] > 0, "the figure is of another load"
            best = min(best, seen["retrieve_s"] * 1e6 / warm.lmcache)
        return best

    def after_restart(self, service: str, words: int) -> str:
        after = self.per_token(words)
        return f"after a restart of {service}: {after:.2f} ms for 1000 tokens, ratio {after / self.before:.2f}"


@pytest.fixture(scope="module")
def clock(stack: Stack) -> Clock:
    stack.settle()
    made = Clock(stack)
    made.before = made.per_token(700)
    return made


def test_vllm_killed_answers_from_ram_and_status_times_it(
    stack: Stack, clock: Clock, capsys: pytest.CaptureFixture[str]
) -> None:
    cold = stack.store(prompt("vllm-killed"))
    stack.kill("vllm")
    stack.start("vllm")
    stack.wait_ready()
    warm = stack.ask(prompt("vllm-killed"))
    assert warm.text == cold.text
    assert warm.lmcache == chunks(cold.prompt_tokens) and warm.l0 == 0
    with capsys.disabled():
        print(f"\ntimed retrieve, as status prints it; {clock.after_restart('vllm', 1000)}")


def test_lmcache_killed_next_answer_is_right_hits_return_and_status_times_them(
    stack: Stack, clock: Clock, capsys: pytest.CaptureFixture[str]
) -> None:
    cold = stack.store(prompt("lmcache-killed"))
    vllm_before = stack.containers()["vllm"]["State"]["StartedAt"]
    stack.kill("lmcache")
    stack.drop_l0()
    during = stack.ask(prompt("lmcache-killed"))
    assert during.text == cold.text
    assert during.seconds < cold.seconds + 10
    stack.start("lmcache")
    stack.wait_used()
    stack.drop_l0()
    after = stack.ask(prompt("lmcache-killed"))
    assert after.text == cold.text and after.lmcache == chunks(cold.prompt_tokens)
    assert stack.containers()["vllm"]["State"]["StartedAt"] == vllm_before
    with capsys.disabled():
        print(f"\ntimed retrieve, as status prints it; {clock.after_restart('lmcache', 1300)}")


def test_vllm_starts_and_answers_while_the_cache_server_is_down(stack: Stack) -> None:
    """Both are killed, and vLLM comes first. Both coming back together is a phase of each whole proof (test_up.py)."""
    cold = stack.store(prompt("no-cache-at-start"))
    stack.kill("vllm", "lmcache")
    stack.start("vllm")
    wait_until(stack.healthy, 240, "vLLM healthy without lmcache")
    assert stack.ask(prompt("no-cache-at-start")).text == cold.text
    stack.start("lmcache")
    stack.wait_used()
    stack.drop_l0()
    warm = stack.ask(prompt("no-cache-at-start"))
    assert warm.text == cold.text and warm.lmcache == chunks(cold.prompt_tokens)


@pytest.mark.parametrize("signal", ["KILL", "STOP"])
@pytest.mark.parametrize("point", ["before_retrieve", "before_store"])
def test_lmcache_dies_between_two_calls_of_one_request(stack: Stack, hook: Path, point: str, signal: str) -> None:
    """The hook holds the engine exactly between lookup and retrieve (or before the store) while the server dies."""
    for number in range(ROUNDS):
        name = f"{point}-{signal}-{number}"
        reference = stack.store(prompt(name)) if point == "before_retrieve" else None
        stack.drop_l0()
        answer = _answer_while_dying(stack, hook, point, signal, name)
        assert answer.status == 200 or 500 <= answer.status < 600, answer
        assert answer.seconds < 30, f"hung for {answer.seconds:.0f} s"
        assert stack.healthy(), "the engine died"
        stack.revive(signal)
        stack.drop_l0()
        after = stack.store(prompt(name))
        assert answer.status != 200 or answer.text == after.text
        assert reference is None or reference.text == after.text
        stack.drop_l0()
        again = stack.ask(prompt(name))
        assert again.text == after.text and again.lmcache == chunks(again.prompt_tokens)


def _answer_while_dying(stack: Stack, hook: Path, point: str, signal: str, name: str) -> Answer:
    (hook / f"{point}.armed").touch()
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(stack.ask, prompt(name))
        wait_until((hook / f"{point}.reached").exists, 30, f"the request reaches {point}")
        stack.strike("lmcache", signal)
        (hook / f"{point}.armed").unlink()
        (hook / f"{point}.go").touch()
        answer = future.result()
    for file in hook.iterdir():
        file.unlink()
    return answer


def test_locks_of_loads_that_were_dropped_are_freed_when_lmcache_is_back(stack: Stack, hook: Path) -> None:
    """Their requests are answered long before; the locks would last for 300 s, and the prefetch jobs for ever."""

    def held() -> tuple[int, int]:
        status = stack.client.get(stack.metrics_url + "/status").json()
        jobs = next(find_all(status, "active_prefetch_jobs"))
        return int(status["storage_manager"]["l1_manager"]["read_locked_count"]), int(jobs)

    prompts = [prompt(f"locks-{n}") for n in range(4)]
    cold = [stack.store(p).text for p in prompts]
    stack.drop_l0()
    wait_until(lambda: held() == (0, 0), 330, "nothing is locked before")
    (hook / "before_retrieve.armed").touch()
    with ThreadPoolExecutor(len(prompts)) as pool:
        answers = [pool.submit(stack.ask, p) for p in prompts]
        wait_until((hook / "before_retrieve.reached").exists, 30, "a load begins")
        time.sleep(1)  # the others are in the queue
        stack.strike("lmcache", "STOP")
        (hook / "before_retrieve.armed").unlink()
        (hook / "before_retrieve.go").touch()
        assert [a.result().text for a in answers] == cold
    stack.revive("STOP")
    seen = held()
    wait_until(lambda: held() == (0, 0), 40, f"nothing is locked after (at first {seen})")


def find_all(tree: Any, name: str) -> Iterator[Any]:
    """Values under `name`, wherever they stand."""
    if isinstance(tree, dict):
        for key, value in tree.items():
            if key == name:
                yield value
            yield from find_all(value, name)
    elif isinstance(tree, list):
        for value in tree:
            yield from find_all(value, name)


def test_a_client_that_goes_away_leaves_no_lock(stack: Stack) -> None:
    """Gone while its blocks are looked up, loaded or computed: the engine lives and no read lock stays for ever."""
    stack.store(prompt("gone", 1500))
    for delay in (0.01, 0.03, 0.1, 0.3):
        stack.drop_l0()
        leave_after(stack, prompt("gone", 1500), delay)
    assert stack.healthy()

    def l1() -> dict[str, int]:
        return dict(stack.client.get(stack.metrics_url + "/status").json()["storage_manager"]["l1_manager"])

    wait_until(lambda: l1()["read_locked_count"] == 0, l1()["read_ttl_seconds"] + 30, "read locks gone")
    assert stack.ask(prompt("gone", 1500)).status == 200


def leave_after(stack: Stack, text: str, seconds: float) -> None:
    """Ask for a long answer and close the connection, whether it has begun or not."""
    body = {"model": stack.model(), "prompt": text, "max_tokens": 400, "temperature": 0, "stream": True}
    url, limit = stack.url + "/v1/completions", httpx.Timeout(5, read=seconds)
    started = time.monotonic()
    with (
        contextlib.suppress(httpx.ReadTimeout),
        httpx.stream("POST", url, json=body, timeout=limit, trust_env=False) as answer,
    ):
        for _ in answer.iter_raw():
            if time.monotonic() - started > seconds:
                return


def test_sixteen_requests_at_once_with_a_small_l1_and_a_busy_server_that_is_not_called_dead(stack: Stack) -> None:
    """Pairs share a prefix, L1 is small (KV_L1_GB=1) and full of other prompts: each answer equals the one given alone.

    Computed at once first, a storm of stores, then loaded at once. Heartbeats go through it: the guard must not flip.
    """
    prompts = [prompt(f"crowd-{n // 2}", 1100) + f" Variant {n % 2}." for n in range(16)]
    with watching(stack) as healthy:
        computed = stack.ask_all(prompts, 8)
        stack.drop_l0()
        alone = [stack.ask(p, 8) for p in prompts]
        stack.drop_l0()
        loaded = stack.ask_all(prompts, 8)
    for together in (computed, loaded):
        assert [a.status for a in together] == [200] * 16
        assert [a.text for a in together] == [a.text for a in alone]
    assert stack.healthy()
    assert healthy and all(healthy)


@contextlib.contextmanager
def watching(stack: Stack) -> Iterator[list[bool]]:
    """Whether the guard calls the cache server healthy, each second."""
    seen: list[bool] = []
    stop = threading.Event()

    def watch() -> None:
        while not stop.is_set():
            seen.append(stack.cache_healthy())
            stop.wait(1)

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield seen
    finally:
        stop.set()
        watcher.join()
