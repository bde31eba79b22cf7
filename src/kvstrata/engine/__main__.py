"""`python -m kvstrata.engine`: the KV engine as a process. Settings: KV_ENGINE_* (docs/engine.md). SIGTERM ends it."""

from __future__ import annotations

import logging
import os
import resource
import signal
import ssl
import sys
import threading
from collections.abc import Callable
from contextlib import suppress

from prometheus_client import disable_created_metrics

from kvstrata.engine.auth import AuthError, Tokens, is_loopback
from kvstrata.engine.buffers import Budget
from kvstrata.engine.content import Engine
from kvstrata.engine.http_blocks import Blocks
from kvstrata.engine.http_body import Bodies
from kvstrata.engine.http_control import Control
from kvstrata.engine.http_pages import pages
from kvstrata.engine.http_routes import Routes
from kvstrata.engine.http_server import REFUSAL, Http
from kvstrata.engine.listener import Connection, Listener
from kvstrata.engine.metrics import EngineMetrics
from kvstrata.engine.settings import EngineSettings
from kvstrata.store.errors import StoreError

__all__ = ["Server", "main"]

log = logging.getLogger("kvstrata.engine")

# Shorter than the ten seconds after which a container engine kills.
_GRACE_S = 7.0
_CLOSE_S = 2.0
# Files beside connections: blocks that are being read, the catalog, the log.
_OTHER_FILES = 1024


class Server:
    """An engine with its listeners, from `start` to `stop`. StoreError, AuthError: what is wrong with a setting."""

    def __init__(self, settings: EngineSettings) -> None:
        self._settings = settings
        self._tokens = _tokens(settings)
        self._tls = _tls(settings)
        self._metrics = EngineMetrics()
        self._budget = Budget(settings.memory, lambda: self._tokens.tenants)
        self._engine = Engine.open(settings, lambda: self._tokens.tenants)
        self._stopping = False
        self.listeners: dict[str, Listener] = {}
        try:
            self._listen("http", settings.http, self._http(), REFUSAL)
            if settings.resp:
                # Not needed where nobody speaks it.
                from kvstrata.engine.resp import make_serve

                serve = make_serve(self._engine, self._tokens, self._budget, settings)
                self._listen("resp", settings.resp, serve, b"-ERR max number of clients reached\r\n")
        except BaseException:
            self._engine.close(_CLOSE_S)
            raise
        self._metrics.watch(lambda: self._engine.stats(None), self._budget, self.listeners)

    def _http(self) -> Callable[[Connection], bool]:
        settings = self._settings
        bodies = Bodies(self._budget, settings.body_s)
        routes = Routes(
            Blocks(self._engine, bodies, settings.max_value),
            Control(self._engine, bodies, settings.max_value),
            pages(
                self._metrics,
                lambda: "the server is stopping" if self._stopping else "",
                lambda: self._tokens.tenants,
            ),
        )
        return Http(routes, self._tokens, self._metrics, settings.header_s, settings.threads).serve

    def _listen(self, protocol: str, address: str, serve: Callable[[Connection], bool], refusal: bytes) -> None:
        settings = self._settings
        host, port = _address(protocol, address)
        if self._tokens.open and not is_loopback(host):
            raise AuthError(
                f"KV_ENGINE_{protocol.upper()}={address} without tokens",
                "a file of tokens for every address that others can reach",
                "set KV_ENGINE_TOKENS_FILE (docs/engine.md, tokens), or listen on 127.0.0.1",
            )
        try:
            self.listeners[protocol] = Listener(
                host, port, serve, name=protocol, idle_s=settings.idle_s, handshake_s=settings.header_s,
                max_connections=settings.max_connections, workers=settings.workers,
                max_workers=settings.threads, tls=self._tls, refusal=refusal,
            )  # fmt: skip
        except (OSError, OverflowError) as error:
            raise StoreError(
                f"KV_ENGINE_{protocol.upper()}={address} ({error})",
                "an address of this machine with a free port",
                f"stop what listens there, or correct KV_ENGINE_{protocol.upper()}",
            ) from error

    def start(self) -> None:
        """Begin to serve."""
        for protocol, listener in self.listeners.items():
            listener.start()
            host, port = listener.address
            log.info("engine: %s on %s:%d%s", protocol, host, port, " with TLS" if self._tls else "")

    def stop(self) -> None:
        """Requests end, then the engine does. What was acknowledged stays."""
        self._stopping = True
        waits = [threading.Thread(target=one.stop, args=(_GRACE_S,)) for one in self.listeners.values()]
        for wait in waits:
            wait.start()
        for wait in waits:
            wait.join()
        self._engine.close(_CLOSE_S)


def _tokens(settings: EngineSettings) -> Tokens:
    return Tokens(settings.tokens_file)


def _tls(settings: EngineSettings) -> ssl.SSLContext | None:
    if settings.tls_cert is None and settings.tls_key is None:
        return None
    try:
        if settings.tls_cert is None:
            raise OSError("no KV_ENGINE_TLS_CERT")
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.load_cert_chain(settings.tls_cert, settings.tls_key)
    except OSError as error:  # ssl.SSLError is one
        raise StoreError(
            f"KV_ENGINE_TLS_CERT={settings.tls_cert}, KV_ENGINE_TLS_KEY={settings.tls_key} ({error})",
            "a certificate chain and its key in PEM files that this user can read",
            "correct both, or unset both to serve without TLS",
        ) from error
    return context


def _address(protocol: str, text: str) -> tuple[str, int]:
    host, colon, port = text.rpartition(":")
    if not colon or not port.isdigit() or int(port) > 65535:
        raise StoreError(
            f"KV_ENGINE_{protocol.upper()}={text}", "host:port, such as 127.0.0.1:9130 or [::]:9130",
            f"correct KV_ENGINE_{protocol.upper()}",
        )  # fmt: skip
    return host.strip("[]") or "0.0.0.0", int(port)


def _raise_file_limit(wanted: int) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < wanted:
        with suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (min(wanted, hard), hard))
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < wanted:
        log.warning("engine: %d open files are allowed, %d are wanted for KV_ENGINE_MAX_CONNECTIONS", soft, wanted)


def main() -> int:
    """Serve until SIGTERM or Ctrl-C. Exit code 2 where a setting is refused."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s", stream=sys.stderr)
    disable_created_metrics()  # type: ignore[no-untyped-call]  # a time stamp beside every counter, which nobody asks for
    ended = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: ended.set())
    try:
        settings = EngineSettings.from_env(os.environ)
        _raise_file_limit(settings.max_connections * (2 if settings.resp else 1) + _OTHER_FILES)
        server = Server(settings)
    except (StoreError, AuthError) as error:
        print(f"found:    {error.found}\nneeded:   {error.needed}\nto fix:   {error.fix}", file=sys.stderr)
        return 2
    server.start()
    ended.wait()
    log.info("engine: stopping")
    server.stop()
    log.info("engine: stopped")
    return 0


if __name__ == "__main__":
    sys.exit(main())
