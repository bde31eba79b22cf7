"""The engine's books in memory: which key means which content, and sums that are always true.

Nothing here locks or does I/O: the engine calls it under its own lock.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import IntEnum

from kvstrata.engine.catalog import Ticket
from kvstrata.engine.room import row_bytes
from kvstrata.store.keys import BlockKey

__all__ = ["Books", "Content", "Ref", "Tenant", "Tier", "block_key"]

NAMESPACE = "engine"


class Tier(IntEnum):
    """Where a content is. It is on exactly one of the disks; HOT is said of a copy in RAM, in the sums alone."""

    WARM = 0
    COLD = 1
    HOT = 2


class Content:
    """Bytes of one tenant, stored once. `size`: bytes of the value; `forks`: pages of snapshots and branches that mean
    it; `lease`: until when (monotonic) it was promised; `pinned`: the engine holds its block in the store; `hot`: there
    is a copy in RAM; `used`: it was read from a disk since the start.
    """

    __slots__ = ("_first", "_more", "digest", "forks", "hot", "lease", "pinned", "size", "tenant", "tier", "used")

    def __init__(self, tenant: str, digest: bytes, size: int, tier: Tier) -> None:
        self.tenant = tenant
        self.digest = digest
        self.size = size
        self.tier = tier
        self.forks = 0
        self.lease = 0.0
        self.pinned = False
        self.hot = self.used = False
        # Most contents have one key: a set for each would be the largest part of it.
        self._first: bytes | None = None
        self._more: set[bytes] | None = None

    def add(self, key: bytes) -> None:
        """One key more, which it has not yet."""
        if self._first is None:
            self._first = key
        elif self._more is None:
            self._more = {key}
        else:
            self._more.add(key)

    def remove(self, key: bytes) -> None:
        """One key less, which it has."""
        if self._first == key:
            self._first = self._more.pop() if self._more else None
        elif self._more is not None:
            self._more.discard(key)

    def keys(self) -> list[bytes]:
        """All of them."""
        return [] if self._first is None else [self._first, *(self._more or ())]

    @property
    def named(self) -> bool:
        """True if it has a key."""
        return self._first is not None

    @property
    def wanted(self) -> bool:
        """True if a key, a snapshot or a branch means it."""
        return self._first is not None or self.forks > 0


class Ref:
    """What a key means. `version`: its tag, or -1; `expires`: seconds since the epoch, or 0.0; `ticket`: of the commit
    that makes it durable.
    """

    __slots__ = ("content", "expires", "ticket", "version")

    def __init__(self, content: Content, version: int, expires: float, ticket: Ticket) -> None:
        self.content = content
        self.version = version
        self.expires = expires
        self.ticket = ticket


@dataclass(slots=True)
class Tenant:
    """Everything of one tenant. `unique`, `resident`: contents that have a key, and their bytes; `logical`: bytes of
    all references; `ends`: keys that expire; `names`: what its keys take in the catalog; `places`: [bytes, blocks] of
    the contents whose fastest place is that tier, so none twice; `version`: entries with an older tag are gone;
    `changed`: names of counters that are not written.
    """

    refs: dict[bytes, Ref] = field(default_factory=dict)
    contents: dict[bytes, Content] = field(default_factory=dict)
    unique: int = 0
    resident: int = 0
    logical: int = 0
    version: int = 0
    ends: int = 0
    names: int = 0
    places: dict[Tier, list[int]] = field(default_factory=lambda: {tier: [0, 0] for tier in Tier})
    counters: Counter[str] = field(default_factory=Counter)
    changed: set[str] = field(default_factory=set)

    def count(self, name: str, by: int = 1) -> None:
        """Move a counter."""
        if by:
            self.counters[name] += by
            self.changed.add(name)


class Books:
    """All tenants."""

    def __init__(self) -> None:
        self.tenants: dict[str, Tenant] = {}
        self.names = 0
        """What all keys take in the catalog."""

    def of(self, tenant: str) -> Tenant:
        """A tenant's; made when it is met."""
        found = self.tenants.get(tenant)
        if found is None:
            found = self.tenants[tenant] = Tenant()
        return found

    # -- contents

    def content(self, tenant: str, digest: bytes, size: int, tier: Tier) -> Content:
        """The content, new in the books or known."""
        of = self.of(tenant)
        content = of.contents.get(digest)
        if content is None:
            content = of.contents[digest] = Content(tenant, digest, size, tier)
            self._sum(of, content, 1)
        return content

    def has(self, content: Content) -> bool:
        """False once it was dropped."""
        return self.of(content.tenant).contents.get(content.digest) is content

    def place(self, content: Content, *, tier: Tier | None = None, hot: bool | None = None) -> None:
        """It is elsewhere now."""
        of = self.of(content.tenant)
        self._sum(of, content, -1)
        content.tier = content.tier if tier is None else tier
        content.hot = content.hot if hot is None else hot
        self._sum(of, content, 1)

    def drop(self, content: Content) -> list[bytes]:
        """It is gone: the keys that meant it, which are gone too."""
        of = self.of(content.tenant)
        keys = content.keys()
        for key in keys:
            self.unname(of, key)
        if self.has(content):
            del of.contents[content.digest]
            self._sum(of, content, -1)
        return keys

    @staticmethod
    def _sum(of: Tenant, content: Content, sign: int) -> None:
        sums = of.places[Tier.HOT if content.hot else content.tier]
        sums[0] += sign * content.size
        sums[1] += sign

    # -- keys

    def name(self, of: Tenant, key: bytes, ref: Ref) -> Content | None:
        """The key means this content from now on; the content that it meant before."""
        before = self.unname(of, key)
        of.refs[key] = ref
        if not ref.content.named:
            of.unique += 1
            of.resident += ref.content.size
        ref.content.add(key)
        of.logical += ref.content.size
        of.ends += ref.expires > 0
        self._named(of, row_bytes(ref.content.tenant, key))
        return before

    def unname(self, of: Tenant, key: bytes) -> Content | None:
        """The key means nothing from now on; the content that it meant."""
        ref = of.refs.pop(key, None)
        if ref is None:
            return None
        content = ref.content
        content.remove(key)
        of.logical -= content.size
        of.ends -= ref.expires > 0
        self._named(of, -row_bytes(content.tenant, key))
        if not content.named:
            of.unique -= 1
            of.resident -= content.size
        return content

    def _named(self, of: Tenant, nbytes: int) -> None:
        of.names += nbytes
        self.names += nbytes

    def all_contents(self) -> Iterator[Content]:
        """Of all tenants. The books must not change meanwhile."""
        for tenant in self.tenants.values():
            yield from tenant.contents.values()


def block_key(tenant: str, digest: bytes) -> BlockKey:
    """What the store calls a content: equal bytes of two tenants are two blocks, so that none learns of the other's."""
    return BlockKey(NAMESPACE, tenant, digest)
