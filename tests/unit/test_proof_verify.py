"""The proof passes on a sound stack and fails, naming the phase, on each fault."""

from __future__ import annotations

import dataclasses
import io
import json
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from rich.console import Console
from tests.unit.proof_sim import CHUNK, CHUNK_BYTES, SimStack

from kvstrata.deploy.errors import KvError
from kvstrata.proof import phases, room, sources, verify
from kvstrata.proof.control import Target
from kvstrata.proof.report import Report


@pytest.fixture
def stack(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimStack]:
    monkeypatch.setattr(verify, "_PROMPT_TOKENS", {False: 200, True: 140})
    monkeypatch.setattr(phases, "wait_for_stores", lambda *args: sources.wait_for_stores(*args, deadline_s=0.5))
    times = ((sources, "_LAST_LOOK_S", 0.01), (sources, "_QUIET_S", 0.02), (verify, "_BUSY_LOOK_S", 0.1))
    for module, name, value in (*times, (room, "_LOOK_S", 0.01)):
        monkeypatch.setattr(module, name, value)
    simulated = SimStack()
    yield simulated
    simulated.close()


def _target(stack: SimStack, **changes: object) -> Target:
    return dataclasses.replace(Target(stack.vllm_url, stack.lmcache_url, "cpu", CHUNK, stack, 10), **changes)  # type: ignore[arg-type]


def _failing(report: Report) -> set[str]:
    return {failure.split(":")[0] for failure in report.all_failures}


def test_full_proof_of_a_sound_stack(stack: SimStack) -> None:
    report = verify.prove(_target(stack))
    assert report.all_failures == ()
    assert report.exit_code == 0
    assert [(p.name, p.source) for p in report.phases] == [
        ("cold", "none"), ("warm_l0", "l0"), ("unseen", "none"), ("other_salt", "none"),
        ("restart_vllm", "l1"), ("restart_lmcache", "l2"), ("restart_both", "l2"),
    ]  # fmt: skip
    # Two vLLM restarts in all, and lmcache dies alone once with vLLM untouched.
    assert [entry[1:] for entry in stack.log if entry[0] == "kill"] == [("vllm",), ("lmcache",), ("lmcache", "vllm")]
    assert not {*stack.l1, *stack.l2}, "own blocks are removed"


def test_live_proof_reads_every_tier_and_kills_nothing(stack: SimStack) -> None:
    report = verify.prove(_target(stack), live=True)
    assert report.all_failures == ()
    assert {p.name: p.source for p in report.phases}["live_l1"] == "l1"
    assert {p.name: p.source for p in report.phases}["live_l2"] == "l2"
    assert stack.log == []
    assert not {*stack.l1, *stack.l2}


def test_json_has_the_documented_shape(stack: SimStack, tmp_path: Path) -> None:
    report = verify.prove(_target(stack))
    report.write(tmp_path / "sub" / "verify.json")
    written = json.loads((tmp_path / "sub" / "verify.json").read_text())
    assert {"passed", "worth_it", "device", "pair", "model", "prompt_tokens", "chunk_size", "phases"} <= written.keys()
    assert all(
        phase.keys() == {"name", "ttft_s", "hit_tokens", "expected_hit_tokens", "source", "text_sha256", "equal"}
        for phase in written["phases"]
    )
    assert written["passed"] is True
    report.render(Console(quiet=True))


def _set(name: str, value: object) -> Callable[[SimStack], None]:
    return lambda stack: setattr(stack, name, value)


@pytest.mark.parametrize(
    ("phase", "damage", "failing", "said"),
    [
        ("cold", _set("guard", False), {"guard"}, "no report of the scheduler"),
        ("cold", _set("model_name", "tiny"), {"guard"}, "engine named tiny"),
        ("restart_lmcache", _set("corrupt", True), {"restart_lmcache", "restart_both"}, "answer differs"),
        ("restart_both", _set("corrupt", True), {"restart_both"}, "answer differs"),
        ("restart_lmcache", lambda s: s.l2.clear(), {"restart_lmcache", "restart_both"}, "cached tokens: found: 0"),
        ("restart_both", lambda s: s.l2.clear(), {"restart_both"}, "cached tokens: found: 0"),
        ("restart_vllm", lambda s: s.l1.clear(), {"restart_vllm"}, "source: found: l2; needed: l1"),
        ("unseen", _set("noise", True), None, "counters moved by other requests"),
    ],
)
def test_each_fault_fails_by_name(
    stack: SimStack, phase: str, damage: Callable[[SimStack], None], failing: set[str] | None, said: str
) -> None:
    if phase == "cold":
        damage(stack)
    report = verify.prove(_target(stack), before=lambda name: damage(stack) if name == phase else None)
    assert report.exit_code == 1
    assert failing is None or _failing(report) == failing
    assert said in " ".join(report.all_failures)


