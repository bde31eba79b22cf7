"""What observability costs: the same requests with it and without it, in turn: `kvstrata observe cost`.

On and off differ as `make up` makes them differ: vLLM and lmcache are other containers, which push or do not.
Rounds change the order (on, off, off, on), so that a machine that warms up or slows down is no one's advantage.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from kvstrata.deploy import settings as configured
from kvstrata.deploy import up
from kvstrata.deploy.errors import KvError
from kvstrata.deploy.steps import Steps
from kvstrata.observe.scenario import Script
from kvstrata.proof.checks import registered_models
from kvstrata.proof.client import LmcacheClient, VllmClient
from kvstrata.proof.control import wait_until
from kvstrata.proof.docker_control import running_stack

__all__ = ["FIGURES", "Row", "order", "rows", "run", "show"]

#: Name to (unit, more is better).
FIGURES: Mapping[str, tuple[str, bool]] = {
    "TTFT, new prompts": ("s", False),
    "TTFT, repeated prompts": ("s", False),
    "tokens generated a second, 4 at a time": ("1/s", True),
}
_KNOB = "KV_OBSERVABILITY"
_PROMPTS, _CHUNKS, _AT_ONCE, _ANSWER = 8, 2, 4, 32


@dataclass(frozen=True)
class Row:
    """One figure: a value a round, off and on."""

    name: str
    off: tuple[float, ...]
    on: tuple[float, ...]

    @property
    def difference(self) -> float:
        """Of the medians, as a share of what it is without; positive is worse."""
        off, on = statistics.median(self.off), statistics.median(self.on)
        return (off - on) / off if FIGURES[self.name][1] else (on - off) / off

    @property
    def noise(self) -> float:
        """The wider of the two spreads between rounds, as a share of the median without."""
        return max(max(self.off) - min(self.off), max(self.on) - min(self.on)) / statistics.median(self.off)

    @property
    def within_noise(self) -> bool:
        """The medians differ by no more than rounds of one kind do."""
        return self.difference <= self.noise


def order(rounds: int) -> list[bool]:
    """On or off, one after the other."""
    return [on for number in range(rounds) for on in ((True, False) if number % 2 == 0 else (False, True))]


def rows(measured: Sequence[tuple[bool, Mapping[str, float]]]) -> list[Row]:
    """Of each figure what was measured off and on."""
    return [
        Row(name, *(tuple(values[name] for was_on, values in measured if was_on is on) for on in (False, True)))
        for name in FIGURES
    ]


def run(root: Path, rounds: int, steps: Steps) -> list[Row]:
    """Measure, and leave the stack as .env wants it. KvError where it cannot be switched."""
    measured = []
    try:
        for on in order(rounds):
            with _environment(_KNOB, "1" if on else "0"):
                if up.up(root, steps, proof=False):
                    raise KvError("the stack did not come up as wanted", "`make up` without a complaint", "see above")
                with steps.step(f"Measure, {'with' if on else 'without'} observability") as step:
                    measured.append((on, _measure(root, step.note)))
                    step.done(", ".join(f"{measured[-1][1][name]:.3g} {unit}" for name, (unit, _) in FIGURES.items()))
    finally:
        up.up(root, steps, proof=False)
    return rows(measured)


def show(found: Sequence[Row], console: Console) -> None:
    """A table for people."""
    table = Table(title="median (least to most) of the rounds")
    for heading in ("", "unit", "without", "with", "cost", "noise", ""):
        table.add_column(heading, justify="right" if heading else "left")
    for row in found:
        texts = [f"{statistics.median(one):.3g} ({min(one):.3g} to {max(one):.3g})" for one in (row.off, row.on)]
        word = "within noise" if row.within_noise else "ABOVE NOISE"
        table.add_row(row.name, FIGURES[row.name][0], *texts, f"{row.difference:+.1%}", f"{row.noise:.1%}", word)
    console.print(table)


def _measure(root: Path, note: Callable[[str], None]) -> dict[str, float]:
    """Medians of one round. The first prompt is nobody's: a server's first request is slow."""
    target = running_stack(configured.load(root), root)
    vllm, lmcache = VllmClient(target.vllm_url), LmcacheClient(target.lmcache_url)
    try:
        known: Callable[[], bool] = lambda: bool(registered_models(lmcache.status()))  # noqa: E731
        wait_until(known, "vLLM registered with lmcache", target.wait_timeout_s)
        script = Script(target, vllm, lmcache, None, note)
        prompts = [script.prompt(_CHUNKS) for _ in range(_PROMPTS)]
        script.ask([script.prompt(_CHUNKS)])
        cold = [vllm.complete(prompt, 1).ttft_s for prompt in prompts]
        warm = [vllm.complete(prompt, 1).ttft_s for prompt in prompts]
        began = time.monotonic()
        with ThreadPoolExecutor(_AT_ONCE) as pool:
            list(pool.map(lambda prompt: vllm.complete(prompt, _ANSWER), prompts))
        rate = _PROMPTS * _ANSWER / (time.monotonic() - began)
        script.tidy()
    finally:
        vllm.close()
        lmcache.close()
    return dict(zip(FIGURES, (statistics.median(cold), statistics.median(warm), rate), strict=True))


@contextmanager
def _environment(key: str, value: str) -> Iterator[None]:
    """An exported knob wins over .env, which stays as it is."""
    before = os.environ.get(key)
    os.environ[key] = value
    try:
        yield
    finally:
        if before is None:
            del os.environ[key]
        else:
            os.environ[key] = before
