"""The value of a SET on its way in: written piece by piece, or whole where it is small."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack

from kvstrata.engine.buffers import Budget
from kvstrata.engine.content import Engine
from kvstrata.engine.errors import EngineError
from kvstrata.engine.receiving import Put

__all__ = ["Incoming"]

#: Half of a CPU's L2 cache: a piece is received, hashed and written while it is there.
_PIECE = 512 << 10


class Incoming:
    """`size` bytes for a key. What it holds ends with `held`."""

    def __init__(
        self, engine: Engine, budget: Budget, tenant: str, key: bytes, size: int, wait_s: float, held: ExitStack
    ) -> None:
        """Waits for memory, and for room on the disk. Busy, TooBig, Full, TooLarge."""
        self._engine, self._tenant, self._key, self._size = engine, tenant, key, size
        # Memory first: who waits for it must not keep room on the disk from others.
        self._view = held.enter_context(budget.take(min(size, _PIECE), wait_s, tenant))
        whole = size <= _PIECE  # then equal bytes are found before anything is written
        self._receiving = None if whole else held.enter_context(engine.receive(tenant, key, size))
        self._failed: EngineError | None = None

    def receive(self, read_into: Callable[[memoryview], None]) -> None:
        """All of its bytes. What goes wrong on the disk meanwhile, `store` tells: the stream must stay in step."""
        if self._receiving is None:
            read_into(self._view)
            return
        left = self._size
        while left:
            piece = self._view[: min(left, len(self._view))]
            with piece:
                read_into(piece)
                left -= len(piece)
                if self._failed is None:
                    try:
                        self._receiving.write(piece)
                    except EngineError as error:
                        self._failed = error

    def store(self, *, replace: bool, over: bool, ttl_s: float | None) -> Put:
        """It is the key's value when this returns. As Engine.put."""
        if self._failed is not None:
            raise self._failed
        if self._receiving is None:
            return self._engine.put(self._tenant, self._key, self._view, replace=replace, over=over, ttl_s=ttl_s)
        return self._receiving.done(replace=replace, over=over, ttl_s=ttl_s)
