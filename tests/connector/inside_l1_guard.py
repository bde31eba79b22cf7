"""Runs inside the image (see test_in_image.py): half-written blocks in a real L1 of the pinned LMCache.

`KVSTRATA_UNGUARDED=1` runs the same without the guard: the tests must then fail, or they pin nothing.
"""

import os
import time
from collections.abc import Iterator

import pytest
import torch
from lmcache.v1.distributed.api import MemoryLayoutDesc, ObjectKey
from lmcache.v1.distributed.config import L1ManagerConfig, L1MemoryManagerConfig
from lmcache.v1.distributed.l1_manager import L1Error, L1Manager

from kvstrata.connector import l1_guard

if not os.environ.get("KVSTRATA_UNGUARDED"):
    l1_guard.install()

LAYOUT = MemoryLayoutDesc(shapes=[torch.Size([2, 1, 256, 8])], dtypes=[torch.float32])
TTL_S = 1


@pytest.fixture
def l1() -> Iterator[L1Manager]:
    memory = L1MemoryManagerConfig(size_in_bytes=64 << 20, use_lazy=False, shm_name="")
    manager = L1Manager(L1ManagerConfig(memory, write_ttl_seconds=TTL_S, read_ttl_seconds=TTL_S))
    yield manager
    manager.close()


def key(n: int) -> ObjectKey:
    return ObjectKey(chunk_hash=bytes([n]) * 32, model_name="m--0", kv_rank=0)


def reserve(l1: L1Manager, n: int) -> L1Error:
    return l1.reserve_write([key(n)], [False], LAYOUT, "new")[key(n)][0]


def test_a_finished_block_is_readable(l1: L1Manager) -> None:
    assert reserve(l1, 1) == L1Error.SUCCESS
    assert l1.finish_write([key(1)])[key(1)] == L1Error.SUCCESS
    assert l1.reserve_read([key(1)])[key(1)][0] == L1Error.SUCCESS


def test_a_block_whose_writer_died_is_never_readable(l1: L1Manager) -> None:
    assert reserve(l1, 2) == L1Error.SUCCESS
    time.sleep(TTL_S + 0.3)
    assert l1.reserve_read([key(2)])[key(2)][0] != L1Error.SUCCESS


def test_a_block_whose_writer_died_can_be_written_again(l1: L1Manager) -> None:
    assert reserve(l1, 3) == L1Error.SUCCESS
    time.sleep(TTL_S + 0.3)
    assert reserve(l1, 3) == L1Error.SUCCESS
    assert l1.finish_write([key(3)])[key(3)] == L1Error.SUCCESS
    assert l1.reserve_read([key(3)])[key(3)][0] == L1Error.SUCCESS


def test_a_late_finish_of_an_expired_write_commits_nothing(l1: L1Manager) -> None:
    assert reserve(l1, 4) == L1Error.SUCCESS
    time.sleep(TTL_S + 0.3)
    l1.finish_write([key(4)])
    assert l1.reserve_read([key(4)])[key(4)][0] != L1Error.SUCCESS


def test_finishing_twice_keeps_the_block(l1: L1Manager) -> None:
    assert reserve(l1, 5) == L1Error.SUCCESS
    l1.finish_write([key(5)])
    l1.finish_write([key(5)])
    assert l1.reserve_read([key(5)])[key(5)][0] == L1Error.SUCCESS
