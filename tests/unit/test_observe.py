"""Catalogue, dashboards, rules and docs hold together; no Prometheus is asked."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import yaml

from kvstrata.observe import dead, generate, metrics_page, promql, sources, svg
from kvstrata.observe.catalog import Needs, all_metrics, find, series_of
from kvstrata.observe.dashboards.all import BOARDS
from kvstrata.observe.dashboards.build import PROMETHEUS, TRACES

ROOT = Path(__file__).parents[2]
RULES = list(sources.alert_rules(ROOT))
QUERIES = [query for query in sources.panels(ROOT) if query.language == "promql"]


def test_generated_files_are_what_the_code_makes() -> None:
    assert not generate.stale(ROOT), "python -m kvstrata.observe.generate"


def test_a_changed_file_and_one_that_no_code_makes_are_stale(tmp_path: Path) -> None:
    for path, text in generate.files(tmp_path).items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    assert not generate.stale(tmp_path)
    changed, other = tmp_path / "docs/metrics.md", tmp_path / sources.DASHBOARDS / "other.json"
    changed.write_text("x")
    other.write_text("{}")
    assert generate.stale(tmp_path) == sorted([changed, other])


def test_names_are_unique_and_none_is_dead() -> None:
    names = [series for metric in all_metrics() for series in series_of(metric)]
    assert len(names) == len(set(names))
    assert not [name for name in names if dead.replacement(name)]


@pytest.mark.parametrize("query", QUERIES, ids=lambda query: f"{query.dashboard}: {query.panel}")
def test_a_panels_query_names_what_exists_and_reads_it_by_its_kind(query: sources.PanelQuery) -> None:
    assert not promql.faults(query.expr)


@pytest.mark.parametrize("query", QUERIES, ids=lambda query: f"{query.dashboard}: {query.panel}")
def test_only_what_appears_with_its_first_event_falls_back_to_zero(query: sources.PanelQuery) -> None:
    inner = promql.without_fallback(query.expr)
    metrics = [metric for name in promql.names(query.expr) if (metric := find(name))]
    if inner is not None:
        assert any(metric.lazy for metric in metrics)
    else:
        assert not [metric.name for metric in metrics if metric.needs in (Needs.EVENT, Needs.MOMENT)]


@pytest.mark.parametrize(
    ("expression", "complaint"),
    [
        ("sum(rate(lmcache_mp_num_submitted_stores_total[5m]))", "never exports"),
        ("sum(rate(lmcache_mp_real_reuse_gap_objects_chunks_bucket[5m]))", "never exports"),
        ("sum(rate(nobodys_total[5m]))", "in no catalogue"),
        ("rate(kvstrata_store_used_bytes[5m])", "rate() of a gauge"),
        ("sum(vllm:prompt_tokens_total)", "without rate()"),
        ("sum(rate(vllm:time_to_first_token_seconds_bucket[5m]))", "outside histogram_quantile()"),
        ("sum(rate(lmcache_mp_l1_chunk_lifetime_seconds[5m]))", "no histogram_...() function"),
        ("sum(rate(up[5m])", "not PromQL"),
    ],
)
def test_a_misread_metric_is_refused(expression: str, complaint: str) -> None:
    assert any(complaint in fault for fault in promql.faults(expression))


def test_every_metric_of_the_catalogue_is_shown_or_alerted_on() -> None:
    used = {use.series for use in sources.uses(ROOT)}
    idle = [metric.name for metric in all_metrics() if not used.intersection(series_of(metric))]
    # for those who ask by hand; docs/metrics.md has them
    assert idle == ["lmcache_mp_l0_block_reuse_gap_seconds", "kvstrata_proof_hit_tokens"]


def test_docs_name_no_metric_that_does_not_exist() -> None:
    unknown = [use for use in sources.uses(ROOT) if find(use.series) is None]
    assert not unknown


# -- dashboards ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("board", BOARDS, ids=lambda board: board.uid)
def test_a_dashboard_can_be_provisioned(board: object) -> None:
    uid = board.uid  # type: ignore[attr-defined]
    made = json.loads((ROOT / sources.DASHBOARDS / f"{uid}.json").read_text(encoding="utf-8"))
    assert made["uid"] == uid
    assert len(uid) <= 40
    assert made["schemaVersion"] >= 36
    assert made.get("id") is None
    assert {variable["name"] for variable in made["templating"]["list"]} == {"host", "model", "tenant"}
    ids = [panel["id"] for panel in made["panels"]]
    assert len(ids) == len(set(ids))
    places = set()
    for panel in made["panels"]:
        at = panel["gridPos"]
        assert at["x"] + at["w"] <= 24
        cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert not cells & places, f"{panel['title']} lies on another panel"
        places |= cells
        for target in panel.get("targets", ()):
            assert target["datasource"]["uid"] in {PROMETHEUS, TRACES}


def test_every_panel_says_what_it_tells_what_is_normal_and_what_to_do() -> None:
    for board in BOARDS:
        titles = [panel.title for panel in board.panels]
        assert len(titles) == len(set(titles)), board.uid
        for panel in board.panels:
            assert panel.tells
            assert panel.normal
            assert panel.otherwise
            if panel.runbook:
                assert (ROOT / "docs" / "runbooks" / f"{panel.runbook}.md").is_file(), panel.title


# -- rules -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule["alert"])
def test_an_alert_reads_what_exists_has_a_page_and_a_test(rule: dict[str, object]) -> None:
    assert not promql.faults(str(rule["expr"]))
    assert rule["labels"]["severity"] in {"page", "warn"}  # type: ignore[index]
    page = ROOT / rule["annotations"]["runbook"]  # type: ignore[index]
    assert f"`{rule['alert']}`" in page.read_text(encoding="utf-8")
    tests = yaml.safe_load((ROOT / "observability/prometheus/tests/kvstrata_test.yaml").read_text(encoding="utf-8"))
    fired = {
        case["alertname"] for test in tests["tests"] for case in test.get("alert_rule_test", ()) if case["exp_alerts"]
    }
    asked = {
        name
        for test in tests["tests"]
        for case in test.get("promql_expr_test", ())
        for name in re.findall(r'alertname="(\w+)"', case["expr"])
    }
    assert rule["alert"] in fired | asked


def test_every_runbook_belongs_to_an_alert() -> None:
    pages = {path.name for path in (ROOT / "docs/runbooks").glob("*.md")} - {"README.md"}
    assert pages == {Path(rule["annotations"]["runbook"]).name for rule in RULES}
    index = (ROOT / "docs/runbooks/README.md").read_text(encoding="utf-8")
    assert all(f"`{rule['alert']}` | [" in index for rule in RULES)


# -- pages -----------------------------------------------------------------------------------------------------------


def test_the_page_of_metrics_says_what_was_found_live() -> None:
    text = metrics_page.text({"vllm:num_requests_running": 3})
    row = next(line for line in text.splitlines() if line.startswith("| `vllm:num_requests_running`"))
    assert row.endswith("| 3 |")


@pytest.mark.parametrize(
    ("value", "unit", "shown"),
    [
        (0.256, "percent", "26 %"),
        (0.0421, "s", "42 ms"),
        (2.41, "s", "2.4 s"),
        (7200, "s", "120 min"),
        (3 * 2**30, "bytes", "3 GiB"),
        (1_250_000, "", "1.2 M"),
    ],
)
def test_values_are_written_for_people(value: float, unit: str, shown: str) -> None:
    assert svg.human(value, unit) == shown


def test_a_line_is_cut_where_samples_are_missing() -> None:
    points = [(float(at), 1.0) for at in (*range(0, 100, 10), *range(500, 600, 10))]
    assert svg.lines([svg.Line("x", points)], 0, 600, "").count("<polyline") == 2


def test_an_axis_of_bytes_has_round_figures() -> None:
    drawn = svg.lines([svg.Line("x", [(0, 0.0), (10, 9.2 * 2**30)])], 0, 10, "bytes")
    assert ">10 GiB<" in drawn


def test_every_panel_that_docs_tell_to_look_at_is_there() -> None:
    titles = {query.panel for query in sources.panels(ROOT)}
    pages = {path: path.read_text(encoding="utf-8") for path in (ROOT / "docs").rglob("*.md")}
    told = {(path.name, title) for path, text in pages.items() for title in re.findall(r"\"panel '([^']+)'\"", text)}
    assert len(told) > 10
    assert {(page, title) for page, title in told if title not in {*titles, "TITLE"}} == set()
