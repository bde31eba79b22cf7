"""Answers as bytes, and how a refusal reaches a client: a status, a word for programs, a sentence for people."""

from __future__ import annotations

import json
import time
from email.utils import formatdate
from http import HTTPStatus
from typing import Any

__all__ = ["API_VERSION", "BINARY", "JSON", "TEXT", "Problem", "head_bytes", "json_bytes"]

API_VERSION = "1"
JSON = b"application/json"
TEXT = b"text/plain; charset=utf-8"
BINARY = b"application/octet-stream"

_LINES = {
    int(status): b"HTTP/1.1 %d %b\r\n" % (status, status.phrase.encode())
    for status in HTTPStatus
}  # fmt: skip
_date: tuple[int, bytes] = (0, b"")


class Problem(Exception):
    """What a request gets instead of what it asked for.

    `headers`: further header lines, each with its line end. `close`: the connection cannot go on after this.
    """

    def __init__(self, status: int, word: str, text: str, *, headers: bytes = b"", close: bool = False) -> None:
        super().__init__(text)
        self.status = status
        self.word = word
        self.text = text
        self.headers = headers
        self.close = close

    def body(self) -> bytes:
        """The JSON that goes with it."""
        return json_bytes({"error": self.word, "message": self.text})


def json_bytes(data: Any) -> bytes:
    """Compact JSON in ASCII, so that it is valid whatever a key has in it."""
    return json.dumps(data, separators=(",", ":")).encode()


def head_bytes(
    status: int, length: int | None, *, content: bytes = b"", headers: bytes = b"", keep: bool = True, minor: int = 1
) -> bytes:
    """Status line and headers, with the empty line that ends them. `length` None: no Content-Length (204, 304)."""
    global _date
    now = int(time.time())
    if _date[0] != now:
        _date = (
            now,
            b"Date: %b\r\nKV-API-Version: %b\r\n" % (formatdate(now, usegmt=True).encode(), API_VERSION.encode()),
        )
    parts = [_LINES[status], _date[1]]
    if content:
        parts.append(b"Content-Type: %b\r\n" % content)
    if length is not None:
        parts.append(b"Content-Length: %d\r\n" % length)
    if headers:
        parts.append(headers)
    if not keep:
        parts.append(b"Connection: close\r\n")
    elif not minor:
        parts.append(b"Connection: keep-alive\r\n")
    parts.append(b"\r\n")
    return b"".join(parts)
