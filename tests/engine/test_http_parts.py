"""The parts under the protocols: the budget of buffers, the listener's connections."""

from __future__ import annotations

import socket
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress

import pytest

from kvstrata.engine.buffers import Budget, Busy, TooBig
from kvstrata.engine.listener import Connection, Listener, NotYet
from tests.engine.process import until

KIB, MIB = 1 << 10, 1 << 20


@pytest.mark.parametrize("size", [0, 1, 64 * KIB, 64 * KIB + 1, MIB, MIB + 1, 3_000_000])
def test_a_buffer_has_just_the_size_that_was_asked_for(size: int) -> None:
    budget = Budget(16 * MIB)
    with budget.take(size, 1) as view:
        assert len(view) == size
        view[:] = b"x" * size
        assert size <= budget.used <= max(64 * KIB, size * 1.25)
    assert budget.used == 0


def test_what_is_more_than_the_whole_budget_is_refused_at_once() -> None:
    with pytest.raises(TooBig), Budget(MIB).take(2 * MIB, 10):
        pass


def test_a_spent_budget_is_busy_until_something_comes_back() -> None:
    budget = Budget(4 * MIB)
    with budget.take(3 * MIB, 1):
        with pytest.raises(Busy), budget.take(2 * MIB, 0.05):
            pass
        with budget.take(MIB, 0.05) as view:
            assert len(view) == MIB
    with budget.take(4 * MIB, 0.05) as view:
        assert len(view) == 4 * MIB


def test_a_large_request_is_not_passed_over_for_ever_by_small_ones() -> None:
    budget = Budget(4 * MIB)
    order: list[str] = []
    release = threading.Event()

    def hold() -> None:
        with budget.take(2 * MIB, 5):
            release.wait(10)

    def take(name: str, size: int) -> None:
        with budget.take(size, 10):
            order.append(name)

    holder = threading.Thread(target=hold)
    holder.start()
    until(lambda: budget.used == 2 * MIB)
    large = threading.Thread(target=take, args=("large", 4 * MIB))
    large.start()
    until(lambda: budget.waiting == 1)
    small = threading.Thread(target=take, args=("small", MIB))  # would fit now, but came later
    small.start()
    until(lambda: budget.waiting == 2)
    release.set()
    for thread in (holder, large, small):
        thread.join(10)
    assert order == ["large", "small"]


def test_who_gives_up_waiting_lets_the_next_one_pass() -> None:
    budget = Budget(4 * MIB)
    done = threading.Event()

    def small() -> None:
        with budget.take(MIB, 10):
            done.set()

    def impatient() -> None:
        with suppress(Busy), budget.take(4 * MIB, 0.3):
            pass

    with budget.take(2 * MIB, 1):
        waiting = threading.Thread(target=impatient)
        waiting.start()
        until(lambda: budget.waiting == 1)
        thread = threading.Thread(target=small)
        thread.start()
        assert done.wait(10)
    waiting.join(10)
    thread.join(10)


