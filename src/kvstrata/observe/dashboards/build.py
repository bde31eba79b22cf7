"""From our panels to Grafana's JSON, by Grafana's own types (grafana-foundation-sdk)."""

from __future__ import annotations

import json

from grafana_foundation_sdk.builders import common, dashboard, prometheus, tempo, timeseries
from grafana_foundation_sdk.builders import stat as stat_builder
from grafana_foundation_sdk.builders import table as table_builder
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models import common as kinds
from grafana_foundation_sdk.models import dashboard as models
from grafana_foundation_sdk.models.tempo import SearchTableType

from kvstrata.observe.dashboards.panels import Board, Panel

__all__ = ["PROMETHEUS", "TRACES", "to_json"]

#: Uids of the data sources that are provisioned; dashboards hold no other reference.
PROMETHEUS, TRACES = "prometheus", "traces"
_METRICS = models.DataSourceRef(type_val="prometheus", uid=PROMETHEUS)
_SPANS = models.DataSourceRef(type_val="tempo", uid=TRACES)
_VARIABLES = (
    ("host", "Host", "label_values(up, host)"),
    ("model", "Model", "label_values(vllm:num_requests_running, model_name)"),
    ("tenant", "Tenant", "label_values(lmcache_mp_lookup_requested_tokens_total, cache_salt)"),
)
_TAG = "kvstrata"


def to_json(board: Board) -> str:
    """The file's text. The same board gives the same text."""
    made = (
        dashboard.Dashboard(board.title)
        .uid(board.uid)
        .description(board.description)
        .tags([_TAG])
        .timezone("browser")
        .refresh("30s")
        .time("now-1h", "now")
        .tooltip(models.DashboardCursorSync.CROSSHAIR)
        .readonly()
        .link(_link())
    )
    for name, label, query in _VARIABLES:
        made = made.with_variable(_variable(name, label, query))
    number = 0
    for row in board.rows:
        number += 1
        made = made.with_row(dashboard.Row(row.title).id(number))
        for panel in row.panels:
            number += 1
            made = made.with_panel(_panel(panel).id(number))
    return json.dumps(made.build(), cls=JSONEncoder, indent=2, sort_keys=True, ensure_ascii=False) + "\n"


def _link() -> dashboard.DashboardLink:
    return (
        dashboard.DashboardLink("Dashboards")
        .type(models.DashboardLinkType.DASHBOARDS)
        .tags([_TAG])
        .as_dropdown(True)
        .include_vars(True)
        .keep_time(True)
    )


def _variable(name: str, label: str, query: str) -> dashboard.QueryVariable:
    """All are chosen at first, and `.*` also takes series that lack the label."""
    return (
        dashboard.QueryVariable(name)
        .label(label)
        .query({"query": query, "refId": name})
        .datasource(_METRICS)
        .refresh(models.VariableRefresh.ON_TIME_RANGE_CHANGED)
        .sort(models.VariableSort.ALPHABETICAL_ASC)
        .multi(True)
        .include_all(True)
        .all_value(".*")
        .current(models.VariableOption(selected=True, text="All", value="$__all"))
    )


def _panel(panel: Panel) -> timeseries.Panel | stat_builder.Panel | table_builder.Panel:
    if panel.kind == "traces":
        found = table_builder.Panel().datasource(_SPANS)
        for letter, search in zip("ABCDEFG", panel.traces, strict=False):
            found = found.with_target(
                tempo.TempoQuery()
                .datasource(_SPANS)
                .query_type("traceql")
                .query(search.query)
                .limit(50)
                .table_type(SearchTableType.TRACES)
                .ref_id(letter)
            )
        return found.title(panel.title).description(panel.description).height(panel.height).span(panel.width)
    made = _stat(panel) if panel.kind == "stat" else _lines(panel)
    for letter, query in zip("ABCDEFGH", panel.queries, strict=False):
        target = prometheus.Dataquery().datasource(_METRICS).expr(query.expr).ref_id(letter)
        target = target.instant() if panel.kind == "stat" else target.range()
        made = made.with_target(target.legend_format(query.legend) if query.legend else target)
    made = made.title(panel.title).description(panel.description).datasource(_METRICS)
    made = made.unit(panel.unit).no_value(panel.no_value).height(panel.height).span(panel.width)
    return made if panel.maximum is None else made.min(0).max(panel.maximum)


def _lines(panel: Panel) -> timeseries.Panel:
    made = (
        timeseries.Panel()
        .line_width(1)
        .fill_opacity(30 if panel.kind == "stack" else 8)
        .show_points(kinds.VisibilityMode.NEVER)
        .axis_soft_min(0)
        .legend(
            common.VizLegendOptions()
            .display_mode(kinds.LegendDisplayMode.LIST)
            .placement(kinds.LegendPlacement.BOTTOM)
            .show_legend(True)
        )
        .tooltip(common.VizTooltipOptions().mode(kinds.TooltipDisplayMode.MULTI).sort(kinds.SortOrder.DESCENDING))
    )
    if panel.kind == "stack":
        made = made.stacking(common.StackingConfig().mode(kinds.StackingMode.NORMAL).group("A"))
    return made


def _stat(panel: Panel) -> stat_builder.Panel:
    made = (
        stat_builder.Panel()
        .graph_mode(kinds.BigValueGraphMode.NONE)
        .color_mode(kinds.BigValueColorMode.VALUE)
        .text_mode(kinds.BigValueTextMode.NAME if panel.names_only else kinds.BigValueTextMode.AUTO)
        .reduce_options(common.ReduceDataOptions().calcs(["lastNotNull"]).values(False).fields(""))
    )
    if panel.steps:
        steps = [models.Threshold(value=value, color=color) for value, color in panel.steps]
        made = made.thresholds(dashboard.ThresholdsConfig().mode(models.ThresholdsMode.ABSOLUTE).steps(steps))
        made = made.color_scheme(dashboard.FieldColor().mode(models.FieldColorModeId.THRESHOLDS))
    if panel.words:
        options = {value: models.ValueMappingResult(text=word) for value, word in panel.words.items()}
        made = made.mappings([models.ValueMap(options=options)])
    return made
