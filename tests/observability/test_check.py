"""`observe check` on a real Prometheus: whole, with a metric gone, with a part that the stack does not have."""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest

from kvstrata.deploy.errors import KvError
from kvstrata.observe import check, panel, promql, report, sources
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


def test_a_panel_can_be_looked_at_without_grafana(running: Running) -> None:
    for query in sources.panels(ROOT):
        said = list(panel.show(running.prometheus, ROOT, query.panel, 2))
        assert f"{query.panel} ({query.dashboard})" in said
        assert all(line in " ".join(said) for line in query.about.splitlines())
        if query.language == "promql":
            assert any(line.startswith("  = ") and "nothing" not in line for line in said), said
    text = "\n".join(panel.show(running.prometheus, ROOT, "hit rate BY MODEL", 2))
    assert re.search(r"= +\d+ %  \S", text), text
    with pytest.raises(KvError, match="Hit rate by model") as refused:
        list(panel.show(running.prometheus, ROOT, "hitrate by modell", 2))
    assert "make observe" in refused.value.fix


def test_the_report_of_a_young_stack_begins_with_its_figures(running: Running) -> None:
    def begins(hours: float) -> float:
        page = report.make(running.prometheus, hours, "x")
        found = re.search(r"<p>(\d{4}-\d\d-\d\d \d\d:\d\d) to", page)
        assert found
        return time.mktime(time.strptime(found[1], "%Y-%m-%d %H:%M"))

    assert begins(0.1) < begins(0.05)
    assert begins(24) >= time.time() - 3600, "this Prometheus is minutes old"


def test_the_report_tells_what_was_known_before_a_target_went_away(running: Running) -> None:
    gone = {metric.name for metric in running.target.metrics if metric.name.startswith("kvstrata_proof_")}
    running.target.without(*gone)
    try:
        running.scrapes(4)
        assert running.prometheus.instant("kvstrata_proof_passed") == []
        page = report.make(running.prometheus, 0.1, "x")
    finally:
        running.target.without()
    assert "none yet" not in page
    assert "nothing was measured" not in page


def test_the_report_says_at_once_what_fires_now(running: Running) -> None:
    row = r"<tr( class=bad)?><td>NoBlocks</td><td>([^<]+)</td><td>(fires now)?</td>"
    assert not re.search(row, report.make(running.prometheus, 0.1, "x"))
    began = time.monotonic()
    running.target.without("kvstrata_store_blocks")
    try:
        running.scrapes(3)
        found = re.search(row, report.make(running.prometheus, 6, "x"))
    finally:
        running.target.without()
    assert found and found[3]
    # It is looked at every 15 s, and fires for two things.
    assert float(found[2].removesuffix(" s")) <= time.monotonic() - began + 15
    running.scrapes(3)
    found = re.search(row, report.make(running.prometheus, 0.1, "x"))
    assert found is None or not found[3]


def test_the_report_counts_corrupt_blocks_of_every_tier(running: Running) -> None:
    """It is the sum that is shown: more than any one of them."""
    found = re.compile(r"Corrupt blocks<b>([\d.]+)( k)?</b>")

    def corrupt() -> float:
        match = found.search(report.make(running.prometheus, 0.1, "x"))
        assert match
        return float(match[1]) * (1000 if match[2] else 1)

    def grown(name: str) -> float:
        series = running.prometheus.instant(f"sum(increase({name}[360s]))")
        return sum(value for one in series for _, value in one.points)

    parts = [grown(f"kvstrata_{tier}_corrupt_total") for tier in ("store", "engine")]
    assert min(parts) > 0
    assert corrupt() > max(parts) * 1.1
