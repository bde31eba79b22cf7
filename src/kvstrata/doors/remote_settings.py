"""Where the engine is and how long it may take: KV_REMOTE_* of the cache server's environment."""

from __future__ import annotations

import math
import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import SplitResult, urlsplit

__all__ = ["RemoteError", "RemoteSettings", "said"]

#: A read or write of many blocks may take longer than one: a second more for each so many bytes (a 1 Gbit/s wire).
BYTES_PER_SECOND = 128 << 20


def said(found: str, needed: str, fix: str) -> str:
    """One line of a log."""
    return f"found: {found}; needed: {needed}; to fix it: {fix}"


class RemoteError(ValueError):
    """A setting that cannot work: found, needed, fix."""

    def __init__(self, found: str, needed: str, fix: str) -> None:
        self.said = said(found, needed, fix)
        super().__init__(f"remote engine: {self.said}")


@dataclass(frozen=True)
class RemoteSettings:
    """`url`: http(s)://host[:port][/base]. Times in seconds. `connections`: for reading, and half as many to write.

    The token comes from `token_file` or from `token`; `ca_file` is of https alone, and empty where the system's CAs are
    meant. Both files are read again at each new connection, so that they may be changed.
    """

    url: SplitResult
    token: str = ""
    token_file: Path | None = None
    ca_file: Path | None = None
    connections: int = 4
    deadline_s: float = 5.0
    lease_s: float = 30.0

    @classmethod
    def from_env(cls, env: Mapping[str, str]) -> RemoteSettings:
        """KV_REMOTE_URL, _TOKEN_FILE, _TOKEN, _CA_FILE, _CONNECTIONS, _DEADLINE. Raises RemoteError."""

        def number(name: str, default: float, low: float, high: float) -> float:
            text = env.get(name, "").strip()
            try:
                value = float(text) if text else default
            except ValueError:
                value = math.nan
            if not low <= value <= high:
                raise RemoteError(f"{name}={text}", f"a number from {low:g} to {high:g}", f"mend {name} in .env")
            return value

        def file(name: str) -> Path | None:
            return Path(env[name].strip()) if env.get(name, "").strip() else None

        return cls(
            url=_url(env.get("KV_REMOTE_URL", "").strip()),
            token=env.get("KV_REMOTE_TOKEN", "").strip(),
            token_file=file("KV_REMOTE_TOKEN_FILE"),
            ca_file=file("KV_REMOTE_CA_FILE"),
            connections=int(number("KV_REMOTE_CONNECTIONS", 4, 1, 64)),
            deadline_s=number("KV_REMOTE_DEADLINE", 5, 0.1, 120),
        )

    def bearer(self) -> str:
        """The token as it is now, or "". Raises RemoteError when its file cannot be read or holds several words."""
        if self.token_file is None:
            return self.token
        try:
            text = self.token_file.read_text(encoding="ascii").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise RemoteError(f"token file {self.token_file}: {error}", "a file with one token, readable here",
                              "run `make up`, which writes it, or mend KV_REMOTE_TOKEN_FILE") from None  # fmt: skip
        if len(text.split()) > 1:
            raise RemoteError(f"{self.token_file} with more than one word", "one token", "leave the token alone in it")
        return text

    @property
    def trusted(self) -> str:
        """Who must have signed an engine's certificate, for people."""
        return f"a CA of {self.ca_file}" if self._has_ca() else "a CA of the system"

    def tls(self) -> ssl.SSLContext | None:
        """What an https engine is checked with, as it is now; None for http. Raises RemoteError for the CA file."""
        if self.url.scheme != "https":
            return None
        try:
            return ssl.create_default_context(cafile=str(self.ca_file) if self._has_ca() else None)
        except OSError as error:  # ssl.SSLError is one
            why = "no certificate in it" if isinstance(error, ssl.SSLError) else error.strerror
            needed = "certificates of CAs as PEM, or nothing in it for the system's"
            fix = "mend KV_ENGINE_CA in .env, then `make up`, which copies it there"
            raise RemoteError(f"CA file {self.ca_file}: {why}", needed, fix) from None

    def _has_ca(self) -> bool:
        try:
            return self.ca_file is not None and bool(self.ca_file.read_bytes().strip())
        except OSError:
            return True  # to be told when it is used

    def deadline_for(self, nbytes: int) -> float:
        """Seconds that a task of `nbytes` may take in all."""
        return self.deadline_s + nbytes / BYTES_PER_SECOND


def _url(text: str) -> SplitResult:
    try:
        url = urlsplit(text)
        good = url.scheme in ("http", "https") and bool(url.hostname) and url.port != 0
        good = good and not (url.query or url.fragment or url.username or url.password)
    except ValueError:
        good = False
    if not good:
        raise RemoteError(f"KV_REMOTE_URL={text!r}", "http://host:port or https://host:port, without user or token",
                          "set KV_ENGINE_URL in .env")  # fmt: skip
    return url
