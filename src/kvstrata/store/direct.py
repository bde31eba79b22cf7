"""Puts and reads in the caller's own thread, for servers whose threads may wait for the disk: no hand-over to a pool,
and the block stays pinned from the put to whatever the caller does next.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import TracebackType

from kvstrata.store.blockfile import UNLIMITED, BlockIO, Written
from kvstrata.store.blockread import OpenBlock
from kvstrata.store.capacity import ADMITTED, Capacity
from kvstrata.store.codecs import CodecError
from kvstrata.store.deadline import Outcome, Result
from kvstrata.store.format import BadBlock
from kvstrata.store.incoming import Incoming
from kvstrata.store.index import Claim, Index, Victim
from kvstrata.store.keeper import Keeper
from kvstrata.store.keys import BlockKey
from kvstrata.store.loads import error_word
from kvstrata.store.publish import Publisher
from kvstrata.store.removal import Remover
from kvstrata.store.root import Root
from kvstrata.store.scratch import Scratch
from kvstrata.store.strikes import Strikes
from kvstrata.store.stuck import Stuck

__all__ = ["Direct", "PinnedBlock"]

_PAUSE_S = 0.001

log = logging.getLogger(__name__)


class PinnedBlock:
    """An open block that is neither evicted nor deleted until `close`. For one thread at a time."""

    __slots__ = ("_block", "_direct", "_entry", "_open", "birth")

    def __init__(self, direct: Direct, entry: bytes, birth: int, block: OpenBlock) -> None:
        self._direct = direct
        self._entry = entry
        self._block = block
        self._open = True
        self.birth = birth

    @property
    def size(self) -> int:
        """Bytes of the value."""
        return self._block.header.raw_len

    @property
    def step(self) -> int:
        """Bytes of a piece; all but the last have that many."""
        return self._block.header.sub_bytes

    def pieces(self, first: int, room: Scratch) -> Iterator[memoryview]:
        """The pieces from number `first` on, each checked before it is given out and good until the next one; `room`:
        this thread's memory for them. Raises BadBlock, after which the block is gone from the store; OSError.
        """
        try:
            for sub in range(first, self._block.header.sub_count):
                with self._direct.reads:
                    piece = self._block.checked(sub, room)
                yield piece
        except (BadBlock, OSError, CodecError) as error:
            self._direct.judge(self._entry, self.birth, error)
            raise

    def send_cached(self, sock: int, head: bytes, tail: bytes) -> int:
        """Send the bytes that are in the page cache, from the first on, up to one that is not or is not right, to a
        blocking socket; `head` before them, `tail` behind the last. Returns how many bytes were sent, in whole pieces,
        and if all were, there is nothing more to read here; 0: nothing was, nor the head. OSError: the socket's.
        """
        # Not among the disk's calls: a client that takes nothing is no disk that hangs.
        return self._block.send_cached(sock, head, tail)

    def close(self) -> None:
        """Let go; idempotent."""
        if self._open:
            self._open = False
            self._block.close()
            self._direct.release(self._entry)

    def __enter__(self) -> PinnedBlock:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class Direct:
    """See the module. Thread-safe; made by the store of its own parts."""

    def __init__(
        self,
        root: Root,
        io: BlockIO,
        index: Index,
        capacity: Capacity,
        publisher: Publisher,
        keeper: Keeper,
        remover: Remover,
        strikes: Strikes,
        reads: Stuck,
        writes: Stuck,
    ) -> None:
        self.reads = reads
        self.writes = writes
        self._root = root
        self._io = io
        self._index = index
        self._capacity = capacity
        self._publisher = publisher
        self._keeper = keeper
        self._remover = remover
        self._strikes = strikes

    # -- reading

    def open(self, key: BlockKey) -> PinnedBlock | None:
        """The block, pinned and its header checked; None if it is not there, or not fit to be read."""
        entry = self._index.names.known(key)
        if not self._index.hold([entry])[0]:
            return None
        birth = self._index.birth(entry)
        try:
            with self.reads:
                block = self._io.open(key)
        except (BadBlock, OSError) as error:
            try:
                self.judge(entry, birth, error)
            finally:
                self._index.release([entry])
            return None
        except BaseException:
            self._index.release([entry])
            raise
        self._keeper.touch(entry)
        return PinnedBlock(self, entry, birth, block)

    def open_leaving(self, key: BlockKey) -> PinnedBlock | None:
        """The same of a block that is on its way out, by who keeps its file from being removed."""
        try:
            # No block's entry: nobody holds this one, and what is found wrong with it is of no interest any more.
            return PinnedBlock(self, b"", 0, self._io.open(key))
        except (BadBlock, OSError):
            return None

    def release(self, entry: bytes) -> None:
        """One holder less."""
        self._index.release([entry])

    def judge(self, entry: bytes, birth: int, error: Exception) -> None:
        """What an error says about the block: lost, corrupt (removed, whoever holds it), or nothing."""
        if isinstance(error, FileNotFoundError):
            self._remover.forget(self._index.take_bad(entry, birth))
            self._keeper.audit(blocks=False)
        elif isinstance(error, BadBlock):
            log.warning("block store: %s is corrupt: %s", self._index.names.path(entry), error)
            self._remover.remove(self._index.take_bad(entry, birth), even_pinned=True)
        else:
            log.warning("block store: cannot read %s: %s", self._index.names.path(entry), error)
            self._strikes.add(entry, birth)

    # -- removing

    def take(self, keys: Sequence[BlockKey]) -> tuple[list[Victim], list[BlockKey]]:
        """Take blocks out, memory only: not found any more, and not to be stored anew until `remove` is done. Those
        that are taken, and the keys of those that are in use.
        """
        names = self._index.names
        victims = self._index.take([names.known(key) for key in keys])
        left = self._index.contains([names.known(key) for key in keys])
        return victims, [key for key, there in zip(keys, left, strict=True) if there]

    def remove(self, victims: Sequence[Victim]) -> None:
        """Remove the files of what was taken; what cannot be removed is there again."""
        self._remover.remove(victims)

    # -- writing

    def put(self, key: BlockKey, source: memoryview, deadline_s: float) -> Result:
        """Store `source`: STORED or PRESENT, and the block has one more holder; else ERROR. Waits for room, and for
        another thread that writes or removes the same block.
        """
        entry, end = self._index.names.entry(key), time.monotonic() + deadline_s
        while not self._index.hold([entry])[0]:
            if self._index.claim([entry])[0] is Claim.MINE:
                result = self._write(key, entry, source, end)
                # The youngest block is the last to be evicted, so not before it is held: but if so, once more.
                if result.outcome is not Outcome.STORED or self._index.hold([entry])[0]:
                    return result
            elif time.monotonic() > end:
                return Result(Outcome.ERROR, "leaving")
            else:
                time.sleep(_PAUSE_S)
        return Result(Outcome.PRESENT)

    def sync(self, key: BlockKey) -> None:
        """A block that is held is on the device afterwards, under its name. OSError."""
        path = Path(self._root.path, key.path)
        # The file, and every folder up to the root: any of them may be new.
        for place in (path, *path.parents):
            if place == self._root.path.parent:
                break
            fd = os.open(place, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
            try:
                os.fsync(fd)
            finally:
                os.close(fd)

    def _write(self, key: BlockKey, entry: bytes, source: memoryview, end: float) -> Result:
        """Of a claimed entry; the claim has ended afterwards."""
        answer = self._room(entry, len(source), len(key.namespace) + len(key.salt), end)
        if answer != ADMITTED:
            self._index.written(entry, None)
            return Result(Outcome.ERROR, answer)
        return self._end(key, entry, len(source), lambda: self._io.write(key, source, 1, UNLIMITED))

    def finish(self, key: BlockKey, entry: bytes, fd: int, header: bytes) -> Result:
        """The same for a file that is complete but for its header and name."""
        return self._end(key, entry, len(header), lambda: self._io.name(fd, key, header))

    def begin(self, size: int, names: int, deadline_s: float) -> Incoming | str:
        """Room and a file for a block that comes in, else why not; `names`: bytes of namespace and salt. OSError."""
        claim = Incoming.name()
        self._index.claim([claim])
        try:
            answer = self._room(claim, size, names, time.monotonic() + deadline_s)
            if answer != ADMITTED:
                self._index.written(claim, None)
                return answer
            with self.writes:
                fd = self._io.unnamed(size)
            return Incoming(self, self._index, claim, fd, size, self._io.sub_bytes)
        except BaseException:
            self._index.written(claim, None)
            raise

    def _end(self, key: BlockKey, entry: bytes, size: int, write: Callable[[], Written]) -> Result:
        nbytes, used_ns = None, 0
        try:
            with self.writes:
                done = self._publisher.write(entry, size, write)
            nbytes, used_ns = self._publisher.facts(entry, done)
        except OSError as error:
            return Result(Outcome.ERROR, error_word(error))
        finally:
            self._index.written(entry, nbytes, used_ns)
        self._keeper.new(entry)
        return Result(Outcome.STORED, nbytes=nbytes or 0)

    def _room(self, entry: bytes, nbytes: int, names: int, end: float) -> str:
        """ADMITTED, or why not."""
        waiting = _Answer()
        room = self._capacity.room_for(nbytes, names)
        answer = self._capacity.admit(entry, room, waiting.give)
        return waiting.take(end) if answer is None else answer


class _Answer:
    """What the evictor says about room, waited for. It answers whoever waits within its patience, so the time limit is
    for a disk that hangs it; the claim must not end while its answer may still come, so that is waited for as well.
    """

    def __init__(self) -> None:
        # A bare lock: an Event would be most of what a put costs in Python, and hardly any put has to wait.
        self._ready = threading.Lock()
        self._ready.acquire()
        self._answer = ""

    def give(self, answer: str) -> None:
        self._answer = answer
        self._ready.release()

    def take(self, end: float) -> str:
        with self._ready:
            if self._answer == ADMITTED and time.monotonic() > end:
                return "deadline"
            return self._answer
