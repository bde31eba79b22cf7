"""`kvstrata bench` against the simulated stack: every tier is measured, in as few starts of vLLM as that takes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import pytest
from tests.unit.proof_sim import CHUNK, SimStack

from kvstrata.proof import bench, room, sources
from kvstrata.proof.bench_report import TIERS
from kvstrata.proof.control import Target


@pytest.fixture
def stack(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimStack]:
    times = ((sources, "_LAST_LOOK_S", 0.01), (sources, "_QUIET_S", 0.02), (room, "_LOOK_S", 0.01))
    for module, name, value in times:
        monkeypatch.setattr(module, name, value)
    simulated = SimStack()
    yield simulated
    simulated.close()


def plain(stack: SimStack) -> Callable[[], AbstractContextManager[object]]:
    """vLLM without the connector: it is another process, and so is the one that comes back."""

    @contextmanager
    def switched() -> Iterator[None]:
        stack.kill(["vllm"])
        stack.connector = False
        yield
        stack.kill(["vllm"])
        stack.connector = True

    return switched


@pytest.mark.parametrize("with_plain", [True, False])
def test_every_tier_is_measured_with_no_more_starts_of_vllm_than_it_takes(stack: SimStack, with_plain: bool) -> None:
    target = Target(stack.vllm_url, stack.lmcache_url, "cpu", CHUNK, stack, 10)
    report = bench.measure(target, (100, 200), 2, plain(stack) if with_plain else None, lambda _text: None)
    assert report.notes == () and report.equal_text
    tiers = {name for name in TIERS if with_plain or not name.startswith("plain")}
    assert len(report.ttft) == 2
    assert all({name: len(found.samples) for name, found in of.items()} == dict.fromkeys(tiers, 2)
               for of in report.ttft.values())  # fmt: skip
    kills = [entry[1:] for entry in stack.log if entry[0] == "kill"]
    assert kills == [*([("vllm",)] * (2 if with_plain else 1)), ("lmcache", "vllm")]
    assert not {*stack.l1, *stack.l2}, "own blocks are removed"


def test_more_prompts_than_l1_keeps_are_said_at_the_start_and_what_it_dropped_is_not_counted(stack: SimStack) -> None:
    stack.l1_chunks = 16
    target, said = Target(stack.vllm_url, stack.lmcache_url, "cpu", CHUNK, stack, 10), []
    report = bench.measure(target, (64, 100), 3, None, said.append)
    assert "15 chunks" in said[0] and "holds 16 chunks" in said[0] and "newest 9" in said[0] and "KV_L1_GB" in said[0]
    assert report.notes[0] == said[0]
    assert all(len(of["l2"].samples) == 3 for of in report.ttft.values())
    dropped = [note for note in report.notes if note.startswith("l1, ")]
    assert dropped and all("source: found: l2; needed: l1: L1 of" in note for note in dropped)
