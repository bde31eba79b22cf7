"""Taking blocks' files away, whatever the reason, and keeping the books while doing so."""

from __future__ import annotations

import errno
import logging
import os
import stat
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from kvstrata.store.deadline import Batch, Outcome, Result
from kvstrata.store.events import Events
from kvstrata.store.index import Index, Victim
from kvstrata.store.settings import CLASSES
from kvstrata.store.surroundings import Surroundings

__all__ = ["Remover"]

_PIN_MODE = 0o400

log = logging.getLogger(__name__)


class Remover:
    """Unlinks what the index gave out as victims."""

    def __init__(self, root: Path, index: Index, surroundings: Surroundings, events: Events) -> None:
        self._root = str(root)
        self._index = index
        self._surroundings = surroundings
        self._events = events

    def remove(self, victims: Sequence[Victim], *, even_pinned: bool = False) -> list[Victim]:
        """Remove them in order, and say so; those that are gone.

        A block that got mode 0400 since the scan is pinned: it stays. The victims that stay are in the index again:
        in their places on a read-only disk, else as if just used, so that a damaged directory's do not stand in the
        way of all others.
        """
        evicted = [self._index.names.key(victim.entry) for victim in victims if victim.evicted]
        if evicted:
            with suppress(Exception):
                self._events.on_evicting([key for key in evicted if key is not None])
        gone: list[Victim] = []
        for at, victim in enumerate(victims):
            try:
                if self._unlink(victim, even_pinned):
                    gone.append(victim)
            except OSError as error:
                log.warning("block store: cannot remove a block: %s", error)
                if error.errno == errno.EROFS:
                    self._index.stays(victims[at:])
                    break
                self._index.stays([victim], young=True)
        self._announce(gone)
        return gone

    def delete(self, batch: Batch) -> None:
        """Remove a batch's blocks, those that nobody holds and whose class is not `pin`, and settle its keys."""
        batch.enter()
        try:
            victims = {victim.entry: victim for victim in self._index.take(batch.entries)}
            gone = {victim.entry for victim in self.remove(list(victims.values()))}
            left = self._index.contains(batch.entries)
            for at, entry in enumerate(batch.entries):
                if entry in gone:
                    batch.settle(at, Result(Outcome.DELETED, nbytes=victims[entry].nbytes))
                elif entry in victims:
                    batch.settle(at, Result(Outcome.ERROR, "not_removed"))
                else:
                    batch.settle(at, Result(Outcome.MISS, "pinned" if left[at] else ""))
        finally:
            batch.leave()

    def forget(self, victims: Sequence[Victim]) -> None:
        """Their files were found to be gone already."""
        for victim in victims:
            self._index.gone(victim)
        self._announce(victims)

    def _unlink(self, victim: Victim, even_pinned: bool) -> bool:
        path = f"{self._root}/{self._index.names.path(victim.entry)}"
        with suppress(FileNotFoundError):
            if not even_pinned and stat.S_IMODE(os.lstat(path).st_mode) == _PIN_MODE:
                self._index.stays([victim], pinned=True)
                return False
            os.unlink(path)  # noqa: PTH108
        if self._index.gone(victim):
            self._surroundings.tidy(victim.entry)
        return True

    def _announce(self, victims: Sequence[Victim]) -> None:
        named = [(self._index.names.key(victim.entry), victim.nbytes) for victim in victims]
        keys = [key for key, _ in named if key is not None]
        if keys:
            with suppress(Exception):
                self._events.on_removed(keys, [nbytes for key, nbytes in named if key is not None])

    def announce_evicted(self, victims: Sequence[Victim]) -> None:
        """Tell the events how much each retention class gave."""
        for number, cls in enumerate(CLASSES):
            sizes = [victim.nbytes for victim in victims if victim.cls == number]
            if sizes:
                with suppress(Exception):
                    self._events.on_evict(cls, len(sizes), sum(sizes))
