"""How much of L1 the proof may count on, and what one chunk takes of it.

LMCache 0.5.3 looks once a second: at 0.8 of the pool it drops 0.2 of its keys, least recently used first
(distributed/storage_controllers/eviction_controller.py:161-192). The newest 0.6 of the pool are left then, whoever
stored them. A store that finds no room until then is dropped whole (distributed/l1_manager.py:498-505), and 0.2 is what
a pool that others filled has free.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from kvstrata.proof.client import LmcacheClient, RequestFailed

__all__ = ["Room", "l1_bytes", "measure"]

_LOOK_S = 0.1
_LOOKS = 40
_STEADY = 3


@dataclass(frozen=True)
class Room:
    """L1 in bytes, and the bytes of one chunk, all ranks."""

    total: int
    chunk: int

    @property
    def a_prompt(self) -> int:
        """Chunks of one prompt that find room in a full L1; the least is one."""
        return max(1, self.total // (5 * self.chunk))

    @property
    def kept(self) -> int:
        """Chunks that are sure to stay through an eviction, the newest."""
        return 3 * self.total // (5 * self.chunk)

    def __str__(self) -> str:
        chunk = f"{self.chunk / (1 << 20):.3g} MiB"
        return f"L1 of {self.total / (1 << 30):.3g} GiB holds {self.total // self.chunk} chunks of {chunk}"


def l1_bytes(lmcache: LmcacheClient) -> tuple[int, int]:
    """(used, total) of L1; zeros where LMCache does not tell."""
    l1 = lmcache.status().get("storage_manager", {}).get("l1_manager", {})
    return int(l1.get("memory_used_bytes", 0)), int(l1.get("memory_total_bytes", 0))


def measure(lmcache: LmcacheClient, store: Callable[[], object]) -> Room | None:
    """By how much L1 grows when `store` stores one chunk and nobody else stores; None when it is not seen to grow."""
    before, total = l1_bytes(lmcache)
    if not total:
        return None
    try:
        store()
    except RequestFailed:
        return None
    grown = steady = 0
    for _ in range(_LOOKS):
        more = l1_bytes(lmcache)[0] - before
        # Rank after rank stores its part; less than was seen before is an eviction.
        grown, steady = max(grown, more), steady + 1 if grown > 0 and more <= grown else 0
        if steady > _STEADY:
            break
        time.sleep(_LOOK_S)
    return Room(total, grown) if grown else None
