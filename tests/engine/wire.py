"""Raw HTTP, byte by byte: what no well-behaved client would send, and answers as they came."""

from __future__ import annotations

import json
import socket
from typing import Any, NamedTuple


class Answer(NamedTuple):
    """One answer. Header names in lower case."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        """The body, parsed."""
        return json.loads(self.body)

    @property
    def stays(self) -> bool:
        """Whether the server keeps the connection."""
        return self.headers.get("connection", "") != "close"


class Wire:
    """A connection to the engine's HTTP port; a context manager."""

    def __init__(
        self, address: tuple[str, int], token: str = "", timeout_s: float = 20.0, receive_buffer: int = 0
    ) -> None:
        self.sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        if receive_buffer:
            self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        self.sock.settimeout(timeout_s)
        self.sock.connect(address)
        self.buffer = b""
        self._token = token

    def __enter__(self) -> Wire:
        return self

    def __exit__(self, *_: object) -> None:
        self.sock.close()

    def send(self, data: bytes) -> None:
        """As it is."""
        self.sock.sendall(data)

    def head(self, method: str, path: str, **headers: object) -> bytes:
        """A request's head. `_` in a header's name is a `-`."""
        lines = [f"{method} {path} HTTP/1.1", "Host: engine"]
        if self._token:
            lines.append(f"Authorization: Bearer {self._token}")
        lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
        return "\r\n".join([*lines, "", ""]).encode()

    def ask(self, method: str, path: str, body: bytes | None = None, **headers: object) -> Answer:
        """One request, one answer."""
        if body is not None:
            headers.setdefault("Content_Length", len(body))
        self.send(self.head(method, path, **headers) + (body or b""))
        return self.answer(method)

    def answer(self, method: str = "GET") -> Answer:
        """The next answer; AssertionError if the server closes before its end."""
        while b"\r\n\r\n" not in self.buffer:
            self._more()
        raw, _, self.buffer = self.buffer.partition(b"\r\n\r\n")
        first, *lines = raw.decode("latin-1").split("\r\n")
        assert first.startswith("HTTP/1.1 "), f"no answer: {first!r}"
        headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines)}
        status = int(first.split(" ")[1])
        length = 0 if method == "HEAD" or status in (100, 204, 304) else int(headers.get("content-length", "0"))
        while len(self.buffer) < length:
            self._more()
        body, self.buffer = self.buffer[:length], self.buffer[length:]
        return Answer(status, headers, body)

    def closed(self) -> bool:
        """Waits for the server to close; False if it sends something instead."""
        try:
            return not self.buffer and self.sock.recv(1) == b""
        except ConnectionResetError:
            return True

    def _more(self) -> None:
        data = self.sock.recv(1 << 20)
        assert data, f"the server closed after {self.buffer[:200]!r}"
        self.buffer += data
