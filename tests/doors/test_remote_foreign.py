"""Path A sent to a server that is no KV engine, or to a proxy that has none behind it: a fault, said once."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import trustme
from tests.certificates import certify
from tests.doors.remote_parts import TOKEN, Driver, Process, block, driver, free_port, name, ours
from tests.nginx import nginx as real_nginx

SOURCE = str(Path(__file__).parents[2] / "src")
KEYS = [name(number) for number in range(6)]
BLOCKS = [block(key) for key in KEYS]
CONFIG = """\
daemon off; master_process off; pid {folder}/pid; error_log {folder}/error.log;
events {{ worker_connections 64; }}
http {{
  access_log {folder}/access.log;
  client_body_temp_path {folder}/body; proxy_temp_path {folder}/proxy; fastcgi_temp_path {folder}/fastcgi;
  uwsgi_temp_path {folder}/uwsgi; scgi_temp_path {folder}/scgi;
  client_max_body_size 64m;
  server {{ {server} }}
}}
"""


@pytest.fixture
def said(caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    caplog.set_level(logging.WARNING, "lmcache.kvstrata.remote")
    return lambda: [record.getMessage() for record in caplog.records if record.name == "lmcache.kvstrata.remote"]


@pytest.fixture
def nginx(tmp_path: Path) -> Iterator[Callable[..., Process]]:
    """A real nginx with one server of the lines that are given; {port} is its own."""
    program = real_nginx()
    running: list[Process] = []

    def start(server: str) -> Process:
        port, folder = free_port(), tmp_path / "nginx"
        folder.mkdir()
        (folder / "conf").write_text(CONFIG.format(folder=folder, server=server.replace("{port}", str(port))))
        argv = [program, "-p", str(folder), "-c", str(folder / "conf")]
        running.append(Process(argv, dict(os.environ), port, folder / "log"))
        return running[-1]

    yield start
    for one in running:
        one.kill()


def not_asked_again(asked: Driver, requests: Callable[[], int]) -> None:
    """Misses, and after the first few of them only a probe now and then."""
    asked.until(lambda: not any(asked.has(KEYS)) and asked.client._breaker.open, "the breaker opens")
    before = requests()
    for _ in range(100):
        assert asked.has(KEYS) == [False] * 6 and asked.get(KEYS)[0] == [False] * 6
        assert not asked.put(KEYS, BLOCKS)
    assert requests() - before < 100, "no request of LMCache's reaches it"


def said_once(lines: list[str], status: int) -> None:
    assert len(lines) == 1, lines
    assert f"found: status {status}" in lines[0] and "needed: a KV engine" in lines[0]
    assert "to fix it: " in lines[0] and "KV_ENGINE_URL" in lines[0]


def test_the_tls_port_of_a_proxy_asked_over_plain_http(
    nginx: Callable[..., Process], tmp_path: Path, said: Callable[[], list[str]]
) -> None:
    cert, key = certify(tmp_path, trustme.CA(), "127.0.0.1")
    server = nginx(f"listen 127.0.0.1:{{port}} ssl; ssl_certificate {cert}; ssl_certificate_key {key};")
    assert server.call("HEAD", "/kv/x")[0] == 400
    log = tmp_path / "nginx" / "access.log"
    with driver(server.port) as asked:
        not_asked_again(asked, lambda: len(log.read_text().splitlines()))
    said_once(said(), 400)


@pytest.mark.parametrize("kind", ["nginx", "python"])
def test_a_web_server_that_has_no_such_page(
    nginx: Callable[..., Process], tmp_path: Path, said: Callable[[], list[str]], kind: str
) -> None:
    if kind == "nginx":
        server = nginx("listen 127.0.0.1:{port}; root /nowhere;")
        log = tmp_path / "nginx" / "access.log"
    else:
        port, log = free_port(), tmp_path / "log"
        argv = [sys.executable, "-m", "http.server", "--bind", "127.0.0.1", "-d", str(tmp_path), str(port)]
        server = Process(argv, dict(os.environ), port, log)
    try:
        with driver(server.port) as asked:
            not_asked_again(asked, lambda: log.read_text().count("/kv/"))
    finally:
        server.kill()
    said_once(said(), 404)


def test_a_proxy_whose_engine_is_away_and_comes_back(
    nginx: Callable[..., Process], tmp_path: Path, said: Callable[[], list[str]]
) -> None:
    engine = ours(tmp_path / "engine", SOURCE)
    proxy = nginx(f"listen 127.0.0.1:{{port}}; location / {{ proxy_pass http://127.0.0.1:{engine.port}; }}")
    try:
        with driver(proxy.port) as asked:
            assert asked.put(KEYS, BLOCKS) and asked.get(KEYS) == ([True] * 6, BLOCKS)
            engine.kill()
            log = tmp_path / "nginx" / "access.log"
            not_asked_again(asked, lambda: len(log.read_text().splitlines()))
            said_once(said(), 502)
            engine.start()
            asked.until(lambda: asked.get(KEYS) == ([True] * 6, BLOCKS), "it is asked again")
    finally:
        engine.kill()


def test_a_proxy_that_has_had_too_many_requests_is_asked_again(nginx: Callable[..., Process]) -> None:
    proxy = nginx("listen 127.0.0.1:{port}; return 429;")
    with driver(proxy.port) as asked:
        assert asked.has(KEYS) == [False] * 6
        assert not asked.client._breaker.open


def test_a_refusal_of_the_engine_itself_is_no_fault(tmp_path: Path, said: Callable[[], list[str]]) -> None:
    """A token that may use other keys only: 403, and JSON."""
    engine = ours(tmp_path, SOURCE)
    tokens = tmp_path / "tokens"
    tokens.write_text(f"other rw default other-keys {TOKEN}\n")
    engine.kill()
    engine.start()
    try:
        with driver(engine.port) as asked:
            for _ in range(5):
                assert asked.has(KEYS) == [False] * 6 and asked.get(KEYS)[0] == [False] * 6
            assert not asked.client._breaker.open
    finally:
        engine.kill()
    assert said() == []
