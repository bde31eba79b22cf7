"""The containers' health checks: does the service answer what it is for. Prints one line; exit code 0 or 1."""

from __future__ import annotations

import http.client
import socket
from pathlib import Path

from kvstrata.launch.config import Paths

__all__ = ["check"]

_TIMEOUT_S = 5.0
_ENGINE_PORT = 9130


def check(service: str, paths: Paths | None = None, port: int = 8000) -> int:
    """Exit code for `service` (vllm, lmcache, engine, relay, hold). The reason of a failed state comes first."""
    paths = paths or Paths()
    try:
        print(paths.failed.read_text(encoding="utf-8").strip(), flush=True)
        return 1
    except FileNotFoundError:
        pass
    except OSError as error:
        print(f"kvstrata failed: {paths.failed} cannot be read: {error}", flush=True)
        return 1
    try:
        if service == "vllm":
            _get(http.client.HTTPConnection("127.0.0.1", port, timeout=_TIMEOUT_S), "/health")
        elif service == "lmcache":
            _get(_SocketConnection(paths.http_socket), "/healthcheck")
        elif service == "engine":
            _get(http.client.HTTPConnection("127.0.0.1", _ENGINE_PORT, timeout=_TIMEOUT_S), "/readyz")
        elif service == "relay":
            _SocketConnection(paths.otlp_socket).connect()  # whether the collector answers is not the relay's health
        elif service == "hold":
            pass  # it answers by running this check
        else:
            print(f"no service {service!r}: vllm, lmcache, engine, relay or hold", flush=True)
            return 2
    except (OSError, http.client.HTTPException) as error:
        print(f"{service} does not answer: {error}", flush=True)
        return 1
    print(f"{service} answers", flush=True)
    return 0


def _get(connection: http.client.HTTPConnection, path: str) -> None:
    try:
        connection.request("GET", path)
        response = connection.getresponse()
        body = response.read(300)
        if response.status != 200:
            raise http.client.HTTPException(f"{path} says {response.status}: {body.decode(errors='replace')}")
    finally:
        connection.close()


class _SocketConnection(http.client.HTTPConnection):
    """http.client over a UNIX socket."""

    def __init__(self, path: Path) -> None:
        super().__init__("lmcache", timeout=_TIMEOUT_S)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(_TIMEOUT_S)
        self.sock.connect(str(self._path))
