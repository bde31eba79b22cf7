"""The hurried rules are the real ones but for their windows, and every alert is caused by one of the stories."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml

from kvstrata.observe import promql, sources
from tests.observability import hurried, test_alerts, test_with_engine

ROOT = Path(__file__).parents[2]
_TIME = re.compile(r"(\[|offset )\d+[smh]")


def _rules(text: str) -> list[dict[str, Any]]:
    return [rule for group in yaml.safe_load(text)["groups"] for rule in group["rules"]]


def test_nothing_but_windows_differs_and_each_is_a_tenth() -> None:
    text = (ROOT / sources.RULES / "kvstrata.yaml").read_text(encoding="utf-8")
    real, quick = _rules(text), _rules(hurried.rules(text))
    assert [rule["alert"] for rule in real] == [rule["alert"] for rule in quick]
    for slow, fast in zip(real, quick, strict=True):
        assert _TIME.sub(r"\1", slow["expr"]) == _TIME.sub(r"\1", fast["expr"])
        assert not promql.faults(fast["expr"])
        assert {k: v for k, v in slow.items() if k not in ("expr", "for")} == {
            k: v for k, v in fast.items() if k not in ("expr", "for")
        }
    assert hurried.shorter("10m") == "60s" and hurried.shorter("1h") == "360s" and hurried.shorter("30s") == "3s"
    assert "[360s] offset 60s" in next(rule["expr"] for rule in quick if rule["alert"] == "HitRateFellToZero")


def test_every_alert_is_caused_on_a_live_stack_once() -> None:
    caused = [name.partition(":")[0] for name in (*test_alerts.ALERTS, *test_with_engine.ALERTS)]
    assert sorted(caused) == sorted({rule["alert"] for rule in sources.alert_rules(ROOT) if "alert" in rule})
