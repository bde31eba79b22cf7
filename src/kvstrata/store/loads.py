"""get_into: blocks into the caller's buffers, every byte checked."""

from __future__ import annotations

import errno
import logging
import threading
from collections.abc import Sequence
from functools import partial
from itertools import pairwise

from kvstrata.store.blockfile import BlockIO, OpenBlock
from kvstrata.store.codecs import CodecError
from kvstrata.store.deadline import Batch, Outcome, Result
from kvstrata.store.format import BadBlock
from kvstrata.store.index import PIN, Index
from kvstrata.store.keeper import Keeper
from kvstrata.store.lease import Expired
from kvstrata.store.pool import LOAD, Pool
from kvstrata.store.removal import Remover
from kvstrata.store.strikes import Strikes

__all__ = ["Loader", "error_word"]

log = logging.getLogger(__name__)


def error_word(error: OSError) -> str:
    """The reason word of an error of the operating system: eio, enospc, erofs, ..."""
    return errno.errorcode.get(error.errno or 0, "oserror").lower()


class _Split:
    """A block that several threads read: the last one ends it with the first error that any of them met."""

    __slots__ = ("birth", "block", "error", "left", "lock")

    def __init__(self, block: OpenBlock, birth: int, parts: int) -> None:
        self.block = block
        self.birth = birth
        self.left = parts
        self.error: Exception | None = None
        self.lock = threading.Lock()

    def done(self, error: Exception | None) -> bool:
        with self.lock:
            self.error = self.error or error
            self.left -= 1
            return self.left == 0


class Loader:
    """Runs the loads of a batch on the pool. Every key given to `start` is held in the index; the loader lets go of it
    when no thread uses its file any more, which on a stuck disk is long after the report.
    """

    def __init__(
        self, io: BlockIO, index: Index, remover: Remover, strikes: Strikes, keeper: Keeper, pool: Pool, workers: int
    ) -> None:
        self._io = io
        self._index = index
        self._remover = remover
        self._keeper = keeper
        self._pool = pool
        self._workers = workers
        self._strikes = strikes

    def start(self, batch: Batch, places: Sequence[int]) -> None:
        """Load the keys at these places. Few big blocks are read by several threads each."""
        parts = -(-self._workers // len(places)) if places else 1
        self._pool.submit(LOAD, [partial(self._load, batch, at, parts) for at in places])

    def _load(self, batch: Batch, at: int, parts: int) -> None:
        if batch.over:
            self._index.release([batch.entries[at]])
            return
        batch.enter()
        try:
            self._read(batch, at, parts)
        finally:
            batch.leave()

    def _read(self, batch: Batch, at: int, parts: int) -> None:
        error: Exception | None = None
        birth = self._index.birth(batch.entries[at])
        try:
            block = self._io.open(batch.keys[at])
        except Exception as problem:
            self._end(batch, at, birth, problem)
            return
        subs = block.header.sub_count
        parts = min(parts, subs)
        if parts > 1:
            self._split(batch, at, _Split(block, birth, parts))
            return
        try:
            block.read(0, subs, batch.buffers[at], batch.lease)
        except Exception as problem:
            error = problem
        finally:
            block.close()
        self._end(batch, at, birth, error)

    def _split(self, batch: Batch, at: int, split: _Split) -> None:
        subs, parts = split.block.header.sub_count, split.left
        bounds = [part * subs // parts for part in range(parts + 1)]
        ranges = list(pairwise(bounds))
        self._pool.submit(LOAD, [partial(self._part, batch, at, split, *span) for span in ranges[1:]], first=True)
        self._part(batch, at, split, *ranges[0])

    def _part(self, batch: Batch, at: int, split: _Split, first: int, last: int) -> None:
        batch.enter()
        error: Exception | None = None
        try:
            if split.error is None:
                split.block.read(first, last, batch.buffers[at], batch.lease)
        except Exception as problem:
            error = problem
        finally:
            if split.done(error):
                split.block.close()
                self._end(batch, at, split.birth, split.error)
            batch.leave()

    def _end(self, batch: Batch, at: int, birth: int, error: Exception | None) -> None:
        entry = batch.entries[at]
        # The books first: who sees the result may ask for usage, or put the key again.
        try:
            result = self._judge(batch, at, birth, error)
        except Exception:
            log.exception("block store: the end of a load failed")
            result = Result(Outcome.ERROR, "internal")
        self._index.release([entry])
        if result is not None:
            batch.settle(at, result)

    def _judge(self, batch: Batch, at: int, birth: int, error: Exception | None) -> Result | None:
        entry = batch.entries[at]
        if error is None:
            self._strikes.clear(entry)
            self._keeper.touch(entry)
            return Result(Outcome.HIT, nbytes=len(batch.buffers[at]))
        if isinstance(error, Expired):
            return None
        if isinstance(error, FileNotFoundError):
            self._remover.forget(self._index.take_bad(entry, birth))
            self._keeper.audit(blocks=False)
            return Result(Outcome.MISS, "lost")
        if isinstance(error, BadBlock):
            facts = self._index.facts(entry)
            if error.reason == "length" and facts is not None and facts[2] == PIN and self._sound(batch, at):
                return Result(Outcome.MISS, "length")
            log.warning("block store: %s is corrupt: %s", self._index.names.path(entry), error)
            self._remover.remove(self._index.take_bad(entry, birth), even_pinned=True)
            return Result(Outcome.CORRUPT, error.reason)
        if isinstance(error, OSError):
            self._strikes.add(entry, birth)
            return Result(Outcome.ERROR, error_word(error))
        if isinstance(error, CodecError):
            return Result(Outcome.ERROR, "codec")
        log.error("block store: a load failed", exc_info=error)
        return Result(Outcome.ERROR, "internal")

    def _sound(self, batch: Batch, at: int) -> bool:
        """True if it is the caller's buffer whose length is wrong: no reason to lose a block that somebody pinned."""
        try:
            with self._io.open(batch.keys[at]) as block:
                return block.header.raw_len != len(batch.buffers[at])
        except (OSError, BadBlock):
            return False
