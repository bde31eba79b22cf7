"""What the store says when it refuses to start."""

from __future__ import annotations

__all__ = ["StoreError"]


class StoreError(Exception):
    """The store cannot be opened: what was found, what it needs, how to get there.

    `owned` marks the one cause that passes by itself: another process owns the root.
    """

    def __init__(self, found: str, needed: str, fix: str, *, owned: bool = False) -> None:
        super().__init__(f"block store: found {found}; needed {needed}; to fix it: {fix}")
        self.found = found
        self.needed = needed
        self.fix = fix
        self.owned = owned
