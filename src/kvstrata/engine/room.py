"""How the catalog's share of the capacity is divided, and what a name takes of it."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["PAGE", "Room", "row_bytes"]

PAGE = 4096
"""Bytes of a page of the catalog; SQLite's default."""

# What the rows of the counters, the schema and half-filled pages take.
_FIXED = 64 << 10
_LEAST_LOG, _MOST_LOG = 512 << 10, 64 << 20
# What a statement may write into the log: its leaf, one that it splits, their parents, and pages that overflow.
_STATEMENT = 8 * PAGE
# SQLite keeps so much of a row in its page at most; of a longer one at least so much, and the rest in pages of its own
# (https://sqlite.org/fileformat2.html#cell_payload_overflow_pages, for an index and pages of 4096 bytes).
_MOST_LOCAL, _LEAST_LOCAL, _OVERFLOW = 1002, 489, PAGE - 4
_ROW = 80


@dataclass(frozen=True)
class Room:
    """`total`: bytes of the catalog, its log and its index of that. All the others are parts of it, in bytes."""

    total: int

    @property
    def log(self) -> int:
        """The log at most. It is merged when half of that is there: the other half is for one transaction."""
        return min(max(self.total // 4, _LEAST_LOG), _MOST_LOG)

    @property
    def file(self) -> int:
        """The catalog's file at most; the log's index takes 8 bytes a page, and 32 KiB at least."""
        return self.total - self.log - (self.log >> 8) - (32 << 10)

    @property
    def forks(self) -> int:
        """The names in snapshots and branches."""
        return self.total // 16

    @property
    def refs(self) -> int:
        """The keys."""
        return self.file - self.forks - _FIXED

    @property
    def together(self) -> int:
        """Statements of one transaction, unless they belong together."""
        return min(max(self.log // 2 // _STATEMENT, 1), 1000)


def row_bytes(tenant: str, key: bytes) -> int:
    """What a key takes in the catalog, its page being half full."""
    payload = len(tenant) + len(key) + _ROW
    if payload <= _MOST_LOCAL:
        return 2 * payload
    local = _LEAST_LOCAL + (payload - _LEAST_LOCAL) % _OVERFLOW
    if local > _MOST_LOCAL:
        local = _LEAST_LOCAL
    return 2 * local + -(-(payload - local) // _OVERFLOW) * PAGE
