"""What the RESP door answers, on a real store, over real sockets."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvstrata.engine.resp_parse import SMALL
from tests.engine.engines import until
from tests.engine.resp_parts import (
    MIB,
    NIL,
    OTHER,
    PREFIXED,
    READER,
    TOKEN,
    Client,
    Failure,
    Server,
    encoded,
    server,
)

SIZES = (0, 1, SMALL - 1, SMALL, SMALL + 1, MIB - 1, MIB, 5 * MIB + 3)


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with server(tmp_path_factory.mktemp("resp")) as found:
        yield found


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with server(tmp_path_factory.mktemp("resp-tokens"), tokens=True) as found:
        yield found


@pytest.fixture
def client(running: Server) -> Iterator[Client]:
    with Client(running.port) as found:
        for key in found("SCAN", 0, "COUNT", 10_000)[1]:
            found("DEL", key)
        yield found


def value(size: int, seed: int = 0) -> bytes:
    return random.Random(seed).randbytes(size)


def eventually(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not true():
        assert time.monotonic() < deadline, "it never came true"
        time.sleep(0.02)


# -- values


@pytest.mark.parametrize("size", SIZES)
def test_what_was_set_comes_back(client: Client, size: int) -> None:
    assert client("SET", b"k\0\r\n\xff", value(size)) == "OK"
    assert client("GET", b"k\0\r\n\xff") == value(size)
    assert client("STRLEN", b"k\0\r\n\xff") == size


def test_set_replaces_and_nx_does_not(client: Client) -> None:
    assert client("SET", "k", "one", "NX") == "OK"
    assert client("SET", "k", "two", "nx") == NIL
    assert client("GET", "k") == b"one"
    assert client("SET", "k", "three") == "OK"
    assert client("GET", "k") == b"three"
    assert client("SET", "other", "x", "XX") == NIL
    assert client("EXISTS", "other") == 0
    assert client("SET", "k", "four", "XX") == "OK"
    assert client("GET", "k") == b"four"


def test_options_behind_a_value_that_was_written_while_it_came_in(client: Client) -> None:
    one, two = value(2 * MIB, 1), value(2 * MIB, 2)
    assert client("SET", "k", one, "XX") == NIL
    assert client("EXISTS", "k") == 0
    assert client("SET", "k", one, "NX", "EX", 100) == "OK"
    assert client("SET", "k", two, "NX") == NIL
    assert client("GET", "k") == one
    assert 90 <= client("TTL", "k") <= 100
    assert client("SET", "k", two, "XX") == "OK"
    assert client("GET", "k") == two
    assert client("TTL", "k") == -1


def test_a_value_with_a_time_to_live_ends(client: Client) -> None:
    assert client("SET", "long", value(2 * MIB), "EX", 100) == "OK"
    assert 90 <= client("TTL", "long") <= 100
    assert 90_000 <= client("PTTL", "long") <= 100_000
    assert client("SET", "short", "x", "PX", 50) == "OK"
    eventually(lambda: client("GET", "short") == NIL)
    assert client("TTL", "short") == -2
    assert client("SET", "long", "for ever") == "OK"
    assert client("TTL", "long") == -1


@pytest.mark.parametrize(
    "options",
    [("EX",), ("EX", "0"), ("EX", "-1"), ("EX", "x"), ("PX", "1.5"), ("NX", "XX"), ("EX", "1", "PX", "1"), ("KEEP",)],
)
def test_set_refuses_options_that_make_no_sense_and_stores_nothing(client: Client, options: tuple[str, ...]) -> None:
    assert client("SET", "k", "v", *options).startswith("ERR")
    assert client("SET", "k", value(MIB), *options).startswith("ERR")
    assert client("EXISTS", "k") == 0


def test_questions_about_keys(client: Client) -> None:
    client("SET", "a", "1")
    client("SET", "b", "22")
    assert client("EXISTS", "a", "b", "c", "a") == 3
    assert client("MGET", "a", "c", "b") == [b"1", NIL, b"22"]
    assert client("TYPE", "a") == "string"
    assert client("TYPE", "c") == "none"
    assert client("STRLEN", "c") == 0
    assert client("DBSIZE") == 2
    assert client("DEL", "a", "c") == 1
    assert client("UNLINK", "b") == 1
    assert client("DBSIZE") == 0
    assert client("GET", "a") == NIL


def test_scan_meets_every_key_once_and_only_those_that_match(client: Client) -> None:
    names = {f"{kind}:{number}".encode() for kind in ("x", "y") for number in range(60)}
    for name in names:
        client("SET", name, "v")

    def scanned(*options: str | int) -> list[bytes]:
        found, cursor = [], b"0"
        while True:
            cursor, keys = client("SCAN", cursor, *options)
            found += keys
            if cursor == b"0":
                return found

    assert sorted(scanned()) == sorted(names)
    assert sorted(scanned("COUNT", 7, "MATCH", "x:*")) == sorted(name for name in names if name.startswith(b"x"))
    assert scanned("TYPE", "list") == []
    assert client("SCAN", "77777777").startswith("ERR invalid cursor")


@pytest.mark.parametrize("key", [b"", b"x" * 4097])
def test_a_key_has_1_to_4096_bytes(client: Client, key: bytes) -> None:
    for words in (("GET", key), ("SET", key, "v"), ("EXISTS", key), ("DEL", key), ("MGET", "a", key)):
        assert "keys have 1 to 4096" in client(*words)
    assert client("SET", b"x" * 4096, "v") == "OK"


# -- the wire


def test_a_pipeline_is_answered_in_order(client: Client) -> None:
    big = value(2 * MIB)
    client.send(
        ("SET", "a", big), ("GET", "a"), ("NOPE",), ("SET", "b", "1"), ("MGET", "a", "b"), ("PING",), ("GET", "c")
    )
    assert [client.reply() for _ in range(7)] == [
        "OK", big, "ERR unknown command 'NOPE'", "OK", [big, b"1"], "PONG", NIL,
    ]  # fmt: skip


def test_a_thousand_small_commands_in_one_go(client: Client) -> None:
    client.send(*(("SET", f"k{number}", number) for number in range(1000)))
    client.send(*(("GET", f"k{number}") for number in range(1000)))
    assert [client.reply() for _ in range(2000)] == ["OK"] * 1000 + [b"%d" % number for number in range(1000)]


def test_a_command_in_pieces_with_pauses(client: Client) -> None:
    whole = encoded(("SET", "k", value(SMALL * 3)))
    for start, stop in ((0, 1), (1, 9), (9, 30), (30, 20_000), (20_000, len(whole) - 1), (len(whole) - 1, len(whole))):
        client.raw(whole[start:stop])
        time.sleep(0.08)  # longer than a worker waits for the rest
    assert client.reply() == "OK"
    assert client("GET", "k") == value(SMALL * 3)


def test_resp3_is_spoken_when_asked_for(client: Client) -> None:
    found = client("HELLO", "3", "SETNAME", "me")
    assert (found[b"proto"], found[b"mode"], found[b"modules"]) == (3, b"standalone", [])
    client.send(("GET", "none"))
    assert client.sock.recv(10) == b"_\r\n"
    assert client("CONFIG", "GET", "sav*") == {b"save": b""}
    assert client("CLIENT", "GETNAME") == b"me"
    assert client("HELLO", "4").startswith("NOPROTO")
    assert isinstance(client("HELLO", "2"), list)
    client.send(("GET", "none"))
    assert client.sock.recv(10) == b"$-1\r\n"


def test_what_is_not_there_is_an_error_and_the_connection_stays_in_step(client: Client) -> None:
    for words in (("FLUSHALL",), ("LPUSH", "k", value(3 * MIB)), ("MULTI",), ("GET",), ("GET", "a", "b"), ("SET", "k"),
                  ("GET", value(3 * MIB)), ("SELECT", 1), ("CLIENT", "KILL", "x"), ("CONFIG", "SET", "save", "1"),
                  ("COMMAND", "NOPE"), ("SCAN", "x"), ("SCAN", "0", "COUNT"), ("ECHO",),
                  ("SET", value(MIB), "v")):  # fmt: skip
        assert isinstance(client(*words), Failure), words
        assert client("PING", "still here") == b"still here"
    assert client("DBSIZE") == 0


def test_small_talk(client: Client) -> None:
    assert client("PING") == "PONG"
    assert client("ECHO", "x\r\ny") == b"x\r\ny"
    assert client("SELECT", 0) == "OK"
    assert client("CLIENT", "SETINFO", "LIB-NAME", "x") == "OK"
    assert client("CLIENT", "ID") > 0
    assert client("COMMAND", "COUNT") == len(client("COMMAND"))
    assert client("COMMAND", "INFO", "get", "nope") == [[b"get", 2, ["readonly", "fast"], 1, 1, 1], NIL]
    assert client("CONFIG", "GET", "maxmemory") == [b"maxmemory", str(256 * MIB).encode()]
    client("SET", "k", "v")
    info = client("INFO").decode()
    assert "redis_version:" in info
    assert "db0:keys=1,expires=0\r\n" in info
    assert client("INFO", "memory").decode().startswith("# Memory\r\nused_memory:")
    client.raw(b"ping\r\n\r\nget k\r\n")
    assert [client.reply(), client.reply()] == ["PONG", b"v"]
    assert client("QUIT") == "OK"
    assert client.closed()


def test_info_says_how_many_keys_will_end(client: Client) -> None:
    def told() -> str:
        return client("INFO", "keyspace").decode().split("db0:")[1].strip()  # type: ignore[no-any-return]

    client("SET", "stays", "v")
    client("SET", "ends", "v", "EX", 100)
    client("SET", "too", "v", "EX", 100)
    assert told() == "keys=3,expires=2"
    client("SET", "ends", "w")
    client("DEL", "too")
    assert told() == "keys=2,expires=0"
    client("SET", "ends", "v", "PX", 20)
    until(lambda: told() == "keys=1,expires=0")


@pytest.mark.parametrize(
    "data",
    [b"*x\r\n", b"*1\r\n$-5\r\n", b"*1\r\n+OK\r\n", b"*3\r\n$3\r\nSET\r\n$1\r\nk\r\n$99999999\r\n", b"\0" * 20_000],
)  # fmt: skip
def test_bytes_that_are_no_resp_end_the_connection_after_what_came_before_is_answered(
    client: Client, data: bytes
) -> None:
    client.raw(encoded(("PING",)) + data)
    assert client.reply() == "PONG"
    assert client.reply().startswith("ERR Protocol error")
    assert client.closed()


def test_a_browser_gets_nothing_executed(client: Client) -> None:
    client.raw(b"POST / HTTP/1.1\r\nHost: here\r\n\r\nSET k v\r\n")
    assert "not HTTP" in client.reply()
    assert client.closed()


# -- who may do what


def test_a_stranger_may_say_who_they_are_and_nothing_else(guarded: Server) -> None:
    with Client(guarded.port) as client:
        for words in (("GET", "k"), ("SET", "k", "v"), ("INFO",), ("PING",), ("SCAN", 0), ("NOPE",), ("HELLO", "3")):
            assert client(*words) == "NOAUTH Authentication required."
        assert client("AUTH", "wrong" * 10).startswith("WRONGPASS")
        assert client("AUTH", TOKEN) == "OK"
        assert client("SET", "k", "v") == "OK"
        assert client("AUTH", "wrong" * 10).startswith("WRONGPASS")
        assert client("GET", "k") == b"v"
    with Client(guarded.port) as client:
        assert client("AUTH", "any user", TOKEN) == "OK"
        assert client("GET", "k") == b"v"
    with Client(guarded.port) as client:
        assert client("HELLO", "3", "AUTH", "default", TOKEN)[b"proto"] == 3
        assert client("GET", "k") == b"v"


def test_a_stranger_cannot_make_us_read_much(guarded: Server) -> None:
    with Client(guarded.port) as client:
        client.raw(b"*3\r\n$3\r\nSET\r\n$1\r\nk\r\n$100000\r\n")
        assert client.reply().startswith("ERR Protocol error: invalid bulk length")
        assert client.closed()


def test_a_token_reads_and_writes_what_it_may(guarded: Server) -> None:
    with Client(guarded.port) as one, Client(guarded.port) as reader, Client(guarded.port) as prefixed:
        assert [one("AUTH", TOKEN), reader("AUTH", READER), prefixed("AUTH", PREFIXED)] == ["OK"] * 3
        one("SET", "k", "v")
        one("SET", "models/a", "v")
        assert reader("GET", "k") == b"v"
        for words in (("SET", "k", "w"), ("SET", "k", value(MIB)), ("DEL", "k"), ("UNLINK", "k")):
            assert reader(*words).startswith("NOPERM")
        assert prefixed("GET", "models/a") == b"v"
        for words in (("GET", "k"), ("SET", "k", "w"), ("MGET", "models/a", "k"), ("EXISTS", "k"), ("DEL", "k"),
                      ("SET", "k", value(MIB)), ("TTL", "k"), ("STRLEN", "k"), ("TYPE", "k")):  # fmt: skip
            assert prefixed(*words).startswith("NOPERM")
        assert prefixed("SCAN", 0, "COUNT", 1000) == [b"0", [b"models/a"]]
        assert one("GET", "k") == b"v"


def test_tenants_do_not_see_each_other(guarded: Server) -> None:
    with Client(guarded.port) as one, Client(guarded.port) as other:
        one("AUTH", TOKEN)
        other("AUTH", OTHER)
        one("SET", "secret", "v")
        assert other("GET", "secret") == NIL
        assert other("EXISTS", "secret") == 0
        assert other("SCAN", 0) == [b"0", []]
        assert other("DBSIZE") == 0
        other("SET", "secret", "mine")
        assert one("GET", "secret") == b"v"


def test_a_token_that_was_taken_away_ends_on_open_connections_too(tmp_path: Path) -> None:
    with server(tmp_path, tokens=True) as found, Client(found.port) as client, Client(found.port) as other:
        assert client("AUTH", TOKEN) == "OK"
        assert other("AUTH", OTHER) == "OK"
        found.tokens.write_text(f"new rw a {'new' * 8}\nfour rw b {OTHER}\n")
        eventually(lambda: client("EXISTS", "k") == "NOAUTH Authentication required.")
        assert other("EXISTS", "k") == 0
        assert client("AUTH", "new" * 8) == "OK"
        assert client("EXISTS", "k") == 0


# -- when something is wrong


def blocks(root: Path, least: int) -> list[Path]:
    return [
        path for path in root.rglob("*") if path.is_file() and path.stat().st_size > least and "sqlite" not in path.name
    ]


def spoil(path: Path, at: int) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 1]))


def test_a_block_that_is_corrupt_at_its_first_byte_is_nil_and_the_connection_goes_on(tmp_path: Path) -> None:
    with server(tmp_path) as found, Client(found.port) as client:
        client("SET", "k", value(3 * MIB))
        (block,) = blocks(found.root, 3 * MIB)
        spoil(block, block.stat().st_size - 3 * MIB + 5)
        client.send(("PING",), ("GET", "k"), ("PING",))
        assert [client.reply() for _ in range(3)] == ["PONG", NIL, "PONG"]
        assert client("EXISTS", "k") == 0
        assert client("SET", "k", value(3 * MIB)) == "OK"
        assert client("GET", "k") == value(3 * MIB)


def test_a_block_that_turns_out_corrupt_on_its_way_cuts_the_connection(tmp_path: Path) -> None:
    with server(tmp_path) as found, Client(found.port) as client:
        client("SET", "k", value(3 * MIB))
        (block,) = blocks(found.root, 3 * MIB)
        spoil(block, block.stat().st_size - 4096)
        client.send(("GET", "k"))
        with pytest.raises((EOFError, ConnectionResetError)):
            client.reply()
        with Client(found.port) as again:
            assert again("GET", "k") == NIL


def test_a_value_that_no_memory_is_left_for_is_refused_and_the_connection_stays_in_step(tmp_path: Path) -> None:
    with server(tmp_path, body_s=0.3, memory=32 * MIB) as found, Client(found.port) as client:
        with found.budget.take(32 * MIB, 1.0):
            assert client("SET", "k", value(MIB)).startswith("OOM")
            assert client("SET", "small", "v") == "OK"
        assert client("SET", "k", value(MIB)) == "OK"
        assert client("GET", "k") == value(MIB)


def test_a_value_that_no_disk_holds_is_refused_and_the_connection_stays_in_step(tmp_path: Path) -> None:
    with server(tmp_path, capacity=16 * MIB) as found, Client(found.port) as client:
        assert client("SET", "k", value(20 * MIB)).startswith("OOM")
        assert client("SET", "k", value(MIB)) == "OK"
        assert client("GET", "k") == value(MIB)
        assert found.budget.used == 0


def test_who_stops_in_the_middle_of_a_value_is_cut_and_the_memory_comes_back(tmp_path: Path) -> None:
    with server(tmp_path, body_s=0.3) as found, Client(found.port) as client, Client(found.port) as other:
        client.raw(b"*3\r\n$3\r\nSET\r\n$1\r\nk\r\n$%d\r\n" % (16 * MIB) + b"x" * MIB)
        eventually(lambda: found.budget.used > 0)
        assert client.closed()
        eventually(lambda: found.budget.used == 0)
        assert other("EXISTS", "k") == 0


def test_who_stops_in_the_middle_of_a_command_holds_no_memory_and_no_thread(tmp_path: Path) -> None:
    with server(tmp_path, header_s=0.5) as found, Client(found.port) as client, Client(found.port) as other:
        client.raw(b"*3\r\n$3\r\nSET\r\n$1")
        eventually(lambda: found.listener.busy_connections == 0)
        assert other("PING") == "PONG"
        assert found.budget.used == 0
        assert client.closed()


def test_who_sends_a_command_byte_by_byte_gets_no_more_time_for_it(tmp_path: Path) -> None:
    with server(tmp_path, header_s=0.5) as found, Client(found.port) as client:
        client.sock.settimeout(0.1)
        sent = 0
        with pytest.raises((BrokenPipeError, ConnectionResetError, AssertionError)):
            for byte in encoded(("SET", "k", "x" * 1000)):
                client.raw(bytes([byte]))
                sent += 1
                try:
                    assert client.sock.recv(1) != b"", "closed"
                except TimeoutError:
                    continue
        assert 1 < sent < 100


def test_between_commands_there_is_more_time_than_for_a_command(tmp_path: Path) -> None:
    with server(tmp_path, header_s=0.3, idle_s=600) as found, Client(found.port) as client:
        assert client("PING") == "PONG"
        time.sleep(0.8)
        assert client("PING") == "PONG"


def test_between_commands_there_is_the_idle_time_and_for_lmcache_s_client_all_the_time(tmp_path: Path) -> None:
    with server(tmp_path, tokens=True, idle_s=2) as found, Client(found.port) as lmcache:
        assert lmcache("AUTH", "lmcache", TOKEN) == "OK"
        with Client(found.port) as client:
            assert client("AUTH", TOKEN) == "OK"
            assert client.closed()
        eventually(lambda: found.listener.open_connections == 1)
        assert lmcache("EXISTS", "k") == 0


def test_who_does_not_read_is_cut(tmp_path: Path) -> None:
    with server(tmp_path, body_s=0.5) as found, Client(found.port) as client, Client(found.port) as other:
        client("SET", "k", value(8 * MIB))
        client.send(*[("GET", "k")] * 10)
        eventually(lambda: found.listener.busy_connections > 0)
        eventually(lambda: found.listener.open_connections == 1)
        assert other("PING") == "PONG"


def test_what_exists_has_promised_is_there_for_get_however_much_is_stored_in_between(tmp_path: Path) -> None:
    with server(tmp_path, capacity=32 * MIB) as found, Client(found.port) as client:
        client("SET", "promised", value(2 * MIB, 1))
        client("SET", "not", value(2 * MIB, 2))
        assert client("EXISTS", "promised") == 1
        for seed in range(10, 40):
            client("SET", f"k{seed}", value(2 * MIB, seed))
        assert client("GET", "promised") == value(2 * MIB, 1)
        assert client("GET", "not") == NIL


def test_lmcache_s_client_gets_failures_in_the_bytes_that_it_reads_or_none_at_all(tmp_path: Path) -> None:
    with server(tmp_path, tokens=True, body_s=0.3) as found, Client(found.port) as client:

        def exchange(*words: str | bytes) -> bytes:
            client.send(words)
            return client.sock.recv(100)

        assert exchange("AUTH", "lmcache", TOKEN) == b"+OK\r\n"
        client("SET", "k", value(3 * MIB))
        with found.budget.take(64 * MIB, 1.0):
            assert exchange("SET", "other", value(MIB)) == b"-ER\r\n"
        assert exchange("EXISTS", "other") == b":0\r\n"
        assert exchange("EXISTS", "x" * 5000) == b":0\r\n"
        (block,) = blocks(found.root, 3 * MIB)
        spoil(block, block.stat().st_size - 3 * MIB + 5)
        failed = exchange("GET", "k")
        assert failed.startswith(b"-E")
        assert failed.endswith(b"\r\n")
        assert len(failed) == len(b"$3145728\r\n")
        assert exchange("EXISTS", "k") == b":0\r\n"
        client.send(("GET", "k"), ("EXISTS", "k"))
        assert client.closed()


def test_the_largest_value_is_taken_and_one_byte_more_is_not(tmp_path: Path) -> None:
    with server(tmp_path) as found, Client(found.port) as client:
        largest = value(32 * MIB)
        assert client("SET", "k", largest) == "OK"
        assert client("GET", "k") == largest
        client.raw(b"*3\r\n$3\r\nSET\r\n$1\r\nk\r\n$%d\r\n" % (32 * MIB + 1))
        assert client.reply().startswith("ERR Protocol error: invalid bulk length")
        assert client.closed()


def test_everything_is_there_after_a_restart(tmp_path: Path) -> None:
    with server(tmp_path) as found, Client(found.port) as client:
        assert client("SET", "k", value(MIB)) == "OK"
        assert client("SET", "ttl", "v", "EX", 1000) == "OK"
    with server(tmp_path) as found, Client(found.port) as client:
        assert client("GET", "k") == value(MIB)
        assert 900 < client("TTL", "ttl") <= 1000


def test_tokens_that_change_in_the_middle_of_an_mget_do_not_shift_its_replies(tmp_path: Path) -> None:
    with server(tmp_path, tokens=True) as found, Client(found.port) as client:
        for key, one in ((b"k/1", value(16 * MIB)), (b"k/2", b"two"), (b"n/1", b"another key's")):
            found.engine.put("a", key, memoryview(one))
        client.send(["AUTH", TOKEN], ["MGET", "k/1", "k/2", "k/2"], ["GET", "n/1"])
        eventually(lambda: found.engine.stats("a")["get_hits"] == 1)  # it stops there, for nobody reads
        found.tokens.write_text(f"one rw a n/ {TOKEN}\n")
        time.sleep(0.6)
        assert client.reply() == "OK"
        assert client.reply()[1:] == [b"two", b"two"]
        assert client.reply() == b"another key's"


def test_a_stranger_who_stops_in_the_middle_of_too_much_holds_no_thread(tmp_path: Path) -> None:
    with server(tmp_path, tokens=True) as found, Client(found.port) as client:
        client.raw(b"*10\r\n$%d\r\n%b\r\n$1\r\n" % (SMALL, b"x" * SMALL))
        assert client.reply() == "ERR Protocol error: too much before AUTH"
        eventually(lambda: found.listener.busy_connections == 0)


def test_a_token_for_figures_alone_speaks_no_resp(tmp_path: Path) -> None:
    with server(tmp_path, tokens=True) as found:
        with found.tokens.open("a") as file:
            file.write("scraper metrics a 0123456789abcdef-scraper\n")

        def told() -> bool:
            with Client(found.port) as client:
                return client("AUTH", "0123456789abcdef-scraper") == "OK"

        eventually(told)
        with Client(found.port) as client:
            client("AUTH", "0123456789abcdef-scraper")
            for words in (["GET", "k"], ["SET", "k", "v"], ["SCAN", 0], ["INFO"], ["DBSIZE"], ["EXISTS", "k"]):
                assert str(client(*words)).startswith("NOPERM"), words


def test_a_scan_of_long_keys_answers_in_parts(tmp_path: Path) -> None:
    keys = {b"%04d" % number + b"." * 4092 for number in range(700)}
    with server(tmp_path) as found, Client(found.port) as client:
        client.send(*(["SET", key, "v"] for key in sorted(keys)))
        assert {client.reply() for _ in keys} == {"OK"}
        seen: list[bytes] = []
        cursor = b"0"
        while True:
            cursor, some = client("SCAN", cursor, "COUNT", 10_000)
            assert sum(map(len, some)) <= MIB + 4096
            seen += some
            if cursor == b"0":
                break
        assert len(seen) == len(keys) and set(seen) == keys
