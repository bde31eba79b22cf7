"""Who was used last: a clock that never repeats or goes back, and linked lists in least-recently-used order."""

from __future__ import annotations

import threading
import time
from array import array
from collections.abc import Callable, Iterator, Sequence

__all__ = ["LATEST_NS", "LruLists", "UseClock"]

LATEST_NS = 1 << 62
"""No use is later than this (year 2116): a broken timestamp in the far future must not stop the clock."""


class UseClock:
    """Nanoseconds for "last use": the wall clock, but strictly increasing.

    Ties are the rule in file timestamps (200 creates gave 9 distinct ones), and a wall clock may jump back by a year;
    neither may disturb the order. After a restart it goes on behind the latest use found on disk.
    """

    def __init__(self, now: Callable[[], int] = time.time_ns) -> None:
        self._now = now
        self._last = 0
        self._lock = threading.Lock()

    def __call__(self) -> int:
        """The next instant."""
        with self._lock:
            self._last = min(max(self._now(), self._last + 1), LATEST_NS)
            return self._last

    def seen(self, instant: int) -> None:
        """Later answers are after `instant`."""
        with self._lock:
            self._last = max(self._last, min(instant, LATEST_NS))


class LruLists:
    """Doubly linked lists over slot numbers, one a retention class, oldest first; every step is O(1).

    Arrays instead of objects: nine bytes a slot. The lists' own ends are kept at the slots 0 .. classes-1.
    """

    def __init__(self, classes: int) -> None:
        self.classes = classes
        self._next = array("i", range(classes))
        self._prev = array("i", range(classes))
        self._list = array("b", range(classes))

    def grow(self) -> int:
        """A fresh slot, in no list."""
        slot = len(self._next)
        self._next.append(slot)
        self._prev.append(slot)
        self._list.append(0)
        return slot

    def cls(self, slot: int) -> int:
        """The list that the slot was put into last."""
        return self._list[slot]

    def remove(self, slot: int) -> None:
        """Take the slot out of its list."""
        before, after = self._prev[slot], self._next[slot]
        self._next[before] = after
        self._prev[after] = before

    def append(self, slot: int, cls: int) -> None:
        """Put a slot that is in no list at the young end."""
        last = self._prev[cls]
        self._next[last] = slot
        self._prev[slot] = last
        self._next[slot] = cls
        self._prev[cls] = slot
        self._list[slot] = cls

    def fill(self, oldest_first: Sequence[int], classes: Sequence[int], first: int) -> None:
        """Make the slots from `first` on, and link them all at once; `classes` in slot order."""
        following, before, count = self._next, self._prev, len(classes)
        following.extend(range(first, first + count))
        before.extend(range(first, first + count))
        self._list.extend(classes)
        last = [before[cls] for cls in range(self.classes)]
        for slot in oldest_first:
            cls = classes[slot - first]
            end = last[cls]
            following[end] = slot
            before[slot] = end
            last[cls] = slot
        for cls, end in enumerate(last):
            following[end] = cls
            before[cls] = end

    def prepend(self, slot: int, cls: int) -> None:
        """Put a slot that is in no list at the old end."""
        first = self._next[cls]
        self._prev[first] = slot
        self._next[slot] = first
        self._next[cls] = slot
        self._prev[slot] = cls
        self._list[slot] = cls

    def oldest(self, cls: int) -> Iterator[int]:
        """Slots of one list from the old end. The list must not change meanwhile."""
        following = self._next
        slot = following[cls]
        while slot != cls:
            yield slot
            slot = following[slot]
