"""Bearer tokens: who may do what in which tenant. The file is read again when it changes, so tokens rotate in place."""

from __future__ import annotations

import hashlib
import hmac
import logging
import re
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

__all__ = ["AuthError", "Grant", "Tokens", "is_loopback"]

log = logging.getLogger(__name__)

_SCOPES = ("ro", "rw", "admin", "metrics", "ro+metrics", "rw+metrics")
_DIGEST = re.compile(r"[0-9a-f]{64}")
_TENANT = re.compile(r"[A-Za-z0-9._-]{1,64}")
_LINE = (
    "name scope tenant [prefix] token (scope: ro, rw, admin, metrics, ro+metrics or rw+metrics;"
    " token: 16 characters or more, or sha256: and its SHA-256 in hex)"
)
_SHORTEST = 16
_LOOK_EVERY_S = 0.5


class AuthError(Exception):
    """The tokens cannot be used: what was found, what it needs, how to get there."""

    def __init__(self, found: str, needed: str, fix: str) -> None:
        super().__init__(f"tokens: found {found}; needed {needed}; to fix it: {fix}")
        self.found, self.needed, self.fix = found, needed, fix


@dataclass(frozen=True, slots=True)
class Grant:
    """What a token allows: with `read`, keys of `tenant` that begin with `prefix`, with `write` also to change them;
    with `metrics` GET /metrics, which shows the whole engine; with `admin` all of it, and /kv/stats of all tenants."""

    tenant: str
    write: bool
    prefix: bytes = b""
    admin: bool = False
    name: str = ""
    read: bool = True
    metrics: bool = False


#: Without a tokens file, which is allowed on loopback only.
OPEN = Grant("default", write=True, admin=True, name="open", metrics=True)


class Tokens:
    """The tokens of a file. Thread-safe.

    A line is `name scope tenant [prefix] token`; empty lines and those that begin with # are skipped. `token` is the
    token itself or `sha256:<64 hex>`, its digest, so that the file need not hold the secret. Several names may carry
    one tenant: the old and the new token during a rotation.

    Args:
        file: None: everybody is `OPEN`. Otherwise a file that must be readable and right at the start.
    """

    def __init__(self, file: Path | None) -> None:
        self._file = file
        self._lock = threading.Lock()
        self._grants: tuple[tuple[bytes, Grant], ...] = ()
        self._look_at = 0.0
        self._stamp: object = None
        self.generation = 0
        self.file_good = True
        self.tenants = 1
        """How many the file names, but for tokens that read no keys."""
        if file is not None:
            self._stamp = _stamp(file)
            self._take(file)

    def _take(self, file: Path) -> None:
        self._grants = tuple(_read(file))
        self.tenants = len({grant.tenant for _, grant in self._grants if grant.read}) or 1

    @property
    def open(self) -> bool:
        """Nobody needs a token."""
        return self._file is None

    def check(self, bearer: bytes) -> Grant | None:
        """The grant of a token as it came over the wire, None if it is none. Takes equally long whichever it is."""
        if self._file is None:
            return OPEN
        self.refresh()
        digest = hashlib.sha256(bearer).digest()
        found = None
        for known, grant in self._grants:
            if hmac.compare_digest(known, digest):
                found = grant
        return found

    def refresh(self) -> int:
        """Read the file again if it has changed, looking at most twice a second. Returns the generation of the tokens:
        a grant that was given under another one has to be checked again."""
        now = time.monotonic()
        if self._file is None or now < self._look_at:
            return self.generation
        with self._lock:
            if now < self._look_at:
                return self.generation
            self._look_at = now + _LOOK_EVERY_S
            stamp = _stamp(self._file)
            if stamp == self._stamp:
                return self.generation
            self._stamp = stamp
            try:
                self._take(self._file)
                self.file_good = True
            except AuthError as error:
                # Half-written or gone: dropping every token would stop the cache over an editor's save.
                self.file_good = False
                log.error("%s; the tokens of before stay in force", error)
                return self.generation
            self.generation += 1
            log.info("tokens: %d read again from %s", len(self._grants), self._file)
        return self.generation


def _stamp(file: Path) -> object:
    try:
        seen = file.stat()
    except OSError:
        return None
    return (seen.st_mtime_ns, seen.st_size, seen.st_ino)


def _read(file: Path) -> Iterator[tuple[bytes, Grant]]:
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise AuthError(
            f"KV_ENGINE_TOKENS_FILE={file} ({error})", "a readable file of tokens", f"write it, one a line: {_LINE}"
        ) from error
    count = 0
    for number, line in enumerate(text.splitlines(), 1):
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        count += 1
        yield _parse(words, f"{file}, line {number}")
    if not count:
        raise AuthError(f"no token in {file}", "at least one", f"add a line: {_LINE}")


def _parse(words: list[str], where: str) -> tuple[bytes, Grant]:
    if len(words) not in (4, 5):
        raise AuthError(f"{len(words)} words in {where}", "4 or 5", f"write it as: {_LINE}")
    name, scope, tenant, *prefix, token = words
    if scope not in _SCOPES:
        raise AuthError(f"scope {scope!r} in {where}", f"one of {', '.join(_SCOPES)}", "correct the second word")
    if not _TENANT.fullmatch(tenant):
        raise AuthError(f"tenant {tenant!r} in {where}", "1 to 64 of A-Z a-z 0-9 . _ -", "correct the third word")
    digest = token.lower().removeprefix("sha256:")
    if not token.startswith("sha256:") or not _DIGEST.fullmatch(digest):
        if token.startswith("sha256:") or len(token) < _SHORTEST:
            raise AuthError(
                f"a token of {len(token)} characters in {where}",
                f"{_SHORTEST} or more, or sha256: and its SHA-256 (64 hex digits)",
                "make one: openssl rand -hex 24",
            )
        digest = hashlib.sha256(token.encode()).hexdigest()
    base, _, _ = scope.partition("+")
    grant = Grant(
        tenant,
        write=base in ("rw", "admin"),
        prefix=prefix[0].encode() if prefix else b"",
        admin=base == "admin",
        name=name,
        read=base != "metrics",
        metrics=base == "admin" or scope.endswith("metrics"),
    )
    return bytes.fromhex(digest), grant


def is_loopback(host: str) -> bool:
    """Whether an address that is listened on is reachable from this machine alone."""
    return host in ("localhost", "::1") or host.startswith("127.")
