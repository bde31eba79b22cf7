"""Many clients, little memory, a sudden end, damage on the disk: what the server keeps to under pressure."""

from __future__ import annotations

import hashlib
import json
import os
import random
import resource
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.engine.process import EngineProcess, until
from tests.engine.wire import Answer, Wire
from tests.store.filesystems import folder_on

MIB = 1 << 20
Start = Callable[..., EngineProcess]


def value_of(key: str, size: int = 256 << 10) -> bytes:
    """The bytes that belong to a key: a wrong answer shows."""
    return hashlib.sha256(key.encode()).digest() * (size // 32)


def test_memory_stays_within_its_limit_under_200_clients(engine_process: Start) -> None:
    limit = 96 * MIB
    engine = engine_process(MEMORY_BYTES=limit, CAPACITY_BYTES=1 << 30)
    idle = engine.rss()
    statuses: set[int] = set()

    def client(number: int) -> None:
        with Wire(engine.http, timeout_s=120) as wire:
            for turn in range(3):
                key = f"m-{number}-{turn}"
                body = value_of(key, 2 * MIB)
                status = wire.ask("PUT", f"/kv/{key}", body).status
                statuses.add(status)
                if status == 201:
                    answer = wire.ask("GET", f"/kv/{key}")
                    assert answer.status == 404 or answer.body == body

    with ThreadPoolExecutor(200) as pool:
        for done in [pool.submit(client, number) for number in range(200)]:
            done.result()
    assert statuses == {201}  # those that found no memory at once waited their turn
    assert engine.peak_rss() - idle < limit + 64 * MIB


def test_bodies_that_find_no_memory_in_time_get_503_and_then_it_goes_on(engine_process: Start) -> None:
    engine = engine_process(MEMORY_BYTES=64 * MIB, BODY_S=4)
    slow = Wire(engine.http)
    slow.send(slow.head("PUT", "/kv/slow", Transfer_Encoding="chunked"))  # of unknown length: all of it is kept for it
    time.sleep(0.3)
    with Wire(engine.http) as wire:
        answer = wire.ask("PUT", "/kv/other", b"x" * MIB)
        assert (answer.status, answer.headers["retry-after"]) == (503, "1")
    slow.sock.close()
    with Wire(engine.http) as wire:
        assert wire.ask("PUT", "/kv/other", b"x" * MIB).status == 201


def test_who_waits_for_memory_keeps_no_room_on_the_disk(engine_process: Start) -> None:
    engine = engine_process(MEMORY_BYTES=64 * MIB, CAPACITY_BYTES=66 * MIB)
    slow, large = Wire(engine.http), Wire(engine.http)
    with Wire(engine.http) as wire:
        assert {wire.ask("PUT", f"/kv/{n}", value_of(str(n), 10 * MIB)).status for n in range(5)} == {201}
        slow.send(slow.head("PUT", "/kv/slow", Transfer_Encoding="chunked"))  # of unknown length: all of it
        until(lambda: b"kvstrata_engine_memory_used_bytes 6.7" in wire.ask("GET", "/metrics").body)
        large.send(large.head("PUT", "/kv/large", Content_Length=40 * MIB))
        until(lambda: b"kvstrata_engine_memory_waiting 1.0" in wire.ask("GET", "/metrics").body)
        assert wire.ask("GET", "/kv/stats").json["evictions"] == 0
    slow.sock.close()
    large.send(b"x" * 40 * MIB)
    assert large.answer().status == 201
    large.sock.close()


def test_a_connection_too_many_is_told_so(engine_process: Start) -> None:
    engine = engine_process(MAX_CONNECTIONS=10)
    held = [Wire(engine.http) for _ in range(10)]
    assert all(one.ask("GET", "/healthz").status == 200 for one in held)
    with Wire(engine.http) as wire:
        assert wire.answer().status == 503
    held.pop().sock.close()
    until(lambda: _served(engine))
    assert all(one.ask("GET", "/healthz").status == 200 for one in held)


def _served(engine: EngineProcess) -> bool:
    try:
        with Wire(engine.http) as wire:
            return wire.ask("GET", "/healthz").status == 200
    except (OSError, AssertionError):
        return False


@pytest.fixture
def many_files() -> Iterator[int]:
    """How many connections this process may open, at most 10,000."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 10_500 if hard == resource.RLIM_INFINITY else min(hard, 10_500)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, wanted), hard))
    yield wanted - 500
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_ten_thousand_connections_cost_no_threads_and_little_memory(engine_process: Start, many_files: int) -> None:
    engine = engine_process(IDLE_S=300)
    before = engine.rss()
    connections = []
    try:
        for _ in range(many_files):
            connections.append(Wire(engine.http, timeout_s=60))
        # Each is served once, so that all are really open, and parked again.
        for one in connections:
            one.send(one.head("GET", "/healthz"))
        assert {one.answer().status for one in connections} == {200}
        assert engine.threads() < 60
        assert engine.rss() - before < 100 * MIB
        assert connections[-1].ask("PUT", "/kv/a", value_of("a")).status == 201
        assert connections[0].ask("GET", "/kv/a").body == value_of("a")
    finally:
        for one in connections:
            one.sock.close()


def test_sigterm_lets_a_request_end_and_keeps_everything(engine_process: Start) -> None:
    engine = engine_process()
    body = os.urandom(4 * MIB)
    idle, busy = Wire(engine.http), Wire(engine.http)
    assert idle.ask("PUT", "/kv/before", body).status == 201
    busy.send(busy.head("PUT", "/kv/during", Content_Length=len(body)) + body[: 2 * MIB])
    time.sleep(0.3)
    engine.process.send_signal(signal.SIGTERM)
    assert idle.closed()
    busy.send(body[2 * MIB :])
    answer = busy.answer()
    assert (answer.status, answer.stays) == (201, False)
    assert engine.stop() == 0
    engine.start()
    with Wire(engine.http) as wire:
        assert wire.ask("GET", "/kv/before").body == body
        assert wire.ask("GET", "/kv/during").body == body


def test_sigterm_does_not_wait_for_ever(engine_process: Start) -> None:
    engine = engine_process()
    with Wire(engine.http) as wire:
        wire.send(wire.head("PUT", "/kv/never", Content_Length=1000) + b"x")
        time.sleep(0.3)
        assert engine.stop(20) == 0


def _blocks(engine: EngineProcess) -> list[Path]:
    files = (path for path in (engine.root / "blocks").rglob("*.*.*") if path.is_file())
    return [path for path in files if path.stat().st_size > 8192]


def _flip(path: Path, at: int) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)
        file.seek(at)
        file.write(bytes([byte[0] ^ 1]))


def test_a_block_damaged_at_its_beginning_is_a_miss(engine_process: Start) -> None:
    engine = engine_process()
    with Wire(engine.http) as wire:
        wire.ask("PUT", "/kv/a", value_of("a"))
        (block,) = _blocks(engine)
        _flip(block, 4096 + 100)
        assert wire.ask("GET", "/kv/a").status == 404
        assert wire.ask("GET", "/kv/a").status == 404
        assert wire.ask("GET", "/kv/stats").json["total_refs"] == 0
        assert wire.ask("PUT", "/kv/a", value_of("a")).status == 201
        assert wire.ask("GET", "/kv/a").body == value_of("a")


def test_damage_further_back_cuts_the_connection_before_a_wrong_byte_leaves(engine_process: Start) -> None:
    engine = engine_process()
    body = os.urandom(8 * MIB)
    with Wire(engine.http) as wire:
        wire.ask("PUT", "/kv/a", body)
        (block,) = _blocks(engine)
        _flip(block, 4096 + 6 * MIB)
        wire.send(wire.head("GET", "/kv/a"))
        received = b""
        while data := wire.sock.recv(MIB):
            received += data
    got = received.partition(b"\r\n\r\n")[2]
    assert len(got) <= 6 * MIB
    assert body.startswith(got)
    with Wire(engine.http) as wire:
        assert wire.ask("GET", "/kv/a").status == 404


class Load:
    """Clients that put and get; what was acknowledged is remembered."""

    def __init__(self, engine: EngineProcess, seed: int) -> None:
        self.acknowledged: list[str] = []
        self._wrong: list[str] = []
        self._end = threading.Event()
        self._threads = [threading.Thread(target=self._client, args=(engine, seed, n)) for n in range(4)]
        for thread in self._threads:
            thread.start()

    def _client(self, engine: EngineProcess, seed: int, number: int) -> None:
        chance = random.Random(f"{seed}-{number}")
        try:
            with Wire(engine.http, timeout_s=30) as wire:
                turn = 0
                while not self._end.is_set():
                    turn += 1
                    key = f"{seed}-{number}-{turn}"
                    if wire.ask("PUT", f"/kv/{key}", value_of(key, 64 << 10)).status == 201:
                        self.acknowledged.append(key)
                    if self.acknowledged and chance.random() < 0.3:
                        other = chance.choice(self.acknowledged)
                        if wire.ask("GET", f"/kv/{other}").body != value_of(other, 64 << 10):
                            self._wrong.append(other)
        except (OSError, AssertionError):
            return  # the server is gone: that is the point

    def stop(self) -> list[str]:
        """Keys that were acknowledged; fails if one came back wrong while it ran."""
        self._end.set()
        for thread in self._threads:
            thread.join(60)
        assert not self._wrong
        return self.acknowledged


@pytest.mark.parametrize("rounds", [3, pytest.param(20, marks=pytest.mark.slow)])
def test_after_kill_9_under_load_everything_acknowledged_comes_back_right(engine_process: Start, rounds: int) -> None:
    engine = engine_process(CAPACITY_BYTES=4 << 30)
    kept: list[str] = []
    for seed in range(rounds):
        load = Load(engine, seed)
        until(lambda load=load: len(load.acknowledged) > 20)  # type: ignore[misc]
        time.sleep(random.Random(seed).random() * 0.3)
        engine.kill()
        kept += load.stop()
        engine.start()
        with Wire(engine.http) as wire:
            chosen = random.Random(seed).sample(kept, min(len(kept), 300)) + kept[-50:]
            for key in chosen:
                assert wire.ask("GET", f"/kv/{key}").body == value_of(key, 64 << 10), key
            stats = wire.ask("GET", "/kv/stats").json
            assert stats["total_refs"] >= len(kept)
            assert stats["logical_bytes"] == stats["total_refs"] * (64 << 10)


def test_counts_survive_a_restart(engine_process: Start) -> None:
    engine = engine_process()
    with Wire(engine.http) as wire:
        for number in range(5):
            wire.ask("PUT", f"/kv/{number}", value_of(str(number % 3)))
            wire.ask("GET", f"/kv/{number}")
        wire.ask("GET", "/kv/nope")
        before = wire.ask("GET", "/kv/stats").json
    engine.stop()
    engine.start()
    with Wire(engine.http) as wire:
        after = wire.ask("GET", "/kv/stats").json
    for shown in (before, after):  # a start merges the log: the names take less room then
        assert shown.pop("catalog_bytes") > 0
    assert json.dumps(after, sort_keys=True) == json.dumps(before, sort_keys=True)
    assert (after["unique_blocks"], after["total_refs"], after["get_hits"], after["get_misses"]) == (3, 5, 5, 1)


def _put(engine: EngineProcess, key: str) -> Answer:
    """2 MiB, on a connection of its own: a refused body is not read to its end."""
    with Wire(engine.http) as wire:
        return wire.ask("PUT", f"/kv/{key}", value_of(key, 2 * MIB))


def test_a_full_disk_refuses_puts_serves_gets_and_goes_on_by_itself(engine_process: Start, tmp_path: Path) -> None:
    with folder_on("tmpfs", tmp_path) as folder:
        engine = engine_process(root=folder / "engine", CAPACITY_BYTES=1 << 30)
        try:
            with Wire(engine.http) as wire:
                assert wire.ask("PUT", "/kv/before", value_of("before")).status == 201
                ballast = folder / "ballast"
                with pytest.raises(OSError), ballast.open("wb", buffering=0) as file:
                    while True:
                        file.write(bytes(MIB // 4))
                answers = [_put(engine, f"full-{n}") for n in range(5)]
                assert {answer.status for answer in answers} <= {503, 507}
                assert {answer.json["error"] for answer in answers} == {"Full"}
                assert wire.ask("GET", "/kv/before").body == value_of("before")
                assert wire.ask("GET", "/kv/full-0").status == 404
                assert wire.ask("GET", "/kv/stats").json["total_refs"] == 1
                ballast.unlink()
                until(lambda: _put(engine, "after").status in (200, 201), 60)
                assert wire.ask("GET", "/kv/after").body == value_of("after", 2 * MIB)
        finally:
            engine.kill()


def test_slow_readers_of_a_value_that_is_often_read_do_not_each_hold_a_copy(engine_process: Start) -> None:
    engine = engine_process(HOT_BYTES=64 * MIB, MEMORY_BYTES=64 * MIB)
    with Wire(engine.http) as wire:
        wire.ask("PUT", "/kv/a", value_of("a", 16 * MIB))
    idle, readers = engine.rss(), []
    for _ in range(20):
        readers.append(Wire(engine.http, receive_buffer=4096))
        readers[-1].send(readers[-1].head("GET", "/kv/a"))
        got = 0
        while got < 12 * MIB:
            got += len(readers[-1].sock.recv(MIB))
    assert engine.rss() - idle < 100 * MIB
    for reader in readers:
        reader.sock.close()


def test_json_of_many_small_things_takes_the_memory_of_one_request_at_most(engine_process: Start) -> None:
    engine = engine_process(MEMORY_BYTES=64 * MIB)
    body = b'{"keys": [], "x": [' + b"[]," * 2_600_000 + b"[]]}"
    with ThreadPoolExecutor(6) as pool:

        def ask(_: int) -> int:
            with Wire(engine.http, timeout_s=60) as wire:
                return wire.ask("POST", "/kv/batch/exists", body).status

        assert set(pool.map(ask, range(6))) == {200}
    assert engine.peak_rss() < 340 * MIB
