"""Runs inside the image (see test_in_image.py): pieces of the guard on the real classes of the pinned pair."""

import json
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from lmcache.integration.vllm.vllm_multi_process_adapter import LoadStoreOp
from lmcache.v1.multiprocess.engine_module import InstanceLivenessTarget
from lmcache.v1.multiprocess.futures import MessagingFuture
from lmcache.v1.multiprocess.modules.management import ManagementModule
from vllm.v1.core.sched.output import CachedRequestData

from kvstrata.connector import adapters, liveness, server_watch
from kvstrata.connector.guard import KvstrataConnector, _computed_tokens
from kvstrata.connector.report import GuardReport


def written(op: LoadStoreOp, chunk: int = 256, blocks: int = 2) -> list[int]:
    size = SimpleNamespace(lmcache_tokens_per_chunk=chunk, blocks_in_chunk=blocks)
    return adapters.GuardedWorkerAdapter._written_blocks(size, op)


def test_a_failed_load_does_not_name_the_blocks_of_the_l0_prefix() -> None:
    """L0 has 1920 of 2560 tokens: the operation starts at 1792, whose block is valid and shared."""
    op = LoadStoreOp([], [[14, 15, 16, 17, 18, 19]], start=1792, end=2560, skip_first_n_tokens=128)
    assert written(op) == [15, 16, 17, 18, 19]
    assert written(LoadStoreOp([], [[1, 2]], start=0, end=256)) == [1, 2]


def test_nothing_is_stored_beyond_what_a_step_computes() -> None:
    cached = CachedRequestData.make_empty()
    cached.req_ids.append("old")
    cached.num_computed_tokens.append(2048)
    new = SimpleNamespace(req_id="new", num_computed_tokens=256)
    output = SimpleNamespace(
        num_scheduled_tokens={"old": 512, "new": 100}, scheduled_cached_reqs=cached, scheduled_new_reqs=[new]
    )
    assert _computed_tokens(output) == {"old": 2560, "new": 356}


class Known(InstanceLivenessTarget):
    """A transfer module that tracks one worker, as LMCache's two do."""

    def __init__(self) -> None:
        self._engine_driven_contexts = {7: object()}


def test_a_ping_of_a_worker_that_the_server_does_not_know_is_answered_with_no() -> None:
    liveness.install()
    module = ManagementModule(ctx=None, liveness_targets=[Known()])
    assert module.ping(7) is True
    assert module.ping(None) is True
    assert module.ping(8) is False


@pytest.mark.parametrize(
    ("answer", "before", "registers", "after"),
    [
        (True, True, False, True),
        (False, True, True, True),  # restarted, or reaped us
        (True, False, True, True),  # back
        (None, True, False, False),  # gone
    ],
)
def test_the_heartbeat_registers_when_the_server_does_not_know_us(
    monkeypatch: pytest.MonkeyPatch, answer: bool | None, before: bool, registers: bool, after: bool
) -> None:
    event, calls = threading.Event(), []
    if before:
        event.set()
    beat = server_watch.Heartbeat(mq_client=None, health_event=event, interval=1, on_change=lambda: None)
    beat.register_recover_callback(lambda: calls.append(1) or True)
    monkeypatch.setattr(beat, "_ping", lambda: answer)
    beat._execute()
    assert (bool(calls), event.is_set()) == (registers, after)


def test_a_server_given_up_during_a_ping_is_registered_with_again(monkeypatch: pytest.MonkeyPatch) -> None:
    event, calls = threading.Event(), []
    event.set()
    beat = server_watch.Heartbeat(mq_client=None, health_event=event, interval=1, on_change=lambda: None)
    beat.register_recover_callback(lambda: calls.append(1) or True)

    def ping() -> bool:
        event.clear()  # the engine's thread timed out while the ping was under way
        return True

    monkeypatch.setattr(beat, "_ping", ping)
    beat._execute()
    assert calls and event.is_set()


