"""The reuse proof on the running stack: `kvstrata verify`.

Two prompts, each with a fresh nonce in its first block, so that cold is cold. P1 runs cold, then warm (L0), and P2 runs
once (unseen: it hits nothing). Then, with two vLLM restarts in all:

    kill vLLM             P1 comes from LMCache's RAM                (restart_vllm,   l1)
    kill lmcache          P2, unread since it was stored, from disk  (restart_lmcache, l2; vLLM untouched)
    kill both             P1 from disk                               (restart_both,   l2; damaged blocks: phases.py)

Kills are SIGKILL, after the stores have reached their last tier. An unrelated warm-up request precedes each timed one,
so that first-request costs are nobody's TTFT. L1 has to keep both prompts until they are read: a small one gets shorter
ones (room.py). The prompts carry no salt, on purpose: the path without a salt is the one that most requests take. Their
blocks are found again by their tokens and removed at the end (own_blocks.py).

`live=True` restarts nothing: cold, warm_l0, unseen, other_salt, then a read of L1 and one of L2 without any restart. A
prompt of exactly k chunks makes vLLM load its last block from LMCache though L0 has the rest (L0 never covers the last
token), and removing the proof's own blocks from L1 first makes LMCache read all k chunks from L2.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

from kvstrata.deploy.errors import KvError
from kvstrata.deploy.settings import Settings
from kvstrata.proof import metrics
from kvstrata.proof.checks import guard_problems, read_guard
from kvstrata.proof.client import Completion, EngineFacts, LmcacheClient, VllmClient
from kvstrata.proof.control import Target
from kvstrata.proof.phases import Disturbed, Prover
from kvstrata.proof.report import Report
from kvstrata.proof.sources import StoresStuck

__all__ = ["FULL", "LIVE", "Target", "progress", "prove", "run"]

FULL = ("cold", "warm_l0", "unseen", "other_salt", "restart_vllm", "restart_lmcache", "restart_both")
LIVE = ("cold", "warm_l0", "unseen", "other_salt", "live_l1", "live_l2")
_PROMPT_TOKENS = {False: 3000, True: 900}
_ANSWER_TOKENS = {False: 64, True: 12}
_BUSY_LOOK_S = 1.0


def run(
    settings: Settings,
    root: Path,
    live: bool = False,
    force: bool = False,
    json_path: Path | None = None,
    *,
    before: Callable[[str], None] | None = None,
) -> Report:
    """Prove the stack of `settings` and keep the report under data/reports (and at `json_path`).

    Args:
        before: called with each phase's name just before its warm-up (tests damage the stack there).
    Raises:
        KvError: nothing to prove (KV_PERSIST=0, stack not up), or requests of others are in flight without `force`.
    """
    from kvstrata.proof.docker_control import running_stack

    target = running_stack(settings, root)
    report = prove(target, live=live, force=force, before=before)
    stamp = datetime.now(UTC).strftime("%Y%m%dT%H%M%SZ")
    for path in (settings.reports_dir / f"verify-{stamp}.json", json_path):
        if path is not None:
            report.write(path)
    metrics.write(report, settings.data_dir / "observability" / "textfile")
    return report


def progress(note: Callable[[str], None], *, live: bool) -> Callable[[str], None]:
    """A `before` that says how far the run is: "phase 5 of 7: restart_vllm"."""
    names = LIVE if live else FULL
    return lambda phase: note(f"phase {names.index(phase) + 1} of {len(names)}: {phase}")


def prove(
    target: Target, *, live: bool = False, force: bool = False, before: Callable[[str], None] | None = None
) -> Report:
    """Run the proof; see the module. Never leaves a service that it killed down."""
    vllm, lmcache = VllmClient(target.vllm_url), LmcacheClient(target.lmcache_url)
    try:
        facts = vllm.facts()
        busy = _busy(vllm)
        if busy and not live and not force:
            raise KvError(
                found=f"{busy} requests of others in flight; the proof kills servers and counts hits",
                needed="an idle server",
                fix="run it when nobody uses the server, use `verify --live`, or force it (`verify --force`)",
            )
        try:
            return _prove_once(target, vllm, lmcache, facts, live, bool(busy), before)
        except Disturbed:
            return _prove_once(target, vllm, lmcache, facts, live, True, before)
    finally:
        vllm.close()
        lmcache.close()
        if target.engine:
            target.engine.close()


def _busy(vllm: VllmClient) -> int:
    """Requests in flight now, or that ended within a second of looking."""
    finished = vllm.samples().sum("vllm:request_success_total")
    most = vllm.in_flight()
    for _ in range(4):
        time.sleep(_BUSY_LOOK_S / 4)
        most = max(most, vllm.in_flight())
    return max(most, int(vllm.samples().sum("vllm:request_success_total") - finished))


def _prove_once(
    target: Target, vllm: VllmClient, lmcache: LmcacheClient, facts: EngineFacts, live: bool, counted: bool,
    before: Callable[[str], None] | None,
) -> Report:  # fmt: skip
    began, started = time.monotonic(), datetime.now(UTC).isoformat(timespec="seconds")
    guard, status = read_guard(target.control), lmcache.status()
    prover = Prover(
        target, vllm, lmcache, facts, guard, answer_tokens=_ANSWER_TOKENS[live], counted=counted,
        retry_counted=live and not counted, before=before,
    )  # fmt: skip
    length = prover.length(_PROMPT_TOKENS[live])
    report = Report(
        device=target.device,
        pair=guard.pair or f"vllm {facts.version}",
        model=facts.model,
        prompt_tokens=length,
        chunk_size=target.chunk_size,
        live=live,
        phases=(),
        failures=(
            *guard_problems(guard, status, target.chunk_size, target.files_digest),
            *_lock_problems(target, facts),
        ),
        started_at=started,
        planned=LIVE if live else FULL,
        l2="engine" if target.engine else "disk",
    )
    if report.failures:
        # What runs is not what was set: hits and texts of it would say nothing, and waiting for them takes minutes.
        return replace(report, planned=(), duration_s=time.monotonic() - began)
    if counted:
        prover.notes.append("others used the server: hits are the connector's own counts of each request, and TTFT is "
                            "the time to the whole answer")  # fmt: skip
    try:
        (_live if live else _full)(prover, length, guard.exact_text)
        if not live:
            # The processes are new ones by now: the guard must be in them as well.
            again = guard_problems(read_guard(target.control), lmcache.status(), target.chunk_size, target.files_digest)
            prover.failures += [f"after the restarts: {problem}" for problem in again if problem not in report.failures]
    except StoresStuck as stuck:
        prover.failures.append(f"{prover.at}: {stuck}")
    except KvError as error:
        if not prover.phases:
            raise
        prover.failures.append(f"{prover.at}: found: {error.found}; needed: {error.needed}")
    finally:
        prover.restore()
        prover.clean_up()
    if prover.sent_tokens:
        report = replace(report, prompt_tokens=prover.sent_tokens)
    planned = tuple(name for name in report.planned if name not in prover.skipped)
    return replace(
        report,
        phases=tuple(prover.phases),
        failures=report.failures + tuple(prover.failures),
        notes=tuple(prover.notes),
        planned=planned,
        duration_s=time.monotonic() - began,
    )


def _lock_problems(target: Target, facts: EngineFacts) -> list[str]:
    """The lock's chunk size is what was tested. A hybrid's chunk is the block that vLLM derives, so it may differ."""
    locked, chunk = target.locked_chunk, target.chunk_size
    if locked is None or chunk in (locked, facts.block_size):
        return []
    return [f"chunk size: found: {chunk} (KV_CHUNK_SIZE); needed: {locked} (versions.lock)"]


def _note_a_weak_yardstick(prover: Prover, one: Completion | None, other: Completion | None) -> None:
    """Each prompt asks for a word of its own. A model that does not give it proves less by the same answer."""
    if one and other and one.text == other.text:
        prover.notes.append(
            "weak yardstick: two different prompts gave the same answer, so blocks of the wrong one could give it too"
        )


def _full(prover: Prover, length: int, exact: bool) -> None:
    length = prover.fitted(length)
    p1, p2 = (prover.prompt(length) for _ in range(2))
    cold = prover.phase("cold", p1, "none", None)
    warm = prover.phase("warm_l0", p1, "l0", cold if exact else None)
    unseen = prover.phase("unseen", p2, "none", None)
    _note_a_weak_yardstick(prover, cold, unseen)
    # The same prompt under another salt computes everything, as cold did: cold is its yardstick in any dtype.
    prover.phase("other_salt", p1, "none", cold, salt=f"proof-{secrets.token_hex(8)}", keep=False)
    yardstick_1 = cold if exact else warm
    yardstick_2 = unseen if exact else prover.ask(p2)
    prover.wait_stored("restart_vllm", p1, p2)
    prover.restart("vllm")
    prover.phase("restart_vllm", p1, "l1", yardstick_1)
    if not prover.has_l2:
        for name in ("restart_lmcache", "restart_both"):
            prover.skip(name, f"{name}: no storage layer is configured (KV_LAYERS is blank), nothing outlives lmcache")
        return
    prover.restart("lmcache")
    prover.phase("restart_lmcache", p2, "l2", yardstick_2)
    # P1 and P2 are on disk since the first wait; a hit stores nothing new.
    prover.wait_stored("restart_both", p1, p2)
    prover.restart("lmcache", "vllm")
    prover.from_disk("restart_both", p1, yardstick_1)


def _live(prover: Prover, length: int, exact: bool) -> None:
    p1, p2 = (prover.prompt(length) for _ in range(2))
    whole = p1[: len(p1) // prover.chunk * prover.chunk]
    cold = prover.phase("cold", p1, "none", None)
    prover.phase("warm_l0", p1, "l0", cold if exact else None)
    unseen = prover.phase("unseen", p2, "none", None, keep=False)
    _note_a_weak_yardstick(prover, cold, unseen)
    salted = prover.phase("other_salt", whole, "none", None, salt=f"proof-{secrets.token_hex(8)}", keep=False)
    prover.wait_stored("live_l1", p1)
    from_l1 = prover.phase("live_l1", whole, "l1", salted if exact else None)
    if not prover.has_l2:
        prover.skip("live_l2", "no L2 layer is configured: L2 not read")
        return
    prover.wait_stored("live_l2", p1)
    prover.drop_l1(whole)
    prover.phase("live_l2", whole, "l2", from_l1)
