"""`KvstrataConnector`: LMCache's multi-process connector with identity, salts and failures under control.

The class name is in no registry of vLLM, so that a vLLM that prefers its registry cannot load another class
in its place. It subclasses LMCacheMPConnector (which keeps SupportsHMA and the three-argument constructor).
"""

import logging
from importlib.metadata import version
from pathlib import Path
from typing import Any

import lmcache
import vllm
from lmcache.integration.vllm import lmcache_mp_connector as mpc
from lmcache.integration.vllm.utils import extract_mm_features
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.v1.request import RequestStatus

from kvstrata.connector.adapters import guarded_adapters
from kvstrata.connector.facts import engine_facts, lora_facts
from kvstrata.connector.keys import cache_model_name, cache_salt, image_token_ids
from kvstrata.connector.pairs import check_pair
from kvstrata.connector.report import GuardReport

__all__ = ["KvstrataConnector"]

logger = logging.getLogger("vllm.kvstrata.guard")

# More tokens than any request has: LMCache's store path then finds nothing left to store.
_NEVER_STORE = 1 << 60
_State = mpc.LMCacheMPRequestState


def _required(extra: dict[str, Any], name: str) -> str:
    value = str(extra.get(name, ""))
    if not value:
        raise ValueError(
            f"kvstrata: connector setting missing. found: no {name!r} in kv_connector_extra_config. "
            "needed: the value that kvstrata-launch puts there. fix: start vLLM through `make up`."
        )
    return value


def _salt_key(extra: dict[str, Any]) -> bytes:
    path = Path(_required(extra, "kvstrata.salt_key_file"))
    key = path.read_bytes().strip()
    if len(key) < 32:
        raise ValueError(
            f"kvstrata: salt key too short. found: {len(key)} bytes in {path}. needed: at least 32. "
            "fix: delete the file and run `make up`; it makes a new one (blocks of salted tenants are then misses)."
        )
    return key


def _computed_tokens(scheduler_output: Any) -> dict[str, int]:
    """Tokens of each scheduled request that are computed when this step ends, by the scheduler's own count."""
    scheduled = scheduler_output.num_scheduled_tokens
    cached = scheduler_output.scheduled_cached_reqs
    before = {request.req_id: request.num_computed_tokens for request in scheduler_output.scheduled_new_reqs}
    before |= dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
    return {request_id: count + scheduled.get(request_id, 0) for request_id, count in before.items()}


def _count_local_hits(params: dict[str, Any] | None, local: int) -> None:
    """Put vLLM's own hits into a request's statistics: where LMCache finds nothing, or is away, it leaves them at 0
    (lmcache 0.5.3 lmcache_mp_connector.py:1077)."""
    stats = (params or {}).get("cached_token_stats")
    if stats:
        found = max(local, stats["num_vllm_cached_tokens"])
        extra = max(0, stats["num_lmcache_cached_tokens"] - found)
        stats.update(num_vllm_cached_tokens=found, num_lmcache_extra_cached_tokens=extra)


