"""HTTP/1.1 over the listener: one request after the other of a connection, from its head to its answer."""

from __future__ import annotations

import logging
import re
import time
from dataclasses import dataclass

from kvstrata.engine.auth import Grant, Tokens
from kvstrata.engine.connection import Connection, Cut, NotYet
from kvstrata.engine.errors import Corrupt, EngineError
from kvstrata.engine.http_head import MAX_HEAD, Head, parse
from kvstrata.engine.http_pages import METRICS, OPEN_PAGES
from kvstrata.engine.http_reply import JSON, Problem, head_bytes
from kvstrata.engine.http_request import NOBODY, Request
from kvstrata.engine.http_routes import Routes
from kvstrata.engine.metrics import EngineMetrics
from kvstrata.engine.places import Places, Strangers

__all__ = ["REFUSAL", "Http"]

log = logging.getLogger(__name__)

# A body that nobody wants is read to its end if it is this short, so that the connection can stay.
_SMALL = 64 << 10
# Else it is dropped for so many seconds and bytes, so that the client is through sending when the connection closes and
# sees the answer. Who has no token gets less of our time.
_DROP_S = 5.0
_DROP = (_DROP_S, 128 << 20)
_DROP_STRANGER = (1.0, 1 << 20)

# A head with it never ends, and parsers disagree about what it means.
_BARE = re.compile(rb"(?:^|[^\r])\n")

# Threads that no tenant holds: for the open pages, and to refuse.
_SPARE = 16

_BUSY = Problem(503, "Busy", "the server has as many connections as it may", headers=b"Retry-After: 1\r\n")


def _problem_bytes(problem: Problem, *, keep: bool, minor: int, bare: bool) -> bytes:
    body = problem.body()
    head = head_bytes(problem.status, len(body), content=JSON, headers=problem.headers, keep=keep, minor=minor)
    return head if bare else head + body


REFUSAL = _problem_bytes(_BUSY, keep=False, minor=1, bare=False)
"""What a connection too many is told."""


@dataclass(slots=True)
class _Known:
    """The last token of a connection: it is looked up again only when it or the file has changed."""

    header: bytes
    generation: int
    grant: Grant


class _Crowded(Problem):
    """The tenant has its part of the threads: the connection is closed at once."""


