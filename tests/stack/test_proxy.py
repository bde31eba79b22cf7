"""What a neighbour can reach of LMCache's HTTP through the proxy: four GETs, whatever he types."""

from __future__ import annotations

import socket

import pytest

from tests.stack.harness import Stack

pytestmark = pytest.mark.stack


def raw(stack: Stack, request: str) -> tuple[int, str]:
    """Send bytes as they are (httpx would tidy the path); (status, body)."""
    port = int(stack.metrics_url.rsplit(":", 1)[1])
    with socket.create_connection(("127.0.0.1", port), timeout=10) as s:
        s.sendall(f"{request} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n".encode())
        data = b"".join(iter(lambda: s.recv(65536), b""))
    head, _, body = data.partition(b"\r\n\r\n")
    return int(head.split()[1]), body.decode(errors="replace")


@pytest.mark.parametrize("path", ["/metrics", "/healthcheck", "/status", "/version"])
def test_the_four_paths_answer(stack: Stack, path: str) -> None:
    status, body = raw(stack, f"GET {path}")
    assert status == 200 and body.strip()


@pytest.mark.parametrize(
    "line",
    [
        "GET /", "GET /env", "GET /run_script", "GET /cache/objects", "GET /config", "GET /threads", "GET /loglevel",
        "GET /metrics/reset", "GET /metrics/", "GET /env/../run_script", "GET /metrics/../env",
        "GET /metrics%2f..%2fenv",
        "GET /%2e%2e/env", "GET //env", "GET //metrics/../env", "GET /metrics/%2e%2e/env", "GET /metricsx",
        "GET http://lmcache/env", "GET http://x/run_script", "POST /run_script", "POST /cache/clear",
    ],
)  # fmt: skip
def test_nothing_else_is_reached(stack: Stack, line: str) -> None:
    status, body = raw(stack, line)
    assert status in (400, 403, 404, 405)
    assert "PATH" not in body and "chunk" not in body


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "HEAD", "OPTIONS", "PATCH", "TRACE"])
def test_only_get_is_let_through(stack: Stack, method: str) -> None:
    assert raw(stack, f"{method} /metrics")[0] == 405


def test_arguments_are_dropped(stack: Stack) -> None:
    status, body = raw(stack, "GET /status?x=../../env")
    assert status == 200 and "PATH" not in body
