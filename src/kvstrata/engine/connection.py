"""One accepted connection as a handler sees it: blocking reads and sends, deadlines kept by somebody else."""

from __future__ import annotations

import mmap
import socket
import ssl
import struct
import time
from dataclasses import dataclass
from typing import Any

__all__ = ["Connection", "Crowd", "Cut", "NotYet"]

# How long a worker waits for the next request before it hands the connection back to the poller: long enough that a
# client in a loop never pays for the way through the poller, short enough for those that may wait for the thread.
_LINGER_S = 0.01
_LINGER = struct.pack("@ll", 0, int(_LINGER_S * 1e6))
# In the middle of something nothing but the watchdog ends the wait, and each look at the clock is for nothing.
_PATIENCE = struct.pack("@ll", 1, 0)
_CHUNK = 32 << 10
# So often a connection that ends is read from while a request is under way: who asks without an end is not waited for.
_LAST_TURNS = 16
# Address space that is read into and never looked at (see `skip`).
_DISCARD = 16 << 20


class Cut(Exception):
    """The peer went away, or a deadline passed, in the middle of something."""


class NotYet(Exception):
    """Nothing has arrived: let `serve` return True, the poller calls again when there is something."""


@dataclass(slots=True)
class Crowd:
    """What the connections of a listener know of each other. `waiting`: how many have something to read and no thread
    for it. `stopping`: each ends after the request that is under way.
    """

    waiting: int = 0
    stopping: bool = False


