"""A failed load beside a request that shares its L0 prefix: neither may take harm, now or later."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.stack.harness import Answer, Stack, chunks, prompt, wait_until

pytestmark = pytest.mark.stack

COLD = {"kv_transfer_params": {"lmcache.skip_save": True, "cached_token_stats": 1}}
LOOKED_UP = "lmcache_mp_lookup_requested_tokens_total"
#: Nearest fp32 runs differ by 1e-5; a few tokens of other KV move a log-probability by more than this.
TOLERANCE = 2e-3


def same(answer: Answer, cold: Answer, what: str) -> None:
    assert answer.status == 200 and answer.text == cold.text, f"{what}: {answer}\ncold: {cold}"
    worst = max(abs(a - b) for a, b in zip(answer.logprobs, cold.logprobs, strict=True))
    assert worst < TOLERANCE, f"{what}: the same text, but a log-probability is off by {worst:.4f}"


@pytest.fixture(scope="module")
def small_steps(stack: Stack) -> Iterator[None]:
    """vLLM computes 512 tokens a step: a long prompt has steps left when the cache server is back."""
    stack.set(KV_VLLM_EXTRA_ARGS="'--max-num-batched-tokens 512'")
    yield
    stack.set(KV_VLLM_EXTRA_ARGS="")


@pytest.mark.parametrize("signal", ["STOP", "KILL"])
def test_a_failed_load_harms_no_request_that_shares_its_prefix(
    stack: Stack, small_steps: None, hook: Path, signal: str
) -> None:
    """`long` is computed in several steps when the load of `short` fails. Both begin with 1930 tokens that L0 has.

    L0 holds 15 blocks (1920 tokens) of them, 7.5 chunks: the load begins at token 1792, inside the shared part. If it
    named that block as failed, vLLM would set `long` back to it, while LMCache's tracker counted on, and `long` would
    store blocks that it has not computed. Eight others decode meanwhile, so that no step ends at the end of a block.
    """

    def text(name: str, words: int) -> list[int]:
        return stack.tokens(prompt(f"shared-{signal}-{name}", words))

    def ask(body: list[int], **fields: Any) -> Answer:
        return stack.ask(body, 32, logprobs=1, **fields)

    common = text("common", 2500)[:1930]
    prompts = {"long": common + text("long", 4500)[: 4200 - 1930], "short": common + text("short", 1500)[: 2100 - 1930]}
    assert [len(p) for p in prompts.values()] == [4200, 2100]
    cold = {"long": ask(prompts["long"], **COLD)}
    stack.drop_l0()
    cold["short"] = ask(prompts["short"])
    assert (cold["long"].lmcache, cold["short"].lmcache) == (0, 0)
    stack.wait_stored()
    stack.drop_l0()
    assert stack.ask(common, 1).status == 200

    began = time.time()
    with ThreadPoolExecutor(10) as pool:
        others = [pool.submit(stack.ask, prompt(f"{signal}-{n}", 20), 60, ignore_eos=True) for n in range(8)]
        wait_until(lambda: stack.running() == 8, 30, "eight requests decode")
        (hook / "before_retrieve.armed").touch()
        asked = stack.metric(LOOKED_UP)
        long = pool.submit(ask, prompts["long"])
        # When its lookup is answered, its first step begins; the short one is looked up after that step.
        wait_until(lambda: stack.metric(LOOKED_UP) >= asked + 4096, 60, "the long prompt is being computed")
        short = pool.submit(ask, prompts["short"])
        wait_until((hook / "before_retrieve.reached").exists, 60, "the load of the short prompt begins")
        assert not long.done(), "too fast: the long prompt was not under way any more"
        stack.strike("lmcache", signal)
        (hook / "before_retrieve.armed").unlink()
        (hook / "before_retrieve.go").touch()
        wait_until(lambda: not stack.cache_healthy(), 60, "the load has failed")
        stack.revive(signal)
        during = {"long": long.result(), "short": short.result()}
        assert [o.result().status for o in others] == [200] * 8
    log = stack.compose("logs", "--no-color", "--since", str(int(began)), "vllm")
    assert re.findall(r"load failure: (\d+) request\(s\) rescheduled", log) == ["1"], "the neighbour was set back"
    for name, answer in during.items():
        same(answer, cold[name], f"{name}, whose load failed or whose neighbour's did")
    assert stack.healthy()
    # The first of these fills the holes that the failure left in the chain, the second reads what lies behind them.
    for turn in ("first", "second"):
        for name, body in prompts.items():
            stack.drop_l0()
            later = ask(body)
            stack.wait_stored()
            same(later, cold[name], f"{name}, {turn} time after the failure")
            if turn == "second":
                assert later.lmcache == chunks(later.prompt_tokens)
