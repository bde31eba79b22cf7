"""Where one request ends and the next begins: connections that stay, pipelines, chunks, and what is ambiguous."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable

import pytest

from tests.engine.process import EngineProcess, until
from tests.engine.wire import Wire

H = b"HTTP/1.1\r\nHost: h\r\n"


def test_a_connection_serves_many_requests(wire: Wire) -> None:
    for number in range(50):
        assert wire.ask("PUT", f"/kv/many-{number}", b"%d" % number).status == 201
    assert [wire.ask("GET", f"/kv/many-{n}").body for n in range(50)] == [b"%d" % n for n in range(50)]


def test_pipelined_requests_are_answered_in_order(wire: Wire) -> None:
    values = [os.urandom(70_000) for _ in range(20)]
    for number, value in enumerate(values):
        wire.send(wire.head("PUT", f"/kv/pipe-{number}", Content_Length=len(value)) + value)
        wire.send(wire.head("GET", f"/kv/pipe-{number}"))
    for value in values:
        assert wire.answer().status == 201
        assert wire.answer().body == value


def test_a_request_may_arrive_byte_by_byte(wire: Wire) -> None:
    for byte in wire.head("PUT", "/kv/slowly", Content_Length=3) + b"abc":
        wire.send(bytes([byte]))
    assert wire.answer().status == 201


def test_connection_close_is_obeyed(engine: EngineProcess) -> None:
    with Wire(engine.http) as wire:
        assert not wire.ask("GET", "/healthz", Connection="close").stays
        assert wire.closed()


@pytest.mark.parametrize(("line", "stays"), [(b"", False), (b"Connection: keep-alive\r\n", True)])
def test_http_1_0_stays_only_when_asked(engine: EngineProcess, line: bytes, stays: bool) -> None:
    with Wire(engine.http) as wire:
        wire.send(b"GET /healthz HTTP/1.0\r\n" + line + b"\r\n")
        answer = wire.answer()
        assert (answer.status, answer.stays) == (200, stays)
        assert stays or wire.closed()


def test_expect_is_answered_before_the_body_comes(wire: Wire) -> None:
    wire.send(wire.head("PUT", "/kv/expected", Content_Length=5, Expect="100-continue"))
    assert wire.answer().status == 100
    wire.send(b"hello")
    assert wire.answer().status == 201
    assert wire.ask("GET", "/kv/expected").body == b"hello"


def test_a_refused_expectation_gets_no_100_and_the_connection_ends(engine: EngineProcess) -> None:
    with Wire(engine.http) as wire:
        wire.send(wire.head("PUT", "/kv/x", Content_Length=(64 << 20) + 1, Expect="100-continue"))
        answer = wire.answer()
        assert (answer.status, answer.stays) == (413, False)
        assert wire.closed()


def test_another_expectation_is_417(engine: EngineProcess) -> None:
    with Wire(engine.http) as wire:
        wire.send(wire.head("PUT", "/kv/x", Content_Length=1, Expect="200-maybe"))
        assert wire.answer().status == 417


def test_a_chunked_body_is_joined_and_what_follows_is_the_next_request(wire: Wire) -> None:
    wire.send(wire.head("PUT", "/kv/chunked", Transfer_Encoding="chunked"))
    wire.send(b"4\r\nwiki\r\n5;ext=1\r\npedia\r\n0\r\nTrailer: x\r\n\r\n" + wire.head("GET", "/kv/chunked"))
    assert wire.answer().status == 201
    assert wire.answer().body == b"wikipedia"


@pytest.mark.parametrize(
    "body",
    [b"x\r\n", b"-1\r\nab\r\n", b"5\r\nab\r\n0\r\n\r\n", b"2\r\nabXX0\r\n\r\n", b"0x2\r\nab\r\n0\r\n\r\n",
     b"2 \x00\r\nab"],
)  # fmt: skip
def test_a_bad_chunk_stores_nothing_and_ends_the_connection(engine: EngineProcess, body: bytes) -> None:
    with Wire(engine.http) as wire:
        wire.send(wire.head("PUT", "/kv/badchunk", Transfer_Encoding="chunked") + body)
        wire.sock.shutdown(socket.SHUT_WR)
        answer = wire.answer()
        assert (answer.status, answer.stays) == (400, False)
        assert wire.closed()
    with Wire(engine.http) as wire:
        assert wire.ask("GET", "/kv/badchunk").status == 404


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (b"GET /healthz HTTP/1.1\nHost: h\n\n", 400),
        (b"GET /healthz HTTP/1.1\r\nHost: h\n", 400),
        (b"GET /healthz\n", 400),
        (b"PUT /kv/s " + H + b"Transfer-Encoding: chunked\r\n\r\n5\n", 400),
        (b"PUT /kv/s " + H + b"Transfer-Encoding: chunked\r\n\r\n2\r\nab\n", 400),
        (b"PUT /kv/s " + H + b"Transfer-Encoding: chunked\r\n\r\n2\r\nabXX", 400),
        (b"PUT /kv/s " + H + b"Transfer-Encoding: chunked\r\n\r\n0\r\nX: y\n", 400),
        (b"PUT /kv/s " + H + b"Transfer-Encoding: chunked\r\n\r\n0\r\nno trailer\r\n", 400),
        (b"PUT /kv/s " + H + b"Transfer-Encoding: chunked\r\n\r\n10000000000000000\r\n", 413),
        (b"PUT /kv/s " + H + b"Transfer-Encoding: chunked\r\n\r\n4000001\r\n", 413),
        (b"PUT /kv/s " + H + b"Transfer-Encoding: chunked\r\n\r\n1;" + b"e" * 10_000, 400),
        (b"PUT /kv/s " + H + b"Transfer-Encoding: chunked\r\n\r\n0\r\n" + b"X: y\r\n" * 10_000, 400),
    ],
)  # fmt: skip
def test_what_cannot_come_right_is_refused_before_its_time_is_over(
    engine: EngineProcess, sent: bytes, status: int
) -> None:
    with Wire(engine.http) as wire:
        wire.send(sent)
        answer = wire.answer()
        assert (answer.status, answer.stays) == (status, False)


def test_a_chunked_body_may_be_cut_anywhere(wire: Wire) -> None:
    body = b'4\r\nwiki\r\n0005;ext="1" ; x\r\npedia\r\n00\r\nTrailer: x\r\n\r\n'
    for byte in wire.head("PUT", "/kv/drop-by-drop", Transfer_Encoding="chunked") + body:
        wire.send(bytes([byte]))
    assert wire.answer().status == 201
    assert wire.ask("GET", "/kv/drop-by-drop").body == b"wikipedia"


@pytest.mark.parametrize(("version", "status"), [("1.2", 200), ("1.9", 200), ("2.0", 505), ("3.1", 505), ("0.9", 505)])
def test_a_later_minor_version_is_served_as_1_1_and_another_major_one_is_505(
    engine: EngineProcess, version: str, status: int
) -> None:
    with Wire(engine.http) as wire:
        wire.send(f"GET /healthz HTTP/{version}\r\nHost: h\r\n\r\n".encode())
        answer = wire.answer()
        assert (answer.status, answer.stays) == (status, status == 200)


def test_chunks_beyond_the_limit_are_413(engine_process: object) -> None:
    engine = engine_process(MAX_VALUE_BYTES=100_000)  # type: ignore[operator]
    with Wire(engine.http) as wire:
        wire.send(wire.head("PUT", "/kv/x", Transfer_Encoding="chunked"))
        for _ in range(3):
            wire.send(b"C350\r\n" + b"x" * 50_000 + b"\r\n")
        assert wire.answer().status == 413


# Each of these leaves two readers in doubt where the body ends, or what the target is.
AMBIGUOUS = {
    "two lengths": b"PUT /kv/s " + H + b"Content-Length: 3\r\nContent-Length: 4\r\n\r\nabcd",
    "the same length twice": b"PUT /kv/s " + H + b"Content-Length: 3\r\nContent-Length: 3\r\n\r\nabc",
    "a list of lengths": b"PUT /kv/s " + H + b"Content-Length: 3, 3\r\n\r\nabc",
    "length and chunks": b"PUT /kv/s " + H + b"Content-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "chunks and length": b"PUT /kv/s " + H + b"Transfer-Encoding: chunked\r\nContent-Length: 3\r\n\r\n0\r\n\r\n",
    "a length with a sign": b"PUT /kv/s " + H + b"Content-Length: +3\r\n\r\nabc",
    "a negative length": b"PUT /kv/s " + H + b"Content-Length: -3\r\n\r\nabc",
    "a length in hex": b"PUT /kv/s " + H + b"Content-Length: 0x3\r\n\r\nabc",
    "a length beyond 64 bits": b"PUT /kv/s " + H + b"Content-Length: 99999999999999999999999\r\n\r\nabc",
    "a blank before the colon": b"PUT /kv/s " + H + b"Content-Length : 3\r\n\r\nabc",
    "a folded header": b"PUT /kv/s " + H + b"X: a\r\n Content-Length: 3\r\n\r\nabc",
    "a bare line feed": b"PUT /kv/s " + H + b"X: a\nContent-Length: 3\r\n\r\nabc",
    "a bare carriage return": b"PUT /kv/s " + H + b"X: a\rContent-Length: 3\r\n\r\nabc",
    "a zero byte": b"PUT /kv/s " + H + b"X: a\x00\r\nContent-Length: 3\r\n\r\nabc",
    "an unknown coding": b"PUT /kv/s " + H + b"Transfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n",
    "nearly chunked": b"PUT /kv/s " + H + b"Transfer-Encoding: xchunked\r\n\r\n0\r\n\r\n",
    "chunked and something after": b"PUT /kv/s " + H + b"Transfer-Encoding: chunked, identity\r\n\r\n0\r\n\r\n",
    "chunked twice": b"PUT /kv/s " + H + b"Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "chunks in HTTP/1.0": b"PUT /kv/s HTTP/1.0\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "two hosts": b"GET /kv/s " + H + b"Host: other\r\n\r\n",
    "no host": b"GET /kv/s HTTP/1.1\r\n\r\n",
    "two tokens": b"GET /kv/s " + H + b"Authorization: Bearer a\r\nAuthorization: Bearer b\r\n\r\n",
    "two blanks": b"GET  /kv/s " + H + b"\r\n",
    "a tab": b"GET\t/kv/s " + H + b"\r\n",
    "a blank in the target": b"GET /kv/s t " + H + b"\r\n",
    "a high byte in the target": b"GET /kv/\xff " + H + b"\r\n",
    "a fragment": b"GET /kv/s#t " + H + b"\r\n",
    "HTTP/0.9": b"GET /kv/s\r\n\r\n",
    "HTTP/2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "no version that is known": b"GET /kv/s HTTP/3.1\r\nHost: h\r\n\r\n",
    "no method that is known": b"GRAB /kv/s " + H + b"\r\n",
    "TLS on a plain port": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n",
}


@pytest.mark.parametrize("what", AMBIGUOUS)
def test_an_ambiguous_request_is_refused_and_nothing_after_it_is_read(engine: EngineProcess, what: str) -> None:
    with Wire(engine.http) as wire:
        wire.send(AMBIGUOUS[what] + b"PUT /kv/smuggled " + H + b"Content-Length: 1\r\n\r\nx")
        answer = wire.answer()
        assert answer.status in (400, 501, 505)
        assert not answer.stays
        assert wire.closed()
    with Wire(engine.http) as wire:
        assert wire.ask("GET", "/kv/smuggled").status == 404
        assert wire.ask("GET", "/kv/s").status == 404


def test_a_body_that_is_longer_than_announced_is_the_next_request(engine: EngineProcess) -> None:
    with Wire(engine.http) as wire:
        wire.send(wire.head("PUT", "/kv/lies", Content_Length=3) + b"abcdefgh\r\n\r\n")
        assert wire.answer().status == 201
        assert not wire.answer().stays
    with Wire(engine.http) as wire:
        assert wire.ask("GET", "/kv/lies").body == b"abc"


@pytest.mark.parametrize("announced", [5000, 5_000_000])
def test_a_body_cut_short_is_never_stored(engine: EngineProcess, announced: int) -> None:
    path = f"/kv/short-{announced}"
    with Wire(engine.http) as wire:
        wire.send(wire.head("PUT", path, Content_Length=announced) + b"x" * 4000)
        wire.sock.shutdown(socket.SHUT_WR)
        assert wire.answer().json["error"] == "ShortBody"
    with Wire(engine.http) as wire:
        wire.send(wire.head("PUT", path, Content_Length=announced) + b"x" * 4000)
    with Wire(engine.http) as wire:
        assert wire.ask("GET", path).status == 404
        assert wire.ask("PUT", path, b"whole").status == 201


def test_bytes_of_bodies_are_counted_as_they_are_read(engine_process: Callable[..., EngineProcess]) -> None:
    engine = engine_process()  # the other tests' may still be reading bodies

    def received() -> int:
        with Wire(engine.http) as look:
            text = look.ask("GET", "/metrics").body.decode()
        return int(float(text.split("\nkvstrata_engine_received_bytes_total ")[1].split("\n")[0]))

    before = received()
    with Wire(engine.http) as wire:
        assert wire.ask("PUT", "/kv/counted", b"x" * 3_000_000).status == 201
        assert wire.ask("PUT", "/kv/counted", b"x" * 3_000_000).status == 200
        wire.send(wire.head("PUT", "/kv/big", Content_Length=(64 << 20) + 1, Expect="100-continue"))
        assert wire.answer().status == 413
    with Wire(engine.http) as wire:
        wire.send(wire.head("PUT", "/kv/cut", Content_Length=5_000_000) + b"x" * 4000)
        wire.sock.shutdown(socket.SHUT_WR)
        assert wire.answer().status == 400
    until(lambda: received() - before == 6_004_000)


def test_put_without_any_length_is_411_and_the_connection_stays(wire: Wire) -> None:
    answer = wire.ask("PUT", "/kv/nolength")
    assert (answer.status, answer.stays) == (411, True)
    assert wire.ask("GET", "/kv/nolength").status == 404


def test_an_empty_block_is_refused(wire: Wire) -> None:
    assert wire.ask("PUT", "/kv/empty", b"").json["error"] == "Empty"
    wire.send(wire.head("PUT", "/kv/empty", Transfer_Encoding="chunked") + b"0\r\n\r\n")
    assert wire.answer().json["error"] == "Empty"
    assert wire.ask("GET", "/kv/empty").status == 404


def test_one_byte_beyond_64_mib_is_413_before_it_is_read(engine: EngineProcess) -> None:
    with Wire(engine.http) as wire:
        wire.send(wire.head("PUT", "/kv/big", Content_Length=(64 << 20) + 1))
        answer = wire.answer()
        assert (answer.status, answer.stays) == (413, False)
        assert answer.json["error"] == "TooLarge"


def test_a_client_that_sends_first_and_reads_later_still_sees_the_413(engine: EngineProcess) -> None:
    with Wire(engine.http) as wire:
        wire.send(wire.head("PUT", "/kv/big", Content_Length=(64 << 20) + 1))
        block = b"x" * (1 << 20)
        for _ in range(64):
            wire.send(block)
        assert wire.answer().status == 413


def test_just_64_mib_go_in_and_come_back(wire: Wire) -> None:
    value = os.urandom(1 << 20) * 64
    assert wire.ask("PUT", "/kv/largest", value).status == 201
    assert wire.ask("GET", "/kv/largest").body == value


def test_an_unwanted_short_body_is_skipped(wire: Wire) -> None:
    assert wire.ask("GET", "/kv/nobody", b"x" * 5000).status == 404
    assert wire.ask("DELETE", "/kv/nobody", b"x" * 5000).status == 404
    assert wire.ask("GET", "/healthz", b"x" * 5000).status == 200
    assert wire.ask("POST", "/kv/nobody", b"x" * 5000).status == 405
    assert wire.ask("GET", "/healthz").status == 200


def test_empty_lines_between_requests_are_forgiven(wire: Wire) -> None:
    wire.send(b"\r\n\r\n" + wire.head("GET", "/healthz") + b"\r\n" + wire.head("GET", "/healthz"))
    assert [wire.answer().status, wire.answer().status] == [200, 200]


def test_an_absolute_target_is_understood(wire: Wire) -> None:
    assert wire.ask("GET", "http://engine/healthz").status == 200


def test_an_upgrade_is_ignored(wire: Wire) -> None:
    assert wire.ask("GET", "/healthz", Connection="Upgrade", Upgrade="h2c").status == 200
    assert wire.ask("GET", "/healthz").status == 200


@pytest.mark.parametrize(
    ("head", "status"),
    [
        (b"GET /healthz " + H + b"".join(b"X-%d: y\r\n" % n for n in range(200)) + b"\r\n", 431),
        (b"GET /healthz " + H + b"X: " + b"y" * 40_000 + b"\r\n\r\n", 431),
        (b"GET /healthz " + H + b"X: " + b"y" * 100_000, 431),
        (b"GET /kv/" + b"k" * 20_000 + b" " + H + b"\r\n", 414),
    ],
)
def test_too_much_of_a_head_is_refused(engine: EngineProcess, head: bytes, status: int) -> None:
    with Wire(engine.http) as wire:
        wire.send(head)
        answer = wire.answer()
        assert (answer.status, answer.stays) == (status, False)


def test_headers_that_never_end_get_408(engine: EngineProcess) -> None:
    with Wire(engine.http) as wire:
        wire.send(b"GET /healthz HTTP/1.1\r\n")
        end = time.monotonic() + 30
        while time.monotonic() < end:  # each line is in time; together they are not
            try:
                wire.send(b"X: y\r\n")
            except OSError:
                break
            wire.sock.settimeout(0.3)
            try:
                wire.buffer += wire.sock.recv(4096)
                break
            except TimeoutError:
                continue
        wire.sock.settimeout(20)
        assert wire.answer().status == 408


def test_a_body_that_never_ends_gets_408_and_is_not_stored(engine: EngineProcess) -> None:
    with Wire(engine.http) as wire:
        wire.send(wire.head("PUT", "/kv/slowbody", Content_Length=1000) + b"x" * 10)
        assert wire.answer().status == 408
        assert wire.closed()
    with Wire(engine.http) as wire:
        assert wire.ask("GET", "/kv/slowbody").status == 404


def test_many_slow_heads_hold_no_thread(engine: EngineProcess) -> None:
    slow = [Wire(engine.http) for _ in range(300)]
    try:
        for one in slow:
            one.send(b"GET /healthz HTTP/1.1\r\n")
        with Wire(engine.http) as wire:
            text = wire.ask("GET", "/metrics").body.decode()
        assert 'kvstrata_engine_connections{protocol="http"} 30' in text
        assert engine.threads() < 60
    finally:
        for one in slow:
            one.sock.close()


def test_an_idle_connection_ends(engine_process: object) -> None:
    engine = engine_process(IDLE_S=0.5)  # type: ignore[operator]
    with Wire(engine.http) as wire:
        assert wire.ask("GET", "/healthz").status == 200
        assert wire.closed()
    with Wire(engine.http) as wire:
        assert wire.closed()


def test_a_client_that_stops_reading_is_cut_and_others_go_on(engine: EngineProcess) -> None:
    with Wire(engine.http) as wire:
        wire.ask("PUT", "/kv/unread", os.urandom(8 << 20))
    stuck = [Wire(engine.http, receive_buffer=64 << 10) for _ in range(40)]
    try:
        for one in stuck:
            one.send(one.head("GET", "/kv/unread"))
        time.sleep(1)  # all of them are in the middle of it, more than there are workers
        with Wire(engine.http) as wire:
            assert wire.ask("GET", "/kv/unread").headers["content-length"] == str(8 << 20)

        def busy() -> int:
            with Wire(engine.http) as look:
                text = look.ask("GET", "/metrics").body.decode()
            return int(float(text.split('busy_connections{protocol="http"} ')[1].split("\n")[0]))

        until(lambda: busy() <= 1, 60)
        for one in stuck:
            size = 0
            try:
                while data := one.sock.recv(1 << 20):
                    size += len(data)
            except ConnectionResetError:
                pass
            assert size < 8 << 20
    finally:
        for one in stuck:
            one.sock.close()
