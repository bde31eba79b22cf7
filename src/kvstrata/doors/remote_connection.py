"""http.client over sockets that know a deadline: a server which sends a byte now and then ends with it as well."""

from __future__ import annotations

import http.client
import socket
import ssl
import threading
import time
from collections.abc import Callable
from typing import Any

from kvstrata.doors.remote_faults import NoGreeting
from kvstrata.doors.remote_settings import RemoteSettings

__all__ = ["Connection"]


class _Timed:
    """Socket whose every wait ends at `deadline` (time.monotonic)."""

    deadline = 0.0

    def _arm(self) -> None:
        left = self.deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError("deadline")
        self.settimeout(left)  # type: ignore[attr-defined]

    def recv_into(self, *args: Any, **kwargs: Any) -> int:
        self._arm()
        return int(super().recv_into(*args, **kwargs))  # type: ignore[misc]

    def send(self, *args: Any, **kwargs: Any) -> int:
        self._arm()
        return int(super().send(*args, **kwargs))  # type: ignore[misc]

    def sendall(self, *args: Any, **kwargs: Any) -> None:
        self._arm()  # plain sockets: the time-out is that of the whole call; TLS calls `send` for each part
        super().sendall(*args, **kwargs)  # type: ignore[misc]


class _Plain(_Timed, socket.socket):
    pass


class _Tls(_Timed, ssl.SSLSocket):
    pass


class Connection(http.client.HTTPConnection):
    """http.client over a timed socket; resolves, connects and greets within the deadline of the first call.

    `opened` is told each socket before it is waited for, so that somebody else can end that; OSError says that it has.
    """

    sock: Any

    def __init__(self, settings: RemoteSettings, deadline: float, opened: Callable[[socket.socket], None]) -> None:
        url = settings.url
        super().__init__(str(url.hostname), url.port or (443 if url.scheme == "https" else 80))
        self.bearer, self._tls = settings.bearer(), settings.tls()
        self._deadline, self._opened = deadline, opened
        self.auto_open = 0  # a lost connection is an error to see, not to hide

    def connect(self) -> None:
        last: OSError = ConnectionRefusedError("no address")
        for family, address in _resolve(self.host, self.port, self._deadline):
            plain = _Plain(family, socket.SOCK_STREAM)
            plain.deadline = self._deadline
            try:
                self._opened(plain)
                plain._arm()
                plain.connect(address)
                plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                self.sock = self._greet(plain, self._tls) if self._tls else plain
                return
            except OSError as error:
                plain.close()
                # What TLS said says more than another address that is closed.
                if not isinstance(last, (ssl.SSLError, NoGreeting)):
                    last = error
        raise last

    def _greet(self, plain: _Plain, context: ssl.SSLContext) -> _Tls:
        context.sslsocket_class = _Tls
        made: Any = context.wrap_socket(plain, server_hostname=self.host, do_handshake_on_connect=False)
        made.deadline = self._deadline
        try:
            self._opened(made)
            made._arm()
            made.do_handshake()
        except OSError as error:
            made.close()
            raise (NoGreeting() if isinstance(error, TimeoutError) else error) from None
        return made  # type: ignore[no-any-return]


def _resolve(host: str, port: int, deadline: float) -> list[tuple[int, Any]]:
    """Addresses of `host`. getaddrinfo has no time-out of its own, so it runs aside and is left behind when late."""
    found: list[tuple[int, Any]] = []
    failed: list[OSError] = []

    def look() -> None:
        try:
            found.extend((f, a) for f, _, _, _, a in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM))
        except OSError as error:
            failed.append(error)

    thread = threading.Thread(target=look, name="kvstrata-resolve", daemon=True)
    thread.start()
    thread.join(max(0.0, deadline - time.monotonic()))
    if failed:
        raise failed[0]
    if not found:
        raise TimeoutError("name lookup")
    return found
