"""If-Match and If-None-Match (RFC 9110, 13.1): what a request makes itself depend on."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from kvstrata.engine.http_reply import Problem
from kvstrata.engine.http_request import Request

__all__ = ["demand", "wanted"]

_NAMES = frozenset((b"if-match", b"if-none-match"))


def wanted(headers: Mapping[bytes, bytes], tag: bytes | None) -> bool:
    """False if If-None-Match names what is there, of which `tag` is the ETag (None: nothing is). Raises Problem 412 if
    If-Match does not.
    """
    match, none_match = headers.get(b"if-match"), headers.get(b"if-none-match")
    if match is not None and not _named(match, tag, weak=False):
        raise _failed()
    return none_match is None or not _named(none_match, tag, weak=True)


def demand(request: Request, tag: Callable[[], bytes | None]) -> None:
    """Before a change: Problem 412 unless it is `wanted`. `tag` is asked where that makes a difference."""
    headers = request.head.headers
    if not _NAMES.isdisjoint(headers) and not wanted(headers, tag()):
        raise _failed()


def _named(header: bytes, tag: bytes | None, *, weak: bool) -> bool:
    if tag is None:
        return False
    if header.strip() == b"*":
        return True
    names = (one.strip() for one in header.split(b","))
    return any((one.removeprefix(b"W/") if weak else one) == tag for one in names)


def _failed() -> Problem:
    return Problem(412, "Precondition", "what is there is not what If-Match or If-None-Match ask for")
