"""Is the lmcache server there, does it know this worker, and does it cut chunks as vLLM counts them."""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from lmcache.integration.vllm import vllm_multi_process_adapter as mpa

__all__ = ["ChunkSizeMismatch", "Heartbeat", "chunk_size_from", "require_chunk_size", "same_chunk_size"]

logger = logging.getLogger("vllm.kvstrata.guard")


class ChunkSizeMismatch(RuntimeError):
    """Server and vLLM disagree on tokens per chunk: every hit would be counted wrongly."""


@contextmanager
def chunk_size_from(expected: int, timeout: float) -> Iterator[list[str]]:
    """While an adapter is constructed, let an absent server count as one that has `expected` tokens a chunk.

    Yields a list that afterwards names the absent servers (empty when all answered).
    """
    absent: list[str] = []
    original = mpa.get_lmcache_chunk_size

    def query(client: Any, timeout_: float = timeout, **_: Any) -> int:
        try:
            return int(original(client, timeout=timeout))
        except TimeoutError:
            absent.append("lmcache server")
            return expected

    mpa.get_lmcache_chunk_size = query
    try:
        yield absent
    finally:
        mpa.get_lmcache_chunk_size = original


def require_chunk_size(found: int, expected: int) -> None:
    if found != expected:
        raise ChunkSizeMismatch(
            f"kvstrata: chunk size mismatch. found: {found} tokens on the lmcache server. needed: {expected} "
            "(KV_CHUNK_SIZE of this vLLM). fix: run `make up`, which gives both the same value."
        )


def same_chunk_size(client: Any, timeout: float, expected: int) -> bool:
    """Whether the server answers within `timeout` seconds with `expected` tokens a chunk; logs why not."""
    try:
        require_chunk_size(int(mpa.get_lmcache_chunk_size(client, timeout=timeout)), expected)
    except (TimeoutError, ChunkSizeMismatch) as error:
        logger.error("%s", error)
        return False
    return True


class Heartbeat(mpa.HeartbeatThread):  # type: ignore[misc]
    """LMCache's heartbeat, with a third answer: the server is there but does not know this worker (`liveness`)."""

    def __init__(self, *args: Any, on_change: Callable[[], None], **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._on_change = on_change

    def _execute(self) -> Any:
        known = self._ping()
        if self.stop_requested:
            return mpa.ThreadRunSummary(success=True, message="stopping")
        # Looked at after the ping: the engine's thread may have given the server up while the ping was under way.
        was_healthy = self._health_event.is_set()
        if known is None:
            self._health_event.clear()
        elif not (known and was_healthy):
            logger.warning("kvstrata: lmcache server %s; registering", "restarted" if was_healthy else "is back")
            if self._recover_callback():
                self._health_event.set()
            else:
                self._health_event.clear()
        healthy = self._health_event.is_set()
        if healthy != was_healthy:
            logger.warning("kvstrata: cache %s", "in use again" if healthy else "not in use: no answer from lmcache")
        self._on_change()
        return mpa.ThreadRunSummary(success=True, message="healthy" if healthy else "unhealthy")

    def _ping(self) -> bool | None:
        """True or False as the server says, None without an answer within the interval (seconds)."""
        try:
            future = mpa.send_lmcache_request(self._mq_client, mpa.RequestType.PING, [self._instance_id])
            return bool(future.result(timeout=self._interval))
        except Exception:
            return None
