"""Any history of puts, gets, deletes, pins, restarts, kills and cap changes, against a model."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from kvstrata.store.store import BlockStore, Outcome
from tests.store import stores
from tests.store.stores import MIB, books_are_right, data, du, file_of, key

NUMBERS = st.integers(0, 39)
BATCHES = st.lists(NUMBERS, min_size=1, max_size=6)


def size_of(number: int) -> int:
    """Each key has its own length: from a few bytes to more than a sub-block."""
    return (17, 4096, 300_001, 700_000, MIB + 4097)[number % 5]


class Machine(RuleBasedStateMachine):
    """`known`: may be there (it was stored, and nobody saw it go). `held`: by us. `modes`: pinned by mode 0400."""

    @initialize(capacity=st.sampled_from([8, 12, 40]))
    def start(self, capacity: int) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="kvstrata-"))
        self.root = self.folder / "store"
        self.known: set[int] = set()
        self.held: list[int] = []
        self.modes: set[int] = set()
        self.open(capacity)

    def open(self, capacity: int) -> None:
        self.capacity = capacity * MIB
        self.store = BlockStore.open(stores.settings(self.root, self.capacity))

    def kill(self) -> None:
        """What a killed process leaves: no last uses written, the lock dropped. (test_crash.py kills for real.)"""
        self.store._keeper._dirty.clear()
        self.store.close()

    @rule(numbers=BATCHES)
    def put(self, numbers: list[int]) -> None:
        buffers = [memoryview(data(number, size_of(number))) for number in numbers]
        results = self.store.put([key(number) for number in numbers], buffers).result(60)
        for number, result in zip(numbers, results, strict=True):
            assert result.outcome in (Outcome.STORED, Outcome.PRESENT) or result.reason in ("full", "leaving"), result
            if result.outcome is Outcome.STORED:
                assert number not in self.sure(), "stored over a block that was there"
                self.known.add(number)

    @rule(numbers=BATCHES)
    def get(self, numbers: list[int]) -> None:
        buffers = [bytearray(size_of(number)) for number in numbers]
        views = [memoryview(buffer) for buffer in buffers]
        results = self.store.get_into([key(number) for number in numbers], views).result(60)
        for number, buffer, result in zip(numbers, buffers, results, strict=True):
            if result.outcome is Outcome.HIT:
                assert number in self.known, "a block that was never stored, or was deleted"
                assert buffer == data(number, size_of(number)), "wrong bytes"
            else:
                assert (result.outcome, result.reason) == (Outcome.MISS, "")
                assert number not in self.sure(), "a pinned block was lost"
                self.known.discard(number)

    @rule(numbers=BATCHES)
    def delete(self, numbers: list[int]) -> None:
        results = self.store.delete([key(number) for number in numbers]).result(60)
        for number, result in zip(numbers, results, strict=True):
            assert result.outcome in (Outcome.DELETED, Outcome.MISS)
            if result.outcome is Outcome.DELETED:
                assert number not in self.sure()
            if number not in self.sure():
                self.known.discard(number)

    @rule(numbers=BATCHES)
    def hold(self, numbers: list[int]) -> None:
        for number, there in zip(numbers, self.store.contains_and_pin([key(n) for n in numbers]), strict=True):
            assert not there or number in self.known
            if there:
                self.held.append(number)

    @rule(count=st.integers(1, 6))
    def let_go(self, count: int) -> None:
        self.store.unpin([key(number) for number in self.held[:count]])
        del self.held[:count]

    @rule(numbers=BATCHES)
    def touch(self, numbers: list[int]) -> None:
        self.store.touch([key(number) for number in numbers])

    @rule(nbytes=st.integers(1, 4 * MIB))
    def evict(self, nbytes: int) -> None:
        self.store.evict(nbytes)

    @rule(capacity=st.sampled_from([8, 12, 40]), killed=st.booleans(), pinned=st.none() | NUMBERS)
    def restart(self, capacity: int, killed: bool, pinned: int | None) -> None:
        before = self.store.usage()
        (self.kill if killed else self.store.close)()
        self.held.clear()
        file = file_of(self.root, pinned) if pinned is not None else None
        # No more pins than the smallest cap holds: what a cap cannot evict it cannot hold.
        if pinned is not None and file is not None and file.exists() and len(self.modes) < 4:
            file.chmod(0o400)
            self.modes.add(pinned)
        self.open(capacity)
        after = self.store.usage()
        if after.blocks < before.blocks:
            assert before.used > 0.9 * self.capacity, "a start threw blocks away without need"
            assert after.used > 0.5 * self.capacity, "a start emptied the store"

    def sure(self) -> set[int]:
        """What must be there."""
        return self.modes | set(self.held)

    @invariant()
    def usage_is_what_du_says_and_within_the_cap(self) -> None:
        usage = self.store.usage()
        assert usage.used + usage.reserved <= usage.capacity
        assert du(self.root) <= self.capacity
        assert books_are_right(self.store, self.root)

    @invariant()
    def pinned_blocks_are_there(self) -> None:
        sure = sorted(self.sure())
        assert all(self.store.contains([key(number) for number in sure]))

    def teardown(self) -> None:
        if hasattr(self, "store"):
            self.store.close()
            shutil.rmtree(self.folder)


Machine.TestCase.settings = settings(
    max_examples=15, stateful_step_count=25, deadline=None, suppress_health_check=list(HealthCheck)
)
TestAnyHistory = Machine.TestCase


@pytest.mark.slow
class TestAnyLongHistory(Machine.TestCase):  # type: ignore[misc, valid-type]
    settings = settings(max_examples=60, stateful_step_count=60, deadline=None, suppress_health_check=list(HealthCheck))