def test_damaged_blocks_pass_when_they_are_computed_again_and_then_hit(stack: SimStack) -> None:
    report = verify.prove(_target(stack), before=_at("restart_both", lambda: stack.damaged.update(stack.l2)))
    assert report.all_failures == ()
    assert [phase.name for phase in report.phases][-2:] == ["restart_lmcache", "restart_both"]
    assert any("damaged blocks on disk were refused" in note for note in report.notes)
    assert stack.lm["refused"] > 0, "lmcache was not restarted since: its counters tell"


def test_a_store_that_refuses_everything_does_not_pass(stack: SimStack) -> None:
    def rot() -> None:
        stack.damaged.update(stack.l2)
        stack.rotten = True

    report = verify.prove(_target(stack), before=_at("restart_both", rot))
    assert _failing(report) == {"restart_both"}


def test_damage_that_a_restart_of_lmcache_does_is_not_forgiven(stack: SimStack) -> None:
    report = verify.prove(_target(stack), before=_at("restart_lmcache", lambda: stack.damaged.update(stack.l2)))
    assert "restart_lmcache" in _failing(report)


def _at(phase: str, action: Callable[[], None]) -> Callable[[str], None]:
    return lambda name: action() if name == phase else None


def test_stores_that_never_reach_l2_name_the_phase_and_the_stack_is_left_up(stack: SimStack) -> None:
    stack.store_lost = True
    report = verify.prove(_target(stack))
    assert report.exit_code == 1
    assert "restart_vllm: stores not finished" in report.all_failures[0]
    assert "restart_both: found: did not run; needed: to run" in report.all_failures
    assert all(entry[0] != "kill" for entry in stack.log)


def test_a_wrong_answer_is_not_faster_than_anything(stack: SimStack) -> None:
    report = verify.prove(_target(stack), before=lambda name: stack.l2.clear() if name == "restart_both" else None)
    speeds = {phase.name: report.speed_up(phase) for phase in report.phases}
    assert speeds["restart_both"] is None and speeds["restart_lmcache"] is not None
    assert not report.worth_it and report.to_json()["worth_it"] is False


def test_the_table_fits_a_terminal_of_80_columns_and_has_no_blanks_at_the_ends(stack: SimStack) -> None:
    report = verify.prove(_target(stack))
    phases_ = [
        dataclasses.replace(p, ttft_s=123.456, hit_tokens=130816, expected_hit_tokens=130816) for p in report.phases
    ]
    long = dataclasses.replace(report, phases=tuple(phases_), notes=(" note" * 30,), failures=(" found" * 30,))
    shown = io.StringIO()
    long.render(Console(file=shown, width=80))
    lines = shown.getvalue().splitlines()
    assert [line for line in lines if line != line.rstrip()] == []
    rows = [line for line in lines if line.startswith(("│", "┃", "┏", "└"))]
    assert len(rows) == len(phases_) + 3 and max(map(len, rows)) <= 80
    assert sum("130816 of 130816" in line for line in lines) == len(phases_)


@pytest.mark.parametrize("live", [False, True])
def test_one_answer_to_two_prompts_is_noted_as_a_weak_yardstick(
    stack: SimStack, monkeypatch: pytest.MonkeyPatch, live: bool
) -> None:
    assert not any("weak yardstick" in note for note in verify.prove(_target(stack), live=live).notes)
    answer = SimStack.complete
    monkeypatch.setattr(SimStack, "complete", lambda self, body: {**answer(self, body), "text": "the same"})
    report = verify.prove(_target(stack), live=live)
    assert report.passed and any("weak yardstick" in note for note in report.notes)


def test_progress_says_which_phase_of_how_many() -> None:
    said: list[str] = []
    verify.progress(said.append, live=False)("restart_vllm")
    verify.progress(said.append, live=True)("cold")
    assert said == ["phase 5 of 7: restart_vllm", "phase 1 of 6: cold"]


def test_no_connector_fails_at_once_and_says_so(stack: SimStack) -> None:
    stack.connector = stack.guard = False
    report = verify.prove(_target(stack), live=True)
    assert not report.passed and report.phases == ()
    assert "connector removed?" in " ".join(report.all_failures)
    assert "guard: found: no engine registered with LMCache" in " ".join(report.all_failures)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"locked_chunk": 64}, "chunk size: found: 32 (KV_CHUNK_SIZE); needed: 64 (versions.lock)"),
        ({"chunk_size": 64}, "chunk size: found: 32 in LMCache; needed: 64 (settings)"),
    ],
)
def test_another_chunk_size_fails(stack: SimStack, changes: dict[str, object], said: str) -> None:
    report = verify.prove(_target(stack, **changes), live=True)
    assert report.exit_code == 1
    assert said in report.all_failures


