"""What watches fails: traces away and back, a collector that was down or hung, a full disk, a clock that is wrong."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvstrata.deploy import observability, settings
from tests.observability.watched import Watched
from tests.stack.harness import chunks, prompt, wait_until

pytestmark = [pytest.mark.docker, pytest.mark.slow, pytest.mark.stack]

_AWAY_S = 45
_BACK_S = 30
"""Within this time of being there again, whatever was away is used again."""
_PUSHED_S = 10
_RUNNING_QUERIES = 20
"""How many Prometheus runs at once (--query.max-concurrency)."""
_SPANS = {"POST /v1/completions", "llm_request", "request", "mp.lookup_prefetch"}
_REQUESTED = "lmcache_mp_lookup_requested_tokens_total"


def back(check: Callable[[], object], seconds: float, what: str) -> None:
    """wait_until, and how long that was: docs/observability.md has a table of them."""
    began = time.monotonic()
    wait_until(check, seconds, what)
    print(f"OUTAGE {what}: {time.monotonic() - began:.0f} s")


def traced(watched: Watched, name: str) -> str:
    """A request under a trace id of our own."""
    trace_id = os.urandom(16).hex()
    body = {"model": watched.model(), "prompt": prompt(name), "max_tokens": 2, "temperature": 0}
    headers = {"traceparent": f"00-{trace_id}-00f067aa0ba902b7-01"}
    assert watched.client.post(watched.url + "/v1/completions", json=body, headers=headers).status_code == 200
    return trace_id


def whole(watched: Watched, trace_id: str) -> bool:
    return {span["name"] for span in watched.trace(trace_id)} >= _SPANS


def becomes_whole(watched: Watched, name: str) -> bool:
    """A trace of now is, within the seconds that its spans are pushed in."""
    trace_id = traced(watched, name)
    with contextlib.suppress(AssertionError):
        wait_until(lambda: whole(watched, trace_id), _PUSHED_S, "its spans")
    return whole(watched, trace_id)


def cached(watched: Watched, name: str) -> None:
    """A prompt is stored and comes back from LMCache, as ever."""
    text = prompt(name)
    watched.store(text)
    watched.drop_l0()
    warm = watched.ask(text)
    assert warm.status == 200 and warm.lmcache == chunks(warm.prompt_tokens)


def test_spans_wait_for_a_trace_store_that_is_away_and_are_delivered_when_it_is_back(watched: Watched) -> None:
    store = watched.containers()["traces"]["Id"]
    watched.docker("stop", "-t", "2", store)
    try:
        during = traced(watched, "while traces were away")
        time.sleep(_AWAY_S)
        cached(watched, "traces away")
    finally:
        watched.docker("start", store)
    wait_until(lambda: watched.client.get(f"{watched.traces}/api/services").status_code == 200, 30, "it answers")
    back(lambda: whole(watched, during), _BACK_S, "trace store back: the trace of meanwhile is whole")
    after = traced(watched, "after traces were away")
    back(lambda: whole(watched, after), _BACK_S, "trace store back: a new trace is whole")


@pytest.mark.parametrize(("away", "back_by"), [("kill", "start"), ("pause", "unpause")])
def test_what_lmcache_and_vllm_push_comes_again_after_the_collector_was_away(
    watched: Watched, away: str, back_by: str
) -> None:
    collector = watched.containers()["otelcol"]["Id"]
    watched.docker(away, collector)
    try:
        time.sleep(_AWAY_S)
        cached(watched, f"collector {away}")
    finally:
        watched.docker(back_by, collector)
    requested = watched.metric(_REQUESTED)
    watched.ask(prompt(f"after {away}"))
    back(lambda: (watched.value(f"sum({_REQUESTED})") or 0) > requested, _BACK_S, f"collector {back_by}: metrics")
    # Spans that are pushed in the first seconds may be lost: a sender gives them up after its time limit.
    back(lambda: becomes_whole(watched, f"since {back_by}"), _BACK_S, f"collector {back_by}: a trace is whole")


@contextlib.contextmanager
def small_disk(watched: Watched) -> Iterator[Path]:
    """Prometheus' folder is a file system of 64 MiB; the history of before is back afterwards."""
    current = settings.load(watched.root, environ={})
    folder = observability.folder(current) / "prometheus"
    container = watched.containers()["prometheus"]["Id"]
    watched.docker("stop", container)
    subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size=64m,uid={current.uid},gid={current.gid}", "tmpfs", folder], check=True
    )
    try:
        watched.docker("start", container)
        yield folder
    finally:
        watched.docker("stop", container)
        subprocess.run(["umount", folder], check=True)
        watched.docker("start", container)
        wait_until(watched.all_up, 120, "every target is up again")


@pytest.mark.skipif(os.geteuid() != 0, reason="mounts a file system")
def test_prometheus_goes_on_after_its_disk_was_full_and_nobody_else_notices(watched: Watched) -> None:
    with small_disk(watched) as folder:
        wait_until(watched.all_up, 120, "every target is up")
        # Its list of running queries is a mapped file with holes. A hole first written to on a full disk ends it
        # (SIGBUS), as it would one that has just been started; one that has run for a minute has filled them.
        for _ in range(2 * _RUNNING_QUERIES):
            watched.value("vector(1)")
        ballast = folder / "ballast"
        with contextlib.suppress(OSError), ballast.open("wb", buffering=0) as file:
            while True:
                file.write(b"\0" * (1 << 16))
        assert shutil.disk_usage(folder).free < 1 << 16
        log = ""

        def said() -> bool:
            nonlocal log
            log = watched.compose("logs", "--no-log-prefix", "--tail", "200", "prometheus")
            return "no space left on device" in log

        back(said, 120, "Prometheus has no room: it says so")
        cached(watched, "while Prometheus' disk was full")
        assert watched.healthy() and watched.cache_healthy()
        ballast.unlink()
        since = time.time()
        back(lambda: fresh(watched, since + 1), 60, "Prometheus has room: samples are taken again")
        watched.docker("restart", watched.containers()["prometheus"]["Id"])
        since = time.time()
        back(lambda: fresh(watched, since), 60, "Prometheus restarted: from what it wrote")


def fresh(watched: Watched, since: float) -> bool:
    """Every target has a sample that is later."""
    oldest = watched.value("min(timestamp(up))")
    return oldest is not None and oldest > since


def test_a_host_whose_clock_is_wrong_is_seen_at_the_right_time(watched: Watched) -> None:
    """An hour ahead, then put right: what goes back in time is refused until the collector has forgotten."""
    script = Path(__file__).with_name("skewed_push.py").read_text(encoding="utf-8")

    def push(ahead: int, value: int, times: int) -> None:
        watched.compose("exec", "-T", "lmcache", "python3", "-c", script, str(ahead), str(value), str(times))

    def seen(value: int) -> bool:
        rows = watched.query('kvskew_total{host="skewed"}')
        return [float(row["value"][1]) for row in rows] == [value]

    push(3600, 11, 3)
    wait_until(lambda: seen(11), 30, "seen now, not in an hour")
    age = watched.value('time() - timestamp(kvskew_total{host="skewed"})')
    assert age is not None and -5 < age < 30
    push(0, 22, 18)
    wait_until(lambda: seen(22), 30, "a minute after its clock was put right")
