"""JSON bodies of requests: small, and checked field by field."""

from __future__ import annotations

import json
import math
import threading
from typing import Any

from kvstrata.engine.http_body import Bodies
from kvstrata.engine.http_head import MAX_KEY
from kvstrata.engine.http_reply import Problem
from kvstrata.engine.http_request import Request

__all__ = ["MAX_JSON", "MAX_KEYS", "keys_of", "object_of", "seconds_of"]

MAX_JSON = 8 << 20
"""Bytes of a JSON body."""
MAX_KEYS = 10_000
"""Keys of one request."""

_FIELDS = ("keys", "lease_s")
# JSON takes twenty times its bytes as objects: one request at a time, and only what is asked for outlives it.
_parsing = threading.Lock()


def object_of(request: Request, bodies: Bodies) -> dict[str, Any]:
    """The object in the body, of it what we know. Raises Problem 400, 411, 413, 415, 503."""
    kind = request.head.headers.get(b"content-type", b"application/json").split(b";")[0].strip().lower()
    if kind != b"application/json":
        raise Problem(415, "MediaType", "send Content-Type: application/json")
    with bodies.received(request.connection, request.head, MAX_JSON, request.grant.tenant) as body, _parsing:
        return _fields(body)


def _fields(body: memoryview) -> dict[str, Any]:
    try:
        data = json.loads(bytes(body))
    except (ValueError, RecursionError) as error:
        raise Problem(400, "BadJson", f"the body is no JSON: {type(error).__name__}") from None
    if not isinstance(data, dict):
        raise Problem(400, "BadJson", "the body is a JSON object")
    keys = data.get("keys")
    if isinstance(keys, list) and len(keys) > MAX_KEYS:
        raise Problem(413, "TooManyKeys", f"{len(keys)} keys; {MAX_KEYS} at most")
    return {name: data[name] for name in _FIELDS if name in data}


def keys_of(data: dict[str, Any], request: Request) -> list[bytes]:
    """Its "keys": text, each at most MAX_KEY bytes in UTF-8 and allowed to the token. Raises Problem 400, 403, 413."""
    keys = data.get("keys")
    if not isinstance(keys, list) or not all(isinstance(key, str) for key in keys):
        raise Problem(400, "BadKeys", '"keys" is a list of strings')
    try:
        found = [key.encode() for key in keys]
    except UnicodeEncodeError:
        raise Problem(400, "BadKeys", "a key with half of a surrogate pair is no text") from None
    if not all(0 < len(key) <= MAX_KEY for key in found):
        raise Problem(400, "BadKey", f"a key has 1 to {MAX_KEY} bytes")
    for key in found:
        request.allowed(key)
    return found


def seconds_of(data: dict[str, Any], name: str, most: float) -> float | None:
    """A number of seconds, or None where it is not there. Raises Problem 400."""
    value = data.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise Problem(400, "BadNumber", f'"{name}" is a number of seconds')
    if not 0 < value <= most:
        raise Problem(400, "BadNumber", f'"{name}" is above 0 and at most {most:g} seconds')
    return float(value)
