"""Whatever names metrics in the tree: dashboards, rules, docs. Read from the files that are shipped."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from kvstrata.observe import promql

__all__ = ["DASHBOARDS", "RULES", "PanelQuery", "Use", "alert_rules", "by_panel", "doc_names", "panels", "uses"]

DASHBOARDS = Path("observability/grafana/dashboards")
RULES = Path("observability/prometheus/rules")
#: A metric's name in a page of docs, in back quotes, with or without labels.
_NAMED = re.compile(r"`((?:lmcache_(?:mp|blend)_|vllm:|kvstrata_(?:store|engine|remote|guard|proof)_)[A-Za-z0-9_:]+)")
_LABEL_VALUES = re.compile(r"label_values\((.+),\s*\w+\)$")


@dataclass(frozen=True)
class PanelQuery:
    """One query of one panel. `language`: promql or traceql; `about`: the panel's description; `unit`: Grafana's."""

    dashboard: str
    panel: str
    expr: str
    language: str = "promql"
    instant: bool = False
    legend: str = ""
    unit: str = ""
    about: str = ""


@dataclass(frozen=True)
class Use:
    """`series` is named by `where`."""

    series: str
    where: str


def panels(root: Path) -> Iterator[PanelQuery]:
    """Every query of every panel of the dashboards' files."""
    for path in sorted((root / DASHBOARDS).glob("*.json")):
        board = json.loads(path.read_text(encoding="utf-8"))
        for panel in _flat(board["panels"]):
            for target in panel.get("targets", ()):
                language = "traceql" if target["datasource"]["type"] == "tempo" else "promql"
                text = target["query"] if language == "traceql" else target["expr"]
                yield PanelQuery(
                    board["uid"], panel["title"], text, language, bool(target.get("instant")),
                    legend=target.get("legendFormat", ""), about=panel.get("description", ""),
                    unit=panel.get("fieldConfig", {}).get("defaults", {}).get("unit", ""),
                )  # fmt: skip


def by_panel(queries: Iterable[PanelQuery]) -> dict[tuple[str, str], list[PanelQuery]]:
    """The same by (dashboard, title of the panel), in their order."""
    found: dict[tuple[str, str], list[PanelQuery]] = {}
    for query in queries:
        found.setdefault((query.dashboard, query.panel), []).append(query)
    return found


def alert_rules(root: Path) -> Iterator[dict[str, Any]]:
    """Every rule of every rules file, as it stands there."""
    for path in sorted((root / RULES).glob("*.yaml")):
        for group in yaml.safe_load(path.read_text(encoding="utf-8"))["groups"]:
            yield from group["rules"]


def doc_names(text: str) -> set[str]:
    """Metric names that a page of docs gives in back quotes."""
    return {name for name in _NAMED.findall(text) if not name.endswith("_")}


def uses(root: Path) -> Iterator[Use]:
    """Every (series, place) of dashboards, variables, rules and docs. Names that rules record are left out."""
    for query in panels(root):
        if query.language == "promql":
            yield from (Use(name, f"{query.dashboard}: {query.panel}") for name in promql.names(query.expr))
    for path in sorted((root / DASHBOARDS).glob("*.json")):
        board = json.loads(path.read_text(encoding="utf-8"))
        for variable in board["templating"]["list"]:
            match = _LABEL_VALUES.match(variable["query"]["query"])
            if match:
                where = f"{board['uid']}: variable {variable['name']}"
                yield from (Use(name, where) for name in promql.names(match.group(1)))
    rules = list(alert_rules(root))
    recorded = {rule["record"] for rule in rules if "record" in rule}
    for rule in rules:
        where = f"rule {rule.get('alert') or rule.get('record')}"
        yield from (Use(name, where) for name in promql.names(rule["expr"]) - recorded)
    for path in sorted((root / "docs").rglob("*.md")):
        if path.name != "metrics.md":
            text = path.read_text(encoding="utf-8")
            yield from (Use(name, str(path.relative_to(root))) for name in sorted(doc_names(text)))


def _flat(found: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    for panel in found:
        yield from _flat(panel.get("panels") or [])
        if panel["type"] != "row":
            yield panel
