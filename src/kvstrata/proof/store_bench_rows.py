"""Rows of the block store's benchmark: samples, medians, and the two ratios that every row carries.

Standard library only: this module also runs inside the cache server's image.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

__all__ = ["CEILING", "LMCACHE_FS", "Row", "table"]

CEILING = "ceiling"
"""Parallel preadv/pwrite into the same pre-touched buffers; the best thread count of a kind of work is 1.0."""
LMCACHE_FS = "lmcache fs"

Work = tuple[str, str, int]
"""(op, state, block size in MiB): what rows must share to be compared."""


@dataclass(frozen=True)
class Row:
    """`samples`: GB/s (10^9 bytes of KV a second) of one candidate at one kind of work; none with a `reason`."""

    name: str
    checked: bool
    op: str
    state: str
    block_mib: int
    threads: int
    samples: tuple[float, ...]
    reason: str = ""

    @property
    def work(self) -> Work:
        return self.op, self.state, self.block_mib

    @property
    def gbps(self) -> float | None:
        return median(self.samples) if self.samples else None


def table(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """The JSON rows: medians with spread, and ratios to the best ceiling and the best LMCache fs of the same work."""
    ceilings, fs = _best(rows, CEILING), _best(rows, LMCACHE_FS)
    return [
        {
            "name": row.name, "checked": row.checked, "op": row.op, "state": row.state, "block_mib": row.block_mib,
            "threads": row.threads, "gbps": _rounded(row.gbps), "of_ceiling": _ratio(row, ceilings),
            "vs_lmcache_fs": _ratio(row, fs), "samples": [round(sample, 3) for sample in row.samples],
            **({"reason": row.reason} if row.reason else {}),
        }
        for row in rows
    ]  # fmt: skip


def _best(rows: Iterable[Row], name: str) -> dict[Work, float]:
    best: dict[Work, float] = {}
    for row in rows:
        if row.name == name and row.gbps is not None:
            best[row.work] = max(best.get(row.work, 0.0), row.gbps)
    return best


def _ratio(row: Row, best: dict[Work, float]) -> float | None:
    against = _rounded(best.get(row.work))
    mine = _rounded(row.gbps)
    return round(mine / against, 3) if against and mine is not None else None


def _rounded(value: float | None) -> float | None:
    """As it stands in the JSON, so that whoever divides two rows of it gets the very ratio that stands there."""
    return None if value is None else round(value, 3)