def test_many_threads_never_hold_more_than_the_budget() -> None:
    budget = Budget(8 * MIB)
    most = 0

    def work(number: int) -> None:
        nonlocal most
        for turn in range(50):
            with budget.take((number * 7 + turn * 13) % 40 * 50 * KIB + 1, 30) as view:
                most = max(most, budget.used)
                view[0] = view[-1] = 1

    threads = [threading.Thread(target=work, args=(number,)) for number in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert budget.used == 0
    assert 0 < most <= budget.total


@pytest.fixture
def listen() -> Iterator[Callable[..., Listener]]:
    """Start a listener with a handler."""
    started: list[Listener] = []

    def start(serve: Callable[[Connection], bool], **more: object) -> Listener:
        started.append(Listener("127.0.0.1", 0, serve, **more).start())  # type: ignore[arg-type]
        return started[-1]

    yield start
    for one in started:
        one.stop(0)


def echo(connection: Connection) -> bool:
    """Sends back each line."""
    while True:
        while b"\n" not in connection.buffered:
            try:
                if not connection.fill():
                    return False
            except NotYet:
                return True
        line, _, rest = bytes(connection.buffered).partition(b"\n")
        connection.buffered[:] = rest
        connection.send(line + b"\n")
        if connection.stopping:
            return False


def test_a_parked_connection_goes_on_where_it_was(listen: Callable[..., Listener]) -> None:
    listener = listen(echo)
    with socket.create_connection(listener.address, timeout=10) as sock:
        for part in (b"he", b"ll", b"o\nwor"):
            sock.sendall(part)
            time.sleep(0.15)  # longer than the linger: it is parked in between, with what it has
        assert sock.recv(100) == b"hello\n"
        sock.sendall(b"ld\n")
        assert sock.recv(100) == b"world\n"


def test_a_fault_in_a_handler_ends_that_connection_alone(
    listen: Callable[..., Listener], caplog: pytest.LogCaptureFixture
) -> None:
    def serve(connection: Connection) -> bool:
        connection.fill()
        if connection.buffered.startswith(b"bad"):
            raise RuntimeError("planted")
        return echo(connection)

    listener = listen(serve)
    with socket.create_connection(listener.address, timeout=10) as sock:
        sock.sendall(b"bad\n")
        assert sock.recv(1) == b""
    assert "planted" in caplog.text
    with socket.create_connection(listener.address, timeout=10) as sock:
        sock.sendall(b"good\n")
        assert sock.recv(100) == b"good\n"
    until(lambda: listener.open_connections == 0)


def test_stuck_workers_do_not_keep_others_waiting(listen: Callable[..., Listener]) -> None:
    release = threading.Event()

    def serve(connection: Connection) -> bool:
        connection.fill()
        if connection.buffered.startswith(b"wait"):
            release.wait(20)
            return False
        return echo(connection)

    listener = listen(serve, workers=2, max_workers=20)
    stuck = [socket.create_connection(listener.address, timeout=10) for _ in range(8)]
    for one in stuck:
        one.sendall(b"wait\n")
    with socket.create_connection(listener.address, timeout=10) as sock:
        sock.sendall(b"me\n")
        assert sock.recv(100) == b"me\n"
    release.set()
    for one in stuck:
        assert one.recv(1) == b""
        one.close()
    until(lambda: listener.busy_connections == 0)


def test_who_sends_byte_by_byte_gives_his_thread_to_those_that_wait(listen: Callable[..., Listener]) -> None:
    listener = listen(echo, workers=1, max_workers=1)
    served = threading.Event()
    slow = socket.create_connection(listener.address, timeout=10)

    def drip() -> None:
        while not served.wait(0.001):  # never long enough for the linger to end
            slow.sendall(b"x")

    dripping = threading.Thread(target=drip)
    dripping.start()
    until(lambda: listener.busy_connections == 1)
    try:
        with socket.create_connection(listener.address, timeout=10) as sock:
            sock.sendall(b"me\n")
            assert sock.recv(100) == b"me\n"
    finally:
        served.set()
        dripping.join(10)
        slow.close()


def test_who_asks_without_a_pause_takes_turns_with_those_that_wait(listen: Callable[..., Listener]) -> None:
    listener = listen(echo, workers=1, max_workers=1)
    done, answers = threading.Event(), 0

    def ask() -> None:
        nonlocal answers
        with socket.create_connection(listener.address, timeout=10) as sock:
            while not done.is_set():
                sock.sendall(b"again\n")
                assert sock.recv(100) == b"again\n"
                answers += 1

    asking = threading.Thread(target=ask)
    asking.start()
    until(lambda: answers > 0)
    between = []
    try:
        for _ in range(9):
            with socket.create_connection(listener.address, timeout=10) as sock:
                before = answers
                sock.sendall(b"me\n")
                assert sock.recv(100) == b"me\n"
                between.append(answers - before)
    finally:
        done.set()
        asking.join(10)
    assert statistics.median(between) < 100, "one turn, and what fits in while the poller wakes"


def test_many_clients_on_few_workers_are_all_served(listen: Callable[..., Listener]) -> None:
    listener = listen(echo, workers=2, max_workers=2)
    wrong: list[object] = []

    def client(number: int) -> None:
        with socket.create_connection(listener.address, timeout=60) as sock:
            for turn in range(20):
                sock.sendall(b"%d-%d\n" % (number, turn))
                if (said := sock.recv(100)) != b"%d-%d\n" % (number, turn):
                    wrong.append(said)

    threads = [threading.Thread(target=client, args=(number,)) for number in range(50)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not wrong
    assert listener.accepted == 50


def test_stop_ends_idle_connections_and_cuts_the_rest(listen: Callable[..., Listener]) -> None:
    def serve(connection: Connection) -> bool:
        connection.fill()
        connection.read_into(memoryview(bytearray(100)))
        return True

    listener = listen(serve)
    with socket.create_connection(listener.address) as idle, socket.create_connection(listener.address) as busy:
        busy.sendall(b"x")
        time.sleep(0.3)
        assert listener.stop(1.0) == 1
        for sock in (idle, busy):
            sock.settimeout(10)
            assert sock.recv(1) == b""
        with pytest.raises(OSError):
            socket.create_connection(listener.address, timeout=1)
