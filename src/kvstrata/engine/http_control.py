"""The routes beside a block's own: figures, the data version, many keys at once, snapshots and branches."""

from __future__ import annotations

import re

from kvstrata.engine.content import Engine
from kvstrata.engine.errors import NoSuchBranchKey
from kvstrata.engine.http_blocks import send_block, tag_of
from kvstrata.engine.http_body import Bodies
from kvstrata.engine.http_conditions import demand
from kvstrata.engine.http_json import keys_of, object_of, seconds_of
from kvstrata.engine.http_reply import Problem
from kvstrata.engine.http_request import Request

__all__ = ["MAX_LEASE_S", "Control"]

MAX_LEASE_S = 300.0
"""How long a client may ask for blocks to be kept."""

_NUMBER = re.compile(rb"\d{1,20}")
_MOST = 2**63 - 1


class Control:
    """Handlers; all of them stay within the tenant of the token, except the figures of an admin."""

    def __init__(self, engine: Engine, bodies: Bodies, max_value: int) -> None:
        self._engine = engine
        self._bodies = bodies
        self._max_value = max_value

    def stats(self, request: Request) -> None:
        """Counts and bytes: the tenant's; the whole engine's for an admin."""
        grant = request.grant
        request.json(self._engine.stats(None if grant.admin else grant.tenant))

    def version(self, request: Request) -> None:
        """The data version of this tenant."""
        version = self._engine.version(request.grant.tenant)
        request.json({"tracking": True, "version": version})

    def bump(self, request: Request, number: bytes) -> None:
        """Raise it: entries that were put with a lower one are gone."""
        request.need_write()
        if request.grant.prefix:
            raise Problem(403, "OutsidePrefix", "the data version is the whole tenant's; this token is for some keys")
        self._engine.bump_version(request.grant.tenant, _number(number))
        self.version(request)

    def batch_exists(self, request: Request) -> None:
        """Which of the keys are there, in their order; with lease_s those stay for so long."""
        data = object_of(request, self._bodies)
        keys = keys_of(data, request)
        lease = seconds_of(data, "lease_s", MAX_LEASE_S)
        request.json({"exists": self._engine.exists(request.grant.tenant, keys, lease)})

    def snapshot(self, request: Request) -> None:
        """Hold on to the keys that are there now."""
        request.need_write()
        keys = keys_of(object_of(request, self._bodies), request)
        number, pages = self._engine.snapshot(request.grant.tenant, keys)
        request.json({"pages": pages, "snapshot": number})

    def drop_snapshot(self, request: Request, number: bytes) -> None:
        """Let go of them. 409 while it has branches."""
        request.need_write()
        self._engine.drop_snapshot(request.grant.tenant, _number(number))
        request.answer(204)

    def fork(self, request: Request, number: bytes) -> None:
        """A branch over a snapshot: it sees the snapshot's blocks and its own writes."""
        request.need_write()
        request.json({"branch": self._engine.fork(request.grant.tenant, _number(number))})

    def drop_branch(self, request: Request, number: bytes) -> None:
        """Forget a branch and what it wrote."""
        request.need_write()
        self._engine.drop_branch(request.grant.tenant, _number(number))
        request.answer(204)

    def branch_get(self, request: Request, number: bytes, segment: bytes) -> None:
        """A block as the branch sees it."""
        key = request.key(segment)
        with self._engine.branch_open(request.grant.tenant, _number(number), key) as block:
            send_block(request, block, self._bodies)

    def branch_put(self, request: Request, number: bytes, segment: bytes) -> None:
        """Write in the branch alone; a second value replaces the first."""
        request.need_write()
        key = request.key(segment)
        branch = _number(number)
        if self._bodies.announced(request.head, self._max_value) == 0:
            raise Problem(400, "Empty", "a block has at least one byte")
        demand(request, lambda: self._branch_tag(request.grant.tenant, branch, key))
        with self._bodies.received(request.connection, request.head, self._max_value, request.grant.tenant) as body:
            if not body:
                raise Problem(400, "Empty", "a block has at least one byte")
            self._engine.branch_put(request.grant.tenant, branch, key, body)
        request.answer(200)

    def _branch_tag(self, tenant: str, branch: int, key: bytes) -> bytes | None:
        try:
            with self._engine.branch_open(tenant, branch, key) as block:
                return tag_of(block.digest)
        except NoSuchBranchKey:
            return None

    def fork_stats(self, request: Request) -> None:
        """Snapshots and branches of this tenant, and what they hold."""
        request.json(self._engine.fork_stats(request.grant.tenant))


def _number(text: bytes) -> int:
    if not _NUMBER.fullmatch(text) or int(text) > _MOST:
        raise Problem(400, "BadNumber", "a whole number below 2^63 belongs here")
    return int(text)