def test_in_16_bit_types_the_prefix_cache_run_is_the_yardstick(stack: SimStack) -> None:
    stack.dtype = "torch.bfloat16"
    report = verify.prove(_target(stack))
    assert report.all_failures == ()


def test_requests_of_others_refuse_a_run_that_kills(stack: SimStack) -> None:
    stack.running = 1
    with pytest.raises(KvError) as refused:
        verify.prove(_target(stack))
    assert refused.value.exit_code == 2
    assert "--force" in refused.value.fix
    assert stack.log == []


def test_live_and_forced_runs_count_by_request_while_others_are_served(stack: SimStack) -> None:
    stack.running = 1
    stack.noise = True
    assert verify.prove(_target(stack), live=True).all_failures == ()
    assert verify.prove(_target(stack), force=True).all_failures == ()


def test_live_run_that_is_disturbed_starts_again_with_counts_by_request(stack: SimStack) -> None:
    stack.noise = True
    report = verify.prove(_target(stack), live=True)
    assert report.all_failures == ()
    assert any("others used the server" in note for note in report.notes)


def test_traffic_of_the_last_second_counts_as_in_flight(stack: SimStack) -> None:
    def later() -> None:
        time.sleep(0.04)
        stack.running = 1

    thread = threading.Thread(target=later)
    thread.start()
    with pytest.raises(KvError):
        verify.prove(_target(stack))
    thread.join()


def _others_fill_l1(stack: SimStack) -> None:
    for number in range(stack.l1_chunks or 0):
        stack.complete({"prompt": [number] * (CHUNK + 1), "max_tokens": 1})
    stack.evict()
    stack.counters.clear()
    stack.lm.clear()


@pytest.mark.parametrize(
    ("l1_chunks", "full", "prompt_chunks"),
    [(4, False, 1), (4, True, 1), (12, False, 2), (12, True, 2), (22, True, 4), (25, True, 5)],
)
def test_prompts_are_as_long_as_l1_can_keep_and_shorter_ones_are_noted(
    stack: SimStack, l1_chunks: int, full: bool, prompt_chunks: int
) -> None:
    """Whole proofs of small pools, empty and full of what others stored. 200 tokens have room for five chunks."""
    stack.l1_chunks = l1_chunks
    if full:
        _others_fill_l1(stack)
    report = verify.prove(_target(stack))
    assert report.all_failures == ()
    assert report.prompt_tokens // CHUNK == prompt_chunks
    size = f"L1 of {l1_chunks * CHUNK_BYTES / (1 << 30):.3g} GiB holds {l1_chunks} chunks"
    noted = [note for note in report.notes if "instead of" in note]
    assert len(noted) == (prompt_chunks < 5)
    assert all("prompts of" in note and size in note and "KV_L1_GB" in note for note in noted)


def test_prompts_are_not_cut_by_what_is_not_known(stack: SimStack) -> None:
    """LMCache tells no sizes, or requests of others would be measured too."""
    full = verify.prove(_target(stack)).prompt_tokens
    stack.l1_chunks = None
    assert verify.prove(_target(stack)).prompt_tokens == full
    stack.l1_chunks, stack.running = 12, 1
    assert verify.prove(_target(stack), force=True).prompt_tokens == full


@pytest.mark.parametrize("live", [False, True])
def test_a_prompt_that_l1_dropped_names_l1_and_what_to_raise(stack: SimStack, live: bool) -> None:
    at = "live_l1" if live else "restart_vllm"
    stack.l1_chunks = 40
    report = verify.prove(_target(stack), live=live, before=_at(at, lambda: _others_fill_l1(stack)))
    assert _failing(report) == {at}
    said = next(failure for failure in report.all_failures if failure.startswith(at))
    assert "source: found: l2; needed: l1" in said and "L1 of 0.117 GiB" in said and "raise KV_L1_GB" in said


def test_an_l1_that_cannot_keep_two_chunks_fails_and_names_itself(stack: SimStack) -> None:
    stack.l1_chunks = 2
    _others_fill_l1(stack)
    report = verify.prove(_target(stack))
    said = " ".join(failure for failure in report.all_failures if failure.startswith("restart_vllm:"))
    assert "L1 of 0.00586 GiB holds 2 chunks" in said and "raise KV_L1_GB" in said
