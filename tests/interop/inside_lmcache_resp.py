"""LMCache's own RESP client against the RESP door. Runs where lmcache is: in the image."""

from __future__ import annotations

import os
import random
import select
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from lmcache.lmcache_redis import LMCacheRedisClient

from tests.engine.resp_parts import MIB, TOKEN, Server, server

SIZE = 3 * MIB


def value(seed: int) -> bytes:
    return random.Random(seed).randbytes(64) * (SIZE // 64)


class Client:
    """One operation at a time, as LMCache's adapter gives it to the client and takes it back."""

    def __init__(self, port: int, workers: int) -> None:
        self.native = LMCacheRedisClient("127.0.0.1", port, workers, "lmcache", TOKEN)
        self._fd = int(self.native.event_fd())

    def _wait(self) -> Any:
        ready, _, _ = select.select([self._fd], [], [], 20)
        assert ready, "the client never came back"
        os.read(self._fd, 8)
        ((_, good, error, found),) = self.native.drain_completions()
        return good, error, found

    def set(self, *seeds: int) -> bool:
        buffers = [bytearray(value(seed)) for seed in seeds]  # it reads them until it has said that it is done
        self.native.submit_batch_set([f"m@{seed}" for seed in seeds], [memoryview(buffer) for buffer in buffers])
        return bool(self._wait()[0])

    def exists(self, *seeds: int) -> list[bool]:
        self.native.submit_batch_exists([f"m@{seed}" for seed in seeds])
        return list(self._wait()[2])

    def get(self, *seeds: int) -> list[bytes | None]:
        buffers = [bytearray(SIZE) for _ in seeds]
        self.native.submit_batch_get([f"m@{seed}" for seed in seeds], [memoryview(buffer) for buffer in buffers])
        good = self._wait()[2]
        return [bytes(buffer) if hit else None for buffer, hit in zip(buffers, good, strict=True)]


@pytest.fixture
def running(tmp_path: Path) -> Iterator[Server]:
    with server(tmp_path, tokens=True, capacity=64 * MIB, body_s=2.0) as found:
        yield found


@pytest.fixture(params=[1, 4])
def client(running: Server, request: pytest.FixtureRequest) -> Client:
    return Client(running.port, request.param)


def test_what_was_set_exists_and_comes_back(client: Client) -> None:
    assert client.set(*range(8))
    assert client.exists(*range(10)) == [True] * 8 + [False] * 2
    assert client.get(*range(8)) == [value(seed) for seed in range(8)]


def test_what_exists_has_said_is_there_for_get_after_the_store_was_filled_twice(client: Client) -> None:
    assert client.set(1, 2)
    assert client.exists(1) == [True]
    for seed in range(100, 140):
        assert client.set(seed)
    assert client.get(1) == [value(1)]
    assert client.exists(2) == [False]


def test_after_a_set_that_failed_the_client_is_in_step(running: Server, client: Client) -> None:
    assert client.set(1)
    with running.budget.take(running.budget.total, 1.0):
        assert not client.set(2)
    assert client.exists(1, 2) == [True, False]
    assert client.set(3)
    assert client.get(1, 3) == [value(1), value(3)]


def test_after_a_block_that_is_corrupt_the_client_is_in_step(running: Server, client: Client) -> None:
    assert client.set(1, 2)
    (bad,) = [path for path in running.root.rglob("*") if path.is_file() and value(1)[:64] in path.read_bytes()[:8192]]
    with bad.open("r+b") as file:
        file.seek(bad.stat().st_size - SIZE)
        file.write(b"spoilt")
    assert client.get(1, 2) == [None, value(2)]
    assert client.exists(1, 2) == [False, True]
    assert client.set(1)
    assert client.get(1, 2) == [value(1), value(2)]


def test_a_get_of_what_never_was_fails_and_nothing_wrong_comes_back_ever_after(running: Server) -> None:
    """One worker: it loses its connection, for it would take every later answer for that of the command before."""
    client = Client(running.port, 1)
    assert client.set(1, 2)
    assert client.get(77) == [None]
    for _ in range(5):
        assert client.get(1, 2) == [None, None]
    assert Client(running.port, 1).get(1, 2) == [value(1), value(2)]
