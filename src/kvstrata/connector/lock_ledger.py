"""Server-side guard: a request that has ended holds no read locks and no prefetch job.

A lookup of LMCache 0.5.3 locks what it finds, and trusts the client to retrieve or free it. A load that is dropped
(server away for a moment), a lookup whose answer nobody fetches (client gone, time-out) and a prefetch that was given
up keep their locks for `read_ttl` (300 s), and a small L1 has no room for stores until then; the job stays for ever.
Here the server notes what a request has locked. What it frees or begins to retrieve is crossed out, the rest is freed
when its END_SESSION arrives; `adapters` sends those later that it could not send. A server that was restarted has no
note of the request, so nothing is freed that somebody else has locked since.
"""

import functools
import threading
import time
from typing import Any

from lmcache.v1.multiprocess.modules.engine_driven_transfer import EngineDrivenTransferModule
from lmcache.v1.multiprocess.modules.lmcache_driven_transfer import LMCacheDrivenTransferModule
from lmcache.v1.multiprocess.modules.lookup import LookupModule
from lmcache.v1.multiprocess.token_hasher import TokenHasher

__all__ = ["install"]

_HELD = "kvstrata_held"  # in a session's extras: (time of the lookup, {chunk number: object keys})
_MARGIN_S = 60.0  # a lock about to expire is left alone: freed late, it would be another request's
_LOCK = threading.Lock()


def install() -> None:
    """Patch the running server process; call before the server is built. Calling twice changes nothing."""
    if getattr(LookupModule, "kvstrata", False):
        return
    query, free, end = LookupModule.query_prefetch_status, LookupModule.free_lookup_locks, LookupModule.end_session

    # LMCache compares a handler's signature with its protocol: `wraps` keeps what it looks at.
    @functools.wraps(query)
    def query_prefetch_status(self: Any, request_id: str) -> Any:
        job = self._prefetch_jobs.get(request_id)
        found = query(self, request_id)
        if found and job is not None:
            _hold(self, request_id, found, job.handle.submit_time)
        return found

    @functools.wraps(free)
    def free_lookup_locks(self: Any, key: Any, tp_size: int) -> None:
        _cross_out(self._ctx, key)
        free(self, key, tp_size)

    @functools.wraps(end)
    def end_session(self: Any, request_id: str) -> None:
        ended = vars(self).setdefault("kvstrata_ended", set())
        ended.add(request_id)
        for one in [*ended]:
            # While its prefetch runs it locks more: such a session is ended by a later call.
            if one in self._prefetch_jobs and query_prefetch_status(self, one) is None:
                continue
            with _LOCK:
                if one not in ended:
                    continue
                ended.discard(one)
            keys = _held(self._ctx, one)
            end(self, one)
            if keys:
                self._ctx.storage_manager.finish_read_prefetched(keys)

    LookupModule.query_prefetch_status, LookupModule.free_lookup_locks = query_prefetch_status, free_lookup_locks
    LookupModule.end_session = end_session
    LookupModule.kvstrata = True
    # From here on the transfer answers for the locks.
    for module, name in ((EngineDrivenTransferModule, "prepare_retrieve"), (LMCacheDrivenTransferModule, "retrieve")):
        setattr(module, name, _taking_over(getattr(module, name)))


def _taking_over(original: Any) -> Any:
    @functools.wraps(original)
    def retrieve(self: Any, key: Any, *args: Any, **kwargs: Any) -> Any:
        _cross_out(self._ctx, key)
        return original(self, key, *args, **kwargs)

    return retrieve


def _hold(module: Any, request_id: str, chunks: int, since: float) -> None:
    session = module._ctx.session_manager.get_or_create(request_id)
    key = session.lookup_ipc_key
    if key is None:
        return
    hashes = [TokenHasher.hash_to_bytes(h) for h in session.get_hashes(0, chunks * module._ctx.chunk_size)]
    held = {number: module._chunk_major_object_keys(key, [one]) for number, one in enumerate(hashes)}
    with _LOCK:
        session.extras[_HELD] = (since, held)


def _cross_out(ctx: Any, key: Any) -> None:
    session = ctx.session_manager.get_or_create(key.request_id)
    with _LOCK:
        _, held = session.extras.get(_HELD, (0.0, {}))
        # Whole chunks only, as LMCache's hasher cuts the range.
        for number in range(-(-key.start // ctx.chunk_size), key.end // ctx.chunk_size):
            held.pop(number, None)


def _held(ctx: Any, request_id: str) -> list[Any]:
    session = ctx.session_manager.get_or_create(request_id)
    with _LOCK:
        since, held = session.extras.pop(_HELD, (0.0, {}))
    young = time.monotonic() - since < ctx.storage_manager._l1_manager._read_ttl_seconds - _MARGIN_S
    return [key for keys in held.values() for key in keys] if young else []
