"""The hot tier: copies in RAM of what is asked often, bounded in bytes, the least recently used go."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

from kvstrata.engine.books import Content

__all__ = ["HotTier"]

# One value must not push everything else out.
_LARGEST_SHARE = 4


class HotTier:
    """Called under the engine's lock. `moved` is told whether a content has a copy here now."""

    def __init__(self, capacity: int, moved: Callable[[Content, bool], None]) -> None:
        self.capacity = capacity
        self._moved = moved
        self._used = 0
        self._copies: OrderedDict[Content, bytes] = OrderedDict()

    def wants(self, content: Content) -> bool:
        """True if a copy of it would be taken."""
        return content.size * _LARGEST_SHARE <= self.capacity and content not in self._copies

    def get(self, content: Content) -> bytes | None:
        """The copy; this was a use of it."""
        copy = self._copies.get(content)
        if copy is not None:
            self._copies.move_to_end(content)
        return copy

    def add(self, content: Content, copy: bytes) -> None:
        """Take a copy of verified bytes."""
        if not self.wants(content) or len(copy) != content.size:
            return
        while self._used + len(copy) > self.capacity:
            self.discard(next(iter(self._copies)))
        self._copies[content] = copy
        self._used += len(copy)
        self._moved(content, True)

    def discard(self, content: Content) -> None:
        """Forget the copy, if there is one."""
        copy = self._copies.pop(content, None)
        if copy is not None:
            self._used -= len(copy)
            self._moved(content, False)
