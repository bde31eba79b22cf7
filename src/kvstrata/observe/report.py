"""`kvstrata report`: one HTML page with plots of the last hours, for people without Grafana."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from kvstrata.observe import promql, svg
from kvstrata.observe.dashboards.panels import growth, quantile, rate, ratio
from kvstrata.observe.prometheus import Prometheus
from kvstrata.observe.report_page import Alert, Figure, Page, Plot

__all__ = ["make"]

_POINTS = 240
_SCRAPE_S = 15
_LEAST_RATE_S = 120
#: A page shows ten minutes at least, and looks at an alert so often.
_SHORTEST_S = 600
_ALERT_STEPS = 2000
#: What the block store, the KV engine and path A found damaged.
_CORRUPT = (
    growth("kvstrata_store_corrupt_total", ""), growth("kvstrata_engine_corrupt_total", ""),
    growth("kvstrata_remote_blocks_total", '{outcome="corrupt"}'),
)  # fmt: skip
#: Phases of the proof (kvstrata.proof.verify) that compare: what a person calls them, and the colour of their tier.
_PHASES = {
    "cold": ("cold, computed", 5),
    "warm_l0": ("L0, vLLM's own cache", 0),
    "live_l1": ("L1, RAM", 1),
    "restart_vllm": ("L1, vLLM restarted", 1),
    "live_l2": ("L2, disk", 2),
    "restart_lmcache": ("L2, lmcache restarted", 2),
    "restart_both": ("L2, both restarted", 2),
}


@dataclass(frozen=True)
class _Ask:
    """A plot's query; `label` names its lines where there is more than one."""

    expr: str
    name: str
    color: int
    label: str = ""
    dashed: bool = False


def _hit_rates() -> tuple[_Ask, ...]:
    return (
        _Ask(ratio(rate("vllm:prefix_cache_hits_total", ""), rate("vllm:prefix_cache_queries_total", "")), "L0", 0),
        _Ask(
            ratio(rate("lmcache_mp_lookup_hit_tokens_total", ""), rate("lmcache_mp_lookup_requested_tokens_total", "")),
            "L1 + L2", 1,
        ),
        _Ask(
            ratio(
                rate("lmcache_mp_l2_prefetch_load_completed_chunks_total", ""),
                rate("lmcache_mp_l2_prefetch_lookup_objects_chunks_total", ""),
            ),
            "L2, of what L1 lacked", 2,
        ),
    )  # fmt: skip


def _sources() -> tuple[_Ask, ...]:
    name = "vllm:prompt_tokens_by_source_total"
    rows = (("local_compute", "computed", 5), ("local_cache_hit", "L0", 0), ("external_kv_transfer", "L1 or L2", 1))
    return tuple(_Ask(rate(name, f'{{source="{source}"}}'), text, color) for source, text, color in rows)


def _ttft() -> tuple[_Ask, ...]:
    name = "vllm:time_to_first_token_seconds"
    return (_Ask(quantile(0.5, name, ""), "median", 0), _Ask(quantile(0.95, name, ""), "95 %", 3))


_L1 = (_Ask("max(lmcache_mp_l1_usage_ratio)", "L1", 1),)
_L2 = (
    _Ask("sum(kvstrata_store_used_bytes)", "used", 2),
    _Ask("sum(kvstrata_store_capacity_bytes)", "cap", 5, dashed=True),
    _Ask('min(node_filesystem_avail_bytes{mountpoint="/cache"})', "free on the disk", 4),
)
_TRAFFIC = (
    _Ask(rate("kvstrata_store_loaded_bytes_total", ""), "read", 1),
    _Ask(rate("kvstrata_store_stored_bytes_total", ""), "written", 2),
)
_CHURN = (
    _Ask(rate("kvstrata_store_hits_total", ""), "hit", 1),
    _Ask(rate("kvstrata_store_evictions_total", ""), "evicted", 3),
)


def make(prometheus: Prometheus, hours: float, title: str) -> str:
    """The page's HTML. Raises KvError when Prometheus does not answer."""
    end = time.time()
    ask = _Asker(prometheus, _begin(_Asker(prometheus, end - hours * 3600, end)), end)
    page = Page(title, ask.start, ask.end, _figures(ask), _plots(ask), _alerts(ask))
    return page.html()


class _Asker:
    def __init__(self, prometheus: Prometheus, start: float, end: float) -> None:
        self._prometheus = prometheus
        self.start, self.end = start, end
        self.step = max((end - start) / _POINTS, _SCRAPE_S)
        # a rate wants four scrapes at least, and no sample may fall between two steps
        self._rate = f"{int(max(self.step, _LEAST_RATE_S))}s"

    def fill(self, expr: str) -> str:
        return promql.substitute(expr, rate=self._rate, span=f"{int(self.end - self.start)}s")

    def one(self, expr: str) -> float | None:
        found = [point for series in self._prometheus.instant(self.fill(expr)) for point in series.points]
        return found[-1][1] if found else None

    def by(self, expr: str, label: str) -> dict[str, float]:
        found = self._prometheus.instant(self.fill(expr))
        return {series.labels.get(label, ""): series.points[-1][1] for series in found if series.points}

    def lines(self, asks: Sequence[_Ask]) -> list[svg.Line]:
        found = []
        for ask in asks:
            for series in self._prometheus.over(self.fill(ask.expr), self.start, self.end, self.step):
                if series.points:
                    found.append(svg.Line(ask.name, series.points, ask.color, ask.dashed))
        return found


