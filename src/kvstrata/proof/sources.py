"""Where the KV of one request came from, and whether what it stored has reached its last tier.

vLLM streams no per-request hit counts, so they are differences of counters around one request; `Meter` refuses to
guess when another request moved them. L0 (vLLM's own prefix cache) and "external" are told apart by
`vllm:prompt_tokens_by_source_total`; L1 and L2 by LMCache's `l2_prefetch_load_completed_chunks`, which moves only when
bytes came from L2 (an L1 hit is a lookup that loads nothing).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from kvstrata.proof.client import Completion, LmcacheClient, VllmClient
from kvstrata.proof.prom import Samples

__all__ = ["Hits", "Meter", "Source", "StoresStuck", "stores_idle", "wait_for_stores"]

Source = Literal["none", "l0", "l1", "l2"]

_BY_SOURCE = "vllm:prompt_tokens_by_source_total"
_L2_LOADED = "lmcache_mp_l2_prefetch_load_completed_chunks_total"
_L2_SUBMITTED = "lmcache_mp_l2_store_submitted_requests_total"
_L2_COMPLETED = "lmcache_mp_l2_store_completed_requests_total"
_LOOKED_UP = "lmcache_mp_lookup_requested_tokens_total"
_STARTED = "process_start_time_seconds"
_LAST_LOOK_S = 0.5
_QUIET_S = 0.5


@dataclass(frozen=True)
class Hits:
    """Prompt tokens of one request that were not computed, by where they came from."""

    l0_tokens: int
    external_tokens: int
    l2_chunks: int
    looked_up_tokens: int
    """Tokens that vLLM asked LMCache for; 0 means that no connector asked."""
    exact: bool = True
    """False when the counters moved by more than this request (others were served meanwhile) or were reset."""

    @property
    def tokens(self) -> int:
        return self.l0_tokens + self.external_tokens

    @property
    def source(self) -> Source:
        """The deepest tier that contributed. Trimmed prompts keep tiers from mixing (kvstrata.proof.prompts)."""
        if self.external_tokens:
            return "l2" if self.l2_chunks else "l1"
        return "l0" if self.l0_tokens else "none"


class Meter:
    """Runs one request at a time and says where its prompt came from."""

    def __init__(self, vllm: VllmClient, lmcache: LmcacheClient | None, settle_s: float = 5.0) -> None:
        self._vllm = vllm
        self._lmcache = lmcache
        self._settle_s = settle_s

    def measure(self, request: Callable[[], Completion]) -> tuple[Completion, Hits]:
        """Run `request` between two readings. Raises what the request raises, and KvError when a reading fails."""
        before = self._read()
        answer = request()
        deadline, last_look = time.monotonic() + self._settle_s, False
        while True:
            # vLLM counts after the answer has left, LMCache on an event queue: wait for this request to be counted.
            hits, total = self._difference(before, self._read(), answer.prompt_tokens)
            counted = total >= answer.prompt_tokens and (self._lmcache is None or hits.looked_up_tokens > 0)
            if counted and hits.external_tokens and not hits.l2_chunks and not last_look:
                # Not from L2, as far as LMCache's queue has been drained: look once more before saying L1.
                last_look = True
                time.sleep(_LAST_LOOK_S)
                continue
            if counted or time.monotonic() > deadline:
                return answer, hits
            time.sleep(0.05)

    def _read(self) -> tuple[Samples, Samples]:
        return self._vllm.samples(), self._lmcache.samples() if self._lmcache else Samples(())

    @staticmethod
    def _difference(
        before: tuple[Samples, Samples], after: tuple[Samples, Samples], prompt_tokens: int
    ) -> tuple[Hits, int]:
        def moved(side: int, name: str, **labels: str) -> int:
            return int(after[side].sum(name, **labels) - before[side].sum(name, **labels))

        total = moved(0, _BY_SOURCE)
        restarted = any(before[side].sum(_STARTED) != after[side].sum(_STARTED) for side in (0, 1))
        return (
            Hits(
                l0_tokens=moved(0, _BY_SOURCE, source="local_cache_hit"),
                external_tokens=moved(0, _BY_SOURCE, source="external_kv_transfer"),
                l2_chunks=moved(1, _L2_LOADED),
                looked_up_tokens=moved(1, _LOOKED_UP),
                exact=total == prompt_tokens and not restarted,
            ),
            total,
        )


class StoresStuck(Exception):
    """Stores did not reach their last tier before the deadline; the message says found and needed."""


def stores_idle(lmcache: LmcacheClient) -> tuple[bool, str]:
    """Is nothing on its way from vLLM to L1 or from L1 to L2? With a printable reading either way."""
    manager = lmcache.status().get("storage_manager", {})
    store, l1 = manager.get("store_controller", {}), manager.get("l1_manager", {})
    counters = lmcache.samples()
    submitted, completed = counters.sum(_L2_SUBMITTED), counters.sum(_L2_COMPLETED)
    reading = {
        "pending": int(store.get("pending_keys_count", 0)),
        "in flight": int(store.get("in_flight_task_count", 0)),
        "write locks": int(l1.get("write_locked_count", 0)),
        "L2 stores submitted but not completed": int(submitted - completed),
    }
    return not any(reading.values()), ", ".join(f"{value} {name}" for name, value in reading.items())


def _failing(lmcache: LmcacheClient) -> str:
    """What the block store says of its last store, if that wrote nothing: LMCache counts it as completed."""
    adapters = lmcache.status().get("storage_manager", {}).get("l2_adapters", ())
    reasons = [str(adapter["store_failing"]) for adapter in adapters if adapter.get("store_failing")]
    return f", the last store to L2 failed: {reasons[0]} (docs/runbooks/l2-stores-fail.md)" if reasons else ""


def wait_for_stores(
    lmcache: LmcacheClient, chunks: int, count: Callable[[], int | None] | None, deadline_s: float = 120.0
) -> None:
    """Return once `chunks` blocks of the proof lie in the last tier and the store pipeline is idle.

    Args:
        chunks: blocks that the prompts stored so far have.
        count: counts those blocks where they lie (L2, or L1 without an L2); None, or a count of None, when nothing
            can: then an idle pipeline that stays idle for a second has to do.
    Raises:
        StoresStuck: not so within `deadline_s` seconds.
    """
    deadline = time.monotonic() + deadline_s
    quiet_since: float | None = None
    stored: int | None = 0
    while True:
        idle, reading = stores_idle(lmcache)
        now = time.monotonic()
        quiet_since = (quiet_since or now) if idle else None
        if quiet_since is not None and now - quiet_since >= _QUIET_S:
            stored = count() if count else None
            if (stored is not None and stored >= chunks) or (stored is None and now - quiet_since >= 3 * _QUIET_S):
                return
        if now > deadline:
            have = "an unknown number of" if stored is None else str(stored)
            why = _failing(lmcache)
            raise StoresStuck(
                f"stores not finished after {deadline_s:.0f} s: found {have} blocks stored, {reading}{why}; "
                f"needed {chunks} blocks and an idle pipeline"
            )
        time.sleep(_QUIET_S / 2)
