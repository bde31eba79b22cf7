"""What the store tells about itself while it works: for metrics and for the door's notifications."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from kvstrata.store.keys import BlockKey

__all__ = ["Events", "NoEvents"]


class Events(Protocol):
    """Called from the store's own threads, never under its locks. Must be quick; what they raise is swallowed.

    `outcome` and `reason` are the words of a Result. Bytes of loads and stores are the caller's (logical) bytes, those
    of evictions and removals are bytes on disk. Seconds run from the call to the end of the block.
    """

    def on_load(self, nbytes: int, seconds: float, outcome: str, reason: str) -> None:
        """One block of a get_into ended."""

    def on_store(self, nbytes: int, seconds: float, outcome: str, reason: str) -> None:
        """One block of a put ended."""

    def on_evicting(self, keys: Sequence[BlockKey]) -> None:
        """Blocks are about to make room: not found any more, but until this returns `BlockStore.open_leaving` reads
        them. The one call that may take its time, for puts wait for it anyway.
        """

    def on_evict(self, cls: str, blocks: int, nbytes: int) -> None:
        """Blocks of one retention class made room."""

    def on_removed(self, keys: Sequence[BlockKey], sizes: Sequence[int]) -> None:
        """Blocks are gone, for whatever reason: evicted, deleted, corrupt, lost."""

    def scan_done(self, blocks: int, seconds: float) -> None:
        """The start-up scan ended."""


class NoEvents:
    """Nobody listens."""

    def on_load(self, nbytes: int, seconds: float, outcome: str, reason: str) -> None:
        """Ignored."""

    def on_store(self, nbytes: int, seconds: float, outcome: str, reason: str) -> None:
        """Ignored."""

    def on_evicting(self, keys: Sequence[BlockKey]) -> None:
        """Ignored."""

    def on_evict(self, cls: str, blocks: int, nbytes: int) -> None:
        """Ignored."""

    def on_removed(self, keys: Sequence[BlockKey], sizes: Sequence[int]) -> None:
        """Ignored."""

    def scan_done(self, blocks: int, seconds: float) -> None:
        """Ignored."""
