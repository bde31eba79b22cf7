"""Counts traces in whichever store runs: Tempo by its search, Jaeger by its query API."""

from __future__ import annotations

import re
import time

import httpx

from kvstrata.deploy.errors import KvError

__all__ = ["search"]

_SERVICE = re.compile(r'resource\.service\.name\s*=\s*"([^"]+)"')
_NAME = re.compile(r'(?:^|[^.\w])name\s*=\s*"([^"]+)"')
_LIMIT = 20


def search(url: str, since_s: float, query: str) -> int:
    """Traces of the last `since_s` seconds that match TraceQL `query`, at most 20.

    Jaeger has no TraceQL: service and span name are taken from the query, its limit on duration is not.
    """
    service, name = _SERVICE.search(query), _NAME.search(query)
    now = time.time()
    with httpx.Client(base_url=url.rstrip("/"), timeout=30.0, trust_env=False) as http:
        try:
            if http.get("/api/services").status_code == 200:
                params = {"service": service.group(1) if service else "", "limit": str(_LIMIT)}
                params |= {"start": str(int((now - since_s) * 1e6)), "end": str(int(now * 1e6))}
                params |= {"operation": name.group(1)} if name else {}
                return len(http.get("/api/traces", params=params).json().get("data") or ())
            params = {"q": re.sub(r"\s*&&\s*duration\s*>\s*\w+", "", query), "limit": str(_LIMIT)}
            params |= {"start": str(int(now - since_s)), "end": str(int(now))}
            return len(http.get("/api/search", params=params).json().get("traces") or ())
        except (httpx.HTTPError, ValueError) as error:
            raise KvError(
                f"{url}: {type(error).__name__}: {error}", "a trace store that answers there", "make status"
            ) from error
