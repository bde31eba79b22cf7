"""The knobs' values, from text to type: what is refused says where it stands, what was found and what is needed."""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeVar

from kvstrata.deploy import dotenv
from kvstrata.deploy.errors import KvError
from kvstrata.launch.config import NUMBER

__all__ = ["Reader", "absolute"]

_T = TypeVar("_T")


class Reader:
    """Typed access to raw values; every complaint names where the value came from."""

    def __init__(self, values: Mapping[str, str], where: Mapping[str, str]) -> None:
        self._values, self._where = values, where

    def text(self, key: str) -> str:
        value = self._values[key]
        if value != value.strip():
            at = self._where.get(key, key)
            raise KvError(f"{at}: {key}={value!r}", "no white space at its ends: docker compose hands it on as it is",
                          f"{key}={dotenv.quote(value.strip())}")  # fmt: skip
        return value

    def matching(self, key: str, pattern: str, needed: str) -> str:
        value = self.text(key)
        if not re.fullmatch(pattern, value):
            raise self.bad(key, needed)
        return value

    def bad(self, key: str, needed: str, fix: str = "") -> KvError:
        at = self._where.get(key, f"{key} (default)")
        return KvError(f"{at}: {key}={self._values[key]}", needed, fix or f"set {key} to {needed} in .env")

    def parsed(self, key: str, parse: Callable[[str], _T], needed: str) -> _T:
        try:
            return parse(self.text(key))
        except ValueError:
            raise self.bad(key, needed) from None

    def number(self, key: str, low: float, high: float, needed: str) -> float:
        value = self.parsed(key, _decimal, needed)
        if not low <= value <= high:  # also false for nan
            raise self.bad(key, needed)
        return value

    def whole(self, key: str, low: int, high: int, needed: str) -> int:
        value = self.parsed(key, _digits, needed)
        if not low <= value <= high:
            raise self.bad(key, needed)
        return value

    def size(self, key: str) -> float | None:
        return self.number(key, 0.001, 1 << 20, "a number of GiB greater than 0, or blank") if self.text(key) else None

    def flag(self, key: str) -> bool:
        if self.text(key) not in ("0", "1"):
            raise self.bad(key, "0 or 1")
        return self.text(key) == "1"

    def choice(self, key: str, allowed: tuple[str, ...], blank: bool) -> str:
        value = self.text(key)
        if value in allowed or (blank and not value):
            return value
        near = difflib.get_close_matches(value, allowed, n=1)
        needed = "one of " + ", ".join(allowed) + (", or blank" if blank else "")
        raise self.bad(key, needed, f"set {key}={near[0]} in .env" if near else "")


def _digits(text: str) -> int:
    """int() also takes "1_000", " 5" and "+5", which docker compose would pass on as they are."""
    if not re.fullmatch(r"[0-9]{1,18}", text):
        raise ValueError(text)
    return int(text)


def _decimal(text: str) -> float:
    """float() also takes "1e1", ".5" and other alphabets' digits, at which the launcher in the container would stop."""
    if not NUMBER.fullmatch(text):
        raise ValueError(text)
    return float(text)


def absolute(root: Path, text: str) -> Path:
    """Absolute, `..` folded, links kept; a relative one starts at the checkout, wherever the caller stands."""
    try:
        return Path(os.path.normpath(root / Path(text).expanduser()))
    except RuntimeError:
        raise KvError(f"the path {text} in .env names a home that does not exist", "a path of this machine",
                      "write the whole path, from / on") from None  # fmt: skip
