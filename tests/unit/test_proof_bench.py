"""`kvstrata bench` against the simulated stack: every tier is measured, in as few starts of vLLM as that takes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import pytest
from tests.unit.proof_sim import CHUNK, SimStack

from kvstrata.proof import bench, sources
from kvstrata.proof.bench_report import TIERS
from kvstrata.proof.control import Target


@pytest.fixture
def stack(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimStack]:
    for name, value in (("_LAST_LOOK_S", 0.01), ("_QUIET_S", 0.02)):
        monkeypatch.setattr(sources, name, value)
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
    assert not stack.l1 | stack.l2, "own blocks are removed"
