"""Real servers of /kv as processes, a wire that can be spoilt, and a driver that asks as LMCache's wrapper does."""

from __future__ import annotations

import contextlib
import hashlib
import http.client
import os
import select
import shutil
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from kvstrata.doors.l2_remote import KvstrataRemote

TOKEN = "a-token-of-the-tests"
ANSWER_S = 20.0
UNTIL_S = 90.0  # pauses of the breaker, and tries that a busy machine makes late


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def block(name: object, size: int = 300_000) -> bytearray:
    return bytearray((hashlib.shake_128(str(name).encode()).digest(4096) * (size // 4096 + 1))[:size])


def name(number: object, salt: str = "") -> str:
    """A key as LMCache's wrapper spells it, with a model name that needs quoting."""
    key = f"org/tiny--0 ü%@{1:08x}@0@{hashlib.sha256(str(number).encode()).hexdigest()}"
    return f"{key}@{salt}" if salt else key


class Process:
    """A server of /kv. A second `start` keeps port and data. `context`: of https, for `call`."""

    def __init__(
        self, argv: Sequence[str], env: dict[str, str], port: int, log: Path, context: ssl.SSLContext | None = None
    ) -> None:
        self.argv, self.env, self.port, self._log, self.context = list(argv), env, port, log, context
        self.start()

    def start(self) -> None:
        with self._log.open("ab") as log:
            self.process = subprocess.Popen(self.argv, env=self.env, stdout=log, stderr=log)
        end = time.monotonic() + ANSWER_S
        while True:
            with contextlib.suppress(OSError):
                socket.create_connection(("127.0.0.1", self.port), 1).close()
                return
            assert self.process.poll() is None and time.monotonic() < end, self._log.read_text()[-2000:]
            time.sleep(0.02)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def call(self, method: str, path: str, body: bytes = b"") -> tuple[int, bytes]:
        connection = (
            http.client.HTTPSConnection("127.0.0.1", self.port, timeout=10, context=self.context)
            if self.context
            else http.client.HTTPConnection("127.0.0.1", self.port, timeout=10)
        )
        connection.request(method, path, body or None, {"Authorization": f"Bearer {TOKEN}"})
        answer = connection.getresponse()
        return answer.status, answer.read()


def epistemic(folder: Path, backend: str) -> Process:
    """epistemic-graph-server 2.27.7. Each variable was found by being refused without it."""
    port = free_port()
    binary = shutil.which("epistemic-graph-server", path=f"{Path(sys.executable).parent}")
    assert binary, "epistemic-graph-server is in requirements/dev.txt: make test installs it"
    folder.mkdir(parents=True, exist_ok=True)
    env = {
        "GRAPH_SERVICE_SOCKET": str(folder / "eg.sock"), "GRAPH_SERVICE_PERSIST_DIR": str(folder / "data"),
        "GRAPH_SERVICE_AUTH_SECRET": "x", "EPISTEMIC_GRAPH_AUDIENCE": "t", "EPISTEMIC_GRAPH_TENANT": "t",
        "EPISTEMIC_GRAPH_POLICY_VERSION": "1", "EPISTEMIC_GRAPH_SIGNER_KEYS_JSON": '{"a":"b"}',
        "EPISTEMIC_GRAPH_REQUIRE_OIDC": "false", "EPISTEMIC_GRAPH_KVCACHE_ADDR": f"127.0.0.1:{port}",
        "EPISTEMIC_GRAPH_KVCACHE_TOKEN": TOKEN, "EPISTEMIC_GRAPH_KVCACHE_BACKEND": backend, "NO_COLOR": "1",
    }  # fmt: skip
    return Process([binary], env, port, folder / "log")


def ours(folder: Path, source: str, context: ssl.SSLContext | None = None, **settings: str) -> Process:
    """`python -m kvstrata.engine` of the tree at `source`, with one token and `settings`."""
    port = free_port()
    folder.mkdir(parents=True, exist_ok=True)
    tokens = folder / "tokens"
    tokens.write_text(f"test rw default {TOKEN}\n")
    env = {
        **{name: value for name, value in os.environ.items() if not name.startswith("KV_")},
        "PYTHONPATH": source, "KV_ENGINE_ROOT": str(folder / "data"), "KV_ENGINE_HTTP": f"127.0.0.1:{port}",
        "KV_ENGINE_CAPACITY_BYTES": str(256 << 20), "KV_ENGINE_FREE_FLOOR_BYTES": "1",
        "KV_ENGINE_TOKENS_FILE": str(tokens), "KV_CACHE_ALLOW_FS": "tmpfs overlay fuse",
        **settings,
    }  # fmt: skip
    return Process([sys.executable, "-m", "kvstrata.engine"], env, port, folder / "log", context)


class Wire:
    """A TCP relay to a server. `mode` is looked at for each piece that the server sends.

    pass, hang (nothing more), drip (a byte now and then), flip (one bit of each large piece), cut (half a piece, then
    closed), rubbish (bytes that are no HTTP, and no question), html (200 and a page for every question).
    """

    def __init__(self, port: int) -> None:
        self.mode, self.server = "pass", port
        self.connections = 0
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        self._open = True
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        self._open = False
        self.mode = "closed"
        self._listener.close()

    def _accept(self) -> None:
        while self._open:
            with contextlib.suppress(OSError):
                client, _ = self._listener.accept()
                self.connections += 1
                threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        with contextlib.suppress(OSError), client, socket.create_connection(("127.0.0.1", self.server)) as server:
            while True:
                ready, _, _ = select.select([client, server], [], [], 0.5)
                for end in ready:
                    data = end.recv(1 << 16)
                    if not data:
                        return
                    if end is server:
                        if not self._answer(client, data):
                            return
                    elif self.mode == "rubbish":
                        client.sendall(b"\x00\xffSSH-2.0-nothing\r\n" * 20)
                        return
                    elif self.mode == "html":
                        client.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 15\r\n\r\n<html>hi</html>")
                        return
                    else:
                        server.sendall(data)

    def _answer(self, client: socket.socket, data: bytes) -> bool:
        while self.mode == "hang":
            time.sleep(0.01)
        if self.mode == "drip":
            for at in range(len(data)):
                client.sendall(data[at : at + 1])
                time.sleep(0.2)  # so that the shortest answer takes longer than ANSWER_S
        elif self.mode == "flip" and len(data) > 5000:
            at = len(data) // 2
            client.sendall(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
        elif self.mode == "cut" and len(data) > 5000:
            client.sendall(data[: len(data) // 2])
            return False
        else:
            client.sendall(data)
        return True


class Driver:
    """Asks and waits on the descriptor, as LMCache's demux thread does."""

    def __init__(self, port: int, **env: str) -> None:
        known = {"KV_REMOTE_URL": f"http://127.0.0.1:{port}", "KV_REMOTE_TOKEN": TOKEN, "KV_REMOTE_DEADLINE": "5"}
        self.client = KvstrataRemote(env={**known, **env})
        self._done: dict[int, tuple[bool, str, list[bool]]] = {}

    def wait(self, future: int) -> tuple[bool, str, list[bool]]:
        poller = select.poll()
        poller.register(self.client.event_fd(), select.POLLIN)
        end = time.monotonic() + ANSWER_S
        while future not in self._done:
            assert poller.poll(max(0.0, end - time.monotonic()) * 1000), f"task {future} was never answered"
            for number, good, error, flags in self.client.drain_completions():
                self._done[number] = (good, error, flags)
        return self._done.pop(future)

    def put(self, keys: Sequence[str], blocks: Sequence[Any]) -> bool:
        return self.wait(self.client.submit_batch_set(keys, [memoryview(b) for b in blocks]))[0]

    def has(self, keys: Sequence[str]) -> list[bool]:
        return self.wait(self.client.submit_batch_exists(keys))[2]

    def get(self, keys: Sequence[str], size: int = 300_000) -> tuple[list[bool], list[bytearray]]:
        buffers = [bytearray(size) for _ in keys]
        return self.wait(self.client.submit_batch_get(keys, [memoryview(b) for b in buffers]))[2], buffers

    def delete(self, keys: Sequence[str]) -> list[bool]:
        return self.wait(self.client.submit_batch_delete(keys))[2]

    def until(self, check: Callable[[], bool], what: str) -> None:
        end = time.monotonic() + UNTIL_S
        while not check():
            assert time.monotonic() < end, what
            time.sleep(0.02)


@contextlib.contextmanager
def driver(port: int, **env: str) -> Iterator[Driver]:
    made = Driver(port, **env)
    try:
        yield made
    finally:
        made.client.close()