def test_a_lookup_that_gives_the_server_up_is_reported_at_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A guard that says `healthy` until the next heartbeat says so of a server that no request asks."""
    monkeypatch.setenv("KVSTRATA_RUN_DIR", str(tmp_path))
    monkeypatch.setattr(adapters.mpa, "send_lmcache_request", lambda *_: MessagingFuture())
    adapter = object.__new__(adapters.GuardedSchedulerAdapter)
    adapter._report = GuardReport("scheduler", {})
    adapter._health_events, adapter._mq_timeout = {"tcp://gone": threading.Event()}, 0.01
    adapter._server_urls, adapter.mq_clients = ["tcp://gone"], {"tcp://gone": None}
    adapter._lookup_started, adapter._finished_lookup_results, adapter._per_server_hits = {}, {}, {}
    adapter._pending_lookups = {"asked"}
    adapter._health_events["tcp://gone"].set()
    adapter._report.update(healthy=adapter.is_healthy)
    assert adapter.check_lookup_result("asked") == 0
    assert json.loads((tmp_path / "guard-scheduler.json").read_text())["healthy"] is False


def connector(**state: Any) -> KvstrataConnector:
    made = object.__new__(KvstrataConnector)
    made._loading, made._failed, made._unfreed, made._draining = set(), {}, set(), set()
    made.request_trackers = {}
    for name, value in state.items():
        setattr(made, name, value)
    return made


def test_ids_that_vllm_does_not_wait_for_are_taken_out() -> None:
    """vLLM's scheduler asserts on them: the engine would die (scheduler.py:2828)."""
    made = connector(_unfreed={"ended"})
    output = SimpleNamespace(finished_sending={"ended", "twice"}, finished_recving={"ghost"}, invalid_block_ids=set())
    made.update_connector_output(output)
    assert output.finished_sending == {"ended"} and output.finished_recving == set()
    made.update_connector_output(output)
    assert output.finished_sending == set()


def test_blocks_of_a_request_that_ended_during_its_load_stay_until_the_load_ends() -> None:
    made = connector(_unfreed={"r"}, _draining={"r"})
    early = SimpleNamespace(finished_sending={"r"}, finished_recving=None, invalid_block_ids=set())
    made.update_connector_output(early)
    assert early.finished_sending == set()
    late = SimpleNamespace(finished_sending=None, finished_recving={"r"}, invalid_block_ids=set())
    made.update_connector_output(late)
    assert late.finished_recving == {"r"} and not made._draining and not made._unfreed


def test_a_load_that_failed_is_remembered_for_its_request_only() -> None:
    tracker = SimpleNamespace(allocated_block_ids={0: [4, 5]})
    other = SimpleNamespace(allocated_block_ids={0: [1, 2]})
    made = connector(_loading={"r", "o"}, request_trackers={"r": tracker, "o": other})
    output = SimpleNamespace(finished_sending=None, finished_recving={"r"}, invalid_block_ids={5})
    made.update_connector_output(output)
    assert made._failed == {"r": None} and made._loading == {"o"}


@pytest.mark.parametrize(
    ("lmcache", "counted", "shown"),
    [
        (0, 0, (2816, 0, 0)),  # a miss, or away
        (2560, 2560, (2816, 2560, 0)),
        (3072, 2816, (2816, 3072, 256)),
    ],
)
def test_hits_of_vllm_are_counted_whatever_lmcache_found(
    monkeypatch: pytest.MonkeyPatch, lmcache: int, counted: int, shown: tuple[int, int, int]
) -> None:
    def found(self: Any, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        tracker = self.request_trackers[request.request_id]
        tracker.num_lmcache_hit_tokens, tracker.num_vllm_hit_tokens = lmcache, counted
        return 0, False

    base = KvstrataConnector.__mro__[1]
    monkeypatch.setattr(base, "get_num_new_matched_tokens", found)
    tracker = SimpleNamespace(kvstrata_keyed=True, state=None, num_stored_tokens=0)
    made = connector(request_trackers={"r": tracker})
    made.scheduler_adapter = SimpleNamespace(end_session=lambda _: None)
    monkeypatch.setattr(base, "_get_or_create_request_tracker", lambda self, _: tracker)
    request = SimpleNamespace(
        request_id="r", prompt_embeds=None, skip_reading_prefix_cache=False, status=None,
        kv_transfer_params={"cached_token_stats": 1},
    )  # fmt: skip
    made.get_num_new_matched_tokens(request, 2816)
    stats = made.request_finished(request, [])[1]["cached_token_stats"]
    names = ("num_vllm_cached_tokens", "num_lmcache_cached_tokens", "num_lmcache_extra_cached_tokens")
    assert tuple(stats[name] for name in names) == shown
