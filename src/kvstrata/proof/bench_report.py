"""Figures of a benchmark: medians and spread by length and tier, speed-ups, break-even; as JSON, table and plot."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table

__all__ = ["TIERS", "BenchReport", "Series", "break_even"]

TIERS = {
    "cold": "computed", "l0": "L0 vLLM", "l1": "L1 after a vLLM kill", "l2": "L2 after a kill of both",
    "plain_cold": "plain vLLM, computed", "plain_l0": "plain vLLM, L0",
}  # fmt: skip
_CACHED = ("l0", "l1", "l2")
#: Of fewer samples a side, a difference of two cold times is noise (-318 ms was seen with one).
_LEAST_FOR_COST = 3


@dataclass(frozen=True)
class Series:
    """TTFTs in seconds of prompts of one length from one tier."""

    samples: tuple[float, ...]

    @property
    def median(self) -> float:
        return median(self.samples)

    def to_json(self) -> dict[str, Any]:
        return {
            "median": round(self.median, 4),
            "min": round(min(self.samples), 4),
            "max": round(max(self.samples), 4),
            "samples": [round(value, 4) for value in self.samples],
        }


@dataclass(frozen=True)
class BenchReport:
    """`ttft` is prompt length -> tier (keys of TIERS) -> series; a tier without a valid sample is absent."""

    device: str
    pair: str
    model: str
    chunk_size: int
    repeats: int
    ttft: Mapping[int, Mapping[str, Series]]
    equal_text: bool
    notes: tuple[str, ...]
    started_at: str
    duration_s: float

    def speed_up(self, length: int, tier: str) -> float | None:
        """Median cold TTFT over the tier's, with the connector on both sides."""
        of = self.ttft[length]
        return of["cold"].median / of[tier].median if "cold" in of and tier in of else None

    def connector_cost(self, length: int) -> float | None:
        """Seconds that the connector adds to a cold TTFT (lookup and store); negative is noise.

        None where either side has fewer than three samples: the difference could not be told from noise.
        """
        of = self.ttft[length]
        if not {"cold", "plain_cold"} <= of.keys():
            return None
        cold, plain = of["cold"], of["plain_cold"]
        if min(len(cold.samples), len(plain.samples)) < _LEAST_FOR_COST:
            return None
        return cold.median - plain.median

    def break_even(self, tier: str) -> float | None:
        """Prompt tokens from which the tier is faster than computing (see `break_even`)."""
        both = [(n, of) for n, of in sorted(self.ttft.items()) if {"cold", tier} <= of.keys()]
        return break_even([(n, of["cold"].median, of[tier].median) for n, of in both])

    def to_json(self) -> dict[str, Any]:
        return {
            "device": self.device, "pair": self.pair, "model": self.model, "chunk_size": self.chunk_size,
            "repeats": self.repeats, "equal_text": self.equal_text, "started_at": self.started_at,
            "duration_s": round(self.duration_s, 1), "notes": list(self.notes),
            "break_even_tokens": {tier: _rounded(self.break_even(tier), 0) for tier in _CACHED},
            "lengths": [
                {
                    "prompt_tokens": length,
                    "ttft_s": {tier: of[tier].to_json() for tier in TIERS if tier in of},
                    "speed_up": {tier: _rounded(self.speed_up(length, tier), 2) for tier in _CACHED},
                    "connector_cost_s": _rounded(self.connector_cost(length), 4),
                }
                for length, of in sorted(self.ttft.items())
            ],
        }  # fmt: skip

    def write(self, folder: Path) -> list[Path]:
        """bench.json, and bench.svg and bench.png where matplotlib is there. Returns what was written."""
        folder.mkdir(parents=True, exist_ok=True)
        written = [folder / "bench.json"]
        written[0].write_text(json.dumps(self.to_json(), indent=2) + "\n", encoding="utf-8")
        return written + self._plot(folder)

    def render(self, console: Console) -> None:
        title = f"TTFT in seconds, median (min - max) of {self.repeats}: {self.model}, {self.pair}, {self.device}"
        table = Table(title=title)
        table.add_column("prompt tokens", justify="right")
        for name in TIERS.values():
            table.add_column(name, justify="right")
        for length, of in sorted(self.ttft.items()):
            table.add_row(str(length), *(self._cell(length, tier, of.get(tier)) for tier in TIERS))
        console.print(table)
        for tier in _CACHED:
            tokens = self.break_even(tier)
            if tokens is None:
                continue
            where = "at every length" if tokens == 0 else f"from about {tokens:.0f} prompt tokens on"
            never = tokens == float("inf")
            console.print(f"{TIERS[tier]}: {'slower' if never else 'faster'} than computing {'' if never else where}")
        costs = [cost for length in self.ttft if (cost := self.connector_cost(length)) is not None]
        if costs:
            console.print(f"the connector itself: {median(costs) * 1000:+.0f} ms of a cold TTFT (median over lengths)")
        elif any("plain_cold" in of for of in self.ttft.values()):
            needed = f"{_LEAST_FOR_COST} samples a length"
            console.print(f"the connector itself: not separable from noise with fewer than {needed} (--repeats)")
        console.print(f"same text from every tier: {'yes' if self.equal_text else 'NO'}")
        for note in self.notes:
            console.print(f"note: {note}", markup=False)

    def _cell(self, length: int, tier: str, series: Series | None) -> str:
        if series is None:
            return "-"
        speed = self.speed_up(length, tier) if tier in _CACHED else None
        spread = f"{series.median:.3f} ({min(series.samples):.3f} - {max(series.samples):.3f})"
        return spread + ("" if speed is None else f" {speed:.1f}x")

    def _plot(self, folder: Path) -> list[Path]:
        try:
            from matplotlib.figure import Figure
        except ImportError:
            return []
        figure = Figure(figsize=(8, 5), layout="constrained")
        axes = figure.subplots()
        for tier, name in TIERS.items():
            points = [(n, of[tier]) for n, of in sorted(self.ttft.items()) if tier in of]
            if not points:
                continue
            middle = [series.median for _, series in points]
            low = [m - min(series.samples) for m, (_, series) in zip(middle, points, strict=True)]
            high = [max(series.samples) - m for m, (_, series) in zip(middle, points, strict=True)]
            style = "--" if tier.startswith("plain") else "-"
            at = [length for length, _ in points]
            axes.errorbar(at, middle, yerr=[low, high], label=name, marker="o", linestyle=style, capsize=3)
        axes.set(xlabel="prompt tokens", ylabel="time to first token (s)", yscale="log")
        axes.set_title(f"{self.model}, {self.pair}, {self.device}", fontsize=10)
        axes.grid(True, which="both", alpha=0.3)
        axes.legend()
        written = [folder / "bench.svg", folder / "bench.png"]
        for path in written:
            figure.savefig(path, dpi=120)
        return written


def break_even(points: Sequence[tuple[int, float, float]]) -> float | None:
    """Length at which the cached time falls below the cold one: (prompt tokens, cold s, cached s) by length.

    Linear between measured lengths; before the first one, along the line through the first two. 0 when that line is
    below from the start, inf when the longest prompt still is slower, None with no points.
    """
    gaps = [(n, cold - cached) for n, cold, cached in points]
    if not gaps:
        return None
    if gaps[-1][1] <= 0:
        return float("inf")
    for (n0, g0), (n1, g1) in zip(reversed(gaps[:-1]), reversed(gaps[1:]), strict=True):
        if g0 <= 0 < g1:
            return n0 + (n1 - n0) * -g0 / (g1 - g0)
    if len(gaps) == 1 or gaps[1][1] <= gaps[0][1]:
        return 0.0
    (n0, g0), (n1, g1) = gaps[:2]
    return max(0.0, n0 - g0 * (n1 - n0) / (g1 - g0))


def _rounded(value: float | None, digits: int) -> float | None:
    # JSON has no infinity: "never" is null there, and the table says it in words.
    return None if value is None or value == float("inf") else round(value, digits)
