"""What tenants share is divided between them: none takes another's part, and no number tells of another."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path

import pytest

from kvstrata.engine.auth import Tokens
from kvstrata.engine.buffers import Budget, Busy
from kvstrata.engine.content import Engine
from kvstrata.engine.errors import Full
from tests.engine.engines import MIB, Opener, data, get, reopening, settings, until
from tests.engine.process import EngineProcess
from tests.engine.resp_parts import OTHER, READER, TOKEN, Client, encoded, server
from tests.engine.wire import Wire


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[Opener]:
    """Open the engine below tmp_path for two tenants, closing one that is open."""

    def start(**more: object) -> Engine:
        return Engine.open(settings(tmp_path / "engine", 32 * MIB, **more), lambda: 2)

    with reopening(start) as open_it:
        yield open_it


def fill(engine: Engine, tenant: str, count: int = 6) -> list[bytes]:
    """So many values of a MiB; their keys."""
    keys = [b"%d" % number for number in range(count)]
    for number, key in enumerate(keys):
        engine.put(tenant, key, memoryview(data(number, MIB)))
    return keys


def test_promises_to_one_tenant_leave_those_to_another(opened: Opener) -> None:
    engine = opened(lease_share=0.25)
    keys = fill(engine, "a"), fill(engine, "b")
    assert engine.exists("a", keys[0], lease_s=60) == [True] * 4 + [False] * 2
    assert engine.exists("b", keys[1], lease_s=60) == [True] * 4 + [False] * 2


def test_snapshots_of_one_tenant_leave_room_for_those_of_another(opened: Opener) -> None:
    engine = opened(fork_share=0.25)
    for _ in range(2):
        for tenant in ("a", "b"):
            keys = fill(engine, tenant)
            with pytest.raises(Full):
                engine.snapshot(tenant, keys)
            engine.snapshot(tenant, keys[:4])
        for tenant in ("a", "b"):
            with pytest.raises(Full):
                engine.snapshot(tenant, keys)
        engine = opened(fork_share=0.25)


def test_names_in_snapshots_of_one_tenant_leave_room_for_those_of_another(opened: Opener) -> None:
    engine = opened()
    for tenant in ("a", "b"):
        long = [b"%04d" % number + b"." * 4000 for number in range(3)]
        for key in long:
            engine.put(tenant, key, memoryview(b"v"))
    with pytest.raises(Full):
        for _ in range(1000):
            engine.snapshot("a", long)
    engine.snapshot("b", long)


def test_a_tenant_that_has_all_its_names_promised_leaves_room_for_those_of_another(opened: Opener) -> None:
    engine = opened()
    with pytest.raises(Full):
        for number in range(3000):
            key = b"%04d" % number + b"." * 4000
            engine.put("a", key, memoryview(b"v"))
            assert engine.exists("a", [key], lease_s=60) == [True]
    before = engine.count("a")
    for number in range(50):
        engine.put("b", b"%04d" % number + b"." * 4000, memoryview(b"v"))
    assert engine.count("b") == 50
    # It keeps its half.
    assert before // 2 <= engine.count("a") < before


def test_numbers_of_snapshots_and_branches_tell_nothing_of_others(opened: Opener) -> None:
    engine = opened()
    keys = fill(engine, "a", 1)
    numbers = []
    for _ in range(10):
        numbers.append(engine.snapshot("a", keys)[0])
        numbers.append(engine.fork("a", numbers[-1]))
    assert len(set(numbers)) == 20
    assert all(abs(one - other) > 1000 for one in numbers for other in numbers if one != other)
    # JSON numbers of many clients are doubles.
    assert all(0 < number < 1 << 53 for number in numbers)
    engine = opened()
    assert engine.fork_stats("a")["branches"] == 10
    assert engine.branch_put("a", numbers[-1], b"k", memoryview(b"v")).new
    assert get(engine, keys[0]) == data(0, MIB)


def test_a_tenants_cursors_are_neither_lost_nor_counted_by_anothers_scans(tmp_path: Path) -> None:
    with (
        server(tmp_path, tokens=True) as found,
        Client(found.port) as mine,
        Client(found.port) as other,
    ):
        for client, token in ((mine, TOKEN), (other, OTHER)):
            client("AUTH", token)
            for number in range(4):
                client("SET", f"k{number}", "v")
        cursor, first = mine("SCAN", 0, "COUNT", 2)
        cursors = [int(other("SCAN", 0, "COUNT", 2)[0]) for _ in range(5000)]
        steps = {after - before for before, after in pairwise(cursors)}
        assert len(steps) > 4000
        end, rest = mine("SCAN", int(cursor), "COUNT", 100)
        assert sorted(first + rest) == [b"k0", b"k1", b"k2", b"k3"]
        assert end == b"0"


def test_connections_have_no_numbers_in_a_row(tmp_path: Path) -> None:
    with server(tmp_path, tokens=True) as found:
        numbers = []
        for _ in range(5):
            with Client(found.port) as client:
                client("AUTH", READER)
                numbers.append(client("CLIENT", "ID"))
    assert all(abs(one - other) > 1000 for one in numbers for other in numbers if one != other)
    assert len(set(numbers)) == 5


def test_tenants_are_those_of_the_tokens_file(tmp_path: Path) -> None:
    file = tmp_path / "tokens"
    file.write_text("one rw a 0123456789abcdef-1\ntwo ro a 0123456789abcdef-2\nthree rw b 0123456789abcdef-3\n")
    assert Tokens(file).tenants == 2
    assert Tokens(None).tenants == 1


def test_bodies_of_one_tenant_leave_memory_for_those_of_another() -> None:
    budget = Budget(4 * MIB, lambda: 2)
    with budget.take(MIB, 0, "a"), budget.take(MIB, 0, "a"):
        with pytest.raises(Busy), budget.take(MIB, 0, "a"):
            pass
        with budget.take(2 * MIB, 0, "b"):
            assert budget.used == 4 * MIB
    with budget.take(4 * MIB, 0, "a"):  # one body of any size fits
        assert budget.used == 4 * MIB


def test_who_waits_for_his_own_memory_holds_up_no_other_tenant() -> None:
    budget = Budget(4 * MIB, lambda: 2)
    served = threading.Event()

    def more() -> None:
        with budget.take(MIB, 30, "a"):
            served.set()

    waiting = threading.Thread(target=more)
    with budget.take(2 * MIB, 0, "a"):
        waiting.start()
        until(lambda: budget.waiting == 1)
        with budget.take(2 * MIB, 0, "b"):
            assert not served.is_set()
    waiting.join(30)
    assert served.is_set()


@contextmanager
def slow_bodies(engine: EngineProcess, *token: str) -> Iterator[None]:
    """More bodies that have begun, and do not end, than there are threads."""
    slow = [Wire(engine.http, *token) for _ in range(300)]
    for one in slow:
        one.send(one.head("POST", "/kv/batch/exists", Content_Length=100) + b"{")
    yield
    for one in slow:
        one.sock.close()


def test_slow_bodies_of_one_tenant_leave_threads_for_another(
    engine_process: Callable[..., EngineProcess], tmp_path: Path
) -> None:
    tokens = tmp_path / "tokens"
    tokens.write_text(f"one ro a {READER}\ntwo rw b {OTHER}\n")
    engine = engine_process(TOKENS_FILE=tokens)
    with slow_bodies(engine, READER), Wire(engine.http, OTHER) as wire:
        assert wire.ask("GET", "/healthz").status == 200
        assert wire.ask("PUT", "/kv/here", b"x").status == 201


def test_slow_values_of_one_tenant_over_resp_leave_threads_for_another(
    engine_process: Callable[..., EngineProcess], tmp_path: Path
) -> None:
    tokens = tmp_path / "tokens"
    tokens.write_text(f"one rw a {TOKEN}\ntwo rw b {OTHER}\n")
    engine = engine_process(TOKENS_FILE=tokens, RESP="127.0.0.1:0")
    slow = [Client(engine.resp[1]) for _ in range(300)]
    for one in slow:
        one.raw(encoded(["AUTH", TOKEN]) + b"*3\r\n$3\r\nSET\r\n$1\r\nk\r\n$20000\r\nbegun")
    with Client(engine.resp[1]) as client:
        assert client("AUTH", OTHER) == "OK"
        assert client("SET", "here", "x") == "OK"
    replies = [one.reply() for one in slow]
    assert {reply for reply in replies if reply != "OK"} == {"ERR too many commands of this tenant at once; try again"}
    assert replies.count("OK") == 128
    for one in slow:
        one.sock.close()


def test_slow_bodies_of_the_only_tenant_leave_threads_for_the_open_pages(
    engine_process: Callable[..., EngineProcess],
) -> None:
    engine = engine_process()
    with slow_bodies(engine), Wire(engine.http) as wire:
        assert [wire.ask("GET", path).status for path in ("/healthz", "/readyz")] == [200, 200]


@pytest.mark.parametrize("method", ["PUT", "GRAB"])
def test_bodies_of_strangers_that_never_come_hold_nobody_up(
    engine_process: Callable[..., EngineProcess], tmp_path: Path, method: str
) -> None:
    tokens = tmp_path / "tokens"
    tokens.write_text(f"one rw a {TOKEN}\n")
    engine = engine_process(TOKENS_FILE=tokens)
    strangers = [Wire(engine.http) for _ in range(300)]
    for one in strangers:
        one.send(one.head(method, "/kv/k", Content_Length=1000) + b"begun")
    assert {one.answer().status for one in strangers} == {401 if method == "PUT" else 501}
    with Wire(engine.http, TOKEN) as wire:
        assert wire.ask("PUT", "/kv/here", b"x").status == 201
    for one in strangers:
        one.sock.close()


@pytest.mark.parametrize("protocol", ["http", "resp"])
def test_strangers_who_do_not_read_their_answers_are_cut(
    engine_process: Callable[..., EngineProcess], tmp_path: Path, protocol: str
) -> None:
    tokens = tmp_path / "tokens"
    tokens.write_text(f"one rw a {TOKEN}\n")
    engine = engine_process(TOKENS_FILE=tokens, RESP="127.0.0.1:0", HEADER_S=600)
    with Wire(getattr(engine, protocol), receive_buffer=4096) as wire:
        asked = wire.head("GET", "/healthz") if protocol == "http" else b"*1\r\n$3\r\nGET\r\n"
        with pytest.raises((ConnectionResetError, BrokenPipeError)):
            while True:
                wire.send(asked * 1000)
