"""The contract: no empty panel, no name that nothing exports. Held against a running Prometheus.

A gap is excused only by the catalogue (`Metric.needs`): its metric needs a part that this stack is not made of, or an
event that a healthy run does not have. Parts come from the stack's layers, not from what is live: a part that is there
and silent is a gap.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvstrata.observe import promql, sources
from kvstrata.observe.catalog import Metric, Needs, find
from kvstrata.observe.prometheus import Prometheus, QueryRefused, Series

__all__ = ["WINDOW_S", "Outcome", "PanelSeen", "TraceSearch", "parts_of", "run"]

TraceSearch = Callable[[str], int]
"""TraceQL text -> number of traces found (kvstrata.observe.traces)."""
_STEPS = 120
_OF_HANDLES = '"mp.retrieve"'
"""This span, too, is made only where the cache server moves the blocks."""
WINDOW_S = 120


@dataclass(frozen=True)
class PanelSeen:
    """One panel: samples of all its queries, whether a value changed, and what is wrong with it."""

    dashboard: str
    title: str
    samples: int
    changed: bool
    gaps: tuple[str, ...] = ()
    excuses: tuple[str, ...] = ()

    @property
    def excused(self) -> bool:
        """Nothing of it can have data in this stack."""
        return self.samples == 0 and bool(self.excuses) and not self.gaps


@dataclass(frozen=True)
class Outcome:
    names_used: int
    names_live: int
    panels: tuple[PanelSeen, ...]
    excused: Mapping[str, str]
    gaps: tuple[str, ...]

    @property
    def with_data(self) -> int:
        return sum(panel.samples > 0 for panel in self.panels)

    @property
    def changing(self) -> float:
        """Share of the panels with data whose value changed."""
        return sum(panel.changed for panel in self.panels) / max(self.with_data, 1)

    def to_json(self) -> dict[str, Any]:
        return {
            "names_used": self.names_used,
            "names_live": self.names_live,
            "panels": len(self.panels),
            "panels_with_data": self.with_data,
            "panels_changing": round(self.changing, 3),
            "excused": [{"name": name, "reason": reason} for name, reason in sorted(self.excused.items())],
            "gaps": list(self.gaps),
            "samples": {f"{panel.dashboard}: {panel.title}": panel.samples for panel in self.panels},
        }


def parts_of(layers: Iterable[str], device: str) -> frozenset[Needs]:
    """What the stack of these compose layers is made of."""
    by_layer = {"nvme": Needs.STORE, "engine": Needs.ENGINE, "path-a": Needs.REMOTE}
    found = {by_layer[layer] for layer in layers if layer in by_layer}
    return frozenset(found | ({Needs.GPU, Needs.HANDLE} if device != "cpu" else set()))


def run(
    prometheus: Prometheus, root: Path, parts: frozenset[Needs], since_s: float, traces: TraceSearch | None = None, *,
    window_s: int = WINDOW_S,
) -> Outcome:  # fmt: skip
    """Look at the last `since_s` seconds. `traces` None: panels of traces are left out, and said to be.

    `window_s` stands for Grafana's `$__rate_interval`: at least four scrapes.
    """
    live = prometheus.names(since_s)
    places: dict[str, set[str]] = defaultdict(set)
    for use in sources.uses(root):
        places[use.series].add(use.where)
    excused, gaps = {}, []
    for name in sorted(set(places) - live):
        metric = find(name)
        reason = _excuse(metric, parts)
        if reason:
            excused[name] = reason
        else:
            gaps.append(f"{name}: not in Prometheus; named by {', '.join(sorted(places[name]))}")
    panels = _panels(prometheus, root, parts, since_s, traces, window_s)
    gaps += [f"{panel.dashboard}: {panel.title}: {gap}" for panel in panels for gap in panel.gaps]
    if traces is None:
        excused["traces"] = "no address of a trace store was given"
    return Outcome(len(places), len(set(places) & live), panels, excused, tuple(gaps))


def _excuse(metric: Metric | None, parts: frozenset[Needs]) -> str:
    if metric is None or metric.needs is Needs.NOTHING or metric.needs in parts:
        return ""
    return f"needs {metric.needs.value}"


def _panels(
    prometheus: Prometheus, root: Path, parts: frozenset[Needs], since_s: float, traces: TraceSearch | None,
    window_s: int,
) -> tuple[PanelSeen, ...]:  # fmt: skip
    asked = (query for query in sources.panels(root) if query.language == "promql" or traces is not None)
    end = time.time()
    seen = []
    for (dashboard, title), queries in sources.by_panel(asked).items():
        samples, changed = 0, False
        wrong: list[str] = []
        excuses: list[str] = []
        for query in queries:
            if query.language == "traceql":
                assert traces is not None
                count = traces(query.expr)
                samples, changed = samples + count, changed or count > 0
                if not count and _OF_HANDLES in query.expr and Needs.HANDLE not in parts:
                    excuses.append(f"needs {Needs.HANDLE.value}")
                elif not count:
                    wrong.append(f"no trace for {query.expr}")
                continue
            try:
                found = _evaluate(prometheus, query.expr, end, since_s, window_s)
            except QueryRefused as error:
                wrong.append(f"{query.expr}: {error}")
                continue
            points = sum(len(series.points) for series in found)
            samples += points
            changed = changed or any(series.changes for series in found)
            if not points:
                reason = _query_excuse(query.expr, parts)
                (excuses if reason else wrong).append(reason or f"no data for {query.expr}")
        seen.append(PanelSeen(dashboard, title, samples, changed, tuple(wrong), tuple(excuses)))
    return tuple(seen)


def _evaluate(prometheus: Prometheus, expr: str, end: float, since_s: float, window_s: int) -> list[Series]:
    """The query without its fallback to zero: that would hide that there is nothing."""
    text = promql.without_fallback(expr) or expr
    span = f"{max(int(since_s), window_s)}s"
    filled = promql.substitute(text, rate=f"{window_s}s", span=span)
    return prometheus.over(filled, end - since_s, end, max(since_s / _STEPS, 1.0))


def _query_excuse(expr: str, parts: frozenset[Needs]) -> str:
    """A query may be empty when one of its metrics is excused."""
    reasons = (_excuse(find(name), parts) for name in sorted(promql.names(expr)))
    return next((reason for reason in reasons if reason), "")
