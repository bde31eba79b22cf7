"""Clients that we did not write, against our engine over HTTP: curl, schemathesis, epistemic-graph's connectors."""

from __future__ import annotations

import os
import select
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

pytest.importorskip("epistemic_graph", reason="the package epistemic-graph is a requirement of the tests (dev.in)")
from epistemic_graph.kvcache import KvCacheConfig, RemoteKVConnector, RemoteKVL2Connector, UrllibTransport

from tests.engine.process import TOKENS, WRITER, EngineProcess

KEYS = [
    "plain", "model@1@0@abcdef", "a/b/c", "a b", "50%", "a%2Fb", "?q=1#f", "k" * 2000, "ключ", "a+b",
    '"<>\\^`{|}',
]  # fmt: skip


@pytest.fixture
def engine(engine_process: Callable[..., EngineProcess], tmp_path: Path) -> EngineProcess:
    """An engine with tokens."""
    file = tmp_path / "tokens"
    file.write_text(TOKENS)
    return engine_process(TOKENS_FILE=file)


def config(engine: EngineProcess) -> KvCacheConfig:
    """Of an epistemic-graph client."""
    return KvCacheConfig(base_url=engine.url, token=WRITER, timeout_s=20)


@pytest.fixture(params=["httpx", "urllib"])
def connector(engine: EngineProcess, request: pytest.FixtureRequest) -> Iterator[RemoteKVConnector]:
    """epistemic-graph's client, on either of its transports."""
    transport = UrllibTransport(timeout_s=20) if request.param == "urllib" else None
    with RemoteKVConnector(config(engine), transport=transport) as one:
        yield one


def test_epistemic_graphs_client_stores_and_finds_every_kind_of_key(connector: RemoteKVConnector) -> None:
    values = {key: os.urandom(5000) for key in KEYS}
    for key, value in values.items():
        assert connector.get(key) is None
        assert not connector.exists(key)
        assert not connector.contains(key)
        assert connector.put(key, value)
    for key, value in values.items():
        assert connector.get(key) == value
        assert connector.exists(key)
        assert connector.contains(key)
        assert connector.put(key, b"other")
        assert connector.get(key) == value


def test_a_key_that_is_a_routes_name_is_not_stored_by_a_client_that_cannot_escape_it(
    connector: RemoteKVConnector,
) -> None:
    assert not connector.put("stats", b"value")
    assert not connector.put("snapshot", b"value")


def test_epistemic_graphs_stats_model_reads_ours_and_all_of_it_moves(connector: RemoteKVConnector) -> None:
    value = os.urandom(10_000)
    connector.put("a", value)
    connector.put("b", value)
    connector.put("b", value)
    connector.get("a")
    connector.get("not there")
    stats = connector.stats()
    assert (stats.unique_blocks, stats.total_refs, stats.resident_bytes, stats.logical_bytes) == (1, 2, 10_000, 20_000)
    assert (stats.dedup_savings_bytes, stats.dedup_hits, stats.get_hits, stats.get_misses) == (10_000, 2, 1, 1)


def test_epistemic_graphs_l2_connector_moves_batches_of_4_mib(engine: EngineProcess) -> None:
    client = RemoteKVL2Connector(base_url=engine.url, token=WRITER, timeout_s=30, num_workers=4)
    try:
        values = {f"m@1@0@{n:064x}": os.urandom(4 << 20) for n in range(6)}
        _done(client, client.submit_batch_set(list(values), [memoryview(v) for v in values.values()]))
        buffers = [bytearray(4 << 20) for _ in values]
        hits = _done(client, client.submit_batch_get(list(values), [memoryview(b) for b in buffers]))
        assert hits == [True] * 6
        assert [bytes(b) for b in buffers] == list(values.values())
        asked = [*values, "not-there"]
        assert _done(client, client.submit_batch_exists(asked)) == [True] * 6 + [False]
    finally:
        client.close()


def _done(client: RemoteKVL2Connector, task: int) -> list[bool] | None:
    """The result of one batch."""
    while True:
        assert select.select([client.event_fd()], [], [], 60)[0], "no completion in time"
        for number, good, error, results in client.drain_completions():
            assert good, error
            if number == task:
                return results  # type: ignore[no-any-return]


def curl(*arguments: object) -> tuple[int, bytes]:
    """curl's exit code and output; it prints the status at the end."""
    if shutil.which("curl") is None:
        pytest.skip("needs curl")
    command = ["curl", "-sS", "-m", "60", "-H", f"Authorization: Bearer {WRITER}", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, timeout=90)
    assert not done.stderr, done.stderr
    return done.returncode, done.stdout


def test_curl_puts_gets_ranges_and_deletes(engine: EngineProcess, tmp_path: Path) -> None:
    value = os.urandom(3 << 20)
    (tmp_path / "value").write_bytes(value)
    url, status = f"{engine.url}/kv/from%20curl", ("-w", "%{http_code}", "-o", tmp_path / "out")
    upload = ("-T", tmp_path / "value", "-H", "Expect: 100-continue")  # and really waits for the 100
    assert curl(*status, *upload, url) == (0, b"201")
    assert curl(*status, *upload, url) == (0, b"200")
    assert curl(url) == (0, value)
    assert curl("-r", "100-199", url) == (0, value[100:200])
    assert curl("-r", "-5", url) == (0, value[-5:])
    assert b"content-length: 3145728" in curl("-I", url)[1].lower()
    assert curl(*status, "-X", "DELETE", url) == (0, b"204")
    assert curl(*status, url) == (0, b"404")


def test_curl_sends_a_pipe_in_chunks(engine: EngineProcess, tmp_path: Path) -> None:
    (tmp_path / "value").write_bytes(b"z" * 1_000_000)
    url = f"{engine.url}/kv/piped"
    assert curl("-T", tmp_path / "value", "-H", "Transfer-Encoding: chunked", url) == (0, b"")
    assert curl(url) == (0, b"z" * 1_000_000)


def test_the_server_keeps_to_its_own_description(engine: EngineProcess, tmp_path: Path) -> None:
    tool, limits = Path(sys.executable).parent / "schemathesis", Path(__file__).parent / "schemathesis.toml"
    command = [
        tool, "--config-file", limits, "run", f"{engine.url}/openapi.json", "-H", f"Authorization: Bearer {WRITER}",
        "--seed", "5", "-n", "25", "-c", "all",
    ]  # fmt: skip
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout[-8000:]
    assert "fault" not in engine.log
