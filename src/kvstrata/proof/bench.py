"""TTFT of every tier at several prompt lengths, in one run: `kvstrata bench`.

One restart serves all prompts: all of them go cold and then warm (L0); vLLM runs once without the connector, for the
connector's own cost on fresh prompts; the vLLM that follows it reads all from L1, as nothing of the first is left; both
servers are killed once and all are read from L2. A sample counts only if its hits came from the tier that it stands
for, in full.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from rich.console import Console

from kvstrata.deploy.errors import KvError
from kvstrata.deploy.settings import Settings
from kvstrata.proof.bench_report import BenchReport, Series
from kvstrata.proof.checks import guard_problems, read_guard
from kvstrata.proof.client import Completion, LmcacheClient, RequestFailed, VllmClient
from kvstrata.proof.control import Target
from kvstrata.proof.phases import Prover, difference
from kvstrata.proof.sources import Source, StoresStuck

__all__ = ["DEFAULT_LENGTHS", "measure", "run"]

DEFAULT_LENGTHS = {"cpu": (512, 1024, 2048, 4096), "": (1024, 4096, 16384, 32768)}
_ANSWER_TOKENS = 8

Plain = Callable[[], AbstractContextManager[object]]
"""A context in which vLLM's address serves without the connector; leaving it brings the connector back."""


def run(
    settings: Settings, root: Path, lengths: Sequence[int], repeats: int, out: Path | None, console: Console
) -> BenchReport:
    """Measure the stack of `settings`; write bench.json (and a plot) to `out`, or data/reports/bench-<time>.

    Kills servers, so it refuses (KvError) while requests of others are in flight.
    """
    from kvstrata.proof.docker_control import PlainVllm, running_stack

    target = running_stack(settings, root)
    plain = PlainVllm(settings, root)
    chosen = tuple(lengths) or DEFAULT_LENGTHS.get(target.device, DEFAULT_LENGTHS[""])
    report = measure(target, chosen, repeats, lambda: plain, say=lambda text: console.print(text, markup=False))
    folder = out or settings.reports_dir / datetime.now(UTC).strftime("bench-%Y%m%dT%H%M%SZ")
    written = report.write(folder)
    report.render(console)
    console.print(f"written: {', '.join(str(path) for path in written)}", markup=False, soft_wrap=True)
    return report


@dataclass(frozen=True)
class _Asked:
    """One prompt of the run and the answer that the later ones are compared with (checks.GuardFacts.exact_text)."""

    size: int
    """The length that was aimed at; a prompt ends at a whole word and may be a few tokens shorter."""
    prompt: tuple[int, ...]
    yardstick: Completion | None


