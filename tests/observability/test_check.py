"""`observe check` on a real Prometheus: whole, with a metric gone, with a part that the stack does not have."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from kvstrata.deploy.errors import KvError
from kvstrata.observe import check, promql, report, sources
from kvstrata.observe.catalog import Needs, find
from kvstrata.observe.prometheus import Prometheus
from tests.observability.conftest import Running

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]
ALL = frozenset(Needs) - {Needs.NOTHING, Needs.EVENT, Needs.MOMENT}


def test_every_name_and_every_panel_has_data_where_everything_is_exported(running: Running) -> None:
    found = check.run(running.prometheus, ROOT, ALL, 30)
    assert not found.gaps
    assert found.with_data == len(found.panels)
    assert found.changing >= 0.8


def test_a_metric_that_is_gone_fails_exactly_its_panels_and_is_named(running: Running) -> None:
    gone = "lmcache_mp_lookup_hit_tokens_total"
    of_it = {
        f"{query.dashboard}: {query.panel}"
        for query in sources.panels(ROOT)
        if query.language == "promql" and gone in promql.names(query.expr)
    }
    running.target.without(gone)
    try:
        running.scrapes(14)
        found = check.run(running.prometheus, ROOT, ALL, 3, window_s=5)
    finally:
        running.target.without()
    assert {f"{panel.dashboard}: {panel.title}" for panel in found.panels if panel.gaps} == of_it
    assert any(gap.startswith(f"{gone}: not in Prometheus") for gap in found.gaps)


@pytest.mark.parametrize("there", [True, False])
def test_a_part_that_is_silent_is_a_gap_only_where_the_stack_has_it(running: Running, there: bool) -> None:
    engine = {m.name for m in running.target.metrics if m.needs is Needs.ENGINE}
    running.target.without(*engine)
    try:
        running.scrapes(14)
        found = check.run(running.prometheus, ROOT, ALL if there else ALL - {Needs.ENGINE}, 3, window_s=5)
    finally:
        running.target.without()
    assert bool(found.gaps) == there
    if not there:
        metrics = [find(name) for name in found.excused if name != "traces"]
        assert {metric.needs for metric in metrics if metric} == {Needs.ENGINE}


def test_the_report_has_every_plot_and_loads_nothing(running: Running) -> None:
    page = report.make(running.prometheus, 0.1, "a <title>")
    assert "nothing was measured" not in page
    assert page.count("<svg") == 8
    assert "a &lt;title&gt;" in page
    assert not re.findall(r"(?:src|href)\s*=|@import|url\(|<script", page)


def test_an_address_without_a_prometheus_is_refused_with_what_to_do() -> None:
    with pytest.raises(KvError) as refused:
        report.make(Prometheus("http://127.0.0.1:9"), 1, "x")
    assert "make status" in refused.value.fix
