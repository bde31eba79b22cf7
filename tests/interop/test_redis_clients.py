"""The RESP door under the clients that others wrote: redis-py, redis-cli, redis-benchmark."""

from __future__ import annotations

import csv
import io
import os
import random
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import redis
import trustme
from redis.backoff import NoBackoff
from redis.retry import Retry

from tests.certificates import certify, trust
from tests.engine.process import READER, TOKENS, WRITER, EngineProcess
from tests.interop.redis_tools import program

MIB = 1 << 20


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineProcess]:
    """With tokens, as it runs beside others."""
    folder = tmp_path_factory.mktemp("redis")
    tokens = folder / "tokens"
    tokens.write_text(TOKENS)
    one = EngineProcess(
        folder / "root", RESP="127.0.0.1:0", TOKENS_FILE=tokens, CAPACITY_BYTES=2048 * MIB, MEMORY_BYTES=576 * MIB
    )
    yield one
    one.kill()


@pytest.fixture(params=[2, 3])
def client(engine: EngineProcess, request: pytest.FixtureRequest) -> Iterator[redis.Redis]:
    host, port = engine.resp
    with redis.Redis(host, port, password=WRITER, protocol=request.param, socket_timeout=60) as found:
        for key in found.scan_iter(count=1000):
            found.delete(key)
        yield found


def test_redis_py_reads_what_it_wrote(client: redis.Redis) -> None:
    values = {f"model@{number}".encode(): random.Random(number).randbytes(number * 300_000) for number in range(1, 6)}
    for key, value in values.items():
        assert client.set(key, value)
    assert {key: client.get(key) for key in values} == values
    assert client.mget([*values, b"none"]) == [*values.values(), None]
    assert client.exists(*values, b"none") == 5
    assert sorted(client.scan_iter(match="model@*", count=2)) == sorted(values)
    assert client.dbsize() == 5
    assert [client.strlen(key) for key in values] == [len(value) for value in values.values()]
    assert client.type("model@1") == b"string"
    assert client.delete("model@1", "none") == 1
    assert client.unlink("model@2") == 1
    assert client.get("model@1") is None


def test_redis_py_s_options_of_set(client: redis.Redis) -> None:
    assert client.set("k", "1", ex=100, nx=True)
    assert not client.set("k", "2", nx=True)
    assert 0 < client.ttl("k") <= 100
    assert 0 < client.pttl("k") <= 100_000
    assert client.set("k", "3", xx=True)
    assert client.ttl("k") == -1
    assert client.ttl("none") == -2
    assert not client.set("none", "1", xx=True)
    assert client.set("k", "4", px=60_000)


def test_redis_py_s_pipeline(client: redis.Redis) -> None:
    pipe = client.pipeline(transaction=False)
    for number in range(200):
        pipe.set(f"k{number}", str(number) * number).get(f"k{number}")
    pipe.get("none").exists("k1", "k2")
    assert pipe.execute() == [
        *[part for number in range(200) for part in (True, (str(number) * number).encode())], None, 2,
    ]  # fmt: skip


def test_redis_py_s_questions_about_the_server(client: redis.Redis) -> None:
    assert client.ping()
    assert client.echo("hello") == b"hello"
    assert client.info("stats")["keyspace_hits"] >= 0
    assert client.info()["redis_mode"] == "standalone"
    assert client.config_get("maxmemory*")["maxmemory-policy"] == "allkeys-lru"
    assert client.command_count() > 10
    assert client.client_id() > 0
    assert client.client_setname("me")
    with pytest.raises(redis.ResponseError, match="unknown command"):
        client.flushall()
    assert client.ping()


def test_redis_py_is_refused_without_the_right_token(engine: EngineProcess) -> None:
    host, port = engine.resp
    once = Retry(NoBackoff(), 0)
    with redis.Redis(host, port, retry=once) as nobody, pytest.raises(redis.AuthenticationError):
        nobody.get("k")
    wrong = redis.Redis(host, port, password="wrong" * 10, retry=once)
    with wrong, pytest.raises(redis.AuthenticationError):
        wrong.get("k")
    with redis.Redis(host, port, username="somebody", password=READER) as reader:
        assert reader.get("never stored") is None
        with pytest.raises(redis.exceptions.NoPermissionError):
            reader.set("k", "v")


