"""One trace a request, through vLLM and LMCache: an ASGI middleware of vLLM's API server, and its other end in lmcache.

Neither upstream hands the context of a trace to the other (vllm 0.28.0, lmcache 0.5.3). What does reach LMCache is the
request's id, which vLLM takes from X-Request-Id. So the middleware opens the trace's first span and puts trace and span
id into that header; `parent_of` reads them from LMCache's session id. A request that brings an X-Request-Id of its own
keeps it: LMCache's spans of it are a trace of their own then, to be found by `session_id`.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from opentelemetry import trace
from opentelemetry.trace import NonRecordingSpan, SpanContext, SpanKind, TraceFlags
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

__all__ = ["TraceIds", "parent_of"]

_Scope = MutableMapping[str, Any]
_App = Callable[[_Scope, Any, Any], Awaitable[None]]
_IDS = re.compile(r"(?<![0-9a-f])([0-9a-f]{32})-([0-9a-f]{16})(?![0-9a-f])")
_WATCHED = ("/v1/", "/inference/")


class TraceIds:
    """See the module. Wraps `app`; requests other than those for an answer of the model pass untouched."""

    def __init__(self, app: _App) -> None:
        self._app = app

    async def __call__(self, scope: _Scope, receive: Any, send: Any) -> None:
        watched = scope["type"] == "http" and scope["method"] == "POST" and scope["path"].startswith(_WATCHED)
        if not watched:
            await self._app(scope, receive, send)
            return
        given = {key.decode("latin-1").lower(): value.decode("latin-1") for key, value in scope["headers"]}
        outer = TraceContextTextMapPropagator().extract(given)
        span = trace.get_tracer("kvstrata").start_span(
            f"POST {scope['path']}", context=outer, kind=SpanKind.SERVER, attributes={"http.route": scope["path"]}
        )
        ids = span.get_span_context()
        if not ids.is_valid:  # tracing is off
            await self._app(scope, receive, send)
            return
        headers = [
            (key, value) for key, value in scope["headers"] if key.lower() not in (b"traceparent", b"tracestate")
        ]
        carrier: dict[str, str] = {}
        TraceContextTextMapPropagator().inject(carrier, trace.set_span_in_context(span))
        headers += [(key.encode(), value.encode()) for key, value in carrier.items()]
        if "x-request-id" not in given:
            headers.append((b"x-request-id", f"{ids.trace_id:032x}-{ids.span_id:016x}".encode()))

        async def noting(message: MutableMapping[str, Any]) -> None:
            if message["type"] == "http.response.start":
                span.set_attribute("http.response.status_code", message["status"])
            await send(message)

        try:
            await self._app({**scope, "headers": headers}, receive, noting)
        finally:
            span.end()


def parent_of(session_id: str) -> Any:
    """The context of the span whose ids `session_id` holds, or None."""
    found = _IDS.search(session_id)
    if found is None:
        return None
    ids = SpanContext(int(found[1], 16), int(found[2], 16), is_remote=True, trace_flags=TraceFlags(TraceFlags.SAMPLED))
    return trace.set_span_in_context(NonRecordingSpan(ids)) if ids.is_valid else None
