"""`kvstrata engine check URL` passes where an engine works, ours or epistemic-graph's, and fails where one does not."""

from __future__ import annotations

import http.server
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest

from tests.engine.process import READER, ROOT, TOKENS, EngineProcess
from tests.interop.epistemic import TOKEN, EpistemicServer


def run(*arguments: object, token: str = "") -> tuple[int, str]:
    """Exit code and output of the command."""
    env = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "KV_ENGINE_TOKEN": token}
    command = [sys.executable, "-m", "kvstrata.cli", "engine", "check", *map(str, arguments)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)
    return done.returncode, done.stdout + done.stderr


def test_it_passes_against_ours(engine_process: Callable[..., EngineProcess]) -> None:
    engine = engine_process()
    code, text = run(engine.url)
    assert code == 0, text
    assert "passed" in text
    assert "note" not in text


def test_it_passes_against_ours_with_a_token_and_leaves_nothing(
    engine_process: Callable[..., EngineProcess], tmp_path: Path
) -> None:
    file = tmp_path / "tokens"
    file.write_text(TOKENS)
    engine = engine_process(TOKENS_FILE=file)
    code, text = run(engine.url, "--token-file", file, "--json")
    assert code == 0, text
    report = json.loads(text)
    assert report["passed"]
    assert {row["verdict"] for row in report["rows"]} == {"ok"}
    code, text = run(engine.url, "--token-file", file, "--json")
    assert json.loads(text)["before"]["total_refs"] == 0


@pytest.mark.parametrize("backend", ["durable", "memory"])
def test_it_passes_against_a_real_epistemic_graph_server(tmp_path: Path, backend: str) -> None:
    server = EpistemicServer(tmp_path / "eg", backend)
    try:
        code, text = run(server.url, token=TOKEN)
    finally:
        server.stop()
    assert code == 0, text
    assert "no DELETE" in text
    assert ("never counts gets" in text) == (backend == "memory")


class Liar(http.server.BaseHTTPRequestHandler):
    """A server that is wrong in one way at a time."""

    protocol_version = "HTTP/1.0"
    kept: ClassVar[dict[str, bytes]] = {}
    fault = ""
    gets = 0

    def do_GET(self) -> None:
        if self.path == "/kv/stats":
            counts = dict.fromkeys(("put_new", "dedup_hits", "get_hits", "get_misses"), 0)
            self._say(200, json.dumps(counts).encode())
        elif self.path.endswith("/exists"):
            self._say(200, b'{"exists": true}')
        else:
            value = self.kept.get(self.path)
            if value is not None and self.fault == "other bytes":
                value = bytes([value[0] ^ 1]) + value[1:]
            self._say(404 if value is None else 200, value or b"")

    def do_HEAD(self) -> None:
        self._say(200 if self.path in self.kept else 404, b"")

    def do_PUT(self) -> None:
        there = self.path in self.kept
        body = self.rfile.read(int(self.headers["Content-Length"]))
        whole = len(body) == int(self.headers["Content-Length"])
        if (not there or self.fault == "replaces") and (whole or self.fault == "stores short bodies"):
            self.kept[self.path] = body
        self._say(200 if there else 201, b"")

    def _say(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def liar() -> Iterator[str]:
    """Its URL."""
    Liar.kept.clear()
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Liar)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()


@pytest.mark.parametrize(
    ("fault", "row"),
    [
        ("other bytes", "the same bytes come back"), ("replaces", "a repeated put is a no-op"),
        ("stores short bodies", "a body cut short is not stored"), ("", "the stats moved"),
    ],
)  # fmt: skip
def test_it_fails_and_says_what_is_wrong(liar: str, monkeypatch: pytest.MonkeyPatch, fault: str, row: str) -> None:
    monkeypatch.setattr(Liar, "fault", fault)
    code, text = run(liar)
    assert code == 1, text
    assert any(line.startswith(" FAIL") and row in line for line in text.splitlines()), text


def test_it_says_what_to_do_when_there_is_no_server_or_no_token(
    engine_process: Callable[..., EngineProcess], tmp_path: Path
) -> None:
    code, text = run("http://127.0.0.1:9")
    assert (code, "does not answer" in text) == (2, True)
    assert run("ftp://x")[0] == 2
    file = tmp_path / "tokens"
    file.write_text(TOKENS)
    engine = engine_process(TOKENS_FILE=file)
    code, text = run(engine.url)
    assert (code, "refuses the token" in text) == (2, True)


@pytest.mark.parametrize(
    ("token", "why"),
    [(READER, "may only read"), ("0123456789abcdef-narrow", "another beginning"), ("0123456789abcdef-scrape", "403")],
)
def test_a_token_that_may_not_do_all_of_it_is_no_fault_of_the_server(
    engine_process: Callable[..., EngineProcess], tmp_path: Path, token: str, why: str
) -> None:
    file = tmp_path / "tokens"
    file.write_text(
        f"{TOKENS}narrow rw default p- 0123456789abcdef-narrow\nscrape metrics default 0123456789abcdef-scrape\n"
    )
    code, text = run(engine_process(TOKENS_FILE=file).url, token=token)
    assert code == 2, text
    assert "FAIL" not in text
    assert why in text
    assert "of scope rw without a prefix" in text
