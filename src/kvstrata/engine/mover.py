"""Between the disks: what the warm one evicts goes to the cold one, what is read on the cold one comes back."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvstrata.engine.books import Content, Tier, block_key
from kvstrata.engine.errors import EngineError
from kvstrata.store.codecs import CodecError
from kvstrata.store.direct import PinnedBlock
from kvstrata.store.format import BadBlock
from kvstrata.store.keys import BlockKey
from kvstrata.store.scratch import Scratch
from kvstrata.store.store import Outcome

if TYPE_CHECKING:
    from kvstrata.engine.core import Core

__all__ = ["Mover"]

_DEMOTE_S = 10.0
# A cold disk that takes nothing must not slow down every eviction.
_PAUSE_S = 5.0
_WAITING_MOST = 64
_WAIT_S = 2.0

log = logging.getLogger(__name__)


class Mover:
    """Demotes in the warm store's evicting thread, so that puts wait for the cold disk instead of losing blocks;
    promotes in a thread of its own, and not at all what comes faster than it can. Every byte is checked on its way.
    Holds one value in memory for each of the two.
    """

    def __init__(self, core: Core) -> None:
        self._core = core
        self._leaving: set[tuple[str, bytes]] = set()
        self._changed = threading.Condition()
        self._no_demotion_before = 0.0
        self._wanted: deque[Content] = deque()
        self._started = self._stopped = False
        self._room = Scratch()
        self._thread = threading.Thread(target=self._run, name="kvstrata-promote", daemon=True)

    def start(self) -> None:
        """Begin, if there is a cold disk. What the warm one evicts before that (its capacity was lowered) is lost."""
        if Tier.COLD in self._core.tiers.stores:
            self._started = True
            self._thread.start()

    def stop(self, timeout_s: float) -> None:
        """Idempotent."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()
        if self._thread.is_alive():
            self._thread.join(timeout_s)

    def wait(self, content: Content) -> None:
        """If it is just being demoted, until it can be found again."""
        name = (content.tenant, content.digest)
        with self._changed:
            self._changed.wait_for(lambda: name not in self._leaving, _WAIT_S)

    # -- down

    def demote(self, keys: Sequence[BlockKey]) -> None:
        """These leave the warm disk when this returns."""
        if not self._started or time.monotonic() < self._no_demotion_before:
            return
        with self._changed:
            self._leaving |= {(key.salt, key.chunk) for key in keys}
        try:
            for key in keys:
                self._demote(key)
                with self._changed:
                    self._leaving.discard((key.salt, key.chunk))
                    self._changed.notify_all()
        finally:
            with self._changed:
                self._leaving -= {(key.salt, key.chunk) for key in keys}
                self._changed.notify_all()

    def _demote(self, key: BlockKey) -> None:
        core = self._core
        with core.lock:
            of = core.books.tenants.get(key.salt)
            content = of.contents.get(key.chunk) if of is not None else None
        if content is None or content.tier is not Tier.WARM or time.monotonic() < self._no_demotion_before:
            return
        block = core.tiers.stores[Tier.WARM].open_leaving(key)
        body = self._read(block) if block is not None else None
        if body is None:
            return
        cold = core.tiers.stores[Tier.COLD]
        result = cold.put_pinned(key, memoryview(body), _DEMOTE_S)
        if result.outcome not in (Outcome.STORED, Outcome.PRESENT):
            if result.reason != "too_large":
                self._no_demotion_before = time.monotonic() + _PAUSE_S
            log.warning("engine: the cold disk does not take a block: %s", result.reason)
            return
        try:
            if core.settings.durability == "fsync":
                cold.sync(key)
            with core.lock:
                if core.books.has(content) and content.tier is Tier.WARM:
                    core.books.place(content, tier=Tier.COLD)
                    core.settle(content)
                    core.books.of(key.salt).count("demotions")
                elif not core.books.has(content):
                    core.orphan(Tier.COLD, key)
        except OSError as error:
            log.warning("engine: the cold disk does not take a block: %s", error)
        finally:
            cold.unpin([key])

    # -- up

    def promote(self, content: Content) -> None:
        """It was used: bring it to the warm disk, soon."""
        with self._changed:
            if len(self._wanted) < _WAITING_MOST and content not in self._wanted:
                self._wanted.append(content)
                self._changed.notify_all()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._stopped or self._wanted)
                if self._stopped:
                    return
                content = self._wanted.popleft()
            try:
                self._promote(content)
            except EngineError as error:
                log.debug("engine: not promoted: %s", error)
            except Exception:
                log.exception("engine: a promotion failed")

    def _promote(self, content: Content) -> None:
        core, key = self._core, block_key(content.tenant, content.digest)
        with core.lock:
            if content.tier is not Tier.COLD or not core.books.has(content):
                return
        block = core.tiers.stores[Tier.COLD].open_pinned(key)
        body = self._read(block) if block is not None else None
        if body is None:
            return
        with core.stored(key, memoryview(body)), core.lock:
            # Meanwhile it may have been deleted, even stored anew.
            if core.books.has(content) and content.tier is Tier.COLD:
                core.move(content, Tier.WARM)
                core.books.of(content.tenant).count("promotions")

    def _read(self, block: PinnedBlock) -> bytearray | None:
        """All of it, checked; None if it is not fit to be kept."""
        with block:
            body = bytearray()
            try:
                for piece in block.pieces(0, self._room):
                    body += piece
            except (BadBlock, OSError, CodecError) as error:
                log.warning("engine: a block is not moved: %s", error)
                return None
            return body
