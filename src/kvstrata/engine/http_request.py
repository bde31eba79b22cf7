"""One request as a route's handler sees it, and what it may answer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kvstrata.engine.auth import Grant
from kvstrata.engine.connection import Connection
from kvstrata.engine.http_head import Head, key_of_segment
from kvstrata.engine.http_reply import BINARY, JSON, Problem, head_bytes, json_bytes

__all__ = ["NOBODY", "Request"]

NOBODY = Grant("", write=False)
"""Of a request that has shown no token yet."""

# For an answer that fits a packet or two; a client that does not even take those is cut.
_ANSWER_S = 30.0


@dataclass(slots=True)
class Request:
    """A request with its connection and the grant of its token. `status` and `sent` say how it was answered."""

    connection: Connection
    head: Head
    grant: Grant
    status: int = 0
    sent: int = 0

    @property
    def known(self) -> bool:
        """Whether a token was shown, or none is needed."""
        return self.grant is not NOBODY

    @property
    def keep(self) -> bool:
        """Whether the connection stays after the answer."""
        return self.head.keep and not self.connection.stopping

    def need_write(self) -> None:
        """Raises Problem 403 for a token that may only read."""
        if not self.grant.write:
            raise Problem(403, "ReadOnly", "this token may only read")

    def key(self, segment: bytes) -> bytes:
        """The key of a path segment. Raises Problem 400, and 403 for a key that the token may not touch."""
        return self.allowed(key_of_segment(segment))

    def allowed(self, key: bytes) -> bytes:
        """The key itself. Raises Problem 403 where it does not begin with the token's prefix."""
        if not key.startswith(self.grant.prefix):
            raise Problem(403, "OutsidePrefix", "this token is for keys with another beginning")
        return key

    def begin(self, status: int, length: int | None, content: bytes = b"", headers: bytes = b"") -> bytes:
        """The head of the answer, for whom sends the body himself. For HEAD it is all of it."""
        self.status = status
        return head_bytes(status, length, content=content, headers=headers, keep=self.keep, minor=self.head.minor)

    def answer(self, status: int, body: bytes = b"", content: bytes = b"", headers: bytes = b"") -> None:
        """Send a short answer."""
        length = None if status in (204, 304) else len(body)
        head = self.begin(status, length, content, headers)
        if self.head.method != b"HEAD":
            head += body
            self.sent += len(body)
        self.connection.until(_ANSWER_S)
        (self.connection.send if self.known else self.connection.send_at_once)(head)

    def answer_head(self, size: int, headers: bytes) -> None:
        """Send what GET would say of a block of `size` bytes, without them."""
        self.connection.until(_ANSWER_S)
        self.connection.send(self.begin(200, size, BINARY, headers))

    def json(self, data: Any, status: int = 200) -> None:
        """Send JSON."""
        self.answer(status, json_bytes(data), JSON)