def test_redis_py_over_tls(engine_process: Callable[..., EngineProcess], tmp_path: Path) -> None:
    authority = trustme.CA()
    trust(tmp_path / "ca.pem", authority)
    cert, key = certify(tmp_path, authority, "127.0.0.1")
    both = tmp_path / "both.pem"
    both.write_bytes(key.read_bytes() + cert.read_bytes())
    host, port = engine_process(RESP="127.0.0.1:0", TLS_CERT=both, TLS_KEY=both, MEMORY_BYTES=512 * MIB).resp
    value = random.Random(1).randbytes(9 * MIB)
    with redis.Redis(host, port, ssl=True, ssl_ca_certs=str(tmp_path / "ca.pem"), socket_timeout=60) as client:
        assert client.set("k", value)
        assert client.get("k") == value
        pipe = client.pipeline(transaction=False)
        for number in range(500):
            pipe.set(f"k{number}", number).get(f"k{number}")
        assert pipe.execute() == [part for number in range(500) for part in (True, str(number).encode())]
        with pytest.raises(redis.ResponseError, match="unknown command"):
            client.execute_command("APPEND", "k", value)
        assert client.get("k") == value


@pytest.mark.slow
def test_redis_py_s_value_of_512_mib(engine: EngineProcess) -> None:
    host, port = engine.resp
    piece = random.Random(1).randbytes(MIB)
    value = b"".join(number.to_bytes(4, "big") + piece[4:] for number in range(512))
    with redis.Redis(host, port, password=WRITER, socket_timeout=120) as client:
        assert client.set("largest", value)
        assert client.strlen("largest") == 512 * MIB
        assert client.get("largest") == value
        client.delete("largest")
    assert engine.rss() < 300 * MIB  # it was never in memory as a whole


@pytest.fixture
def cli(engine: EngineProcess) -> Callable[..., str]:
    def run(*words: str, stdin: bytes = b"", good: bool = True) -> str:
        host, port = engine.resp
        done = subprocess.run(
            [program("redis-cli"), "-h", host, "-p", str(port), *words],
            input=stdin, capture_output=True, timeout=60, env={**os.environ, "REDISCLI_AUTH": WRITER},
        )  # fmt: skip
        assert (done.returncode == 0) is good, done.stderr.decode()
        return done.stdout.decode()

    return run


@pytest.mark.parametrize("protocol", ["-2", "-3"])
def test_redis_cli(cli: Callable[..., str], protocol: str) -> None:
    assert cli(protocol, "set", "cli", "some words") == "OK\n"
    assert cli(protocol, "get", "cli") == "some words\n"
    assert cli(protocol, "get", "no such key") == "\n"
    assert cli(protocol, "exists", "cli", "none") == "1\n"
    assert "cli" in cli(protocol, "--scan", "--pattern", "cl*").split()
    assert "redis_version:" in cli(protocol, "info", "server")
    assert "ERR unknown command" in cli(protocol, "flushall")
    assert cli(protocol, "del", "cli") == "1\n"


def test_redis_cli_takes_a_value_from_its_input_and_loads_in_bulk(cli: Callable[..., str], tmp_path: Path) -> None:
    value = bytes(range(256)) * 20_000
    assert cli("-x", "set", "binary", stdin=value) == "OK\n"
    assert cli("strlen", "binary") == f"{len(value)}\n"
    commands = b"".join(b"*3\r\n$3\r\nSET\r\n$7\r\npipe%03d\r\n$3\r\nxyz\r\n" % number for number in range(500))
    assert "errors: 0, replies: 500" in cli("--pipe", stdin=commands)
    assert cli("get", "pipe499") == "xyz\n"


@pytest.mark.parametrize("options", [("-d", "3", "-n", "3000", "-P", "16"), ("-d", str(MIB), "-n", "200")])
def test_redis_benchmark_finds_no_error(engine: EngineProcess, options: tuple[str, ...]) -> None:
    host, port = engine.resp
    done = subprocess.run(
        [program("redis-benchmark"), "-h", host, "-p", str(port), "-a", WRITER, "-t", "ping_mbulk,set,get", "-c", "8",
         "-r", "50", "--csv", *options],
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "rror" not in done.stdout + done.stderr.replace("Warning", "")
    rows = {row["test"]: float(row["rps"]) for row in csv.DictReader(io.StringIO(done.stdout))}
    assert {name.split("_")[0] for name in rows} == {"PING", "SET", "GET"}
    assert all(rows.values())
