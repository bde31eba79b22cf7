"""What the store tells about its content."""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from kvstrata.store.index import Index
from kvstrata.store.keys import BlockKey
from kvstrata.store.settings import CLASSES

__all__ = ["BlockInfo", "Usage", "listing"]


@dataclass(frozen=True, slots=True)
class Usage:
    """Bytes on disk. `used`: everything below the root, as `du` counts; `reserved`: for puts under way; their sum never
    passes `capacity`. `by_namespace`: (namespace, salt) -> (blocks, bytes) of the blocks alone. `free_on_device`: about
    a second old. `suspect`: the disk does not answer in time, nothing is found until it does.
    """

    capacity: int
    used: int
    reserved: int
    blocks: int
    by_namespace: dict[tuple[str, str], tuple[int, int]]
    free_on_device: int
    suspect: bool


@dataclass(frozen=True, slots=True)
class BlockInfo:
    """One block of a listing; `nbytes` on disk; `token` continues a listing behind it (valid for this process)."""

    key: BlockKey
    nbytes: int
    last_use_ns: int
    cls: str
    token: str


def listing(index: Index, after: str | None, limit: int | None) -> Iterator[BlockInfo]:
    """See BlockStore.scan."""
    entries: Sequence[bytes] = index.entries()
    if after:
        last = bytes.fromhex(after)
        entries = [entry for entry in entries if entry > last]
    left = len(entries) if limit is None else limit
    for bite in (sorted(entries),) if limit is None else _bites(entries, limit):
        for entry in bite:
            if left <= 0:
                return
            key, facts = index.names.key(entry), index.facts(entry)
            if key is not None and facts is not None:
                left -= 1
                yield BlockInfo(key, facts[0], facts[1], CLASSES[facts[2]], entry.hex())


def _bites(entries: Sequence[bytes], limit: int) -> Iterator[list[bytes]]:
    """Ascending entries, a bite of about `limit` at a time: some may be gone, or nameless."""
    while entries and limit > 0:
        bite = heapq.nsmallest(limit, entries)
        yield bite
        entries = [entry for entry in entries if entry > bite[-1]]
