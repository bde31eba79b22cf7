"""Read a block, piece by piece, into a caller's buffer that may be taken back at any moment."""

from __future__ import annotations

import errno
import os
import stat
from types import TracebackType

from kvstrata.store.checksum import crc32
from kvstrata.store.codecs import codec
from kvstrata.store.format import HEADER_BYTES, BadBlock, Header, parse_header
from kvstrata.store.keys import BlockKey
from kvstrata.store.lease import Lease
from kvstrata.store.pagecache import CachedReader
from kvstrata.store.scratch import PAGE, Scratch, copy

__all__ = ["OpenBlock", "open_block"]

# O_NONBLOCK: a FIFO under a block's name must not hold the thread; it means nothing for regular files.
_FLAGS = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
# Bytes a system call, about. A call more is another turn for the interpreter's lock: 3 MiB in one are 20 % faster.
_RUN = 4 << 20
# A short head that is sent before a piece moves it by as much in the kernel's pages, and a copy to a place a few bytes
# further in its page than its source makes 3 GB/s instead of 40 on an AMD EPYC (Zen 4): RESP's head has ten.
_ASIDE = PAGE // 2


class OpenBlock:
    """A block whose header was found good. Several threads may read different sub-blocks at once."""

    __slots__ = ("_cached", "_direct", "_fd", "_scratch", "header", "warm")

    def __init__(
        self, fd: int, header: Header, warm: bool, scratch: Scratch, direct: bool, cached: CachedReader
    ) -> None:
        """`warm`: the page cache had the first byte of the payload when the file was opened."""
        self._fd = fd
        self.header = header
        self.warm = warm
        self._scratch = scratch
        self._direct = direct
        self._cached = cached

    def fileno(self) -> int:
        """The descriptor; -1 after close."""
        return self._fd

    def close(self) -> None:
        """Idempotent. Not while a thread still reads."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def __enter__(self) -> OpenBlock:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def read(self, first: int, last: int, target: memoryview, lease: Lease) -> None:
        """Sub-blocks `first` up to and without `last` into their places in `target`, the whole block's buffer: raw_len
        bytes, writable, contiguous, of format B.

        What is not in the page cache goes through memory of our own, so a read that comes back after the lease ended
        finds its lease gone and touches nothing. After any exception `target` holds no block. Raises BadBlock,
        Expired, OSError (the device), CodecError (the codec's library is missing).
        """
        if len(target) != self.header.raw_len:
            raise BadBlock("length", f"{self.header.raw_len} bytes for a buffer of {len(target)}")
        lengths, sub = self.header.lengths, first
        while sub < last:
            start, end = self.header.raw_range(sub)
            if lengths[sub] < end - start:
                self._read_encoded(sub, target[start:end], lease)
                sub += 1
                continue
            behind = sub + 1
            while behind < last and end - start < _RUN:
                begin, stop = self.header.raw_range(behind)
                if lengths[behind] < stop - begin:
                    break
                behind, end = behind + 1, stop
            self._read_plain(sub, behind, target[start:end], lease)
            sub = behind

    def checked(self, sub: int, room: Scratch) -> memoryview:
        """A sub-block's raw bytes, found good, in this thread's own memory until its next call. May block for as long
        as the device likes; `room`: for a decoded one. Raises as read does, but for Expired.
        """
        start, end = self.header.raw_range(sub)
        stored = self._fetch(self.header.starts[sub], self.header.lengths[sub])
        self._compare(sub, crc32(stored))
        if len(stored) == end - start:
            return stored
        piece = room.take(end - start)
        codec(self.header.codec).decode_into(stored, piece)
        return piece

    def send_cached(self, sock: int, head: bytes, tail: bytes) -> int:
        """Send head, payload and tail as far as CachedReader.send does. Returns how many bytes of the payload, whole
        sub-blocks, were sent, and if that is all of them, the block is closed; 0: nothing was. OSError: the socket's.
        """
        header = self.header
        if not self.warm or header.stored_len != header.raw_len or not header.raw_len:
            return 0
        room = self._scratch.take(_ASIDE + min(header.sub_bytes, header.raw_len))[_ASIDE:]
        sent = self._cached.send(self._fd, sock, room, header.raw_len, header.starts[0], header.crcs, head, tail)
        if sent == header.raw_len:
            self._fd = -1
        return sent

    def verify(self, room: Scratch) -> None:
        """Check every sub-block without a caller's buffer; `room`: for one decoded one. Raises as read does."""
        for sub in range(self.header.sub_count):
            start, end = self.header.raw_range(sub)
            stored = self._fetch(self.header.starts[sub], self.header.lengths[sub])
            self._compare(sub, crc32(stored))
            if len(stored) < end - start:
                codec(self.header.codec).decode_into(stored, room.take(end - start))

    def _read_plain(self, first: int, behind: int, piece: memoryview, lease: Lease) -> None:
        """Neighbours that are stored as they are: in one call what the page cache has of them, the rest one by one."""
        lengths = self.header.lengths[first:behind]
        start, done = self.header.starts[first], 0
        sums: list[int] = []
        # One byte first: where it is not cached, this asks the device to read ahead, and a device that hangs may hold
        # whoever asks, RWF_NOWAIT or not. Nobody should hang while holding the caller's buffer.
        if not self._direct and self._cached.read(self._fd, self._scratch.take(1), start, 1)[0]:
            with lease.touching():
                done, sums = self._cached.read(self._fd, piece, start, self.header.sub_bytes)
        begin = 0
        for sub, length in enumerate(lengths):
            end = begin + length
            crc = sums[sub] if sub < len(sums) else 0
            if end > done:
                done = max(done, begin)
                rest = self._fetch(start + done, end - done)
                crc = crc32(rest, crc)
                with lease.touching():
                    copy(piece[done:end], rest)
                done = end
            self._compare(first + sub, crc)
            begin = end

    def _read_encoded(self, sub: int, piece: memoryview, lease: Lease) -> None:
        stored = self._fetch(self.header.starts[sub], self.header.lengths[sub])
        self._compare(sub, crc32(stored))
        decoder = codec(self.header.codec)
        with lease.touching():
            decoder.decode_into(stored, piece)

    def _compare(self, sub: int, crc: int) -> None:
        if crc != self.header.crcs[sub]:
            raise BadBlock("payload_crc", f"the checksum of sub-block {sub} does not fit")

    def _fetch(self, start: int, size: int) -> memoryview:
        """Those bytes of the file in this thread's scratch. May block for as long as the device likes."""
        begin = start - start % PAGE if self._direct else start
        skip, room = start - begin, start + size - begin
        room = -(-room // PAGE) * PAGE if self._direct else room
        aside = 0 if self._direct else _ASIDE
        view, got = self._scratch.take(aside + room)[aside:], 0
        while got < skip + size:
            more = os.preadv(self._fd, [view[got:]], begin + got)
            if not more:
                raise BadBlock("truncated", f"the file ends at {begin + got}, inside its payload")
            got += more
        return view[skip : skip + size]


def open_block(path: str, key: BlockKey | None, scratch: Scratch, direct: bool, cached: CachedReader) -> OpenBlock:
    """Open and check the header. Raises FileNotFoundError, BadBlock, OSError."""
    # A page of its own and not joined with the payload: faster when cold too, it wakes the read-ahead.
    page = scratch.take(PAGE)
    try:
        found = cached.open(path, _FLAGS | (os.O_DIRECT if direct else 0), page)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENXIO):
            raise BadBlock("magic", "a symbolic link or a socket") from None
        raise
    try:
        if not stat.S_ISREG(found.mode):
            raise BadBlock("magic", "not a regular file")
        header = parse_header(page[: min(found.got, HEADER_BYTES)], key, found.size)
    except BaseException:
        os.close(found.fd)
        raise
    return OpenBlock(found.fd, header, found.cached, scratch, direct, cached)
