"""Pages about the server itself: alive, ready, metrics, the description of its interface."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from prometheus_client import CONTENT_TYPE_LATEST

from kvstrata.engine.http_reply import JSON, Problem, json_bytes
from kvstrata.engine.http_request import Request
from kvstrata.engine.metrics import EngineMetrics
from kvstrata.engine.openapi import description

__all__ = ["METRICS", "OPEN_PAGES", "pages"]

OPEN_PAGES = frozenset((b"/healthz", b"/readyz"))
"""Answered without a token."""


METRICS = b"/metrics"
"""All that a token of scope `metrics` may ask for."""


def pages(
    metrics: EngineMetrics, unready: Callable[[], str], tenants: Callable[[], int]
) -> Mapping[str, Callable[..., None]]:
    """Path to handler. `unready` says why the engine cannot serve, "" if it can; `tenants`: how many there are."""
    api = json_bytes(description())

    def healthz(request: Request) -> None:
        request.json({"status": "ok"})

    def readyz(request: Request) -> None:
        why = unready()
        if why:
            raise Problem(503, "NotReady", why, headers=b"Retry-After: 1\r\n")
        request.json({"status": "ready"})

    def metrics_page(request: Request) -> None:
        # The figures of the whole engine: where there is one tenant, they are its own.
        if not request.grant.metrics and tenants() > 1:
            raise Problem(403, "NotYourFigures", "these are all tenants' figures: for tokens of scope metrics or admin")
        request.answer(200, metrics.page(), CONTENT_TYPE_LATEST.encode())

    def openapi(request: Request) -> None:
        request.answer(200, api, JSON)

    return {"/healthz": healthz, "/readyz": readyz, "/metrics": metrics_page, "/openapi.json": openapi}
