"""The report's HTML: figures on top, plots below, alerts at the end. One file, nothing is loaded from anywhere."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

__all__ = ["Alert", "Figure", "Page", "Plot"]

_STYLE = """
:root { --ink: #1c2330; --dim: #667085; --paper: #f6f7f9; --card: #ffffff; --rule: #e4e7ec; --bad: #c4320a;
  --c0: #2f6fde; --c1: #0f9d8a; --c2: #e08a00; --c3: #b4409e; --c4: #7a8699; --c5: #98a2b3; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6e9ef; --dim: #98a2b3; --paper: #12161d; --card: #1b212b;
  --rule: #2c3442; --bad: #ff8a65; --c0: #6aa0ff; --c1: #3fcfb8; --c2: #ffb547; --c3: #e27fd0; --c4: #9aa7bb;
  --c5: #7d8899; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--paper); color: var(--ink); font: 15px/1.45 system-ui, "DejaVu Sans", sans-serif; }
main { max-width: 1360px; margin: 0 auto; padding: 28px 24px 40px; }
h1 { font-size: 24px; margin: 0; } h2 { font-size: 16px; margin: 0; }
p { margin: 2px 0 0; color: var(--dim); }
.figures { display: grid; grid-template-columns: repeat(auto-fit, minmax(180px, 1fr)); gap: 14px; margin: 22px 0; }
.plots { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(560px, 100%), 1fr)); gap: 14px; }
.card { background: var(--card); border: 1px solid var(--rule); border-radius: 10px; padding: 14px 16px; }
.figure b { display: block; font-size: 26px; line-height: 1.25; font-weight: 650; }
.bad b, .bad { color: var(--bad); }
svg { width: 100%; height: auto; margin-top: 8px; display: block; }
.grid { stroke: var(--rule); } .axis { fill: var(--dim); font-size: 11.5px; }
.value { fill: var(--ink); font-size: 12.5px; }
.line { fill: none; stroke-width: 1.8; stroke-linejoin: round; } .dashed { stroke-dasharray: 6 4; }
.c0 { stroke: var(--c0); } .c1 { stroke: var(--c1); } .c2 { stroke: var(--c2); } .c3 { stroke: var(--c3); }
.c4 { stroke: var(--c4); } .c5 { stroke: var(--c5); }
.bar, .dot { stroke: none; } .bar.c0, .dot.c0 { fill: var(--c0); } .bar.c1, .dot.c1 { fill: var(--c1); }
.bar.c2, .dot.c2 { fill: var(--c2); } .bar.c3, .dot.c3 { fill: var(--c3); } .bar.c4, .dot.c4 { fill: var(--c4); }
.bar.c5, .dot.c5 { fill: var(--c5); }
.legend { display: flex; flex-wrap: wrap; gap: 4px 16px; margin-top: 6px; color: var(--dim); font-size: 13px; }
.legend i { display: inline-block; width: 12px; height: 3px; border-radius: 2px;
  margin: 0 6px 3px 0; vertical-align: middle; }
.none { padding: 70px 0; text-align: center; color: var(--dim); }
table { border-collapse: collapse; margin-top: 8px; } td { padding: 3px 24px 3px 0; }
section { margin-top: 14px; }
@media print { body { background: none; } .card { break-inside: avoid; } }
"""


@dataclass(frozen=True)
class Figure:
    """One number with what it is and a word on it."""

    title: str
    value: str
    note: str = ""
    bad: bool = False


@dataclass(frozen=True)
class Plot:
    """`drawn` is SVG, "" where Prometheus had nothing; `legend` holds (name, colour)."""

    title: str
    says: str
    drawn: str
    legend: Sequence[tuple[str, int]]


@dataclass(frozen=True)
class Alert:
    """What fired, for how long in all, and whether it does still."""

    name: str
    span: str
    now: bool


@dataclass(frozen=True)
class Page:
    title: str
    start: float
    end: float
    figures: Sequence[Figure]
    plots: Sequence[Plot]
    alerts: Sequence[Alert]

    def html(self) -> str:
        """The whole file."""
        figures = "".join(map(_figure, self.figures))
        plots = "".join(map(_plot, self.plots))
        return (
            '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
            '<meta name="viewport" content="width=device-width, initial-scale=1">'
            f"<title>{escape(self.title)}</title><style>{_STYLE}</style></head><body><main>"
            f"<h1>{escape(self.title)}</h1><p>{_clock(self.start)} to {_clock(self.end)}</p>"
            f'<div class="figures">{figures}</div><div class="plots">{plots}</div>{self._alerts()}'
            "</main></body></html>\n"
        )

    def _alerts(self) -> str:
        if not self.alerts:
            return '<section class="card"><h2>Alerts</h2><p>None fired in this time.</p></section>'
        rows = "".join(
            f"<tr{' class=bad' if one.now else ''}><td>{escape(one.name)}</td><td>{escape(one.span)}</td>"
            f"<td>{'fires now' if one.now else ''}</td></tr>"
            for one in self.alerts
        )
        return (
            '<section class="card"><h2>Alerts</h2><p>What fired, and how long. docs/runbooks has a page for each.</p>'
            f"<table>{rows}</table></section>"
        )


def _figure(one: Figure) -> str:
    return (
        f'<div class="card figure{" bad" if one.bad else ""}">{escape(one.title)}<b>{escape(one.value)}</b>'
        f"<p>{escape(one.note)}</p></div>"
    )


def _plot(plot: Plot) -> str:
    names = dict.fromkeys(plot.legend)
    legend = "".join(f'<span><i style="background: var(--c{color})"></i>{escape(name)}</span>' for name, color in names)
    body = plot.drawn or '<div class="none">nothing was measured in this time</div>'
    return (
        f'<div class="card"><h2>{escape(plot.title)}</h2><p>{escape(plot.says)}</p>{body}'
        f'<div class="legend">{legend}</div></div>'
    )


def _clock(at: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(at))
