"""Requests that the cache server would not make: the KV engine's panels have to move as well."""

from __future__ import annotations

import secrets
from dataclasses import dataclass

import httpx

from kvstrata.deploy.errors import KvError

__all__ = ["EngineTraffic"]

_BYTES = 64 << 10
_ROUNDS = 3
_S = 10.0


@dataclass(frozen=True)
class EngineTraffic:
    """One engine at `url` and the token of a client that may write."""

    url: str
    token: str

    def run(self) -> None:
        """Blocks new, repeated and under two keys; hits and misses; a fork; a stranger. Leaves nothing behind.

        Raises KvError where an answer is not the documented one (docs/engine.md).
        """
        with httpx.Client(base_url=self.url, timeout=_S, trust_env=False) as http:
            known = {"Authorization": f"Bearer {self.token}"}
            for _ in range(_ROUNDS):
                self._round(http, known)

    def _round(self, http: httpx.Client, known: dict[str, str]) -> None:
        name, body = f"scenario-{secrets.token_hex(8)}", secrets.token_bytes(_BYTES)
        first, second = f"/kv/{name}-a", f"/kv/{name}-b"
        for path, status in ((first, 201), (first, 200), (second, 201)):
            self._ask(http, status, "PUT", path, headers=known, content=body)
        self._ask(http, 200, "GET", first, headers=known)
        self._ask(http, 404, "GET", f"/kv/{name}-c", headers=known)
        self._ask(http, 401, "GET", first)
        made = self._ask(http, None, "POST", "/kv/snapshot", headers=known, json={"keys": [f"{name}-a"]}).json()
        snapshot = f"/kv/snapshot/{made['snapshot']}"
        branch = f"/kv/branch/{self._ask(http, None, 'POST', f'{snapshot}/fork', headers=known).json()['branch']}"
        self._ask(http, 200, "GET", f"{branch}/{name}-a", headers=known)
        for path in (branch, snapshot, first, second):
            self._ask(http, 204, "DELETE", path, headers=known)

    def _ask(self, http: httpx.Client, status: int | None, method: str, path: str, **rest: object) -> httpx.Response:
        """`status` None: any of 2xx."""
        try:
            answer = http.request(method, path, **rest)  # type: ignore[arg-type]
        except httpx.HTTPError as error:
            raise self._fault(f"{method} {path}: {type(error).__name__}: {error}", status) from None
        if answer.status_code != status and not (status is None and answer.is_success):
            raise self._fault(f"{method} {path}: HTTP {answer.status_code} {answer.text[:200]}", status)
        return answer

    def _fault(self, found: str, status: int | None) -> KvError:
        return KvError(f"KV engine at {self.url}: {found}", f"status {status or '2xx'}", "make logs ARGS=engine")