class KvstrataConnector(mpc.LMCacheMPConnector):  # type: ignore[misc]
    """See the module. Scheduler-side state: `_loading` (loads under way), `_failed` (loads that failed),
    `_unfreed` (ended requests whose blocks vLLM still holds for us), `_draining` (those of them that were loading)."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any = None) -> None:
        pair = check_pair(vllm.__version__, version("lmcache"))
        extra = vllm_config.kv_transfer_config.kv_connector_extra_config
        facts = engine_facts(vllm_config, _required(extra, "kvstrata.identity"), pair)
        name = cache_model_name(_required(extra, "kvstrata.model_name"), facts)
        role_name = "scheduler" if role == KVConnectorRole.SCHEDULER else "worker"
        report = GuardReport(
            role_name
            if role_name == "scheduler" or vllm_config.parallel_config.rank == 0
            else f"worker-{vllm_config.parallel_config.rank}",
            {
                "class": f"{type(self).__module__.rsplit('.', 1)[0]}.{type(self).__name__}",
                "pair": pair,
                "identity": name,
                "facts": facts,
                "chunk_size": int(extra["kvstrata.chunk_size"]),
                "lmcache": getattr(lmcache, "__version__", ""),
            },
        )
        with guarded_adapters(mpc, report):
            super().__init__(vllm_config, role, kv_cache_config)
        adapter = self.scheduler_adapter if role == KVConnectorRole.SCHEDULER else self.worker_adapter
        adapter.model_name = name  # first sent after construction (0.5.3 vllm_multi_process_adapter.py:998, 1267)
        self._salt_key = _salt_key(extra)
        self._lora_digests: dict[str, tuple[Any, str]] = {}
        self._loading: set[str] = set()
        self._failed: dict[str, int | None] = {}
        self._unfreed: set[str] = set()
        self._draining: set[str] = set()
        report.update(healthy=adapter.is_healthy)
        logger.info("kvstrata guard loaded: role=%s, %s, keys of %s", role_name, pair, name)

    # -- keys ---------------------------------------------------------------------------------------------------

    def _get_or_create_request_tracker(self, request: Any) -> Any:
        tracker = super()._get_or_create_request_tracker(request)
        if getattr(tracker, "kvstrata_keyed", False):
            return tracker
        tracker.cache_salt = cache_salt(
            request.cache_salt, lora_facts(request.lora_request, self._lora_digests), self._salt_key
        )
        hashes, positions = extract_mm_features(request)
        if hashes and positions:
            images = [(h, p.offset, p.length) for h, p in zip(hashes, positions, strict=True)]
            tracker.mm_adjusted_prompt_ids = image_token_ids(request.prompt_token_ids, images)
        tracker.kvstrata_keyed = True
        return tracker

    # -- lookup -------------------------------------------------------------------------------------------------

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        """Failures are misses here too: what goes wrong in a lookup costs this request its cache, nothing else."""
        try:
            return self._matched_tokens(request, num_computed_tokens)
        except Exception:
            logger.exception("kvstrata: lookup of %s failed; served without the cache", request.request_id)
            tracker = super()._get_or_create_request_tracker(request)
            tracker.kvstrata_keyed = True
            tracker.num_lmcache_hit_tokens = tracker.num_vllm_hit_tokens = 0
            tracker.num_stored_tokens = _NEVER_STORE
            return 0, False

    def _matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        tracker = self._get_or_create_request_tracker(request)
        if not hasattr(tracker, "kvstrata_local"):
            tracker.kvstrata_local = num_computed_tokens
        if request.request_id in self._failed:
            # A load of this request failed: computed locally now. A second one would wait for a load that nobody makes.
            self._failed[request.request_id] = num_computed_tokens
            return 0, False
        if getattr(request, "prompt_embeds", None) is not None:
            # Token ids are all 0 with prompt embeddings (vllm v1/request.py:145): they name nothing.
            tracker.num_stored_tokens = _NEVER_STORE
            return 0, False
        if request.skip_reading_prefix_cache:
            # prompt_logprobs needs every position computed; LMCache's connector does not look.
            if self._skip_save(request):
                tracker.num_stored_tokens = _NEVER_STORE
            return 0, False
        if tracker.state == _State.PREFETCHING and request.status != RequestStatus.PREEMPTED:
            # vLLM asks again when blocks were short; upstream adds the same hit once more each time.
            tracker.num_stored_tokens = 0
        result: tuple[int | None, bool] = super().get_num_new_matched_tokens(request, num_computed_tokens)
        if self._skip_save(request):
            tracker.num_stored_tokens = _NEVER_STORE
        return result

    @staticmethod
    def _skip_save(request: Any) -> bool:
        params = getattr(request, "kv_transfer_params", None)
        return bool(isinstance(params, dict) and params.get("lmcache.skip_save"))

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        request_id = request.request_id
        tracker = self._get_request_tracker(request_id)
        if request_id in self._failed:
            self._forget_load(tracker, request, self._failed.pop(request_id))
        elif num_external_tokens == 0 and tracker.state == _State.PREFETCHING:
            # vLLM decided to load nothing: the connector must not write into blocks that others may share.
            tracker.num_vllm_hit_tokens = max(tracker.num_vllm_hit_tokens, tracker.num_lmcache_hit_tokens)
        super().update_state_after_alloc(request, blocks, num_external_tokens)
        if tracker.state == _State.WAITING_FOR_LOAD:
            self._loading.add(request_id)

    def _forget_load(self, tracker: Any, request: Any, local_tokens: int | None) -> None:
        """After a failed load: what counts is what vLLM has valid now, and nothing is known to be stored."""
        valid = request.num_computed_tokens if local_tokens is None else local_tokens
        tracker.num_vllm_hit_tokens = valid // self._hit_alignment_tokens * self._hit_alignment_tokens
        tracker.num_lmcache_hit_tokens = 0
        tracker.num_scheduled_tokens = 0
        tracker.num_stored_tokens = _NEVER_STORE if self._skip_save(request) else 0
        tracker.allocated_block_ids = {}
        tracker.state = _State.READY

    # -- steps --------------------------------------------------------------------------------------------------

    def build_connector_meta(self, scheduler_output: Any) -> Any:
        metadata = super().build_connector_meta(scheduler_output)
        computed = _computed_tokens(scheduler_output)
        # A server known to be gone need not be found out once more by the worker. And whatever the tracker thinks, no
        # token is stored that this step does not compute. Retrieves stay: they have to be reported as failed.
        metadata.requests = [
            r
            for r in metadata.requests
            if r.direction != "STORE"
            or (self.scheduler_adapter.is_healthy and r.op.end <= computed.get(r.request_id, 0))
        ]
        return metadata

    def update_connector_output(self, connector_output: Any) -> None:
        """Called first by vLLM's scheduler, which then asserts that every id reported here is one it waits for.

        Ids that it does not wait for are taken out: a request whose load ended after it was aborted would
        otherwise be reported twice and kill the engine (vllm v1/core/sched/scheduler.py:2828).
        """
        invalid = connector_output.invalid_block_ids
        if invalid:
            for request_id in self._loading:
                tracker = self.request_trackers.get(request_id)
                if tracker and any(b in invalid for ids in tracker.allocated_block_ids.values() for b in ids):
                    self._failed[request_id] = None
        if connector_output.finished_recving:
            received = connector_output.finished_recving & (self._loading | self._unfreed)
            connector_output.finished_recving = received
            self._loading -= received
            self._unfreed -= received
            self._draining -= received
        if connector_output.finished_sending:
            # Blocks of an aborted request stay until its load has ended: the server may still write into them.
            sent = (connector_output.finished_sending & self._unfreed) - self._draining
            connector_output.finished_sending = sent
            self._unfreed -= sent
        super().update_connector_output(connector_output)

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        request_id = request.request_id
        self._unfreed.add(request_id)
        self._failed.pop(request_id, None)
        if request_id in self._loading:
            self._loading.discard(request_id)
            self._draining.add(request_id)
        tracker = self.request_trackers.get(request_id)
        if tracker is None:
            # Gone before it was looked up; upstream asserts a tracker when the client asked for statistics.
            self.scheduler_adapter.end_session(request_id)
            return True, None
        if tracker.state == _State.PREFETCHING:
            self.scheduler_adapter.abandon_lookup(request_id, tracker.get_token_ids(), tracker.cache_salt)
        delayed, params = super().request_finished(request, block_ids)
        _count_local_hits(params, getattr(tracker, "kvstrata_local", 0))
        return delayed, params
