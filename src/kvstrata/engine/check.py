"""Does a KV engine do what it says? Puts, gets and counts over HTTP, against ours or a real epistemic-graph-server.

A run leaves nothing behind where the server knows DELETE, and one small block where it does not.
"""

from __future__ import annotations

import http.client
import json
import os
import secrets
import socket
import ssl
from collections.abc import Callable
from contextlib import closing
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit

__all__ = ["CheckError", "Report", "Row", "check", "token_of"]

_SIZE = 256 << 10
_TIMEOUT_S = 20.0
# What each step of ours must add, at least, to the counters that the server shows.
_MOVES = {"put_new": 1, "dedup_hits": 1, "get_hits": 2, "get_misses": 1}
_OCCUPANCY = ("unique_blocks", "total_refs", "logical_bytes")


class CheckError(Exception):
    """The check cannot begin: what was found, what it needs, how to get there."""

    def __init__(self, found: str, needed: str, fix: str) -> None:
        super().__init__(f"found {found}; needed {needed}; to fix it: {fix}")
        self.found, self.needed, self.fix = found, needed, fix


@dataclass(frozen=True)
class Row:
    """One thing that was looked at. `verdict`: ok, FAIL, or note (not as good as it could be, but as documented)."""

    name: str
    verdict: str
    detail: str


@dataclass
class Report:
    """All rows of a run, and the stats of before and after."""

    url: str
    rows: list[Row] = field(default_factory=list)
    before: dict[str, Any] = field(default_factory=dict)
    after: dict[str, Any] = field(default_factory=dict)

    @property
    def passed(self) -> bool:
        """Nothing failed."""
        return all(row.verdict != "FAIL" for row in self.rows)

    def to_json(self) -> dict[str, Any]:
        """For --json."""
        return {**asdict(self), "passed": self.passed}


class _Client:
    """One request a connection: what every server of this interface can do."""

    def __init__(self, url: str, token: str, ca: Path | None) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise CheckError(f"{url!r}", "a URL such as http://127.0.0.1:9130", "correct the argument")
        self._tls = ssl.create_default_context(cafile=ca) if parts.scheme == "https" else None
        self._host, self._port = parts.hostname, parts.port or (443 if self._tls else 80)
        self._headers = {"Authorization": f"Bearer {token}"} if token else {}

    def ask(self, method: str, path: str, body: bytes | None = None, *, token: bool = True) -> tuple[int, bytes, Any]:
        """(status, body, headers). OSError and http.client.HTTPException as they come."""
        headers = dict(self._headers) if token else {}
        with closing(self._open()) as connection:
            connection.request(method, path, body, headers)
            answer = connection.getresponse()
            return answer.status, answer.read(), answer.headers

    def cut_short(self, path: str, declared: int, sent: bytes) -> None:
        """PUT that announces more than it sends, and then closes its side."""
        with closing(self._open()) as connection:
            connection.putrequest("PUT", path)
            for name, value in {**self._headers, "Content-Length": str(declared)}.items():
                connection.putheader(name, value)
            connection.endheaders(sent)
            if self._tls is None:
                connection.sock.shutdown(socket.SHUT_WR)
                connection.sock.recv(4096)

    def _open(self) -> http.client.HTTPConnection:
        if self._tls is not None:
            return http.client.HTTPSConnection(self._host, self._port, timeout=_TIMEOUT_S, context=self._tls)
        return http.client.HTTPConnection(self._host, self._port, timeout=_TIMEOUT_S)


def check(url: str, token: str = "", ca: Path | None = None) -> Report:
    """Run all steps. Raises CheckError where the server cannot be reached, or the token may not do them."""
    report = Report(url)
    client = _Client(url, token, ca)
    report.before = _stats(client, url)
    steps = _Steps(client, report)
    steps.may_begin()
    steps.run(with_token=bool(token))
    return report


