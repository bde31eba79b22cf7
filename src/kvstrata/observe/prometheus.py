"""The few calls of Prometheus' HTTP API that the check and the report need."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import httpx

from kvstrata.deploy.errors import KvError

__all__ = ["Prometheus", "QueryRefused", "Series"]


class QueryRefused(Exception):
    """Prometheus answered a query with an error."""


@dataclass(frozen=True)
class Series:
    """One series: labels, and (unix time, value) in order of time; NaN and infinite values are left out.

    Samples that are native histograms count by their number of observations.
    """

    labels: Mapping[str, str]
    points: tuple[tuple[float, float], ...]

    @property
    def changes(self) -> bool:
        return len({value for _, value in self.points}) > 1


class Prometheus:
    """One server at `url`. Raises KvError when it does not answer."""

    def __init__(self, url: str, timeout_s: float = 30.0) -> None:
        self.url = url.rstrip("/")
        # never through a proxy of the environment: the address is this machine's own
        self._http = httpx.Client(base_url=self.url, timeout=timeout_s, trust_env=False)

    def close(self) -> None:
        self._http.close()

    def names(self, since_s: float) -> frozenset[str]:
        """Names of all series that have a sample within the last `since_s` seconds.

        By a query, as /api/v1/label/__name__/values takes its limits for those of whole blocks of two hours.
        """
        seconds = max(int(since_s), 1)
        found = self.instant(f'group by (__name__) (last_over_time({{__name__=~".+"}}[{seconds}s]))')
        return frozenset(series.labels["__name__"] for series in found)

    def counts(self) -> Mapping[str, int]:
        """Series name to number of series now."""
        found = self.instant('count by (__name__) ({__name__=~".+"})')
        return {series.labels["__name__"]: int(series.points[0][1]) for series in found if series.points}

    def instant(self, query: str) -> list[Series]:
        """The value of each series now."""
        result = self._get("/api/v1/query", {"query": query})
        if result["resultType"] == "scalar":
            return [Series({}, _points([result["result"]]))]
        return [Series(one["metric"], _points([one[key]])) for one in result["result"] for key in _value_key(one)]

    def over(self, query: str, start: float, end: float, step_s: float) -> list[Series]:
        """Each series from `start` to `end` (unix times)."""
        params = {"query": query, "start": f"{start:.3f}", "end": f"{end:.3f}", "step": f"{step_s:.3f}"}
        result = self._get("/api/v1/query_range", params)
        return [
            Series(one["metric"], _points(one.get("values", ())) + _points(one.get("histograms", ())))
            for one in result["result"]
        ]

    def _get(self, path: str, params: Mapping[str, str]) -> Any:
        try:
            answer = self._http.get(path, params=dict(params))
            body = answer.json()
        except (httpx.HTTPError, ValueError) as error:
            raise KvError(
                found=f"{self.url}{path}: {type(error).__name__}: {error}",
                needed="a Prometheus that answers there",
                fix="make status; the layer observability starts it (KV_OBSERVABILITY=1 in .env, then `make up`)",
            ) from error
        if body.get("status") != "success":
            raise QueryRefused(f"{body.get('errorType')}: {body.get('error')}")
        return body["data"]


def _value_key(one: Mapping[str, Any]) -> tuple[str, ...]:
    return tuple(key for key in ("value", "histogram") if key in one)


def _points(raw: Any) -> tuple[tuple[float, float], ...]:
    pairs = ((float(at), float(value["count"] if isinstance(value, Mapping) else value)) for at, value in raw)
    return tuple(pair for pair in pairs if math.isfinite(pair[1]))
