"""Memory for values in flight: one budget for all connections, buffers used again, a queue when it is spent."""

from __future__ import annotations

import mmap
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from kvstrata.engine.shares import Shares

__all__ = ["Budget", "Busy", "TooBig"]

_SMALLEST = 64 << 10


class Busy(Exception):
    """The memory for values in flight is spent, and none came free in time."""


class TooBig(Exception):
    """More than the whole budget."""


def _rounded(size: int) -> int:
    """The size class, a quarter of a power of two wide: a buffer fits its next user and wastes a fifth at most."""
    if size <= _SMALLEST:
        return _SMALLEST
    step = 1 << ((size - 1).bit_length() - 3)
    return -(-size // step) * step


class Budget:
    """Hands out buffers; used and kept ones together never take more than `total` bytes. Thread-safe.

    A thread that holds one must not wait for a second: two such could wait for each other until their deadlines.
    Where there may be several tenants, one has half of it at most, or a single buffer: those who send slowly, or never,
    leave the other half to others.
    """

    def __init__(self, total: int, tenants: Callable[[], int] = lambda: 1) -> None:
        self.total = total
        self._lock = threading.Lock()
        self._shares = Shares(total, tenants, parts=2)
        self._kept_bytes = 0
        self._kept: dict[int, list[mmap.mmap]] = {}
        self._queue: deque[tuple[int, str, threading.Event]] = deque()

    @property
    def used(self) -> int:
        """Bytes that are handed out."""
        return self._shares.taken

    @property
    def waiting(self) -> int:
        """Threads that wait for memory."""
        return len(self._queue)

    @contextmanager
    def take(self, size: int, wait_s: float, tenant: str = "") -> Iterator[memoryview]:
        """A buffer of `size` bytes with anything in it, page aligned. First come, first served, but for tenants that
        have their part.

        Raises Busy after `wait_s`, TooBig if it can never fit.
        """
        room = _rounded(size)
        if room > self.total:
            raise TooBig
        buffer = self._get(room, wait_s, tenant)
        view = memoryview(buffer)
        part = view[:size]
        try:
            yield part
        finally:
            part.release()
            view.release()
            self._give_back(room, tenant, buffer)

    def _get(self, room: int, wait_s: float, tenant: str) -> mmap.mmap:
        with self._lock:
            if not self._queue and self._fits(room, tenant) and self._shares.taken + room <= self.total:
                self._shares.take(tenant, room)
                return self._buffer(room)
            granted = threading.Event()
            ticket = (room, tenant, granted)
            self._queue.append(ticket)
            self._admit()
        deadline = time.monotonic() + wait_s
        granted.wait(wait_s)
        with self._lock:
            if granted.is_set():  # `_admit` has counted it
                return self._buffer(room)
            self._queue.remove(ticket)
            self._admit()  # it may have stood in front of somebody who fits
        raise Busy(f"waited {time.monotonic() - deadline + wait_s:.1f} s for {room} bytes")

    def _fits(self, room: int, tenant: str) -> bool:
        """Whether it is within the tenant's part."""
        held = self._shares.of(tenant)
        return not held or held + room <= self._shares.each

    def _buffer(self, room: int) -> mmap.mmap:
        """A kept one of that class, or a new one once enough kept ones have gone. The room is counted already."""
        same = self._kept.get(room)
        if same:
            self._kept_bytes -= room
            return same.pop()
        while self._kept_bytes and self._shares.taken + self._kept_bytes > self.total:
            size, buffers = next((size, buffers) for size, buffers in self._kept.items() if buffers)
            with suppress(BufferError):  # somebody still looks at it: it goes when they let go
                buffers.pop().close()
            self._kept_bytes -= size
        return mmap.mmap(-1, room)

    def _give_back(self, room: int, tenant: str, buffer: mmap.mmap) -> None:
        with self._lock:
            self._shares.take(tenant, -room)
            self._kept.setdefault(room, []).append(buffer)
            self._kept_bytes += room
            self._admit()

    def _admit(self) -> None:
        passed: set[str] = set()
        for ticket in tuple(self._queue):
            room, tenant, granted = ticket
            if tenant in passed or not self._fits(room, tenant):
                passed.add(tenant)  # waits for its own, and holds no other up
                continue
            if self._shares.taken + room > self.total:
                return
            self._queue.remove(ticket)
            self._shares.take(tenant, room)
            granted.set()

    def trim(self) -> None:
        """Give kept memory back to the system."""
        with self._lock:
            for buffers in self._kept.values():
                for buffer in buffers:
                    with suppress(BufferError):
                        buffer.close()
            self._kept.clear()
            self._kept_bytes = 0
