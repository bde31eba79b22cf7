"""LMCache's scheduler and worker adapters, made to fail as misses.

Fixed here, all in lmcache 0.5.3 `integration/vllm/vllm_multi_process_adapter.py` (see docs/architecture.md):
- the scheduler's heartbeat never starts, so one time-out turns lookups off until vLLM restarts;
- an absent server keeps vLLM from starting, and one that dies in a store kills the engine (PREPARE_STORE raises);
- a failed retrieve is reported as a success, and vLLM decodes from blocks that were never filled;
- a restarted server with another chunk size would be believed.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

from lmcache.integration.vllm import vllm_multi_process_adapter as mpa

from kvstrata.connector.hook import pause_at
from kvstrata.connector.report import GuardReport
from kvstrata.connector.server_watch import Heartbeat, chunk_size_from, require_chunk_size, same_chunk_size

__all__ = ["GuardedSchedulerAdapter", "GuardedWorkerAdapter", "guarded_adapters"]

logger = logging.getLogger("vllm.kvstrata.guard")

_LOOKUP_DEADLINE_S = 20.0  # a prefetch has no time-out in LMCache; a hung disk must not hold a request for ever
_UNSAID = 4096  # ended requests that a server is told of when it is back; it forgets their locks by itself anyway


class GuardedSchedulerAdapter(mpa.LMCacheMPSchedulerAdapter):  # type: ignore[misc]
    """Scheduler side: lookups. Every failure is (0 tokens found)."""

    def __init__(self, *args: Any, extra_config: dict[str, Any], report: GuardReport, **kwargs: Any) -> None:
        self._expected_chunk_size = int(extra_config["kvstrata.chunk_size"])
        self._report = report
        self._lookup_started: dict[str, float] = {}
        self._unsaid: deque[str] = deque(maxlen=_UNSAID)
        timeout = float(extra_config.get("lmcache.mp.mq_timeout", 5))
        with chunk_size_from(self._expected_chunk_size, timeout) as absent:
            super().__init__(*args, extra_config=extra_config, **kwargs)
        require_chunk_size(self.lmcache_tokens_per_chunk, self._expected_chunk_size)
        if absent:
            logger.warning("kvstrata: no lmcache server yet; vLLM starts without it and uses it when it comes")
            for event in self._health_events.values():
                event.clear()
        self._ensure_heartbeat_started()
        self._report.update(healthy=self.is_healthy)

    def _ensure_heartbeat_started(self) -> None:
        # 0.5.3 tests `is not None` on a dict that is never None (fixed upstream in 0.5.6).
        if self._heartbeats:
            return
        with self._heartbeat_lock:
            if self._heartbeats:
                return
            for url, client in self.mq_clients.items():
                heartbeat = Heartbeat(
                    mq_client=client,
                    health_event=self._health_events[url],
                    interval=self._heartbeat_interval,
                    on_change=self._after_beat,
                )
                heartbeat.register_recover_callback(
                    partial(same_chunk_size, client, self._mq_timeout, self._expected_chunk_size)
                )
                heartbeat.start()
                self._heartbeats[url] = heartbeat

    def _after_beat(self) -> None:
        self._report.update(healthy=self.is_healthy)
        while self._unsaid and self.is_healthy:
            super().end_session(self._unsaid.popleft())

    def end_session(self, request_id: str) -> None:
        """The server frees then what the request still has locked (`lock_ledger`); upstream forgets it while away."""
        if self.is_healthy:
            super().end_session(request_id)
        else:
            self._unsaid.append(request_id)

    def maybe_submit_lookup_request(self, request_id: str, token_ids: list[int], cache_salt: str = "") -> None:
        try:
            super().maybe_submit_lookup_request(request_id, token_ids, cache_salt)
        except Exception:
            # Only this request goes without the cache; upstream the engine dies (a bad salt did that to 0.5.3).
            logger.exception("kvstrata: lookup of %s failed; served without the cache", request_id)
            self._report.lost("lookup")
        self._tell_if_gone()

    def _tell_if_gone(self) -> None:
        """A lookup that timed out has given the server up; the next heartbeat would say so seconds later."""
        if not self.is_healthy:
            self._report.update(healthy=False)

    def check_lookup_result(self, request_id: str) -> int | None:
        result: int | None = super().check_lookup_result(request_id)
        if result is not None:
            self._tell_if_gone()
            self._lookup_started.pop(request_id, None)
            return result
        started = self._lookup_started.setdefault(request_id, time.monotonic())
        if time.monotonic() - started < _LOOKUP_DEADLINE_S:
            return None
        logger.error("kvstrata: prefetch of %s took over %.0f s; counted as a miss", request_id, _LOOKUP_DEADLINE_S)
        self._report.lost("lookup")
        self._finished_lookup_results[request_id] = 0
        self._lookup_started.pop(request_id, None)
        return 0

    def cleanup_lookup_result(self, request_id: str) -> None:
        self._lookup_started.pop(request_id, None)
        super().cleanup_lookup_result(request_id)

    def abandon_lookup(self, request_id: str, token_ids: list[int], cache_salt: str) -> None:
        """Free the read locks of a lookup whose request ended before it was scheduled (client gone)."""
        found = self._finished_lookup_results.get(request_id, 0)
        if found:
            self.free_lookup_locks(token_ids, 0, found, request_id, cache_salt)
        self.cleanup_lookup_result(request_id)


class GuardedWorkerAdapter(mpa.LMCacheMPWorkerAdapter):  # type: ignore[misc]
    """Worker side: stores and retrieves. A store that fails is not stored; a retrieve that fails is recomputed."""

    _heartbeat: Any

    def __init__(self, *args: Any, extra_config: dict[str, Any], report: GuardReport, **kwargs: Any) -> None:
        self._expected_chunk_size = int(extra_config["kvstrata.chunk_size"])
        self._report = report
        timeout = float(extra_config.get("lmcache.mp.mq_timeout", 5))
        # Held while bytes move through shared memory: a registration lets the server free what was unfinished.
        self._moving = threading.Lock()
        with chunk_size_from(self._expected_chunk_size, timeout) as absent:
            super().__init__(*args, extra_config=extra_config, **kwargs)
        require_chunk_size(self.lmcache_tokens_per_chunk, self._expected_chunk_size)
        if absent:
            self._health_event.clear()

    def register_kv_caches(self, kv_caches: Any, engine_group_infos: Any = ()) -> None:
        try:
            if self.is_healthy:
                super().register_kv_caches(kv_caches, engine_group_infos=engine_group_infos)
            else:
                self.kv_caches = kv_caches
                self.engine_group_infos = list(engine_group_infos)
        except ConnectionError as error:
            logger.warning("kvstrata: not registered with lmcache (%s); retried by the heartbeat", error)
            self._health_event.clear()
        # From the start, not from the first store on: a server that restarts before it has to be noticed as well.
        self._ensure_heartbeat_started()
        self._tell()

    def _send_register_kv_caches_request(self, kv_caches: Any) -> None:
        self._close_context(self.transfer_ctx)
        super()._send_register_kv_caches_request(kv_caches)
        context = getattr(self.transfer_ctx, "_engine_driven_context", None)
        if context is not None:
            self._fail_fast(context)

    @staticmethod
    def _close_context(old: Any) -> None:
        """Unmap the pool of a server that is gone at once: /dev/shm holds two pools, not three."""
        context = getattr(old, "_engine_driven_context", None)
        if context is not None:
            vars(context).pop("prepare_retrieve", None)  # our wrapper refers back to the context
            with suppress(Exception):
                old.close()

    def _fail_fast(self, context: Any) -> None:
        """After a retrieve that timed out, upstream waits for the commit as well: twice `mq_timeout` for nothing."""
        prepare = context.prepare_retrieve

        def prepare_retrieve(key: Any, instance_id: int) -> Any:
            started = time.monotonic()
            buffers = prepare(key, instance_id)
            if buffers is None and time.monotonic() - started >= 0.9 * self._mq_timeout:
                raise TimeoutError(f"PREPARE_RETRIEVE: no answer within {self._mq_timeout} s")
            return buffers

        context.prepare_retrieve = prepare_retrieve

    def _ensure_heartbeat_started(self) -> None:
        if self._heartbeat is not None:
            return
        with self._heartbeat_lock:
            if self._heartbeat is not None:
                return
            heartbeat = Heartbeat(
                mq_client=self.mq_client,
                health_event=self._health_event,
                interval=self._heartbeat_interval,
                instance_id=self.instance_id,
                on_change=self._tell,
            )
            heartbeat.register_recover_callback(self._reregister_kv_caches_callback)
            heartbeat.start()
            self._heartbeat = heartbeat

    def _reregister_kv_caches_callback(self) -> bool:
        if not same_chunk_size(self.mq_client, self._mq_timeout, self._expected_chunk_size):
            return False
        with self._moving:
            return bool(super()._reregister_kv_caches_callback())

    def submit_store_request(self, request_id: str, op: Any, event: Any, cache_salt: str = "") -> None:
        try:
            pause_at("before_store")
            if not self.is_healthy:
                return
            with self._moving:
                super().submit_store_request(request_id, op, event, cache_salt=cache_salt)
            future = self.store_futures.get(request_id)
            if future is not None and future.query() and not future.result(timeout=0):
                self._lost("store", request_id)
        except Exception as error:
            self._lost("store", request_id, error)

    def submit_retrieve_request(self, request_id: str, op: Any, event: Any, cache_salt: str = "") -> None:
        try:
            pause_at("before_retrieve")
            if not self.is_healthy:
                raise ConnectionError("lmcache is not in use")
            with self._moving:
                super().submit_retrieve_request(request_id, op, event, cache_salt=cache_salt)
            future, _ = self.retrieve_futures[request_id]
            self.retrieve_futures[request_id] = (future, self._written_blocks(op))
        except Exception as error:
            self.error_block_ids.update(self._written_blocks(op))
            self._dropped_retrieves.add(request_id)
            self._lost("retrieve", request_id, error)

    def _written_blocks(self, op: Any) -> list[int]:
        """Blocks that a retrieve fills. An operation begins at the chunk below the L0 hit; the blocks before the hit
        are valid and shared with running requests, and naming them as failed would set those requests back."""
        if len(op.block_ids) != 1 or isinstance(op.block_ids[0], int):
            return list(op.flat_block_ids)
        blocks = list(op.block_ids[0])
        per_block = self.lmcache_tokens_per_chunk // self.blocks_in_chunk
        return blocks[op.skip_first_n_tokens // per_block :]

    def get_finished(self, finished_req_ids_from_engine: set[str]) -> tuple[set[str] | None, set[str] | None]:
        failed = [
            (request_id, blocks)
            for request_id, (future, blocks) in self.retrieve_futures.items()
            if future.query() and not _succeeded(future)
        ]
        for _, blocks in failed:
            self.error_block_ids.update(blocks)
        finished: tuple[set[str] | None, set[str] | None] = super().get_finished(finished_req_ids_from_engine)
        for request_id, _ in failed:
            self._lost("retrieve", request_id)
        return finished

    def _lost(self, what: str, request_id: str, error: BaseException | None = None) -> None:
        """Leave the server alone until a heartbeat has registered us again: an unanswered call costs `mq_timeout`."""
        logger.warning("kvstrata: %s of %s failed (%s); counted as a miss", what, request_id, error or "server said no")
        self._health_event.clear()
        self._ensure_heartbeat_started()
        self._report.lost(what)
        self._tell()

    def _tell(self) -> None:
        self._report.update(
            healthy=self.is_healthy, transfer=self.transfer_kind(), chunk_size=self.lmcache_tokens_per_chunk
        )

    def transfer_kind(self) -> str:
        """`shm`, `pickle`, `handle` (CUDA IPC) or `none`: the class that moves bytes now, not what was configured."""
        context = self.transfer_ctx
        if context is None:
            return "none"
        inner = getattr(context, "_engine_driven_context", None)
        if inner is not None:
            return "shm" if type(inner).__name__.endswith("Shm") else "pickle"
        return "handle" if "LMCacheDriven" in type(context).__name__ else "none"


def _succeeded(future: Any) -> bool:
    try:
        return bool(future.result(timeout=0))
    except Exception:
        return False


_LOCK = threading.Lock()


@contextmanager
def guarded_adapters(connector_module: Any, report: GuardReport) -> Iterator[None]:
    """While LMCache's connector is constructed, let it make our adapters instead of its own."""

    def scheduler(**kwargs: Any) -> GuardedSchedulerAdapter:
        return GuardedSchedulerAdapter(report=report, **kwargs)

    def worker(**kwargs: Any) -> GuardedWorkerAdapter:
        return GuardedWorkerAdapter(report=report, **kwargs)

    with _LOCK:
        originals = connector_module.LMCacheMPSchedulerAdapter, connector_module.LMCacheMPWorkerAdapter
        connector_module.LMCacheMPSchedulerAdapter, connector_module.LMCacheMPWorkerAdapter = scheduler, worker
        try:
            yield
        finally:
            connector_module.LMCacheMPSchedulerAdapter, connector_module.LMCacheMPWorkerAdapter = originals