class Http:
    """The protocol. `serve` is what a Listener calls.

    Args:
        header_s: seconds from the first byte of a request to the end of its headers.
        threads: how many may serve at once, more than a few.
    """

    def __init__(self, routes: Routes, tokens: Tokens, metrics: EngineMetrics, header_s: float, threads: int) -> None:
        self._routes = routes
        self._tokens = tokens
        self._metrics = metrics
        self._header_s = header_s
        self._places = Places(threads - _SPARE, lambda: tokens.tenants)
        self._strangers = Strangers()

    def serve(self, connection: Connection) -> bool:
        """Answer what has arrived. True: the connection stays, and waits for more."""
        while True:
            try:
                raw = self._next_head(connection)
            except NotYet:
                return True
            except Problem as problem:
                self._refuse(connection, None, problem)
                return False
            if raw is None or not self._answer(connection, raw):
                return False

    # -- the head

    def _next_head(self, connection: Connection) -> bytes | None:
        """The next request's head; None when the client has closed. Raises NotYet, Problem 400, 408 and 431."""
        buffered = connection.buffered
        seen = 0
        while True:
            while buffered.startswith(b"\r\n"):  # some clients end a body with one more of these
                del buffered[:2]
            end = buffered.find(b"\r\n\r\n", seen) + 4
            if end > 3:
                if end > MAX_HEAD:
                    break
                raw = bytes(buffered[:end])
                del buffered[:end]
                return raw
            if len(buffered) > MAX_HEAD:
                break
            if _BARE.search(buffered, seen):
                raise Problem(400, "BadRequest", "a line of a head ends with a carriage return and a line feed")
            seen = max(0, len(buffered) - 3)
            if not buffered:
                connection.until(None)
            try:
                count = connection.fill()
            except Cut:
                if not buffered:
                    return None
                raise Problem(408, "Timeout", f"the headers took more than {self._header_s:g} seconds") from None
            if not count:
                return None
            if len(buffered) == count:
                connection.until(self._header_s)
        raise Problem(431, "HeadersTooLarge", f"more than {MAX_HEAD} bytes of headers")

    # -- the answer

    def _answer(self, connection: Connection, raw: bytes) -> bool:
        """One request. Returns whether the connection stays."""
        began = time.perf_counter()
        connection.until(None)  # the head was in time; what comes now has times of its own
        try:
            head = parse(raw)
        except Problem as problem:
            self._refuse(connection, None, problem)
            return False
        request = Request(connection, head, NOBODY)
        before = connection.received - len(connection.buffered)
        op, placed = "none", False
        try:
            target = _path(head.target)
            if target not in OPEN_PAGES:
                request.grant = self._grant(connection, head)
                placed = self._places.take(request.grant.tenant)
                if not placed:
                    raise _Crowded(
                        503,
                        "Busy",
                        "too many requests of this tenant at once",
                        headers=b"Retry-After: 1\r\n",
                        close=True,
                    )
                if not request.grant.read and target != METRICS:
                    raise Problem(403, "MetricsOnly", "this token is for /metrics alone")
            op, handler, segments = self._routes.find(head.method, target)
            handler(request, *segments)
            keep = self._finish(request)
        except Problem as problem:
            keep = self._refuse(connection, request, problem)
        except EngineError as error:
            keep = self._refuse(connection, request, _of_engine(error))
        except Cut:
            keep = self._cut(connection, request)
        except OSError:
            request.status = request.status or 499
            raise
        except Exception:
            log.exception("%s %s of %s ended by a fault", head.method.decode(), op, connection.peer)
            if request.status:
                raise  # something has been sent already: only a cut tells the client
            keep = self._refuse(connection, request, Problem(500, "Fault", "the server's log says why", close=True))
        finally:
            if placed:
                self._places.leave(request.grant.tenant)
            taken = connection.received - len(connection.buffered) - before
            self._metrics.request(op, request.status, time.perf_counter() - began, taken, request.sent)
        if keep and connection.buffered:
            connection.until(self._header_s)
        return keep

    def _grant(self, connection: Connection, head: Head) -> Grant:
        """Who asks. Raises Problem 401."""
        header = head.headers.get(b"authorization", b"")
        generation = self._tokens.refresh()
        known: _Known | None = connection.state
        if known is not None and known.header == header and known.generation == generation:
            return known.grant
        scheme, _, token = header.partition(b" ")
        grant = None
        if self._tokens.open or scheme.lower() == b"bearer":
            grant = self._tokens.check(token.strip())
        if grant is None:
            self._metrics.unauthorized()
            raise Problem(
                401, "Unauthorized", "send Authorization: Bearer <a token of the server's file>",
                headers=b"WWW-Authenticate: Bearer\r\n",
            )  # fmt: skip
        connection.state = _Known(header, generation, grant)
        return grant

    def _finish(self, request: Request) -> bool:
        """After the answer: a body that the handler left is read if it is short."""
        head = request.head
        if head.unread:
            with self._strangers.waiting(request.known or self._is_there(request)) as free:
                if not (free and self._drain(request.connection, head)):
                    return False
        return request.keep

    @staticmethod
    def _is_there(request: Request) -> bool:
        """All of the body has arrived."""
        return (request.head.length or 0) <= len(request.connection.buffered)

    @staticmethod
    def _drain(connection: Connection, head: Head) -> bool:
        if head.chunked or head.expect or (head.length or 0) > _SMALL:
            return False
        connection.until(_DROP_S)
        connection.skip(head.length or 0)
        head.unread = False
        return True

    def _refuse(self, connection: Connection, request: Request | None, problem: Problem) -> bool:
        """Answer with a problem. Returns whether the connection stays."""
        known = request is not None and request.known
        if request is None:
            self._metrics.request("none", problem.status, 0.0, 0, 0)
            keep, minor, bare, unread = False, 1, False, True
        else:
            head = request.head
            request.status = problem.status
            if not problem.close and head.unread and (known or self._is_there(request)):
                self._drain(connection, head)
            unread = head.unread and not head.expect
            keep = request.keep and not head.unread and not problem.close
            minor, bare = head.minor, head.method == b"HEAD"
        connection.until(_DROP_S)
        # The thread of a stranger, or of a tenant that has its part, waits for nothing: they could hold all of them.
        crowded = isinstance(problem, _Crowded)
        send = connection.send if known and not crowded else connection.send_at_once
        send(_problem_bytes(problem, keep=keep, minor=minor, bare=bare))
        if unread and not crowded:
            with self._strangers.waiting(known) as free:
                if free:
                    connection.finish(*(_DROP if known else _DROP_STRANGER))
        return keep

    def _cut(self, connection: Connection, request: Request) -> bool:
        """The body came to no end, or the client stopped taking the answer."""
        if request.status:  # the answer is under way: it ends short
            return False
        if connection.expired:
            problem = Problem(408, "Timeout", "the body took too long", close=True)
        else:
            problem = Problem(400, "ShortBody", "the connection ended before the body did", close=True)
        request.status = problem.status
        connection.send(_problem_bytes(problem, keep=False, minor=request.head.minor, bare=False))
        return False


def _path(target: bytes) -> bytes:
    """Without scheme and authority, which a proxy's client may send."""
    if target.startswith(b"/"):
        return target
    scheme, _, rest = target.partition(b"://")
    if scheme.lower() in (b"http", b"https"):
        return b"/" + rest.partition(b"/")[2]
    raise Problem(404, "NoSuchRoute", "no such route")


def _of_engine(error: EngineError) -> Problem:
    if isinstance(error, Corrupt):
        return Problem(404, "NoSuchBlock", "the block was damaged and has been removed")
    headers = b"Retry-After: 1\r\n" if error.status == 503 else b""
    return Problem(error.status, error.word, str(error), headers=headers)
