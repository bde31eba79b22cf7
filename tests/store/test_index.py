"""The index: small, in order of use, exact in its sums."""

from __future__ import annotations

import gc
import itertools
import os
import random
import tracemalloc

from hypothesis import given
from hypothesis import strategies as st

from kvstrata.store.entries import Entries
from kvstrata.store.index import Claim, Index
from kvstrata.store.keys import BlockKey
from kvstrata.store.recency import LATEST_NS, LruLists, UseClock
from kvstrata.store.settings import CLASSES


def _index() -> Index:
    return Index(Entries(lambda namespace, salt: CLASSES.index(namespace if namespace in CLASSES else "normal")))


def _add(index: Index, key: BlockKey, nbytes: int = 4096, used_ns: int = 0) -> bytes:
    entry = index.names.entry(key)
    assert index.claim([entry]) == [Claim.MINE]
    index.written(entry, nbytes, used_ns)
    return entry


def test_a_block_takes_at_most_250_bytes_even_right_after_the_table_grew() -> None:
    # A dict grows at 2/3 of 2**n: just behind 43,690 (and 349,525) its spare room is largest.
    index, count = _index(), 43_700
    number, chunks = index.names.number("model", "tenant"), [os.urandom(32) for _ in range(count)]
    gc.collect()
    tracemalloc.start()
    for used_ns, chunk in enumerate(chunks):
        entry = index.names.pack(number, chunk, 0x1000000, 0)
        index.claim([entry])
        index.written(entry, 3 << 20, used_ns)
    each = tracemalloc.get_traced_memory()[0] / count
    tracemalloc.stop()
    assert each <= 250, f"{each:.0f} bytes a block"


@given(
    st.text(max_size=8),
    st.text(max_size=8),
    st.binary(max_size=70),
    st.integers(0, (1 << 64) - 1),
    st.integers(0, (1 << 32) - 1),
)
def test_an_entry_gives_path_and_key_back(namespace: str, salt: str, chunk: bytes, rank: int, group: int) -> None:
    names, key = Entries(lambda namespace, salt: 1), BlockKey(namespace, salt, chunk, rank, group)
    entry = names.entry(key)
    assert names.path(entry) == key.path
    assert names.shelf_path(entry) == key.path.rpartition("/")[0]
    assert names.key(entry) == (key if 1 <= len(chunk) <= 64 else None)


def test_victims_come_by_class_then_by_age_and_pinned_and_held_ones_never() -> None:
    index = _index()
    entries = {
        (cls, age): _add(index, BlockKey(cls, "", bytes([age])), used_ns=age)
        for age, cls in itertools.product(range(3), ("keep", "pin", "bulk", "normal"))
    }
    assert index.hold([entries["normal", 0]]) == [True]
    victims = [victim.entry for victim in index.take_oldest(1 << 30, 100)]
    order = [("bulk", 0), ("bulk", 1), ("bulk", 2), ("normal", 1), ("normal", 2), ("keep", 0), ("keep", 1), ("keep", 2)]
    assert victims == [entries[name] for name in order]


def test_a_victim_counts_until_its_file_is_gone_and_cannot_be_put_meanwhile() -> None:
    index = _index()
    entry = _add(index, BlockKey("m", "", b"x"), 5000)
    (victim,) = index.take([entry])
    assert index.contains([entry]) == [False]
    assert index.counts().used == 5000
    assert index.claim([entry]) == [Claim.LEAVING]
    index.gone(victim)
    assert index.counts().used == 0
    assert index.claim([entry]) == [Claim.MINE]


def test_a_bad_block_goes_whoever_holds_it_but_not_one_that_came_in_its_place() -> None:
    index = _index()
    entry = _add(index, BlockKey("m", "", b"x"))
    birth = index.birth(entry)
    index.hold([entry])
    (victim,) = index.take_bad(entry, birth)
    index.gone(victim)
    _add(index, BlockKey("m", "", b"x"))
    assert index.take_bad(entry, birth) == []
    assert index.contains([entry]) == [True]


def test_victims_that_stay_get_their_old_places_back() -> None:
    index = _index()
    entries = [_add(index, BlockKey("m", "", bytes([age])), used_ns=age) for age in range(5)]
    index.stays(index.take_oldest(3 * 4096, 100))
    assert [victim.entry for victim in index.take_oldest(1 << 30, 100)] == entries


def test_a_reservation_never_passes_the_limit() -> None:
    index = _index()
    first, second = (index.names.entry(BlockKey("m", "", chunk)) for chunk in (b"1", b"2"))
    index.claim([first, second])
    assert index.reserve(first, 60, 100)
    assert not index.reserve(second, 41, 100)
    assert index.reserve(second, 40, 100)
    index.written(first, None)
    assert index.counts().reserved == 40


@given(st.lists(st.tuples(st.sampled_from(["append", "prepend", "touch", "remove"]), st.integers(0, 7)), max_size=60))
def test_the_lists_do_what_a_python_list_does(steps: list[tuple[str, int]]) -> None:
    lists, model = LruLists(2), ([], [])  # type: tuple[LruLists, tuple[list[int], list[int]]]
    for _ in range(8):
        lists.grow()
    for step, number in steps:
        slot, mine = number + 2, model[number % 2]
        there = slot in mine
        if step in ("remove", "touch") and there:
            lists.remove(slot)
            mine.remove(slot)
        if (step == "touch" and there) or (step == "append" and not there):
            lists.append(slot, number % 2)
            mine.append(slot)
        elif step == "prepend" and not there:
            lists.prepend(slot, number % 2)
            mine.insert(0, slot)
        assert [list(lists.oldest(cls)) for cls in range(2)] == list(model)


def test_filling_at_once_equals_filling_one_by_one() -> None:
    at_once, one_by_one = LruLists(4), LruLists(4)
    classes = bytes(random.choices(range(4), k=100))
    order = random.sample(range(4, 104), 100)
    at_once.fill(order, classes, 4)
    for _ in range(100):
        one_by_one.grow()
    for slot in order:
        one_by_one.append(slot, classes[slot - 4])
    assert [list(at_once.oldest(cls)) for cls in range(4)] == [list(one_by_one.oldest(cls)) for cls in range(4)]


@given(st.lists(st.integers(-(1 << 63), 1 << 63), max_size=50), st.integers(0, 1 << 63))
def test_the_clock_of_uses_only_goes_forward(walls: list[int], seen: int) -> None:
    times = iter(walls)
    clock = UseClock(lambda: next(times))
    clock.seen(seen)
    given_times = [clock() for _ in walls]
    below = [instant for instant in given_times if instant < LATEST_NS]
    assert below == sorted(set(below))
    assert all(min(seen, LATEST_NS) <= instant <= LATEST_NS for instant in given_times)
