"""What a PromQL expression names, and whether it reads each metric in the way of its kind."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import promql_parser as parser

from kvstrata.observe.catalog import Kind, find
from kvstrata.observe.dead import replacement

__all__ = ["Selection", "faults", "names", "selections", "substitute", "without_fallback"]

_RATES = frozenset({"rate", "irate", "increase"})
#: The last one is for who compares counts of one moment with each other, and says so.
_OVER_TIME = frozenset({"delta", "deriv", "resets", "changes", "last_over_time"})
_OF_NATIVE = frozenset(f"histogram_{what}" for what in ("quantile", "avg", "count", "sum", "fraction"))
_FALLBACK = re.compile(r"^\((?P<inner>.*)\) or vector\(0\)$", re.S)
#: What Grafana fills in. Longest first, as `$__rate_interval` begins with `$__r`.
_VARIABLES = re.compile(r"\$(?:\{(\w+)(?::\w+)?\}|(\w+))")


@dataclass(frozen=True)
class Selection:
    """One series selector with the functions and aggregations around it, innermost first."""

    name: str
    around: tuple[str, ...]
    ranged: bool


def substitute(expression: str, *, rate: str = "5m", span: str = "1h", step: str = "1m") -> str:
    """Grafana's variables as it fills them in when everything is chosen; durations as given."""
    known = {"__rate_interval": rate, "__range": span, "__interval": step}
    return _VARIABLES.sub(lambda m: known.get(m.group(1) or m.group(2), ".*"), expression)


def without_fallback(expression: str) -> str | None:
    """The part before `or vector(0)` where a query has that fallback at its top; None where it has none."""
    match = _FALLBACK.match(expression.strip())
    return match.group("inner") if match else None


def selections(expression: str) -> list[Selection]:
    """Every series selector of an expression. Raises ValueError with the parser's words."""
    return list(_walk(parser.parse(substitute(expression)), ()))


def names(expression: str) -> set[str]:
    """Names of the series that it reads."""
    return {found.name for found in selections(expression)}


def faults(expression: str) -> list[str]:
    """What is wrong with it: unknown or dead names, `rate()` of a gauge, a counter that is not rated, and the like."""
    try:
        found = selections(expression)
    except ValueError as error:
        return [f"not PromQL: {error}"]
    return [fault for one in found if (fault := _fault(one))]


def _fault(one: Selection) -> str | None:
    dead = replacement(one.name)
    if dead is not None:
        return f"{one.name}: LMCache 0.5.3 never exports it; it has {dead}"
    metric = find(one.name)
    if metric is None:
        return f"{one.name}: in no catalogue (kvstrata.observe.catalog)"
    rated = bool(one.around) and one.around[0] in _RATES
    if metric.kind is Kind.GAUGE:
        return f"{one.name}: {one.around[0]}() of a gauge" if rated else None
    if not rated and not (one.ranged and one.around and one.around[0] in _OVER_TIME):
        return f"{one.name}: a {metric.kind.value} that is read without rate() or increase()"
    if metric.kind is Kind.NATIVE and not _OF_NATIVE.intersection(one.around):
        return f"{one.name}: a native histogram that no histogram_...() function reads"
    if metric.kind is Kind.HISTOGRAM and one.name.endswith("_bucket") and "histogram_quantile" not in one.around:
        return f"{one.name}: buckets outside histogram_quantile()"
    return None


def _walk(node: Any, around: tuple[str, ...]) -> Iterator[Selection]:
    """`around`: innermost first, so that what is put in front is nearer to the selector."""
    match node:
        case parser.VectorSelector():
            yield Selection(_name(node), around, False)
        case parser.MatrixSelector():
            yield Selection(_name(node.vector_selector), around, True)
        case parser.Call():
            for argument in node.args:
                yield from _walk(argument, (node.func.name, *around))
        case parser.AggregateExpr():
            yield from _walk(node.expr, (str(node.op), *around))
        case parser.BinaryExpr():
            yield from _walk(node.lhs, around)
            yield from _walk(node.rhs, around)
        case parser.ParenExpr() | parser.UnaryExpr() | parser.SubqueryExpr():
            yield from _walk(node.expr, around)


def _name(selector: Any) -> str:
    if selector.name:
        return str(selector.name)
    for matcher in selector.matchers.matchers:
        if matcher.name == "__name__":
            return str(matcher.value)
    raise ValueError(f"a selector without a metric's name: {selector}")
