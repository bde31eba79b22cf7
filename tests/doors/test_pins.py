"""LMCache's locks end: by an unlock, by their time, or with the adapter; and never somebody else's."""

from __future__ import annotations

import pytest

from kvstrata.doors.l2_pins import Pins
from kvstrata.store.keys import BlockKey

A, B = (BlockKey("m", "", bytes([n]) * 32) for n in (1, 2))


class Held:
    """Stands for the store: how often each key is pinned."""

    def __init__(self) -> None:
        self.now = 0.0
        self.count: dict[BlockKey, int] = {A: 0, B: 0}
        self.pins = Pins(self.unpin, 100.0, lambda: self.now)

    def lookup(self, *keys: BlockKey) -> None:
        for key in keys:
            self.count[key] += 1
        self.pins.add(keys)

    def unpin(self, keys: list[BlockKey]) -> None:
        for key in keys:
            self.count[key] -= 1


@pytest.fixture
def held() -> Held:
    return Held()


def test_each_unlock_ends_one_lock(held: Held) -> None:
    held.lookup(A, B)
    held.lookup(A)
    held.pins.release([A, B])
    assert held.count == {A: 1, B: 0}
    held.pins.release([A])
    assert held.count == {A: 0, B: 0} and len(held.pins) == 0


def test_a_lock_ends_by_itself_and_its_late_unlock_takes_nobody_elses(held: Held) -> None:
    held.lookup(A)
    held.now = 60
    held.lookup(A)
    held.now = 101
    assert held.pins.sweep() == 1 and held.count[A] == 1
    held.pins.release([A])
    held.pins.release([A])
    assert held.count[A] == 0, "two locks, one ended by time, one by an unlock"


def test_sweeping_is_cheap_when_called_often(held: Held) -> None:
    held.lookup(A)
    held.now = 101
    assert held.pins.sweep() == 1
    held.lookup(B)
    held.now = 102
    assert held.pins.sweep() == 0


def test_unlocks_of_what_was_never_locked_do_nothing(held: Held) -> None:
    held.pins.release([A, B, A])
    assert held.count == {A: 0, B: 0}


def test_all_locks_end_with_the_adapter(held: Held) -> None:
    held.lookup(A, A, B)
    held.pins.release_all()
    assert held.count == {A: 0, B: 0} and len(held.pins) == 0
