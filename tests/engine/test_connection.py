"""A listener's connections where others wait for a thread, where it stops, and where the peer is slow."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from kvstrata.engine.connection import Connection, Crowd, NotYet
from kvstrata.engine.listener import Listener


class Counting(socket.socket):
    """Counts the calls that receive."""

    calls = 0

    def recv(self, *args: Any) -> bytes:
        self.calls += 1
        return super().recv(*args)

    def recv_into(self, *args: Any) -> int:
        self.calls += 1
        return super().recv_into(*args)


@pytest.fixture
def pair() -> Iterator[tuple[Counting, socket.socket]]:
    ours, theirs = socket.socketpair()
    counting = Counting(fileno=ours.detach())
    with counting, theirs:
        yield counting, theirs


@pytest.mark.parametrize("waiting", [0, 1])
def test_who_stops_takes_the_rest_of_a_request_that_has_arrived(
    pair: tuple[Counting, socket.socket], waiting: int
) -> None:
    ours, theirs = pair
    connection = Connection(ours, "peer", crowd=Crowd(waiting, stopping=True))
    for part in (b"GET / HT", b"TP/1.1\r\n", b"\r\n"):
        theirs.sendall(part)
        assert connection.fill() == len(part)
    with pytest.raises(NotYet):
        connection.fill()


def test_who_stops_is_not_held_by_a_peer_that_asks_without_an_end(pair: tuple[Counting, socket.socket]) -> None:
    ours, theirs = pair
    connection = Connection(ours, "peer", crowd=Crowd(stopping=True))
    theirs.sendall(b"x" * (80 << 10))
    connection.fill()
    connection.buffered.clear()  # answered
    with pytest.raises(NotYet):
        connection.fill()
    with pytest.raises(NotYet):
        for _ in range(100):
            theirs.sendall(b"x")
            connection.fill()
            connection.buffered[:] = b"the beginning of another one"


@pytest.mark.parametrize("way", ["read_into", "skip", "wait"])
def test_a_slow_peer_costs_hardly_any_calls_and_the_next_request_no_wait(
    pair: tuple[Counting, socket.socket], way: str
) -> None:
    ours, theirs = pair
    connection = Connection(ours, "peer")

    def later() -> None:
        time.sleep(0.5)
        theirs.sendall(b"x")

    sending = threading.Thread(target=later)
    sending.start()
    match way:
        case "read_into":
            connection.read_into(memoryview(bytearray(1)))
        case "skip":
            connection.skip(1)
        case _:
            connection.wait()
    sending.join(10)
    assert ours.calls < 5
    began = time.monotonic()
    with pytest.raises(NotYet):
        connection.fill()
    assert time.monotonic() - began < 0.4


def test_what_came_as_the_stop_began_is_answered() -> None:
    parking, go = threading.Event(), threading.Event()

    def serve(connection: Connection) -> bool:
        try:
            connection.fill()
        except NotYet:
            return True
        if connection.buffered != b"whole":  # gives its thread to others, as it is told to stop and the rest arrives
            parking.set()
            assert go.wait(10)
            return True
        connection.send(b"answer")
        return False

    listener = Listener("127.0.0.1", 0, serve, workers=1).start()
    with socket.create_connection(listener.address, timeout=10) as sock:
        sock.sendall(b"who")
        assert parking.wait(10)
        stopping = threading.Thread(target=listener.stop, args=(10,))
        stopping.start()
        while not listener._crowd.stopping:
            time.sleep(0.001)
        sock.sendall(b"le")
        time.sleep(0.05)
        go.set()
        assert sock.recv(10) == b"answer"
    stopping.join(10)
    assert not stopping.is_alive()


def test_a_system_that_gives_no_thread_keeps_them_waiting_and_ends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    start, refused = threading.Thread.start, 0

    def refuse(thread: threading.Thread) -> None:
        nonlocal refused
        if thread.name.startswith("few-") and thread.name != "few-poll" and refused < 2:
            refused += 1
            raise RuntimeError("can't start new thread")
        start(thread)

    def serve(connection: Connection) -> bool:
        if not connection.fill():
            return False
        connection.send(bytes(connection.buffered))
        connection.buffered.clear()
        return True

    monkeypatch.setattr(threading.Thread, "start", refuse)
    listener = Listener("127.0.0.1", 0, serve, name="few", workers=2).start()
    try:
        with socket.create_connection(listener.address, timeout=10) as sock:
            sock.sendall(b"me")
            assert sock.recv(10) == b"me"
        assert refused == 2 and listener.busy_connections <= 1
    finally:
        listener.stop(0)
