"""Reading the container's environment. Everything the launcher knows comes from here, so a test can hand in its own."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

__all__ = ["NUMBER", "ConfigError", "Paths", "number", "required", "whole"]


#: The one spelling of a number, for the command line's own check of .env as well: docker compose hands it on as it is.
NUMBER = re.compile(r"[0-9]+(\.[0-9]+)?")


class ConfigError(Exception):
    """The container cannot run as configured; a restart would not help. One line: found, needed, how to fix."""


@dataclass(frozen=True)
class Paths:
    """Places inside the containers; compose mounts them."""

    run: Path = field(default=Path("/run/kvstrata"))
    http_socket: Path = field(default=Path("/run/lmcache-http/http.sock"))
    otlp_socket: Path = field(default=Path("/run/otlp/otlp.sock"))
    model: Path = field(default=Path("/model"))
    state: Path = field(default=Path("/run/kvstrata-state"))
    salt_key: Path = field(default=Path("/run/secrets/kv_salt_key"))
    cache: Path = field(default=Path("/cache"))
    shm: Path = field(default=Path("/dev/shm"))  # noqa: S108 - the volume that vllm and lmcache share

    @property
    def failed(self) -> Path:
        """Holds the reason while the service is in its failed state."""
        return self.run / "failed"


def required(env: Mapping[str, str], key: str) -> str:
    """Value of `key`; ConfigError when it is absent or blank."""
    value = env.get(key, "").strip()
    if not value:
        raise ConfigError(f"{key} is not set in the container; run `make up`, which writes it to .env")
    return value


def number(env: Mapping[str, str], key: str, default: float | None = None) -> float:
    """A finite positive number."""
    text = env.get(key, "").strip() or ("" if default is None else str(default))
    if not NUMBER.fullmatch(text) or float(text) <= 0:
        raise ConfigError(f"{key}={text!r}, needed a number above 0; mend it in .env and run `make up`")
    return float(text)


def whole(env: Mapping[str, str], key: str, default: int | None = None) -> int:
    """A positive whole number."""
    value = number(env, key, default)
    if value != int(value):
        raise ConfigError(f"{key}={value}, needed a whole number; mend it in .env and run `make up`")
    return int(value)
