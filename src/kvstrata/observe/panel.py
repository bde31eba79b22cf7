"""A panel of the dashboards in a terminal: what its queries give now. For where no Grafana runs."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from pathlib import Path

from kvstrata.deploy.errors import KvError
from kvstrata.observe import promql, sources, svg
from kvstrata.observe.check import WINDOW_S
from kvstrata.observe.prometheus import Prometheus

__all__ = ["show"]

_LABEL = re.compile(r"\{\{\s*(\w+)\s*\}\}")
#: Grafana's name of a unit to svg.human's.
_UNITS = {"percentunit": "percent", "s": "s", "bytes": "bytes", "Bps": "bytes"}
#: Grafana's units of something a second.
_RATES = ("Bps", "GBs", "cps", "ops", "reqps")


def show(prometheus: Prometheus, root: Path, words: str, minutes: float) -> Iterator[str]:
    """Lines of every panel whose title holds `words`. Raises KvError where none does."""
    grouped = sources.by_panel(sources.panels(root))
    exact = [at for at in grouped if at[1].lower() == words.strip().lower()]
    wanted = exact or [at for at in grouped if words.strip().lower() in at[1].lower()]
    if not wanted:
        titles = {title.lower(): title for _, title in grouped}
        near = [titles[name] for name in get_close_matches(words.lower(), titles, 5, 0.4)]
        raise KvError(
            f"no panel with {words!r} in its title", f"one such as {', '.join(map(repr, near or titles.values()))}",
            "make observe ARGS=\"panel 'WORDS OF A TITLE'\"",
        )  # fmt: skip
    for at in wanted:
        (dashboard, title), queries = at, grouped[at]
        yield f"{title} ({dashboard})"
        yield from (f"  {line}" for line in queries[0].about.splitlines() if line)
        lines = [line for query in queries for line in _values(prometheus, query, minutes)]
        yield from lines or ["  = nothing in Prometheus now"]
        yield ""


def _values(prometheus: Prometheus, query: sources.PanelQuery, minutes: float) -> Iterator[str]:
    if query.language != "promql":
        yield f"  = a search of the trace store: {query.expr}"
        return
    span = f"{max(int(minutes * 60), WINDOW_S)}s"
    for series in prometheus.instant(promql.substitute(query.expr, rate=f"{WINDOW_S}s", span=span)):
        if series.points:
            yield f"  = {_value(series.points[-1][1], query.unit):>12}  {_name(query.legend, series.labels)}".rstrip()


def _name(legend: str, labels: Mapping[str, str]) -> str:
    if legend:
        return _LABEL.sub(lambda match: labels.get(match.group(1)) or "(none)", legend)
    return ", ".join(f"{name}={value}" for name, value in sorted(labels.items()) if name != "__name__")


def _value(value: float, unit: str) -> str:
    text = f"{value:.1f} %" if unit == "percent" else svg.human(value, _UNITS.get(unit, ""))
    text += {"decmbytes": " MB", "GBs": " GB"}.get(unit, "")
    return f"{text}/s" if unit in _RATES else text
