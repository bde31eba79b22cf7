"""What all tenants have together, divided among those that there may be."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

__all__ = ["Shares"]


class Shares:
    """Bytes, or whatever is counted, of `total`. No tenant can take, or find out, what others have of it. Called under
    its owner's lock.
    """

    def __init__(self, total: int, tenants: Callable[[], int], parts: int | None = None) -> None:
        """`tenants`: how many there may be; it may change. Each has an equal part, of at most `parts`: then a few can
        take everything together, and none alone.
        """
        self.total = total
        self._tenants = tenants
        self._parts = parts
        self._used: Counter[str] = Counter()
        self._sum = 0

    @property
    def each(self) -> int:
        """What one tenant may take."""
        tenants = max(1, self._tenants())
        return self.total // (tenants if self._parts is None else min(tenants, self._parts))

    @property
    def taken(self) -> int:
        """By all of them."""
        return self._sum

    def of(self, tenant: str) -> int:
        """What the tenant has taken."""
        return self._used[tenant]

    def fits(self, tenant: str, nbytes: int) -> bool:
        """True if the tenant may take so many more; the sum holds also while a tenant is new."""
        return self._used[tenant] + nbytes <= self.each and self._sum + nbytes <= self.total

    def take(self, tenant: str, nbytes: int) -> None:
        """They are taken, or given back where negative."""
        self._used[tenant] += nbytes
        self._sum += nbytes
        if not self._used[tenant]:
            del self._used[tenant]
