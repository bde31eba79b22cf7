"""Just enough of the Prometheus text format to read counters of vLLM and LMCache.

A client library would bring a dependency for one function; what we need is a sum over the labels that we do not name
(LMCache 0.5.3 adds a `cache_salt` label to a counter as soon as the first salt is seen, so series come and go).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

__all__ = ["Samples", "parse"]

_LINE = re.compile(r"^([a-zA-Z_:][a-zA-Z0-9_:]*)(?:\{(.*)\})?\s+(\S+)")
_LABEL = re.compile(r'([a-zA-Z_][a-zA-Z0-9_]*)="((?:[^"\\]|\\.)*)"')


@dataclass(frozen=True)
class Samples:
    """One scrape. `rows` holds (name, labels, value) as the server gave them."""

    rows: tuple[tuple[str, Mapping[str, str], float], ...]

    def sum(self, name: str, **labels: str) -> float:
        """Sum of every series of `name` whose labels include `labels`; 0.0 when there is none.

        LMCache's counters appear on their first event, so that absent means zero.
        """
        return sum(
            value
            for row, own, value in self.rows
            if row == name and all(own.get(key) == want for key, want in labels.items())
        )

    def has(self, name: str) -> bool:
        return any(row == name for row, _, _ in self.rows)

    def labels(self, name: str) -> Mapping[str, str]:
        """Labels of the first series of `name` (info metrics), or an empty mapping."""
        return next((own for row, own, _ in self.rows if row == name), {})


def parse(text: str) -> Samples:
    """Read an exposition; lines that are not samples are skipped."""
    rows: list[tuple[str, Mapping[str, str], float]] = []
    for line in text.split("\n"):  # not splitlines: a label may hold U+2028
        if line.startswith("#"):
            continue
        match = _LINE.match(line)
        if match is None:
            continue
        try:
            value = float(match.group(3))
        except ValueError:
            continue
        rows.append((match.group(1), dict(_LABEL.findall(match.group(2) or "")), value))
    return Samples(tuple(rows))
