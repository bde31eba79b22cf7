"""The verdict of a proof run: JSON for machines, one table for people."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from kvstrata.proof.sources import Source

__all__ = ["Phase", "Report"]

_SOURCE_NAMES = {"none": "computed", "l0": "L0 vLLM", "l1": "L1 RAM", "l2": "L2"}


@dataclass(frozen=True)
class Phase:
    """One timed request: what was seen, what was needed, and in `problems` each difference as a sentence."""

    name: str
    ttft_s: float | None
    hit_tokens: int
    expected_hit_tokens: int
    source: Source
    expected_source: Source
    text_sha256: str
    equal: bool
    problems: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "ttft_s": None if self.ttft_s is None else round(self.ttft_s, 4),
            "hit_tokens": self.hit_tokens,
            "expected_hit_tokens": self.expected_hit_tokens,
            "source": self.source,
            "text_sha256": self.text_sha256,
            "equal": self.equal,
        }


@dataclass(frozen=True)
class Report:
    """A whole run. `failures` are the reasons why it did not pass; `notes` do not count against it."""

    device: str
    pair: str
    model: str
    prompt_tokens: int
    chunk_size: int
    live: bool
    phases: tuple[Phase, ...]
    failures: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    started_at: str = ""
    duration_s: float = 0.0
    planned: tuple[str, ...] = field(default=())
    """Names of the phases that this kind of run has; one that did not run is a failure."""
    l2: str = "disk"
    """What L2 is: disk, or engine."""

    @property
    def all_failures(self) -> tuple[str, ...]:
        of_phases = (f"{phase.name}: {problem}" for phase in self.phases for problem in phase.problems)
        ran = {phase.name for phase in self.phases}
        missing = (f"{name}: found: did not run; needed: to run" for name in self.planned if name not in ran)
        return (*self.failures, *of_phases, *missing)

    @property
    def passed(self) -> bool:
        return bool(self.phases) and not self.all_failures

    @property
    def worth_it(self) -> bool:
        """It passed, and every phase that was to be served from a cache began sooner than the cold one."""
        cold = self._ttft("cold")
        cached = [phase for phase in self.phases if phase.expected_source != "none"]
        return (
            self.passed
            and cold is not None
            and bool(cached)
            and all(p.hit_tokens > 0 and p.ttft_s is not None and p.ttft_s < cold for p in cached)
        )

    @property
    def exit_code(self) -> int:
        return 0 if self.passed else 1

    def speed_up(self, phase: Phase) -> float | None:
        """cold TTFT / this TTFT, of a phase that was to be served from a cache; None where it went wrong."""
        cold = self._ttft("cold")
        if cold is None or not phase.ttft_s or phase.expected_source == "none" or phase.problems:
            return None
        return cold / phase.ttft_s

    def _ttft(self, name: str) -> float | None:
        return next((phase.ttft_s for phase in self.phases if phase.name == name), None)

    def to_json(self) -> dict[str, Any]:
        return {
            "passed": self.passed,
            "worth_it": self.worth_it,
            "device": self.device,
            "pair": self.pair,
            "model": self.model,
            "prompt_tokens": self.prompt_tokens,
            "chunk_size": self.chunk_size,
            "l2": self.l2,
            "phases": [phase.to_json() for phase in self.phases],
            "live": self.live,
            "started_at": self.started_at,
            "duration_s": round(self.duration_s, 1),
            "failures": list(self.all_failures),
            "notes": list(self.notes),
        }

    def write(self, path: Path) -> None:
        """Write the JSON whole or not at all."""
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(path.name + ".tmp")
        temporary.write_text(json.dumps(self.to_json(), indent=2) + "\n", encoding="utf-8")
        temporary.replace(path)

    def render(self, console: Console) -> None:
        console.print(
            f"{self.model}: {self.prompt_tokens} prompt tokens, {self.pair}, {self.device}",
            markup=False,
            soft_wrap=True,
        )
        table = Table()
        for heading in ("phase", "TTFT", "cached", "from", "same", "speed-up"):
            table.add_column(heading, justify="left" if heading in ("phase", "from") else "right", no_wrap=True)
        for phase in self.phases:
            speed = self.speed_up(phase)
            bad = bool(phase.problems)
            cached = str(phase.hit_tokens)
            table.add_row(
                phase.name,
                "-" if phase.ttft_s is None else f"{phase.ttft_s:.2f} s",
                f"{cached} of {phase.expected_hit_tokens}" if phase.expected_hit_tokens else cached,
                _SOURCE_NAMES[phase.source] + (f" {self.l2}" if phase.source == "l2" else ""),
                "yes" if phase.equal else "NO",
                "" if speed is None else f"{speed:.1f}x",
                style="red" if bad else None,
            )
        console.print(table)
        for note in self.notes:
            console.print(f"note: {note}", markup=False, soft_wrap=True)
        for failure in self.all_failures:
            console.print(f"FAILED {failure}", style="red", markup=False, soft_wrap=True)
        verdict = "passed" if self.passed else "FAILED"
        worth = "and faster than computing it" if self.worth_it else "but NOT faster than computing it everywhere"
        console.print(f"proof {verdict}" + (f", {worth}" if self.passed else "") + f" ({self.duration_s:.0f} s)")