def _figures(ask: _Asker) -> list[Figure]:
    cached = growth("vllm:prompt_tokens_cached_total", "")
    cost = ratio(
        growth("vllm:request_prefill_time_seconds_sum", ""), growth("vllm:request_prefill_kv_computed_tokens_sum", "")
    )
    # The last of the shown time: who tells of it may be away just now.
    passed = ask.one("min(last_over_time(kvstrata_proof_passed[$__range]))")
    when = ask.one("max(last_over_time(kvstrata_proof_timestamp_seconds[$__range]))")
    proof = "none yet" if passed is None or when is None else "passed" if passed else "FAILED"
    seconds = max(ask.end - (when or 0), 0)
    age = "" if when is None else f"{seconds / 3600:.0f} h ago" if seconds > 7200 else f"{svg.human(seconds, 's')} ago"
    found = [value for query in _CORRUPT if (value := ask.one(query)) is not None]
    corrupt = sum(found) if found else None
    share = ask.one(ratio(cached, growth("vllm:prompt_tokens_total", "")))
    return [
        Figure("Prompt tokens from cache", _text(share, "percent"), "of all prompt tokens"),
        Figure("Tokens not recomputed", _text(ask.one(cached), ""), "in the shown time"),
        Figure("Compute saved", _text(ask.one(f"{cached} * {cost}"), "s"), "estimate, at the price of prefill"),
        Figure("Requests", _text(ask.one(growth("vllm:request_success_total", "")), ""), "ended"),
        Figure("Last proof", proof, age, bad=proof == "FAILED"),
        Figure("Corrupt blocks", _text(corrupt, ""), "refused and removed", bad=bool(corrupt)),
    ]  # fmt: skip


def _text(value: float | None, unit: str) -> str:
    return "–" if value is None else svg.human(round(value) if unit == "" else value, unit)


def _plots(ask: _Asker) -> list[Plot]:
    def over(title: str, says: str, asks: Sequence[_Ask], unit: str, top: float | None = None) -> Plot:
        found = ask.lines(asks)
        drawn = svg.lines(found, ask.start, ask.end, unit, top=top) if found else ""
        return Plot(title, says, drawn, [(line.name, line.color) for line in found])

    times = ask.by("max by (phase) (last_over_time(kvstrata_proof_ttft_seconds[$__range]))", "phase")
    rows = [(name, times[phase], color) for phase, (name, color) in _PHASES.items() if phase in times]
    return [
        over("Hit rate by tier", "Of what each tier was asked for. The tiers overlap.", _hit_rates(), "percent", 1.0),
        Plot("Time to first token by source", "The last proof: the same prompt cold, and from each tier.",
             svg.bars(rows, "s") if rows else "", []),
        over("Prompt tokens by source", "Tokens a second; computed is what was new.", _sources(), ""),
        over("Time to first token, all requests", "Whatever clients sent, hit or not.", _ttft(), "s"),
        over("L1 (RAM) in use", "Share of the pool; eviction begins at 80 %.", _L1, "percent", 1.0),
        over("L2 (disk) in use", "What the block store holds, its cap, and what the disk has left.", _L2, "bytes"),
        over("L2 traffic", "Bytes a second, read and written.", _TRAFFIC, "bytes"),
        over("L2: hit and evicted", "Blocks a second. More evicted than hit: the cap is too small.", _CHURN, ""),
    ]  # fmt: skip


def _begin(ask: _Asker) -> float:
    """The start, or when Prometheus' figures begin, if that is later: a page of a young stack is not all margin."""
    first = ask.one(f"min(min_over_time(timestamp(up)[$__range:{int(ask.step)}s]))")
    return max(ask.start, min(first or ask.end, ask.end - _SHORTEST_S))


def _alerts(ask: _Asker) -> list[Alert]:
    """Alerts that fired within the shown time, those that fire now first, then the longest."""
    step = max(int((ask.end - ask.start) / _ALERT_STEPS), _SCRAPE_S)
    firing = 'max by (alertname) (ALERTS{alertstate="firing"})'
    text = f"count_over_time(({firing})[$__range:{step}s])"
    now = ask.by(firing, "alertname")
    steps = dict.fromkeys(now, 1.0) | ask.by(text, "alertname")
    found = [Alert(name, svg.human(count * step, "s"), name in now) for name, count in steps.items()]
    return sorted(found, key=lambda alert: (not alert.now, -steps[alert.name], alert.name))