class _Steps:
    def __init__(self, client: _Client, report: Report) -> None:
        self._client = client
        self._report = report
        self._key = f"kvstrata-check/{secrets.token_hex(8)}@1"
        self._path = f"/kv/{quote(self._key, safe='')}"
        self._value = os.urandom(_SIZE)

    def may_begin(self) -> None:
        """Raises CheckError where this token may not change the keys of the steps."""
        try:
            status, content, _ = self._client.ask("DELETE", self._path)
        except (OSError, http.client.HTTPException):
            return  # the steps will say so
        if status == 403:
            raise _forbidden(f"DELETE answered 403 {content[:200].decode(errors='replace')}")

    def run(self, *, with_token: bool) -> None:
        steps: list[tuple[str, Callable[[], str]]] = [
            ("an unknown key is a miss", self._miss),
            ("a new block is stored (201)", self._put),
            ("the same bytes come back", self._get),
            ("a repeated put is a no-op (200)", self._repeat),
            ("exists says so, by HEAD and by JSON", self._exists),
            ("a body cut short is not stored", self._short),
            ("the stats moved", self._moved),
            ("a deleted block is gone", self._delete),
        ]
        if with_token:
            steps.insert(0, ("no token is refused (401)", self._no_token))
        for name, step in steps:
            try:
                detail = step()
                verdict = "note" if detail.startswith("note: ") else "ok"
            except (AssertionError, OSError, http.client.HTTPException, ValueError) as error:
                verdict, detail = "FAIL", str(error) or type(error).__name__
            self._report.rows.append(Row(name, verdict, detail.removeprefix("note: ")))

    def _expect(self, wanted: int | tuple[int, ...], method: str, path: str, body: bytes | None = None) -> bytes:
        status, content, _ = self._client.ask(method, path, body)
        allowed = (wanted,) if isinstance(wanted, int) else wanted
        _need(status in allowed, f"{method} answered {status} {content[:200]!r}; needed {wanted}")
        return content

    def _no_token(self) -> str:
        status, _, _ = self._client.ask("GET", self._path, token=False)
        _need(status == 401, f"GET without a token answered {status}; needed 401")
        return ""

    def _miss(self) -> str:
        self._expect(404, "GET", self._path)
        return ""

    def _put(self) -> str:
        self._expect(201, "PUT", self._path, self._value)
        return f"{_SIZE} bytes"

    def _get(self) -> str:
        _need(self._expect(200, "GET", self._path) == self._value, "GET gave other bytes than were put")
        return ""

    def _repeat(self) -> str:
        self._expect(200, "PUT", self._path, b"other bytes")
        _need(self._expect(200, "GET", self._path) == self._value, "the second put replaced the first value")
        return ""

    def _exists(self) -> str:
        status, _, headers = self._client.ask("HEAD", self._path)
        _need(status == 200, f"HEAD answered {status}; needed 200")
        said = json.loads(self._expect(200, "GET", f"{self._path}/exists"))
        _need(said.get("exists") is True, f"exists answered {said}")
        length = int(headers.get("Content-Length") or 0)
        return "" if length == _SIZE else f"note: HEAD says {length} bytes, not {_SIZE}"

    def _short(self) -> str:
        path = f"{self._path}-short"
        self._client.cut_short(path, 100_000, b"x" * 1000)
        status, content, _ = self._client.ask("GET", path)
        _need(status == 404, f"1000 of 100000 bytes were sent, and GET answered {status} with {len(content)} bytes")
        return ""

    def _moved(self) -> str:
        before, after = self._report.before, _stats(self._client, self._report.url)
        self._report.after = after
        shown: list[str] = []
        still: list[str] = []
        for name, least in _MOVES.items():
            if name in before:
                moved = after[name] - before[name]
                (shown if moved >= least else still).append(f"{name} +{moved}")
        for name in _OCCUPANCY:
            if name in before:
                moved = after[name] - before[name]
                # others may have deleted meanwhile, and a full server evicts
                good = moved > 0 or after.get("evictions", 0) > before.get("evictions", 0)
                (shown if good else still).append(f"{name} {moved:+d}")
        _need(bool(shown or still), "the stats have none of the counters of this interface")
        if before.get("backend") == "memory" and {"get_hits +0", "get_misses +0"} >= set(still) and still:
            return f"note: {', '.join(shown)}; its memory backend never counts gets"
        _need(not still, f"too little: {', '.join(still)}; as it should: {', '.join(shown)}")
        return ", ".join(shown)

    def _delete(self) -> str:
        status, _, _ = self._client.ask("DELETE", self._path)
        if status == 405:
            return f"note: this server knows no DELETE; one block of {_SIZE} bytes stays ({self._key})"
        _need(status == 204, f"DELETE answered {status}; needed 204")
        self._expect(404, "GET", self._path)
        return ""


def _need(good: bool, text: str) -> None:
    if not good:
        raise AssertionError(text)


def _forbidden(found: str) -> CheckError:
    return CheckError(found, "a token of scope rw without a prefix", "give one by --token-file or KV_ENGINE_TOKEN")


def _stats(client: _Client, url: str) -> dict[str, Any]:
    try:
        status, content, _ = client.ask("GET", "/kv/stats")
    except ssl.SSLCertVerificationError as error:
        raise CheckError(
            f"{url} has a certificate that is not trusted ({error})",
            "one of a known CA, for that name",
            "give its CA by --ca",
        ) from error
    except (OSError, http.client.HTTPException) as error:
        raise CheckError(
            f"{url} does not answer ({type(error).__name__}: {error})", "a KV engine that serves HTTP there",
            "start it (kvstrata engine serve), or correct the URL",
        ) from error  # fmt: skip
    if status == 401:
        raise CheckError(
            f"{url} refuses the token", "one that it knows", "give it by --token-file or in KV_ENGINE_TOKEN"
        )
    if status == 403:
        raise _forbidden("GET /kv/stats answered 403")
    try:
        data = json.loads(content)
    except ValueError:
        data = None
    if status != 200 or not isinstance(data, dict):
        raise CheckError(f"GET /kv/stats answered {status}", "200 and a JSON object", "is this the engine's HTTP port?")
    return data


def token_of(file: Path) -> str:
    """The token in a file: its only word, or the last word of its first line, as the engine's own file has it."""
    try:
        lines = [line for line in file.read_text(encoding="utf-8").splitlines() if line.strip() and line[0] != "#"]
    except (OSError, UnicodeDecodeError) as error:
        raise CheckError(f"{file} ({error})", "a readable file with a token", "correct --token-file") from error
    token = lines[0].split()[-1] if lines else ""
    if not token or token.startswith("sha256:"):
        raise CheckError(f"no token in {file}", "the token itself, not its digest", "correct --token-file")
    return token
