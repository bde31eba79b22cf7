"""One result of a check."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

__all__ = ["Finding"]


@dataclass(frozen=True)
class Finding:
    """`level`: an error keeps the stack from being started, a warning does not."""

    name: str
    level: Literal["error", "warning"]
    found: str
    needed: str
    fix: str
