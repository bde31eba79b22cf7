"""The launcher's part of observability: the socket relay, the guard's page, and the arguments."""

from __future__ import annotations

import asyncio
import json
import socket
import urllib.request
from pathlib import Path

import pytest
from tests.unit.test_launch_roles import ARGS, CACHE_ENV, VLLM_ENV

from kvstrata.launch import guard_metrics, health, lmcache, relay, vllm
from kvstrata.launch.config import ConfigError, Paths
from kvstrata.proof import prom

ENDPOINT = "unix:///run/otlp/otlp.sock"


def test_with_an_endpoint_both_servers_push_and_without_one_neither_does() -> None:
    assert "--otlp-endpoint" not in lmcache.build_argv(CACHE_ENV, Paths())
    argv = lmcache.build_argv({**CACHE_ENV, "KV_OTLP_ENDPOINT": ENDPOINT, "KV_HOST_NAME": "h1"}, Paths())
    assert argv[argv.index("--otlp-endpoint") + 1] == ENDPOINT and argv[argv.index("--instance-id") + 1] == "h1"
    assert "--enable-tracing" in argv
    assert "--otlp-traces-endpoint" not in vllm.build_argv(ARGS, VLLM_ENV, Paths())
    argv = vllm.build_argv(ARGS, {**VLLM_ENV, "KV_OTLP_ENDPOINT": ENDPOINT}, Paths())
    assert argv[argv.index("--otlp-traces-endpoint") + 1] == ENDPOINT and "--middleware" in argv


@pytest.mark.parametrize("own", ["--otlp-traces-endpoint=http://x:4317", "--otlp_traces_endpoint=http://x:4317"])
def test_a_users_own_endpoint_for_traces_stays_his(own: str) -> None:
    argv = vllm.build_argv([*ARGS, own], {**VLLM_ENV, "KV_OTLP_ENDPOINT": ENDPOINT}, Paths())
    assert "--otlp-traces-endpoint" not in argv and "--middleware" not in argv


def exchange(path: Path, port: int, text: bytes) -> bytes:
    """One connection through a relay; b"" where it was closed."""

    async def once() -> bytes:
        server = await relay.serve(path, "127.0.0.1", port)
        async with server:
            reader, writer = await asyncio.open_unix_connection(path)
            writer.write(text)
            writer.write_eof()
            try:
                return await asyncio.wait_for(reader.read(), 10)
            except ConnectionError:
                return b""
            finally:
                writer.close()

    return asyncio.run(once())


def test_the_relay_passes_bytes_on_over_a_socket_that_a_dead_one_left_behind(tmp_path: Path) -> None:
    path = tmp_path / "otlp.sock"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))

    async def echo() -> bytes:
        async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write((await reader.readexactly(4)).upper())
            await writer.drain()
            writer.close()

        async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
            port = server.sockets[0].getsockname()[1]
            return await asyncio.to_thread(exchange, path, port, b"ping")

    assert asyncio.run(echo()) == b"PING"
    assert path.stat().st_mode & 0o777 == 0o600


def test_the_relay_closes_a_connection_that_nobody_takes(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound, not listening
        assert exchange(tmp_path / "s", taken.getsockname()[1], b"ping") == b""


def test_the_relays_health_is_its_socket_and_not_the_collector(tmp_path: Path) -> None:
    paths = Paths(run=tmp_path, otlp_socket=tmp_path / "s")
    assert health.check("relay", paths) == 1

    async def look() -> int:
        async with await relay.serve(paths.otlp_socket, "127.0.0.1", 1):
            return await asyncio.to_thread(health.check, "relay", paths)

    assert asyncio.run(look()) == 0


def test_the_guards_page_says_what_the_reports_say(tmp_path: Path) -> None:
    worker = {
        "role": "worker", "healthy": True, "transfer": "pickle", "beat": 1700000000.5, "pair": "a+b", "chunk_size": 256,
        "identity": 'odd"\\name', "lost": {"store": 2},
    }  # fmt: skip
    (tmp_path / "guard-worker.json").write_text(json.dumps(worker))
    (tmp_path / "guard-scheduler.json").write_text(json.dumps({"role": "scheduler", "healthy": False}))
    (tmp_path / "guard-worker-1.json").write_text('{"role": ')
    found = prom.parse(guard_metrics.page(tmp_path))
    assert found.sum("kvstrata_guard_healthy", role="worker") == 1
    assert found.sum("kvstrata_guard_healthy", role="scheduler") == 0 and found.has("kvstrata_guard_healthy")
    assert found.sum("kvstrata_guard_transfer", kind="pickle") == 1 and found.sum("kvstrata_guard_transfer") == 1
    assert found.sum("kvstrata_guard_heartbeat_timestamp_seconds", role="worker") == 1700000000.5
    assert found.sum("kvstrata_guard_lost_total", what="store") == found.sum("kvstrata_guard_lost_total") == 2
    assert {row[1]["role"] for row in found.rows} == {"worker", "scheduler"}


def test_the_page_is_served_and_a_taken_port_is_gone_without(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "guard-worker.json").write_text('{"role": "worker", "healthy": true}')
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    env = {"KV_GUARD_METRICS": f"127.0.0.1:{port}"}
    guard_metrics.start(env, Paths(run=tmp_path))
    body = urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5).read().decode()
    assert 'kvstrata_guard_healthy{role="worker"} 1' in body
    guard_metrics.start(env, Paths(run=tmp_path))
    assert "no page of the guard's metrics" in capsys.readouterr().err
    guard_metrics.start({}, Paths(run=tmp_path))
    with pytest.raises(ConfigError, match="KV_GUARD_METRICS"):
        guard_metrics.start({"KV_GUARD_METRICS": "9131"}, Paths(run=tmp_path))
