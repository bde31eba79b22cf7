"""Blocks that the device would not read: the second time they go."""

from __future__ import annotations

from kvstrata.store.index import PIN, Index
from kvstrata.store.removal import Remover

__all__ = ["Strikes"]

_STRIKES = 2
_STRIKES_KEPT = 1024


class Strikes:
    """A bad sector would make a promise that fails for ever, and keep a good copy out. One count for all readers."""

    def __init__(self, index: Index, remover: Remover) -> None:
        self._index = index
        self._remover = remover
        self._counts: dict[bytes, int] = {}

    def add(self, entry: bytes, birth: int) -> None:
        """It could not be read; the block of that birth goes at the second time, unless its class is `pin`."""
        if len(self._counts) >= _STRIKES_KEPT:
            self._counts.clear()
        self._counts[entry] = self._counts.get(entry, 0) + 1
        if self._counts[entry] >= _STRIKES:
            del self._counts[entry]
            facts = self._index.facts(entry)
            if facts is not None and facts[2] != PIN:
                self._remover.remove(self._index.take_bad(entry, birth))

    def clear(self, entry: bytes) -> None:
        """It was read."""
        if self._counts:
            self._counts.pop(entry, None)
