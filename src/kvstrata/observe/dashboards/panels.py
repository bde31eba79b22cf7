"""What a panel is here, and the queries that panels are made of. Knows nothing of Grafana's JSON."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from kvstrata.observe.catalog import Kind, find

__all__ = [
    "CACHE_DISK", "Board", "Panel", "Query", "Row", "TraceQuery", "average", "by_rate", "growth", "host", "lines",
    "model",
    "quantile", "rate", "ratio", "stat", "tenant", "zero",
]  # fmt: skip


#: The node exporter sees the cache's disk at this place.
CACHE_DISK = 'mountpoint="/cache"'


@dataclass(frozen=True)
class Query:
    """One PromQL expression; `legend` is Grafana's template of the series' names."""

    expr: str
    legend: str = ""


@dataclass(frozen=True)
class TraceQuery:
    """A search for traces (TraceQL)."""

    query: str


@dataclass(frozen=True)
class Panel:
    """One panel. The three sentences are its description: what it tells, what is normal, what to do otherwise."""

    title: str
    queries: tuple[Query, ...]
    tells: str
    normal: str
    otherwise: str
    runbook: str = ""
    """Name of a file in docs/runbooks, without `.md`."""
    unit: str = "short"
    kind: Literal["lines", "stack", "stat", "traces"] = "lines"
    width: int = 8
    height: int = 8
    maximum: float | None = None
    no_value: str = "no traffic"
    steps: tuple[tuple[float | None, str], ...] = ()
    """Thresholds of a stat: (from, colour), the first from None."""
    words: dict[str, str] = field(default_factory=dict)
    """Value to word, for 0/1 figures."""
    names_only: bool = False
    """A stat that shows the series' names instead of their values."""
    traces: tuple[TraceQuery, ...] = ()

    @property
    def description(self) -> str:
        text = f"{self.tells}\n\nNormal: {self.normal}\n\nOtherwise: {self.otherwise}"
        return text + (f"\n\nRunbook: docs/runbooks/{self.runbook}.md" if self.runbook else "")


@dataclass(frozen=True)
class Row:
    title: str
    panels: tuple[Panel, ...]


@dataclass(frozen=True)
class Board:
    """One dashboard. `uid` is its file's name and its address in Grafana."""

    uid: str
    title: str
    description: str
    rows: tuple[Row, ...]

    @property
    def panels(self) -> tuple[Panel, ...]:
        return tuple(panel for row in self.rows for panel in row.panels)


# -- selectors --------------------------------------------------------------------------------------------------


def host(*more: str) -> str:
    """Label matchers: the hosts that are chosen, and `more`."""
    return "{" + ", ".join(('host=~"$host"', *more)) + "}"


def model(*more: str) -> str:
    """As `host`, and the models that are chosen. LMCache's model name is vLLM's with `--<identity>` behind it."""
    return host('model_name=~"$model(--.*)?"', *more)


def tenant(*more: str) -> str:
    """As `host`, and the tenants (digests of cache salts; none is a tenant of its own) that are chosen."""
    return host('cache_salt=~"$tenant"', *more)


# -- expressions ------------------------------------------------------------------------------------------------


def _sum(by: str, inner: str) -> str:
    return f"sum by ({by}) ({inner})" if by else f"sum({inner})"


def rate(name: str, select: str, by: str = "") -> str:
    """A counter a second."""
    return _sum(by, f"rate({name}{select}[$__rate_interval])")


def growth(name: str, select: str, by: str = "", span: str = "$__range") -> str:
    """What a counter gained within `span`, by default what the dashboard shows."""
    return _sum(by, f"increase({name}{select}[{span}])")


def ratio(part: str, whole: str) -> str:
    """Nothing, not NaN, while the whole is zero."""
    return f"{part} / ({whole} > 0)"


def zero(expr: str) -> str:
    """For counters that appear with their first event, where absent means zero."""
    return f"({expr}) or vector(0)"


def _is_native(name: str) -> bool:
    metric = find(name)
    return metric is not None and metric.kind is Kind.NATIVE


def quantile(q: float, name: str, select: str, by: str = "") -> str:
    """Of a histogram, in whichever form Prometheus holds it."""
    if _is_native(name):
        return f"histogram_quantile({q}, {rate(name, select, by)})"
    return f"histogram_quantile({q}, {rate(name + '_bucket', select, f'le, {by}' if by else 'le')})"


def average(name: str, select: str, by: str = "") -> str:
    """Mean of a histogram's values within the window; nothing while there are none."""
    if _is_native(name):
        return f"histogram_sum({rate(name, select, by)}) / (histogram_count({rate(name, select, by)}) > 0)"
    return ratio(rate(name + "_sum", select, by), rate(name + "_count", select, by))


def by_rate(name: str, select: str, legend: str, by: str = "", zeroed: bool = False) -> Query:
    """A counter a second with its legend."""
    expr = rate(name, select, by)
    return Query(zero(expr) if zeroed else expr, legend)


# -- panels of one kind -----------------------------------------------------------------------------------------


def lines(title: str, *queries: Query, tells: str, normal: str, otherwise: str, **rest: object) -> Panel:
    """A panel over time."""
    return Panel(title, queries, tells, normal, otherwise, **rest)  # type: ignore[arg-type]


def stat(title: str, expr: str, *, tells: str, normal: str, otherwise: str, legend: str = "", **rest: object) -> Panel:
    """One figure. Narrow and low, unless said otherwise."""
    rest = {"width": 4, "height": 4, **rest}
    return Panel(title, (Query(expr, legend),), tells, normal, otherwise, kind="stat", **rest)  # type: ignore[arg-type]
