"""Memory of our own for what must not land in a caller's buffer yet."""

from __future__ import annotations

import ctypes
import mmap
import threading

__all__ = ["PAGE", "Scratch", "address", "copy"]

PAGE = 4096
"""What O_DIRECT wants offsets, lengths and addresses to be multiples of."""


class Scratch(threading.local):
    """One buffer a thread, on a page boundary, kept for the next call and grown when needed."""

    _view: memoryview = memoryview(b"")

    def take(self, size: int) -> memoryview:
        """`size` writable bytes; the thread's earlier ones are the same memory."""
        if len(self._view) < size:
            self._view = memoryview(mmap.mmap(-1, -(-size // PAGE) * PAGE))
        return self._view[:size]


def address(view: memoryview) -> int | None:
    """Where a writable, non-empty view lies; None for other views."""
    if view.readonly or not view.nbytes:
        return None
    return ctypes.addressof(ctypes.c_char.from_buffer(view))


def copy(target: memoryview, source: memoryview) -> None:
    """target[:] = source for two writable views of equal length, without the GIL: a slice assignment would hold it."""
    to, start = address(target), address(source)
    if to is None or start is None or len(target) != len(source):
        target[:] = source
    else:
        ctypes.memmove(to, start, len(source))