def measure(
    target: Target, lengths: Sequence[int], repeats: int, plain: Plain | None, say: Callable[[str], None]
) -> BenchReport:
    """The run itself. `plain` None leaves the plain vLLM columns out: vLLM is killed then. `say` gets progress."""
    began, started = time.monotonic(), datetime.now(UTC).isoformat(timespec="seconds")
    vllm, lmcache = VllmClient(target.vllm_url, timeout_s=900), LmcacheClient(target.lmcache_url)
    facts, guard = vllm.facts(), read_guard(target.control)
    if busy := vllm.in_flight():
        raise KvError(f"{busy} requests in flight", "an idle server: this run kills it", "run it when nobody uses it")
    if wrong := guard_problems(guard, lmcache.status(), target.chunk_size, target.files_digest):
        raise KvError("; ".join(wrong), "the stack as `make up` starts it", "make up, then make status")
    prover = Prover(
        target, vllm, lmcache, facts, guard, answer_tokens=_ANSWER_TOKENS, counted=False,
        retry_counted=False, before=None,
    )  # fmt: skip
    tiers = _Tiers(prover)
    try:
        sizes = _sizes(prover, lengths)
        asked = []
        stored, room = sum(size // target.chunk_size for size in sizes) * repeats, prover.measure_l1()
        if room and stored > room.kept:
            prover.notes.append(
                f"all prompts together are {stored} chunks; {room}, and is sure to keep the newest {room.kept}. What "
                "comes from L2 instead is not counted: fewer --lengths or --repeats, or a larger KV_L1_GB"
            )
            say(prover.notes[-1])
        say(f"{len(sizes) * repeats} prompts of {', '.join(map(str, sizes))} tokens: cold, then L0")
        for size in sizes * repeats:
            prompt = prover.prompt(size)
            cold = tiers.add("cold", size, prompt, "none", None)
            warm = tiers.add("l0", size, prompt, "l0", cold if guard.exact_text else None)
            asked.append(_Asked(size, prompt, cold if guard.exact_text else warm))
        prover.wait_stored("l1", *(one.prompt for one in asked))
        if plain is None:
            say("kill vllm, then L1")
            prover.restart("vllm")
        else:
            say("vLLM without the connector")
            with plain():
                _measure_plain(vllm, prover, sizes, repeats, tiers)
            say("vLLM with the connector again, then L1")
            prover.wait_back()
        tiers.add_all("l1", asked)
        say("kill lmcache and vllm, then L2")
        prover.restart("lmcache", "vllm")
        tiers.add_all("l2", asked)
    except StoresStuck as stuck:
        prover.notes.append(str(stuck))
    finally:
        prover.restore()
        prover.clean_up()
    vllm.close()
    lmcache.close()
    return BenchReport(
        target.device, guard.pair, facts.model, target.chunk_size, repeats, tiers.series(), tiers.equal,
        tuple(prover.notes), started, time.monotonic() - began,
    )  # fmt: skip


class _Tiers:
    """Collects valid samples; an invalid one becomes a note."""

    def __init__(self, prover: Prover) -> None:
        self.equal = True
        self._prover = prover
        self._samples: dict[int, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))

    def add(
        self, tier: str, size: int, prompt: tuple[int, ...], source: Source, yardstick: Completion | None
    ) -> Completion | None:
        """Ask for `prompt`, whose KV is to come from `source`; keep the time only if it did."""
        answer = self._prover.phase(tier, prompt, source, yardstick)
        phase = self._prover.phases[-1]
        self.equal = self.equal and phase.equal
        if phase.problems or phase.ttft_s is None:
            self._prover.notes.append(f"{tier}, {len(prompt)} tokens, not counted: {'; '.join(phase.problems)}")
        else:
            self.keep(tier, size, phase.ttft_s)
        return answer

    def add_all(self, tier: Source, asked: Sequence[_Asked]) -> None:
        """Every prompt of the run again, out of `tier`."""
        for one in asked:
            self.add(tier, one.size, one.prompt, tier, one.yardstick)

    def keep(self, tier: str, size: int, ttft_s: float) -> None:
        self._samples[size][tier].append(ttft_s)

    def series(self) -> dict[int, dict[str, Series]]:
        return {n: {tier: Series(tuple(v)) for tier, v in of.items() if v} for n, of in self._samples.items()}


def _sizes(prover: Prover, lengths: Sequence[int]) -> list[int]:
    """Lengths as they can be had: whole chunks and a little more, within the model's context, each once."""
    remainder = max(1, prover.block * 3 // 4)
    return sorted({prover.length(max(length, prover.chunk) + remainder) for length in lengths})


def _measure_plain(vllm: VllmClient, prover: Prover, sizes: Sequence[int], repeats: int, tiers: _Tiers) -> None:
    """Cold and L0 of fresh prompts. No LMCache is asked, so that only vLLM's clock counts here."""
    try:
        vllm.complete(prover.prompt(sizes[0]), _ANSWER_TOKENS)  # the first request of a server is nobody's figure
        for size in list(sizes) * repeats:
            prompt = prover.prompt(size)
            cold = vllm.complete(prompt, _ANSWER_TOKENS)
            warm = vllm.complete(prompt, _ANSWER_TOKENS)
            tiers.keep("plain_cold", size, cold.ttft_s)
            tiers.keep("plain_l0", size, warm.ttft_s)
            if unlike := difference(warm, cold):
                prover.notes.append(f"plain vLLM, {len(prompt)} tokens: warm {unlike}")
    except RequestFailed as failed:
        prover.notes.append(f"plain vLLM: {failed}")
