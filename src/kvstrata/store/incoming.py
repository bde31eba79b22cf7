"""A block that is written while its bytes come in, and gets its name when all of them are known."""

from __future__ import annotations

import logging
import os
import time
from itertools import count
from typing import TYPE_CHECKING

from kvstrata.store.checksum import crc32
from kvstrata.store.deadline import Outcome, Result
from kvstrata.store.format import HEADER_BYTES, fitting_sub_bytes, pack_header
from kvstrata.store.index import Claim, Index
from kvstrata.store.keys import BlockKey

if TYPE_CHECKING:
    from kvstrata.store.direct import Direct

__all__ = ["Incoming"]

_PAUSE_S = 0.001
_numbers = count()

log = logging.getLogger(__name__)


class Incoming:
    """Made by the store, with room set aside for `size` bytes. For one thread at a time; `close` it whatever happens:
    what was not published by then has never been there.
    """

    def __init__(self, direct: Direct, index: Index, claim: bytes, fd: int, size: int, sub_bytes: int) -> None:
        self._direct = direct
        self._index = index
        self._claim = claim
        self._fd = fd
        self._size = size
        self._sub_bytes = fitting_sub_bytes(size, sub_bytes)
        self._at = 0
        self._crc = 0
        self._crcs: list[int] = []

    @staticmethod
    def name() -> bytes:
        """What an incoming block is called in the books before it has a key; no entry is so short."""
        return b"in%d" % next(_numbers)

    def write(self, data: memoryview) -> None:
        """The next bytes. ValueError if they are more than were announced; OSError."""
        if self._at + len(data) > self._size:
            raise ValueError(f"found: more than the {self._size} bytes that were announced; needed: just those")
        at, rest = HEADER_BYTES + self._at, data
        while data:
            piece = data[: self._sub_bytes - self._at % self._sub_bytes]
            self._crc = crc32(piece, self._crc)
            self._at += len(piece)
            if self._at % self._sub_bytes == 0 or self._at == self._size:
                self._crcs.append(self._crc)
                self._crc = 0
            data = data[len(piece) :]
        # In one call: the larger it is, the larger are the folios that the page cache makes of it.
        while rest:
            with self._direct.writes:
                done = os.pwrite(self._fd, rest, at)
            at, rest = at + done, rest[done:]

    def publish(self, key: BlockKey, deadline_s: float) -> Result:
        """All bytes are in: STORED or PRESENT, and the block has one more holder; else ERROR. Once."""
        if self._at != self._size:
            raise ValueError(f"found: {self._at} bytes; needed: the {self._size} that were announced")
        entry, end = self._index.names.entry(key), time.monotonic() + deadline_s
        while not self._index.hold([entry])[0]:
            if self._claim and self._index.move_claim(self._claim, entry) is Claim.MINE:
                self._claim = b""
                result = self._direct.finish(key, entry, self._fd, self._header(key))
                if result.outcome is not Outcome.STORED or self._index.hold([entry])[0]:
                    return result
            # Another thread writes or removes the same block; or ours was evicted at once, which is an error then.
            elif time.monotonic() > end or not self._claim:
                return Result(Outcome.ERROR, "leaving")
            else:
                time.sleep(_PAUSE_S)
        return Result(Outcome.PRESENT)

    def _header(self, key: BlockKey) -> bytes:
        lengths = [self._sub_bytes] * len(self._crcs)
        if lengths:
            lengths[-1] = self._size - self._sub_bytes * (len(lengths) - 1)
        return pack_header(key, "raw", 1, self._sub_bytes, self._size, lengths, self._crcs)

    def close(self) -> None:
        """Give back what is not needed any more; idempotent."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)
        claim, self._claim = self._claim, b""
        if claim:
            self._index.written(claim, None)
