"""Line plots and bars as inline SVG: two kinds, a few hundred points, no library in the page.

Colours are classes (`c0` ... `c5`) that the page's style sheet defines, so that the same plot is drawn for light and
dark screens and for paper.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from itertools import pairwise

__all__ = ["Line", "bars", "human", "lines"]

_WIDTH, _HEIGHT = 620, 220
_LEFT, _RIGHT, _TOP, _BOTTOM = 58, 12, 10, 24
_GAP = 2.5
"""A hole in the line where samples are further apart than this many steps."""


@dataclass(frozen=True)
class Line:
    """(unix time, value) in order of time; `color` is an index of the page's palette."""

    name: str
    points: Sequence[tuple[float, float]]
    color: int = 0
    dashed: bool = False


def human(value: float, unit: str) -> str:
    """A value for people: percent, s, bytes, or a plain number."""
    if unit == "percent":
        return f"{value * 100:.0f} %"
    if unit == "s":
        return (
            f"{value * 1000:.0f} ms" if abs(value) < 1 else f"{value:.1f} s" if value < 600 else f"{value / 60:.0f} min"
        )
    if unit == "bytes":
        return _scaled(value, 1024.0, ("B", "KiB", "MiB", "GiB", "TiB"))
    return _scaled(value, 1000.0, ("", "k", "M", "G", "T")).strip()


def _scaled(value: float, base: float, units: Sequence[str]) -> str:
    at = 0
    while abs(value) >= base and at < len(units) - 1:
        value, at = value / base, at + 1
    digits = 0 if value == int(value) or abs(value) >= 100 else 1 if abs(value) >= 1 else 2 if abs(value) >= 0.1 else 3
    return f"{value:.{digits}f} {units[at]}"


def lines(plots: Sequence[Line], start: float, end: float, unit: str, *, top: float | None = None) -> str:
    """Lines over time from `start` to `end`. `top`: the upper end of the axis; else what the values need."""
    highest = max((value for line in plots for _, value in line.points), default=0.0)
    ticks = _ticks(top if top is not None else highest, unit)
    scale = ticks[-1] or 1.0

    def place(at: float, value: float) -> tuple[float, float]:
        x = _LEFT + (at - start) / max(end - start, 1e-9) * (_WIDTH - _LEFT - _RIGHT)
        return x, _HEIGHT - _BOTTOM - min(value / scale, 1.0) * (_HEIGHT - _TOP - _BOTTOM)

    parts = [f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img">']
    for tick in ticks:
        y = place(start, tick)[1]
        parts.append(f'<line class="grid" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text class="axis" x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{human(tick, unit)}</text>')
    for at in _hours(start, end):
        x, y = place(at, 0)
        clock = time.strftime("%d. %H:%M" if end - start > 86400 else "%H:%M", time.localtime(at))
        parts.append(f'<text class="axis" x="{x:.1f}" y="{y + 16:.1f}" text-anchor="middle">{clock}</text>')
    for line in plots:
        dashed = " dashed" if line.dashed else ""
        for piece in _pieces(line.points):
            path = " ".join(f"{x:.1f},{y:.1f}" for x, y in (place(*point) for point in piece))
            if len(piece) == 1:
                x, y = place(*piece[0])
                parts.append(f'<circle class="dot c{line.color}" cx="{x:.1f}" cy="{y:.1f}" r="2.5"/>')
            else:
                parts.append(f'<polyline class="line c{line.color}{dashed}" points="{path}"/>')
    return "".join(parts) + "</svg>"


def bars(rows: Sequence[tuple[str, float, int]], unit: str) -> str:
    """Horizontal bars: (name, value, colour)."""
    step, left, right = 34, 170, 90
    longest = max((value for _, value, _ in rows), default=0.0) or 1.0
    parts = [f'<svg viewBox="0 0 {_WIDTH} {step * len(rows) + 8}" role="img">']
    for at, (name, value, color) in enumerate(rows):
        y, width = 6 + at * step, value / longest * (_WIDTH - left - right)
        parts.append(f'<text class="axis" x="{left - 8}" y="{y + 17}" text-anchor="end">{escape(name)}</text>')
        parts.append(f'<rect class="bar c{color}" x="{left}" y="{y}" width="{max(width, 1):.1f}" height="24" rx="3"/>')
        parts.append(f'<text class="value" x="{left + width + 8:.1f}" y="{y + 17}">{human(value, unit)}</text>')
    return "".join(parts) + "</svg>"


def _pieces(points: Sequence[tuple[float, float]]) -> list[list[tuple[float, float]]]:
    """Cut where samples are missing."""
    gaps = sorted(b[0] - a[0] for a, b in pairwise(points))
    limit = gaps[len(gaps) // 2] * _GAP if gaps else math.inf
    found: list[list[tuple[float, float]]] = []
    for point in points:
        if not found or point[0] - found[-1][-1][0] > limit:
            found.append([])
        found[-1].append(point)
    return found


def _ticks(highest: float, unit: str) -> list[float]:
    """0 and two to five round figures, the last at or above `highest`."""
    if highest <= 0:
        return [0.0, 1.0]
    if unit == "bytes" and highest >= 1024:
        power = 1024.0 ** int(math.log(highest, 1024))
        return [tick * power for tick in _ticks(highest / power, "")]
    raw = highest / 4
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= raw * 0.999)
    return [step * at for at in range(math.ceil(highest / step * 0.999) + 1)]


def _hours(start: float, end: float) -> list[float]:
    """Four to eight round times."""
    span = end - start
    step = next((s for s in (60, 300, 600, 1800, 3600, 10800, 21600, 43200, 86400) if span / s <= 8), 7 * 86400)
    first = math.ceil(start / step) * step
    edge = span * 0.03
    return [at for at in range(int(first), int(end), int(step)) if start + edge < at < end - edge]
