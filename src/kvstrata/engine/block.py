"""A value on its way to a client: every byte checked before it leaves."""

from __future__ import annotations

import socket
import ssl
from collections.abc import Callable, Iterator
from types import TracebackType

from kvstrata.engine.errors import Corrupt
from kvstrata.store.codecs import CodecError
from kvstrata.store.direct import PinnedBlock
from kvstrata.store.format import BadBlock
from kvstrata.store.scratch import Scratch

__all__ = ["Block"]

_room = Scratch()


class Block:
    """`size`: bytes of the value; `digest`: BLAKE3 of it, in hex. It can be neither evicted nor deleted until `close`.
    For one thread at a time.
    """

    __slots__ = ("_collected", "_copy", "_on_bad", "_on_copy", "_pinned", "digest", "size")

    def __init__(
        self,
        source: PinnedBlock | bytes,
        digest: str,
        on_bad: Callable[[], None],
        on_copy: Callable[[bytes | None], None] | None = None,
    ) -> None:
        """`on_bad`: told that the bytes were found corrupt; `on_copy`: gets a copy if all of it was read in turn,
        else None, once."""
        self._pinned = None if isinstance(source, bytes) else source
        self._copy = source if isinstance(source, bytes) else None
        self.size = len(source) if isinstance(source, bytes) else source.size
        self.digest = digest
        self._on_bad = on_bad
        self._on_copy = on_copy
        self._collected = bytearray()

    def pieces(self, start: int = 0, stop: int | None = None) -> Iterator[memoryview]:
        """The bytes from `start` up to `stop`, in pieces that are good until the next one. Corrupt, at the first piece
        that is not what was stored: nothing of that piece was given out.
        """
        stop = self.size if stop is None else min(stop, self.size)
        if start >= stop:
            return
        if self._copy is not None:
            yield memoryview(self._copy)[start:stop]
            return
        assert self._pinned is not None
        at = start - start % self._pinned.step
        try:
            for piece in self._pinned.pieces(at // self._pinned.step, _room):
                self._collect(at, piece)
                yield piece[max(start - at, 0) : stop - at]
                at += len(piece)
                if at >= stop:
                    return
        except (BadBlock, OSError, CodecError) as error:
            self._on_bad()
            raise Corrupt(f"the stored value cannot be read: {error}", sent=at > start) from error

    def send_to(
        self,
        sock: socket.socket,
        start: int = 0,
        stop: int | None = None,
        head: bytes = b"",
        tail: bytes = b"",
    ) -> None:
        """Send `head`, the bytes, `tail`. The head goes out with the first piece, once that was found good.

        Corrupt: `sent` tells whether anything left; if so, the connection must be cut. OSError: the socket's.
        """
        stop = self.size if stop is None else min(stop, self.size)
        left, before = max(stop - start, 0), head
        if not left:
            _send(sock, [head, tail])
            return
        sent = False
        plain = not isinstance(sock, ssl.SSLSocket)
        if self._pinned is not None and self._on_copy is None and left == self.size and plain:
            start = self._pinned.send_cached(sock.fileno(), head, tail)
            if start:
                left, before, sent = left - start, b"", True
        try:
            for piece in self.pieces(start, stop):
                left -= len(piece)
                _send(sock, [before, piece, b"" if left else tail])
                before, sent = b"", True
        except Corrupt as error:
            raise Corrupt(str(error), sent=sent) from error.__cause__

    def read_all(self, target: memoryview) -> None:
        """All of it into `target`, of exactly its size. Corrupt."""
        at = 0
        for piece in self.pieces():
            target[at : at + len(piece)] = piece
            at += len(piece)

    def close(self) -> None:
        """Let go; idempotent."""
        if self._pinned is not None:
            self._pinned.close()
        on_copy, collected = self._on_copy, self._collected
        self._on_copy, self._collected = None, bytearray()
        if on_copy is not None:
            on_copy(bytes(collected) if len(collected) == self.size else None)

    def __enter__(self) -> Block:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _collect(self, at: int, piece: memoryview) -> None:
        if self._on_copy is not None and at == len(self._collected):
            self._collected += piece


def _send(sock: socket.socket, parts: list[bytes | memoryview]) -> None:
    parts = [part for part in parts if len(part)]
    if isinstance(sock, ssl.SSLSocket):
        for part in parts:
            sock.sendall(part)
        return
    if not parts:
        return
    done = sock.sendmsg(parts)
    for part in parts:
        if done >= len(part):
            done -= len(part)
        else:
            sock.sendall(memoryview(part)[done:])
            done = 0
