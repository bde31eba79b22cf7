"""The proof must fail when what it proves is broken: each test breaks one thing on the running stack."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from kvstrata.deploy import settings
from kvstrata.deploy.errors import KvError
from kvstrata.proof import verify
from kvstrata.proof.checks import read_guard
from kvstrata.proof.client import LmcacheClient, VllmClient
from kvstrata.proof.docker_control import running_stack
from kvstrata.proof.phases import Prover
from kvstrata.proof.report import Report
from tests.stack.harness import Stack, prompt

pytestmark = pytest.mark.stack


def prove(stack: Stack, *, live: bool = False, before: Callable[[str], None] | None = None) -> Report:
    return verify.run(settings.load(stack.root, environ={}), stack.root, live=live, before=before)


def at(phase: str, action: Callable[[], None]) -> Callable[[str], None]:
    return lambda name: action() if name == phase else None


def test_random_bytes_on_disk_give_equal_text_and_are_stored_again(stack: Stack) -> None:
    """What was damaged is refused, counted and computed again; the phase then hits what was stored again.

    The last phase of the whole proof alone: the others do not meet the damage (tests/unit/test_proof_verify.py).
    """
    with prover(stack) as proof:
        text = proof.prompt(proof.length(900))
        cold = proof.phase("cold", text, "none", None)
        proof.wait_stored("restart_both", text)
        proof.restart("lmcache")
        stack.drop_l0()
        for path in stack.blocks():
            with path.open("r+b") as file:
                file.write(os.urandom(path.stat().st_size))
        proof.from_disk("restart_both", text, cold)
        proof.clean_up()
    assert [phase.name for phase in proof.phases] == ["cold", "restart_both"]
    assert all(phase.equal and not phase.problems for phase in proof.phases), proof.phases
    assert any("damaged blocks on disk were refused" in note for note in proof.notes)
    assert stack.metric("kvstrata_store_corrupt_total") > 0


@contextmanager
def prover(stack: Stack) -> Iterator[Prover]:
    """The steps of the proof, one by one."""
    target = running_stack(settings.load(stack.root, environ={}), stack.root)
    vllm, lmcache = VllmClient(target.vllm_url), LmcacheClient(target.lmcache_url)
    try:
        yield Prover(
            target, vllm, lmcache, vllm.facts(), read_guard(target.control), answer_tokens=12, counted=False,
            retry_counted=False, before=None,
        )  # fmt: skip
    finally:
        vllm.close()
        lmcache.close()


def test_an_emptied_l2_fails_the_phase_that_reads_it(stack: Stack) -> None:
    def empty() -> None:
        for path in stack.blocks():
            path.unlink()

    report = prove(stack, live=True, before=at("live_l2", empty))
    assert not report.passed
    assert any("live_l2" in failure for failure in report.all_failures), report.all_failures


@pytest.fixture
def without_guard(stack: Stack) -> Iterator[None]:
    """LMCache's own connector in place of ours: text and hits are the same, the guard is what is missing."""
    (stack.root / "compose" / "unguarded.yaml").write_text(
        "# purpose: test\n# adds: LMCache's own connector\n# needs: lmcache\n# undo: test\n"
        "services:\n  vllm:\n    entrypoint:\n      - python3\n      - -c\n      - |\n"
        "        import os, sys\n"
        "        from kvstrata.launch import vllm as ours\n"
        "        from kvstrata.launch.config import Paths\n"
        "        ours.CONNECTOR = {'kv_connector': 'LMCacheMPConnector'}\n"
        "        argv = ours.build_argv(sys.argv[1:], os.environ, Paths())\n"
        "        os.execvp('vllm', ['vllm', *argv])\n"
    )
    stack.set(KV_LAYERS="nvme,hook,unguarded")
    stack.ok("up", "--no-proof")  # and no waiting for a guard
    yield
    stack.set(KV_LAYERS="nvme,hook")


def test_a_missing_guard_fails(stack: Stack, without_guard: None) -> None:
    report = prove(stack, live=True)
    assert not report.passed
    assert any("guard" in failure for failure in report.all_failures), report.all_failures
    assert stack.cli("status").returncode == 1


def test_another_chunk_size_on_the_server_fails(stack: Stack) -> None:
    """`.env` says one thing, the running stack another: what runs is not what was set."""
    stack.set(KV_CHUNK_SIZE="512")
    try:
        report = prove(stack, live=True)
        assert not report.passed
        assert any("chunk" in failure for failure in report.all_failures), report.all_failures
    finally:
        stack.set(KV_CHUNK_SIZE="256")


def test_verify_refuses_while_others_use_the_server(stack: Stack) -> None:
    import threading

    done = threading.Event()

    def busy() -> None:
        while not done.is_set():
            stack.ask(prompt("busy", 200), 64)

    thread = threading.Thread(target=busy)
    thread.start()
    try:
        with pytest.raises(KvError, match="in flight"):
            prove(stack)
    finally:
        done.set()
        thread.join()
