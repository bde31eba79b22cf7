"""What all tenants have together, divided equally among those that there may be."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

__all__ = ["Shares"]


class Shares:
    """Bytes of `total`. No tenant can take, or find out, what others have of it. Called under the engine's lock."""

    def __init__(self, total: int, tenants: Callable[[], int]) -> None:
        """`tenants`: how many there may be; it may change."""
        self.total = total
        self._tenants = tenants
        self._used: Counter[str] = Counter()
        self._sum = 0

    @property
    def each(self) -> int:
        """What one tenant may take."""
        return self.total // max(1, self._tenants())

    def fits(self, tenant: str, nbytes: int) -> bool:
        """True if the tenant may take so many more; the sum holds also while a tenant is new."""
        return self._used[tenant] + nbytes <= self.each and self._sum + nbytes <= self.total

    def take(self, tenant: str, nbytes: int) -> None:
        """They are taken, or given back where negative."""
        self._used[tenant] += nbytes
        self._sum += nbytes
        if not self._used[tenant]:
            del self._used[tenant]
