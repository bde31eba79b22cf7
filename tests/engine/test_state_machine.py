"""Whatever is done in whatever order, restarts included: the engine and a model of it agree, statistics and all."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import hypothesis.strategies as st
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvstrata.engine.content import Engine
from kvstrata.engine.errors import NoSuchBranch, NoSuchBranchKey, NoSuchSnapshot, StillReferenced
from tests.engine.engines import MIB, data, get
from tests.engine.engines import settings as engine_settings

TENANTS = st.sampled_from(["a", "b"])
KEYS = st.sampled_from([b"k%d" % number for number in range(5)])
VALUES = st.integers(0, 4).map(lambda number: data(number, 1000 + number))
ANY = st.integers(0, 7)


class EngineMachine(RuleBasedStateMachine):
    """A model in dicts beside an engine with all three tiers."""

    def __init__(self) -> None:
        super().__init__()
        self.root = Path(tempfile.mkdtemp(prefix="kvstrata-"))
        self.keys: dict[tuple[str, bytes], tuple[bytes, int | None]] = {}
        self.versions = {"a": 0, "b": 0}
        self.counts = {tenant: {"put_new": 0, "dedup_hits": 0, "get_hits": 0, "get_misses": 0} for tenant in "ab"}
        self.snapshots: dict[int, tuple[str, dict[bytes, bytes]]] = {}
        self.branches: dict[int, tuple[str, int, dict[bytes, bytes]]] = {}

    @initialize()
    def start(self) -> None:
        self.open()

    def open(self) -> None:
        self.engine = Engine.open(
            engine_settings(
                self.root / "engine", 16 * MIB, hot=8000, cold_root=self.root / "cold", cold_capacity=16 * MIB
            )
        )

    def teardown(self) -> None:
        self.engine.close()
        shutil.rmtree(self.root)

    # -- keys

    def held(self, tenant: str) -> set[bytes]:
        """The contents that a tenant has on the disk."""
        found = {value for (name, _), (value, _) in self.keys.items() if name == tenant}
        for owner, pages in self.snapshots.values():
            found |= set(pages.values()) if owner == tenant else set()
        for owner, _, pages in self.branches.values():
            found |= set(pages.values()) if owner == tenant else set()
        return found

    @rule(tenant=TENANTS, key=KEYS, value=VALUES, replace=st.booleans(), tagged=st.booleans())
    def put(self, tenant: str, key: bytes, value: bytes, replace: bool, tagged: bool) -> None:
        version = self.versions[tenant] if tagged else None
        there = (tenant, key) in self.keys
        result = self.engine.put(tenant, key, memoryview(value), replace=replace, version=version)
        assert result.new is not there
        counts = self.counts[tenant]
        counts["put_new"] += not there
        if there and not replace:
            counts["dedup_hits"] += 1
            return
        counts["dedup_hits"] += value in self.held(tenant)
        self.keys[tenant, key] = (value, version)

    @rule(tenant=TENANTS, key=KEYS)
    def get(self, tenant: str, key: bytes) -> None:
        expected = self.keys.get((tenant, key), (None, None))[0]
        assert get(self.engine, key, tenant) == expected
        self.counts[tenant]["get_hits" if expected is not None else "get_misses"] += 1

    @rule(tenant=TENANTS, keys=st.lists(KEYS, max_size=3))
    def delete(self, tenant: str, keys: list[bytes]) -> None:
        there = {key for key in keys if (tenant, key) in self.keys}
        assert self.engine.delete(tenant, keys) == len(there)
        for key in there:
            del self.keys[tenant, key]

    @rule(tenant=TENANTS, keys=st.lists(KEYS, max_size=3), lease=st.sampled_from([None, 0.01, 5.0]))
    def exists(self, tenant: str, keys: list[bytes], lease: float | None) -> None:
        assert self.engine.exists(tenant, keys, lease) == [(tenant, key) in self.keys for key in keys]

    @rule(tenant=TENANTS, step=st.integers(-1, 2))
    def bump(self, tenant: str, step: int) -> None:
        wanted = self.versions[tenant] + step
        self.versions[tenant] = max(self.versions[tenant], wanted)
        assert self.engine.bump_version(tenant, wanted) == self.versions[tenant]
        for name, (_, version) in list(self.keys.items()):
            if name[0] == tenant and version is not None and version < self.versions[tenant]:
                del self.keys[name]

    # -- forks

    @rule(tenant=TENANTS, keys=st.lists(KEYS, max_size=4))
    def snapshot(self, tenant: str, keys: list[bytes]) -> None:
        pages = {key: self.keys[tenant, key][0] for key in keys if (tenant, key) in self.keys}
        number, count = self.engine.snapshot(tenant, keys)
        assert count == len(pages)
        assert number not in self.snapshots
        self.snapshots[number] = (tenant, pages)

    @precondition(lambda self: self.snapshots)
    @rule(tenant=TENANTS, which=ANY)
    def fork(self, tenant: str, which: int) -> None:
        number = list(self.snapshots)[which % len(self.snapshots)]
        if self.snapshots[number][0] != tenant:
            try:
                self.engine.fork(tenant, number)
                raise AssertionError("another tenant's snapshot")
            except NoSuchSnapshot:
                return
        self.branches[self.engine.fork(tenant, number)] = (tenant, number, {})

    @precondition(lambda self: self.branches)
    @rule(which=ANY, key=KEYS, value=VALUES)
    def branch_put(self, which: int, key: bytes, value: bytes) -> None:
        number = list(self.branches)[which % len(self.branches)]
        tenant, _, pages = self.branches[number]
        assert self.engine.branch_put(tenant, number, key, memoryview(value)).new is (key not in pages)
        pages[key] = value

    @precondition(lambda self: self.branches)
    @rule(tenant=TENANTS, which=ANY, key=KEYS)
    def branch_get(self, tenant: str, which: int, key: bytes) -> None:
        number = list(self.branches)[which % len(self.branches)]
        owner, parent, pages = self.branches[number]
        expected = pages.get(key, self.snapshots[parent][1].get(key))
        try:
            with self.engine.branch_open(tenant, number, key) as block:
                assert b"".join(map(bytes, block.pieces())) == expected
            assert owner == tenant
        except NoSuchBranch:
            assert owner != tenant
        except NoSuchBranchKey:
            assert expected is None

    @precondition(lambda self: self.branches)
    @rule(which=ANY)
    def drop_branch(self, which: int) -> None:
        number = list(self.branches)[which % len(self.branches)]
        self.engine.drop_branch(self.branches.pop(number)[0], number)

    @precondition(lambda self: self.snapshots)
    @rule(which=ANY)
    def drop_snapshot(self, which: int) -> None:
        number = list(self.snapshots)[which % len(self.snapshots)]
        used = any(parent == number for _, parent, _ in self.branches.values())
        try:
            self.engine.drop_snapshot(self.snapshots[number][0], number)
            assert not used
            del self.snapshots[number]
        except StillReferenced:
            assert used

    # -- what happens to it

    @rule()
    def restart(self) -> None:
        self.engine.close()
        self.open()

    @rule(nbytes=st.integers(1, 10_000))
    def make_room(self, nbytes: int) -> None:
        """What the warm disk evicts is on the cold one, so that nothing can be seen of it."""
        next(iter(self.engine._core.tiers.stores.values())).evict(nbytes)

    @invariant()
    def agrees(self) -> None:
        for tenant in "ab":
            values = [value for (name, _), (value, _) in self.keys.items() if name == tenant]
            stats = self.engine.stats(tenant)
            assert stats["total_refs"] == len(values)
            assert stats["unique_blocks"] == len(set(values))
            assert stats["logical_bytes"] == sum(map(len, values))
            assert stats["resident_bytes"] == sum(map(len, set(values)))
            assert {name: stats[name] for name in self.counts[tenant]} == self.counts[tenant]
            tiers = stats["tiers"]
            assert isinstance(tiers, dict)
            assert sum(tier["bytes"] for tier in tiers.values()) == sum(map(len, self.held(tenant)))
            assert sorted(self.engine.scan(tenant, b"", None, 100)[1]) == sorted(
                key for name, key in self.keys if name == tenant
            )
            forks = self.engine.fork_stats(tenant)
            assert forks["snapshots"] == sum(owner == tenant for owner, _ in self.snapshots.values())
            assert forks["branches"] == sum(owner == tenant for owner, _, _ in self.branches.values())


EngineMachine.TestCase.settings = settings(
    max_examples=20,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    # Each step is a disk's, and shrinking takes thousands: for whoever looks into a failure.
    phases=[Phase.explicit, Phase.reuse, Phase.generate],
)
TestEngine = EngineMachine.TestCase
