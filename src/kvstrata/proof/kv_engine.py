"""What the KV engine says of itself: its counters, and which of the proof's own blocks it has."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import httpx

from kvstrata.deploy.errors import KvError
from kvstrata.proof.prom import parse

__all__ = ["KvEngine"]

_AT_ONCE = 5000


class KvEngine:
    """The engine's HTTP at `url`. `prefix`: what the storage layer puts before LMCache's keys (path A: `framed@`)."""

    def __init__(self, url: str, token: str, prefix: str = "", timeout_s: float = 10.0) -> None:
        self.url, self._prefix = url, prefix
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        self._http = httpx.Client(base_url=url, headers=headers, timeout=timeout_s, trust_env=False)

    def close(self) -> None:
        self._http.close()

    def stats(self) -> Mapping[str, Any]:
        """GET /kv/stats. Raises KvError when the engine does not give it."""
        found: Mapping[str, Any] = self._json("GET", "/kv/stats")
        return found

    def hits(self) -> int:
        """Blocks that were asked for and given since the engine's data began."""
        return int(self.stats().get("get_hits", 0))

    def connections(self, protocol: str) -> int:
        """Open now: "http" or "resp"."""
        try:
            answer = self._http.get("/metrics")
            answer.raise_for_status()
        except httpx.HTTPError as error:
            raise self._fault("/metrics", error) from None
        return int(parse(answer.text).sum("kvstrata_engine_connections", protocol=protocol))

    def present(self, keys: Sequence[str]) -> list[bool]:
        """Which of LMCache's `keys` it has."""
        found: list[bool] = []
        for at in range(0, len(keys), _AT_ONCE):
            body = {"keys": [self._prefix + key for key in keys[at : at + _AT_ONCE]]}
            found += self._json("POST", "/kv/batch/exists", body)["exists"]
        return found

    def _json(self, method: str, path: str, body: object = None) -> Any:
        try:
            answer = self._http.request(method, path, json=body)
            answer.raise_for_status()
            return answer.json()
        except (httpx.HTTPError, ValueError) as error:
            raise self._fault(path, error) from None

    def _fault(self, path: str, error: Exception) -> KvError:
        return KvError(
            found=f"KV engine at {self.url}: {path}: {' '.join(str(error).split())[:200]}",
            needed="an answer with status 200",
            fix="make status; make logs ARGS=engine; the token is in data/secrets/engine-client/token",
        )
