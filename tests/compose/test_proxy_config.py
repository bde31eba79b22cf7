"""configs/proxy/nginx.conf with a real nginx in front of a server on a UNIX socket that records what reaches it."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.nginx import nginx

CONFIG = Path(__file__).parents[2] / "configs" / "proxy" / "nginx.conf"
PATHS = ("/metrics", "/healthcheck", "/status", "/version")


@dataclass
class Proxy:
    """A running nginx: its port, and the raw head of every request that came out at the other side."""

    port: int
    socket: Path
    heads: list[str] = field(default_factory=list)

    def raw(self, head: str) -> tuple[int, str]:
        """Send these bytes; status code and the whole answer."""
        with socket.create_connection(("127.0.0.1", self.port), timeout=5) as connection:
            connection.sendall(head.encode())
            answer = b""
            while chunk := connection.recv(65536):
                answer += chunk
        text = answer.decode()
        match = re.match(r"HTTP/1\.[01] (\d{3})", text)
        return int(match[1]) if match else 0, text

    def ask(self, target: str, method: str = "GET", headers: str = "") -> tuple[int, str]:
        return self.raw(f"{method} {target} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n{headers}\r\n")


def upstream(path: Path, heads: list[str], stop: threading.Event) -> None:
    """A server that answers 200 to everything: whatever gets through is seen."""
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))
        server.listen(16)
        server.settimeout(0.1)
        while not stop.is_set():
            try:
                connection, _ = server.accept()
            except TimeoutError:
                continue
            with connection:
                connection.settimeout(2)
                head = b""
                while b"\r\n\r\n" not in head and (chunk := connection.recv(65536)):
                    head += chunk
                heads.append(head.decode())
                body = b"from upstream"
                connection.sendall(
                    b"HTTP/1.1 200 OK\r\nServer: uvicorn\r\nContent-Length: %d\r\nConnection: close\r\n\r\n%s"
                    % (len(body), body)
                )


@pytest.fixture(scope="module")
def proxy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Proxy]:
    folder = tmp_path_factory.mktemp("proxy")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    text = CONFIG.read_text()
    # The same file but for places: this host is not the container.
    for old, new in (
        ("listen 8080;", f"listen 127.0.0.1:{port};"),
        ("/run/lmcache-http/http.sock", f"{folder}/http.sock"),
        (" /tmp/", f" {folder}/"),
    ):
        assert old in text
        text = text.replace(old, new)
    config = folder / "nginx.conf"
    config.write_text(text)
    running = Proxy(port, folder / "http.sock")
    stop = threading.Event()
    thread = threading.Thread(target=upstream, args=(folder / "http.sock", running.heads, stop), daemon=True)
    thread.start()
    with (folder / "log").open("w") as log:
        argv = [nginx(), "-e", "stderr", "-p", str(folder), "-c", str(config)]
        if os.geteuid() == 0:  # nginx under root drops to a user who may not enter pytest's folders
            argv += ["-g", "user root;"]
        process = subprocess.Popen(argv, stdout=log, stderr=log)
    try:
        end = time.monotonic() + 10
        while True:
            assert process.poll() is None and time.monotonic() < end, (folder / "log").read_text()
            try:
                socket.create_connection(("127.0.0.1", port), timeout=1).close()
                break
            except OSError:
                time.sleep(0.05)
        yield running
    finally:
        process.terminate()
        process.wait(10)
        stop.set()
        thread.join(5)


@pytest.mark.parametrize("path", PATHS)
def test_a_get_of_an_allowed_path_reaches_exactly_that_path(proxy: Proxy, path: str) -> None:
    proxy.heads.clear()
    code, answer = proxy.ask(path)
    assert code == 200
    assert answer.endswith("from upstream")
    assert [head.split("\r\n")[0] for head in proxy.heads] == [f"GET {path} HTTP/1.1"]


@pytest.mark.parametrize("path", PATHS)
def test_arguments_and_headers_of_the_client_are_dropped(proxy: Proxy, path: str) -> None:
    proxy.heads.clear()
    code, _ = proxy.ask(path + "?name=evil&x=%0d%0a", headers="X-Evil: 1\r\nCookie: a=b\r\n")
    assert code == 200
    assert proxy.heads[0].split("\r\n")[0] == f"GET {path} HTTP/1.1"
    assert "evil" not in proxy.heads[0].lower()
    assert "cookie" not in proxy.heads[0].lower()


@pytest.mark.parametrize("method", ["HEAD", "POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE", "get"])
@pytest.mark.parametrize("path", ["/metrics", "/status", "/run_script"])
def test_no_other_method_passes(proxy: Proxy, method: str, path: str) -> None:
    proxy.heads.clear()
    code, _ = proxy.ask(path, method, headers="Content-Length: 0\r\n" if method != "HEAD" else "")
    assert code == (400 if method == "get" else 405)
    assert not proxy.heads


@pytest.mark.parametrize(
    "target",
    [
        "/", "/run_script", "/env", "/cache/clear", "/config", "/quota", "/metrics/", "/metricsx", "/METRICS",
        "/env/../metrics", "/metrics/../env", "/metrics/../run_script", "/./metrics", "/metrics/.", "/metrics/..",
        "/%2e%2e/metrics", "/env/%2e%2e/metrics", "/metrics%2f..%2fenv", "/metrics%2f", "/%6detrics", "/metrics%00",
        "/metrics%20", "//metrics", "/metrics//", "//env", "/metrics;x", "/metrics#x", "\\metrics", "/..\\metrics",
        "http://127.0.0.1/metrics", "http://lmcache/run_script", "http://x/env", "*", "metrics",
    ],
)  # fmt: skip
def test_nothing_else_passes(proxy: Proxy, target: str) -> None:
    proxy.heads.clear()
    code, answer = proxy.ask(target)
    assert code in (400, 404)
    assert "from upstream" not in answer
    assert not proxy.heads


def test_a_body_or_a_second_request_in_it_does_not_pass(proxy: Proxy) -> None:
    proxy.heads.clear()
    proxy.ask("/metrics", headers="Content-Length: 33\r\n\r\nPOST /run_script HTTP/1.1\r\nHost: x\r\n")
    proxy.raw(
        "GET /metrics HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\nConnection: close\r\n\r\n"
        "1c\r\nPOST /run_script HTTP/1.1\r\n\r\n0\r\n\r\n"
    )
    assert not [head for head in proxy.heads if "run_script" in head]


def test_the_servers_do_not_tell_their_versions(proxy: Proxy) -> None:
    for target in ("/metrics", "/nothing", "/healthz"):
        _, answer = proxy.ask(target)
        assert not re.search(r"nginx/\d|uvicorn", answer)


def test_a_dead_upstream_is_a_quick_502_and_the_proxy_stays_healthy(proxy: Proxy) -> None:
    hidden = proxy.socket.with_suffix(".hidden")
    proxy.socket.rename(hidden)
    try:
        started = time.monotonic()
        assert proxy.ask("/metrics")[0] == 502
        assert time.monotonic() - started < 2
        assert proxy.ask("/healthz")[0] == 200
    finally:
        hidden.rename(proxy.socket)
    assert proxy.ask("/metrics")[0] == 200, "and the first request after its return is served"


def test_the_file_needs_neither_root_nor_a_writable_root_file_system() -> None:
    text = re.sub(r"#.*", "", CONFIG.read_text())
    assert not re.search(r"^\s*user\s", text, re.M)
    written = re.findall(r"(?:^|\s)(?:pid|\w+_temp_path)\s+(\S+);", text)
    assert len(written) == 6
    assert all(path.startswith("/tmp/") for path in written)
    assert "listen 8080;" in text
