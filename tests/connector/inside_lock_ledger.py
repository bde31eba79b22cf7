"""Runs inside the image (see test_in_image.py): read locks of requests that ended, on LMCache's real server parts.

`KVSTRATA_UNGUARDED=1` runs the same without the guard: the tests that free something must then fail.
"""

import os
from collections.abc import Iterator

import pytest
import torch
from lmcache.v1.distributed.api import MemoryLayoutDesc, ipc_key_to_object_keys
from lmcache.v1.distributed.config import (
    EvictionConfig,
    L1ManagerConfig,
    L1MemoryManagerConfig,
    StorageManagerConfig,
)
from lmcache.v1.multiprocess.custom_types import IPCCacheServerKey
from lmcache.v1.multiprocess.engine_context import MPCacheServerContext
from lmcache.v1.multiprocess.modules.lookup import LookupModule

from kvstrata.connector import lock_ledger

if not os.environ.get("KVSTRATA_UNGUARDED"):
    lock_ledger.install()

CHUNK, CHUNKS = 256, 4
LAYOUT = MemoryLayoutDesc(shapes=[torch.Size([2, 1, CHUNK, 8])], dtypes=[torch.float32])
TOKENS = tuple(range(CHUNK * CHUNKS + 7))


def key(request: str, start: int = 0, end: int = CHUNK * CHUNKS) -> IPCCacheServerKey:
    return IPCCacheServerKey("m--0", 1, None, TOKENS, start, end, request)


@pytest.fixture
def server() -> Iterator[LookupModule]:
    """A server that has all chunks of TOKENS in L1."""
    memory = L1MemoryManagerConfig(size_in_bytes=64 << 20, use_lazy=False, shm_name="")
    config = StorageManagerConfig(L1ManagerConfig(memory), EvictionConfig("LRU"))
    ctx = MPCacheServerContext(config, chunk_size=CHUNK)
    ctx.layout_desc_registry.register("m--0", 1, LAYOUT)
    hashes = ctx.token_hasher.compute_chunk_hashes(list(TOKENS))
    objects = ipc_key_to_object_keys(key("setup"), hashes, [0])[0]
    assert len(ctx.storage_manager.reserve_write(objects, LAYOUT, "new")) == CHUNKS
    ctx.storage_manager.finish_write(objects)
    yield LookupModule(ctx)
    ctx.storage_manager.close()


def look_up(server: LookupModule, request: str) -> None:
    server.lookup(key(request), 1)


def locked(server: LookupModule) -> int:
    return int(server._ctx.storage_manager._l1_manager.report_status()["read_locked_count"])


def test_locks_of_a_load_that_was_dropped_go_with_the_request(server: LookupModule) -> None:
    look_up(server, "r")
    assert server.query_prefetch_status("r") == CHUNKS and locked(server) == CHUNKS
    server.end_session("r")
    assert locked(server) == 0


def test_a_lookup_whose_answer_nobody_fetched_leaves_nothing(server: LookupModule) -> None:
    look_up(server, "r")
    assert locked(server) == CHUNKS
    server.end_session("r")
    assert locked(server) == 0 and server.report_status()["active_prefetch_jobs"] == 0


def test_what_the_request_freed_itself_is_not_freed_again(server: LookupModule) -> None:
    """Locks are counted: one too many would open a block that another request is about to read."""
    for request in ("one", "two"):
        look_up(server, request)
        assert server.query_prefetch_status(request) == CHUNKS
    server.free_lookup_locks(key("one"), 1)
    server.end_session("one")
    assert locked(server) == CHUNKS
    server.free_lookup_locks(key("two", end=2 * CHUNK + CHUNK // 2), 1)  # two whole chunks
    assert locked(server) == 2
    server.end_session("two")
    assert locked(server) == 0


def test_a_retrieve_that_has_begun_answers_for_its_locks(server: LookupModule) -> None:
    look_up(server, "r")
    assert server.query_prefetch_status("r") == CHUNKS
    lock_ledger._cross_out(server._ctx, key("r", start=CHUNK))
    server.end_session("r")
    assert locked(server) == CHUNKS - 1


def test_a_request_that_this_server_never_looked_up_frees_nothing(server: LookupModule) -> None:
    look_up(server, "r")
    assert server.query_prefetch_status("r") == CHUNKS
    server.end_session("of a server before this one")
    assert locked(server) == CHUNKS


def test_a_lock_that_may_have_expired_is_left_alone(server: LookupModule, monkeypatch: pytest.MonkeyPatch) -> None:
    look_up(server, "r")
    assert server.query_prefetch_status("r") == CHUNKS
    monkeypatch.setattr(lock_ledger, "_MARGIN_S", 1e9)
    server.end_session("r")
    assert locked(server) == CHUNKS
