"""put: blocks from the caller's buffers, within the cap, the first writer wins."""

from __future__ import annotations

import logging
from functools import partial

from kvstrata.store.blockfile import BlockIO, Written
from kvstrata.store.capacity import ADMITTED, Capacity
from kvstrata.store.deadline import Batch, Outcome, Result
from kvstrata.store.index import Claim, Index
from kvstrata.store.keeper import Keeper
from kvstrata.store.lease import Expired
from kvstrata.store.loads import error_word
from kvstrata.store.pool import STORE, Pool
from kvstrata.store.publish import Publisher

__all__ = ["Storer"]

log = logging.getLogger(__name__)


class Storer:
    """Runs the puts of a batch on the pool; a put that waits for room waits outside of it."""

    def __init__(
        self, io: BlockIO, index: Index, capacity: Capacity, publisher: Publisher, keeper: Keeper, pool: Pool
    ) -> None:
        self._io = io
        self._index = index
        self._capacity = capacity
        self._publisher = publisher
        self._keeper = keeper
        self._pool = pool

    def start(self, batch: Batch, itemsize: int) -> None:
        """Store all keys of the batch."""
        places = []
        for at, claim in enumerate(self._index.claim(batch.entries)):
            if claim is Claim.PRESENT:
                batch.settle(at, Result(Outcome.PRESENT))
            elif claim is Claim.LEAVING:
                batch.settle(at, Result(Outcome.ERROR, "leaving"))
            else:
                places.append(at)
        self._pool.submit(STORE, [partial(self._admit, batch, at, itemsize) for at in places])

    def _admit(self, batch: Batch, at: int, itemsize: int) -> None:
        if batch.over:
            self._give_up(batch, at, "deadline")
            return
        key = batch.keys[at]
        room = self._capacity.room_for(len(batch.buffers[at]), len(key.namespace) + len(key.salt))
        answer = self._capacity.admit(batch.entries[at], room, partial(self._resume, batch, at, itemsize))
        if answer is not None:
            (self._write if answer == ADMITTED else self._refuse)(batch, at, itemsize, answer)

    def _resume(self, batch: Batch, at: int, itemsize: int, answer: str) -> None:
        if answer == ADMITTED:
            self._pool.submit(STORE, [partial(self._write, batch, at, itemsize, answer)], first=True)
        else:
            self._refuse(batch, at, itemsize, answer)

    def _refuse(self, batch: Batch, at: int, itemsize: int, reason: str) -> None:
        self._give_up(batch, at, reason)

    def _give_up(self, batch: Batch, at: int, reason: str) -> None:
        self._index.written(batch.entries[at], None)
        batch.settle(at, Result(Outcome.ERROR, reason))

    def _write(self, batch: Batch, at: int, itemsize: int, _: str) -> None:
        if batch.over:
            self._give_up(batch, at, "deadline")
            return
        batch.enter()
        try:
            buffer = batch.buffers[at]
            done = self._publisher.write(
                batch.entries[at],
                len(buffer),
                lambda: self._io.write(batch.keys[at], buffer, itemsize, batch.lease, publish=batch.lease.publish),
            )
        except Expired:
            self._give_up(batch, at, "deadline")
        except OSError as error:
            self._give_up(batch, at, error_word(error))
        except Exception:
            log.exception("block store: a put failed")
            self._give_up(batch, at, "internal")
        else:
            self._stored(batch, at, done)
        finally:
            batch.leave()

    def _stored(self, batch: Batch, at: int, done: Written) -> None:
        entry = batch.entries[at]
        self._index.written(entry, *self._publisher.facts(entry, done))
        if done.existed:
            batch.settle(at, Result(Outcome.PRESENT))
            return
        self._keeper.new(entry)
        batch.settle(at, Result(Outcome.STORED, nbytes=done.allocated))
