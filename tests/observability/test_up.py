"""Observability of a running stack: what is up, what that costs in rights, and that its failures are nobody else's."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from typing import Any

import pytest

from kvstrata.observe.catalog import Needs, all_metrics
from kvstrata.proof import prom
from tests.observability.watched import Watched
from tests.stack.hardening import findings
from tests.stack.harness import chunks, prompt, wait_until
from tests.stack.test_hardening import exceptions

pytestmark = pytest.mark.stack
JOBS = {
    "vllm", "guard", "lmcache", "lmcache-store", "collector", "prometheus", "alertmanager", "traces", "node",
}  # fmt: skip


def test_every_expected_target_is_up_by_name(watched: Watched) -> None:
    assert watched.jobs() == dict.fromkeys(JOBS, "up")
    rows = watched.query("up")
    assert {row["metric"]["job"] for row in rows} == JOBS
    assert len({row["metric"]["host"] for row in rows}) == 1
    assert watched.cli("status").returncode == 0


def test_one_stopped_is_named_and_status_ends_with_1(watched: Watched) -> None:
    watched.docker("stop", "-t", "2", watched.containers()["node-exporter"]["Id"])
    try:
        wait_until(lambda: watched.jobs()["node"] != "up", 60, "the target is seen as down")
        done = watched.cli("status")
        assert done.returncode == 1 and "target node" in done.stdout
    finally:
        watched.start("node-exporter")
    wait_until(watched.all_up, 60, "every target is up again")


def test_every_container_keeps_every_rule(watched: Watched) -> None:
    containers = watched.containers()
    broken = {(service, rule) for service, c in containers.items() for rule in findings(c)}
    assert broken == {(service, rule) for service, rule in exceptions() if service in containers}


def test_lmcache_says_the_same_to_the_collector_and_on_its_own_page(watched: Watched) -> None:
    """So that dashboards and the proof read one set of names."""
    watched.store(prompt("same names"))
    watched.scraped(time.time())
    page = prom.parse(watched.client.get(watched.metrics_url + "/metrics").text)
    histograms = {name.removesuffix("_bucket") for name, _, _ in page.rows if name.endswith("_bucket")}
    own = {name for name, _, _ in page.rows if name.startswith("lmcache_")}
    own = {
        name
        for name in own
        if name.removesuffix("_bucket").removesuffix("_sum").removesuffix("_count") not in histograms
    }
    rows = watched.query('group by (__name__) ({job="lmcache",__name__=~"lmcache_.*"})')
    pushed = {row["metric"]["__name__"] for row in rows}
    # What is under way at a push stays in the collector for a minute; the page has it at that moment alone.
    momentary = {metric.name for metric in all_metrics() if metric.needs is Needs.MOMENT}
    assert pushed - momentary == (own | {name for name in histograms if name.startswith("lmcache_")}) - momentary
    assert own and histograms, "native histograms have no _bucket series"
    total = "lmcache_mp_lookup_requested_tokens_total"
    assert watched.value(f"sum({total})") == page.sum(total) > 0


def test_series_say_which_host_they_are_of(watched: Watched) -> None:
    assert watched.query('count by (job) ({host="", __name__!~"ALERTS.*|scrape_.*", job!=""})') == []


def test_the_store_and_the_guard_and_the_proof_are_there(watched: Watched) -> None:
    for name in (
        "kvstrata_store_used_bytes",
        "kvstrata_guard_healthy",
        "kvstrata_guard_transfer",
        "kvstrata_proof_passed",
    ):
        assert watched.query(name), name
    assert watched.value("min(kvstrata_guard_healthy)") == 1
    assert watched.value('kvstrata_guard_transfer{kind="shm"}') == 1
    assert watched.value("time() - max(kvstrata_guard_heartbeat_timestamp_seconds)") < 60


def test_one_trace_holds_the_spans_of_vllm_and_of_lmcache(watched: Watched) -> None:
    """A request that comes from L2: dropped from L0 and L1 by restarting both."""
    text = prompt("traced")
    watched.store(text)
    watched.kill("vllm", "lmcache")
    watched.start("vllm", "lmcache")
    watched.wait_ready()
    body = {"model": watched.model(), "prompt": text, "max_tokens": 2, "temperature": 0}
    trace_id = os.urandom(16).hex()
    started = time.monotonic()
    reply = watched.client.post(
        watched.url + "/v1/completions", json=body, headers={"traceparent": f"00-{trace_id}-00f067aa0ba902b7-01"}
    )
    seconds = time.monotonic() - started
    assert reply.status_code == 200
    # mp.retrieve and mp.store come with CUDA IPC only (0.5.3 lmcache_driven_transfer.py:1076).
    names = {"POST /v1/completions", "llm_request", "request", "mp.lookup_prefetch"}
    spans: list[dict[str, Any]] = []

    def whole() -> bool:
        spans[:] = watched.trace(trace_id)
        return names <= {span["name"] for span in spans}

    wait_until(whole, 30, "the trace")
    by_name = {span["name"]: span for span in spans}
    assert by_name["llm_request"]["service"] == "vllm" and by_name["mp.lookup_prefetch"]["service"] == "lmcache"
    assert by_name["request"]["parent"] == by_name["POST /v1/completions"]["id"]
    assert int(by_name["mp.lookup_prefetch"]["tags"]["hit_tokens"]) == chunks(reply.json()["usage"]["prompt_tokens"])
    ttft = float(by_name["llm_request"]["tags"]["gen_ai.latency.time_to_first_token"])
    assert by_name["mp.lookup_prefetch"]["seconds"] <= ttft <= seconds


def test_a_request_without_a_trace_gets_one(watched: Watched) -> None:
    watched.ask(prompt("no trace of its own"), tokens=2)

    def found() -> bool:
        reply = watched.client.get(
            f"{watched.traces}/api/traces", params={"service": "lmcache", "operation": "request", "limit": 5}
        )
        return any(
            {p["serviceName"] for p in t["processes"].values()} == {"vllm", "lmcache"} for t in reply.json()["data"]
        )

    wait_until(found, 30, "a trace of both")


@pytest.fixture
def collector(watched: Watched) -> Iterator[str]:
    """Its container; alive again afterwards."""
    container = watched.containers()["otelcol"]["Id"]
    yield container
    watched.docker("unpause", container, check=False)
    watched.start("otelcol")
    wait_until(watched.all_up, 90, "every target is up again")


@pytest.mark.parametrize("how", ["kill", "pause"])
def test_a_collector_that_is_gone_or_hangs_costs_no_request_and_no_proof(
    watched: Watched, collector: str, how: str
) -> None:
    before = {name: watched.containers()[name]["State"]["StartedAt"] for name in ("vllm", "lmcache")}
    watched.docker(how, collector)
    text = prompt(f"collector {how}")
    cold = watched.store(text)
    watched.drop_l0()
    warm = watched.ask(text)
    assert (cold.status, warm.status) == (200, 200) and warm.lmcache == chunks(warm.prompt_tokens)
    assert watched.metric("lmcache_mp_lookup_requested_tokens_total") > 0, "the page of LMCache's own"
    assert watched.cli("verify", "--live").returncode == 0
    time.sleep(15)  # longer than one push and its time-out
    assert watched.healthy() and watched.cache_healthy()
    assert {name: watched.containers()[name]["State"]["StartedAt"] for name in before} == before


def test_a_hanging_collector_does_not_hold_up_a_stop(watched: Watched, collector: str) -> None:
    watched.docker("pause", collector)
    watched.ask(prompt("before the stop"))
    started = time.monotonic()
    watched.docker("stop", watched.containers()["lmcache"]["Id"])
    exit_code = json.loads(watched.docker("inspect", f"{watched.project}-lmcache-1"))[0]["State"]["ExitCode"]
    assert exit_code == 0, f"killed after {time.monotonic() - started:.0f} s"
    watched.start("lmcache")
    watched.wait_used()


def test_a_killed_relay_takes_its_socket_back(watched: Watched) -> None:
    watched.kill("otlp")
    watched.start("otlp")
    total = "lmcache_mp_lookup_requested_tokens_total"
    before = watched.metric(total)
    since = time.time()
    watched.ask(prompt("after the relay"))
    assert watched.metric(total) > before
    wait_until(
        lambda: watched.containers()["otlp"]["State"]["Health"]["Status"] == "healthy", 60, "the relay is healthy"
    )
    watched.scraped(since + 5)
    # Without a salt, as that request: salted series of a server that is gone stay for a minute (metric_expiration).
    page = prom.parse(watched.client.get(watched.metrics_url + "/metrics").text)
    own = sum(value for name, labels, value in page.rows if name == total and not labels.get("cache_salt"))
    assert watched.value(f'sum({total}{{cache_salt=""}})') == own


def test_up_goes_on_where_observability_cannot(watched: Watched) -> None:
    """A collector whose configuration is broken: said, exit code 1, and the rest runs."""
    path = watched.root / "observability" / "collector" / "collector.yaml"
    good = path.read_text()
    path.write_text(good + "\nnonsense: 1\n")
    before = watched.containers()["vllm"]["Id"]
    try:
        done = watched.cli("up")
        assert done.returncode == 1 and "no observability" in done.stdout
        assert "otelcol" in done.stdout and watched.containers()["vllm"]["Id"] == before
        assert watched.ask(prompt("without a collector")).status == 200
    finally:
        path.write_text(good)
    assert watched.cli("up").returncode == 0
    assert watched.containers()["vllm"]["Id"] == before


def test_retention_is_by_size(watched: Watched) -> None:
    flags = watched.client.get(f"{watched.prometheus}/api/v1/status/flags").json()["data"]
    assert flags["storage.tsdb.retention.size"] == "2GiB"