class Connection:
    """A socket with what was read ahead of the handler. Used by one worker at a time.

    Attributes:
        sock: blocking; an `ssl.SSLSocket` where the listener has a certificate.
        peer: "address:port".
        tls: whether `sock` encrypts (then there is no sendfile).
        buffered: bytes that have arrived and that the handler has not consumed; it deletes what it took.
        state: the handler's own, kept between its calls.
        midway: set by a handler that parks in the middle of a request with nothing in `buffered`: the deadline goes on.
        idle_s: how long it may be parked with nothing under way; None: for ever. A handler may change it.
        received: bytes that have arrived so far, whoever took them.
        expired: the deadline has passed; reading is shut down already, a short answer may still be sent.
    """

    __slots__ = (
        "_crowd", "_patient", "_turns", "_whole", "buffered", "deadline", "expired", "fd", "handshaking", "idle_s",
        "midway", "parked", "peer", "received", "sock", "state", "tls",
    )  # fmt: skip

    def __init__(self, sock: socket.socket, peer: str, idle_s: float | None = None, crowd: Crowd | None = None) -> None:
        self.sock = sock
        self.fd = sock.fileno()
        self.peer = peer
        self.tls = isinstance(sock, ssl.SSLSocket)
        self.handshaking = self.tls
        self.buffered = bytearray()
        self.received = 0
        self.state: Any = None
        self.deadline: float | None = None
        self.expired = False
        self.parked = False
        self.midway = False
        self.idle_s = idle_s
        self._crowd = crowd or Crowd()
        self._turns = 0
        self._patient = False
        self._whole = 0 if self.tls else socket.MSG_WAITALL
        if not self.tls:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _LINGER)

    @property
    def stopping(self) -> bool:
        """It ends after the request that is under way."""
        return self._crowd.stopping

    def until(self, seconds: float | None) -> None:
        """From now on this much time is left, for all that follows, until the next call. None: no deadline."""
        self.deadline = None if seconds is None else time.monotonic() + seconds

    def wait(self) -> None:
        """Append to `buffered` what comes next. Raises Cut when the peer closes or the deadline passes before."""
        while True:
            try:
                data = self.sock.recv(_CHUNK)
            except BlockingIOError:
                self._set_patient(True)
                data = None
            if data == b"" or self.expired:
                raise Cut
            if data:
                self.buffered += data
                self.received += len(data)
                return

    def fill(self) -> int:
        """Append what has arrived to `buffered`, after a short wait. Returns how much; 0 when the peer has closed.

        While others wait for a thread there is no waiting, and every second call gives them this one. Raises NotYet
        when nothing came, Cut when the deadline has passed, OSError when the connection broke.
        """
        if self.expired:
            raise Cut
        hurry = self._crowd.waiting > 0 or self._crowd.stopping
        turns, self._turns = self._turns, 0
        # Who stops parks nobody: of a request that is under way, what has arrived is still read.
        last = self._crowd.stopping and (self.buffered or self.midway)
        if hurry and turns >= (_LAST_TURNS if last else 1):
            raise NotYet
        try:
            if self.tls:
                self.sock.settimeout(0 if hurry else _LINGER_S)
                try:
                    data = self.sock.recv(_CHUNK)
                finally:
                    self.sock.settimeout(None)
            else:
                if not hurry:
                    self._set_patient(False)
                data = self.sock.recv(_CHUNK, socket.MSG_DONTWAIT if hurry else 0)
        except (BlockingIOError, TimeoutError, ssl.SSLWantReadError):
            if self.expired:
                raise Cut from None
            raise NotYet from None
        if not data and self.expired:
            raise Cut  # it is the watchdog that has closed this side
        self._turns = turns + 1 if hurry else 0
        self.buffered += data
        self.received += len(data)
        return len(data)

    def read_into(self, view: memoryview) -> None:
        """Fill the whole view, from `buffered` first. Raises Cut when the peer closes or the deadline passes before."""
        size = len(view)
        got = min(len(self.buffered), size)
        if got:
            view[:got] = self.buffered[:got]
            del self.buffered[:got]
        while got < size:
            got += self._receive(view[got:], size - got, self._whole)

    def skip(self, size: int) -> None:
        """Read `size` bytes and forget them. Raises Cut as read_into does."""
        got = min(len(self.buffered), size)
        del self.buffered[:got]
        # MSG_TRUNC: the kernel drops the bytes of a TCP socket without copying them, and never writes to the buffer.
        flags = 0 if self.tls else socket.MSG_TRUNC
        scratch = memoryview(bytearray(_CHUNK)) if self.tls else _untouched()
        while got < size:
            got += self._receive(scratch, min(size - got, len(scratch)), flags)

    def _receive(self, view: memoryview, size: int, flags: int) -> int:
        try:
            count = self.sock.recv_into(view, size, flags) if flags else self.sock.recv_into(view, size)
        except BlockingIOError:
            self._set_patient(True)
            count = -1
        if count == 0 or self.expired:
            raise Cut
        count = max(count, 0)
        self.received += count
        return count

    def _set_patient(self, patient: bool) -> None:
        """How long a receive waits. Only a slow peer costs these calls."""
        if patient is not self._patient and not self.tls:
            self._patient = patient
            self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _PATIENCE if patient else _LINGER)

    def send(self, data: bytes | memoryview, *, more: bool = False) -> None:
        """Send all of it. `more`: something follows at once, so the kernel may wait and fill the packet."""
        if more and not self.tls:
            self.sock.sendall(data, socket.MSG_MORE)
        else:
            self.sock.sendall(data)

    def send_at_once(self, data: bytes) -> None:
        """Send all of it without waiting for the peer, who does not read its answers if it cannot be. Raises Cut,
        OSError.
        """
        if self.tls:
            self.sock.settimeout(0)
            try:
                self.sock.sendall(data)
            finally:
                self.sock.settimeout(None)
        elif self.sock.send(data, socket.MSG_DONTWAIT) < len(data):
            raise Cut

    def finish(self, seconds: float, limit: int) -> None:
        """Say goodbye so that the last answer is read: close our side, then drop what still comes, for a short while.

        A plain close with unread bytes would reset the connection, and the peer might never see why it was refused.
        """
        if self.tls:
            return
        self.until(seconds)
        try:
            self.sock.shutdown(socket.SHUT_WR)
            self.skip(limit)
        except (Cut, OSError):
            return

    def has_more(self) -> bool:
        """Bytes that the poller cannot see: a TLS record that is decrypted already."""
        return isinstance(self.sock, ssl.SSLSocket) and self.sock.pending() > 0


_discard: list[memoryview] = []


def _untouched() -> memoryview:
    if not _discard:
        _discard.append(memoryview(mmap.mmap(-1, _DISCARD)))
    return _discard[0]
