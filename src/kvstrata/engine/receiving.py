"""A value on its way in: hashed, summed and written piece by piece, visible whole or not at all."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import NamedTuple

from blake3 import blake3

from kvstrata.engine.books import block_key
from kvstrata.engine.core import Core
from kvstrata.engine.errors import Full
from kvstrata.store.keys import BlockKey

__all__ = ["Put", "Receiving"]


class Put(NamedTuple):
    """`new`: the key was not there. `digest`: of the value that it means now, in hex."""

    new: bool
    digest: str


class Receiving:
    """A context manager, for one thread at a time: `write` all of the announced bytes, then `done`. Pieces of 256 KiB
    to 1 MiB are best: each is used three times while it is in a CPU's cache.
    """

    def __init__(
        self,
        core: Core,
        tenant: str,
        size: int,
        name_it: Callable[[BlockKey, bool, bool, float | None], Put],
        *,
        replace: bool,
        ttl_s: float | None,
    ) -> None:
        """Waits for room. Full, TooLarge."""
        self._replace = replace
        self._ttl_s = ttl_s
        self._core = core
        self._tenant = tenant
        self._size = size
        self._name_it = name_it
        self._hash = blake3()
        self._incoming = core.tiers.begin(tenant, size)

    def write(self, piece: memoryview) -> None:
        """The next bytes; they may change afterwards. Full; ValueError if they are more than were announced."""
        self._hash.update(piece)
        try:
            self._incoming.write(piece)
        except OSError as error:
            raise Full(f"the value cannot be stored: {error}", retry=True) from error

    def done(self, *, replace: bool | None = None, over: bool = False, ttl_s: float | None = None) -> Put:
        """All bytes are in: acknowledged when this returns. `replace`, `ttl_s`: where they were not known before the
        bytes; None: as given to `receive`. `over`: as in put. Full, Absent; ValueError if bytes are missing.
        """
        key = block_key(self._tenant, self._hash.digest())
        self._core.tiers.publish(self._incoming, key, self._size)
        with self._core.held(key):
            return self._name_it(
                key,
                self._replace if replace is None else replace,
                over,
                self._ttl_s if ttl_s is None else ttl_s,
            )

    def close(self) -> None:
        """Give back what was not used; idempotent."""
        self._incoming.close()

    def __enter__(self) -> Receiving:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
