"""The proof against real servers as plain processes: it passes on a sound stack and fails on each planted fault.

Slow (minutes, most of it vLLM starts) and outside the default test paths:
    KVSTRATA_TEST_VENV=… KVSTRATA_TEST_MODEL=… pytest tests/proof_process
"""

from __future__ import annotations

import dataclasses
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from rich.console import Console

from kvstrata.proof import bench, verify
from kvstrata.proof.bench_report import TIERS
from kvstrata.proof.client import LmcacheClient, VllmClient
from kvstrata.proof.control import Target, wait_until
from tests.proof_process.stack import ProcessStack

pytestmark = pytest.mark.slow


def _start(folder: Path, **options: object) -> ProcessStack:
    venv, model = os.environ.get("KVSTRATA_TEST_VENV"), os.environ.get("KVSTRATA_TEST_MODEL")
    if not venv or not model:
        pytest.fail("found: no KVSTRATA_TEST_VENV, KVSTRATA_TEST_MODEL; needed: a venv with the CPU pair, a model")
    stack = ProcessStack(folder, venv=Path(venv), model=Path(model), **options)  # type: ignore[arg-type]
    stack.start(["lmcache"])
    wait_until(LmcacheClient(stack.lmcache_url).healthy, "lmcache", 90)
    stack.start(["vllm"])
    wait_until(VllmClient(stack.vllm_url).healthy, "vllm", 300)
    return stack


def _target(stack: ProcessStack) -> Target:
    return Target(stack.vllm_url, stack.lmcache_url, "cpu", 256, stack)


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ProcessStack]:
    stack = _start(tmp_path_factory.mktemp("sound"))
    yield stack
    stack.stop()


def _blocks(root: Path) -> list[Path]:
    return sorted(root.glob("*/*/*/*.*.*"))


def test_live_passes_reads_every_tier_and_leaves_nothing(sound: ProcessStack) -> None:
    report = verify.prove(_target(sound), live=True)
    assert report.all_failures == ()
    assert [phase.source for phase in report.phases] == ["none", "l0", "none", "none", "l1", "l2"]
    assert _blocks(sound.l2) == []


def test_a_foreign_block_survives_the_cleaning(sound: ProcessStack) -> None:
    client = VllmClient(sound.vllm_url)
    client.complete([7] * 300, 2)
    wait_until(lambda: len(_blocks(sound.l2)) == 1, "stored", 20)
    verify.prove(_target(sound), live=True)
    assert len(_blocks(sound.l2)) == 1


def test_live_passes_while_others_are_served(sound: ProcessStack) -> None:
    stop = threading.Event()
    served: list[int] = []

    def others() -> None:
        client = VllmClient(sound.vllm_url)
        while not stop.wait(0.2):
            served.append(client.complete([9, len(served) % 4000 + 3] * 20, 2).prompt_tokens)

    thread = threading.Thread(target=others)
    thread.start()
    try:
        report = verify.prove(_target(sound), live=True)
    finally:
        stop.set()
        thread.join()
    assert report.all_failures == ()
    assert len(served) > 5
    assert any("others used the server" in note for note in report.notes)


def test_another_chunk_size_than_claimed_fails(sound: ProcessStack) -> None:
    report = verify.prove(dataclasses.replace(_target(sound), chunk_size=512), live=True)
    assert report.exit_code == 1
    assert any(failure.startswith("chunk size: found: 256 in LMCache; needed: 512") for failure in report.all_failures)


def test_another_chunk_size_than_the_lock_fails(sound: ProcessStack) -> None:
    report = verify.prove(dataclasses.replace(_target(sound), locked_chunk=512), live=True)
    assert report.all_failures == ("chunk size: found: 256 (KV_CHUNK_SIZE); needed: 512 (versions.lock)",)


def test_full_passes(sound: ProcessStack) -> None:
    report = verify.prove(_target(sound))
    assert report.all_failures == ()
    assert report.worth_it
    assert [(phase.name, phase.source) for phase in report.phases][-3:] == [
        ("restart_vllm", "l1"), ("restart_lmcache", "l2"), ("restart_both", "l2"),
    ]  # fmt: skip
    assert report.to_json()["passed"] is True


def _flip(folder: Path) -> None:
    """The top exponent bit of one float of each block: finite, and huge."""
    for path in _blocks(folder):
        data = bytearray(path.read_bytes())
        data[4096 + 4 * 1000 + 3] ^= 0x40
        path.write_bytes(data)


def _empty(folder: Path) -> None:
    for path in _blocks(folder):
        path.unlink()


def test_flipped_and_emptied_l2_fail_by_name(sound: ProcessStack) -> None:
    damage: dict[str, Callable[[Path], None]] = {"restart_lmcache": _flip, "restart_both": _empty}
    report = verify.prove(_target(sound), before=lambda name: damage.get(name, lambda _: None)(sound.l2))
    assert report.exit_code == 1
    assert {phase.name for phase in report.phases if phase.problems} == {"restart_lmcache", "restart_both"}
    problems = {phase.name: " ".join(phase.problems) for phase in report.phases}
    assert "cached tokens: found: 0" in problems["restart_lmcache"] and "answer differs" not in str(problems)
    assert "cached tokens: found: 0" in problems["restart_both"]


def test_bench_has_every_tier_and_the_connectors_cost(sound: ProcessStack, tmp_path: Path) -> None:
    report = bench.measure(_target(sound), (512, 1024, 2048), 2, sound.plain, print)
    report.write(tmp_path)
    report.render(Console(width=200))
    assert report.notes == ()
    assert report.equal_text
    assert all(of.keys() == set(TIERS) for of in report.ttft.values())
    assert _blocks(sound.l2) == []


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"guard": False}, "guard: found: no report of the scheduler"),
        ({"connector": False}, "guard: found: no engine registered with LMCache"),
    ],
)
def test_without_the_guard_or_the_connector_it_fails(
    tmp_path: Path, sound: ProcessStack, options: dict[str, object], expected: str
) -> None:
    sound.stop()
    stack = _start(tmp_path, **options)
    try:
        report = verify.prove(_target(stack), live=True)
    finally:
        stack.stop()
    assert report.exit_code == 1
    assert any(failure.startswith(expected) for failure in report.all_failures)
