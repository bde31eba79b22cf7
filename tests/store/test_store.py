"""BlockStore as its callers see it."""

from __future__ import annotations

import mmap
import os
import threading
from array import array
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path

import pytest

from kvstrata.store.errors import StoreError
from kvstrata.store.events import NoEvents
from kvstrata.store.keys import BlockKey
from kvstrata.store.store import BlockStore, Outcome, Result
from tests.store.stores import MIB, books_are_right, data, file_of, get, key, outcomes, put, wait_for

pytestmark = pytest.mark.usefixtures("reader")
Opened = Callable[..., BlockStore]


class Told(NoEvents):
    """Remembers what the store told."""

    def __init__(self) -> None:
        self.loads: list[tuple[int, str, str]] = []
        self.stores: list[tuple[int, str, str]] = []
        self.evicted: list[tuple[str, int]] = []
        self.removed: list[BlockKey] = []
        self.scanned: list[int] = []

    def on_load(self, nbytes: int, seconds: float, outcome: str, reason: str) -> None:
        self.loads.append((nbytes, outcome, reason))

    def on_store(self, nbytes: int, seconds: float, outcome: str, reason: str) -> None:
        self.stores.append((nbytes, outcome, reason))

    def on_evict(self, cls: str, blocks: int, nbytes: int) -> None:
        self.evicted.append((cls, blocks))

    def on_removed(self, keys: Sequence[BlockKey], sizes: Sequence[int]) -> None:
        assert len(keys) == len(sizes)
        self.removed += keys

    def scan_done(self, blocks: int, seconds: float) -> None:
        self.scanned.append(blocks)


def test_questions_about_salts_that_were_never_stored_leave_nothing_behind(opened: Opened) -> None:
    store = opened()
    put(store, [1])
    before = len(store._names.folders)
    for number in range(50):
        asked = [key(1, f"random {number}"), key(1)]
        assert store.contains_and_pin(asked) == [False, True]
        store.unpin(asked)
        store.touch(asked)
        assert [str(result.outcome) for result in store.delete(asked[:1]).result(10)] == ["miss"]
        assert outcomes(get(store, [1], salt=f"random {number}")) == {"miss"}
    assert len(store._names.folders) == before


@pytest.mark.parametrize("size", [0, 1, 4096, MIB, 3 * MIB, 5 * MIB + 17])
@pytest.mark.parametrize("codec", ["raw", "lz4", "zstd"])
def test_bytes_come_back_from_this_process_and_from_the_next(opened: Opened, size: int, codec: str) -> None:
    store = opened(codec=codec)
    assert outcomes(put(store, range(3), size)) == {"stored"}
    assert outcomes(get(store, range(3), size)) == {"hit"}
    store.close()
    assert outcomes(get(opened(), range(3), size)) == {"hit"}


@pytest.mark.parametrize("workers", [1, 2, 3, 8])
def test_one_big_block_is_shared_out_to_all_workers(opened: Opened, workers: int) -> None:
    store = opened(workers=workers)
    put(store, [1], 5 * MIB)
    assert get(store, [1], 5 * MIB)[0].nbytes == 5 * MIB


def test_direct_io_gives_the_same_bytes(opened: Opened) -> None:
    store = opened(io="direct")
    assert outcomes(put(store, range(3), 2 * MIB + 5)) == {"stored"}
    assert outcomes(get(store, range(3), 2 * MIB + 5)) == {"hit"}


def test_a_stranger_is_a_miss_and_each_key_has_a_result_of_its_own(opened: Opened) -> None:
    store = opened()
    put(store, [1, 3])
    assert [result.outcome for result in get(store, [1, 2, 3])] == [Outcome.HIT, Outcome.MISS, Outcome.HIT]
    assert store.contains([key(1), key(2), key(3)]) == [True, False, True]


def test_namespace_salt_rank_and_group_keep_blocks_apart(opened: Opened) -> None:
    store, chunk = opened(), os.urandom(32)
    keys = [BlockKey(n, s, chunk, r, g) for n in ("a", "b") for s in ("", "t") for r in (0, 1 << 40) for g in (0, 9)]
    keys += [BlockKey("a", "", os.urandom(100)), BlockKey("a", "", b"")]
    buffers = [memoryview(bytes([number]) * 4096) for number in range(len(keys))]
    assert outcomes(store.put(keys, buffers).result(10)) == {"stored"}
    store.close()
    store = opened()
    targets = [bytearray(4096) for _ in keys]
    assert outcomes(store.get_into(keys, [memoryview(target) for target in targets]).result(10)) == {"hit"}
    assert [target[0] for target in targets] == list(range(len(keys)))


def test_the_first_writer_wins_and_the_second_put_is_a_cheap_success(opened: Opened, root: Path) -> None:
    store = opened()
    assert put(store, [1])[0].outcome is Outcome.STORED
    assert store.put([key(1)], [memoryview(b"other bytes")]).result(10)[0].outcome is Outcome.PRESENT
    assert get(store, [1])[0].outcome is Outcome.HIT
    assert sorted(str(result.outcome) for result in put(store, [2, 2])) == ["present", "stored"]
    assert books_are_right(store, root)


def test_writers_that_make_a_folder_together_leave_nothing_uncounted(opened: Opened, root: Path) -> None:
    """Of one shelf, and in a new salt each time: each writes the salt's JSON file, and sees the other's, or none."""
    by_shelf: dict[str, list[int]] = {}
    for number in range(2000):
        by_shelf.setdefault(file_of(root, number).parent.name, []).append(number)
    numbers = max(by_shelf.values(), key=len)[:8]
    store = opened(workers=8)
    for turn in range(150):
        assert outcomes(put(store, numbers, 64, f"salt-{turn}")) == {"stored"}
    assert books_are_right(store, root)


def test_many_threads_may_put_and_get_the_same_keys(opened: Opened, root: Path) -> None:
    store, seen = opened(workers=4), set()

    def churn(seed: int) -> None:
        for turn in range(6):
            seen.update(outcomes(put(store, range(turn, turn + 8))))
            seen.update(outcomes(get(store, range(turn + seed, turn + 8))))

    threads = [threading.Thread(target=churn, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    # A key that another thread is still writing is PRESENT for a put and a miss for a get.
    assert seen <= {"stored", "present", "hit", "miss"}
    assert outcomes(get(store, range(13))) == {"hit"}
    assert books_are_right(store, root)


def test_a_held_block_can_neither_be_deleted_nor_evicted_until_the_last_holder_lets_go(opened: Opened) -> None:
    store = opened(capacity=8 * MIB)
    put(store, [1])
    assert store.contains_and_pin([key(1), key(2)]) == [True, False]
    assert store.contains_and_pin([key(1)]) == [True]
    store.unpin([key(1)])
    result = store.delete([key(1)]).result(10)[0]
    assert (result.outcome, result.reason) == (Outcome.MISS, "pinned")
    put(store, range(10, 60))
    assert get(store, [1])[0].outcome is Outcome.HIT
    store.unpin([key(1)])
    assert store.delete([key(1), key(999)]).result(10)[0].outcome is Outcome.DELETED
    assert get(store, [1])[0].outcome is Outcome.MISS


def test_too_many_unpins_do_no_harm(opened: Opened) -> None:
    store = opened()
    put(store, [1])
    store.unpin([key(1), key(1), key(2)])
    assert store.contains_and_pin([key(1)]) == [True]
    assert store.delete([key(1)]).result(10)[0].reason == "pinned"


def test_a_corrupt_block_is_a_miss_that_heals_itself(opened: Opened, root: Path) -> None:
    told = Told()
    store = opened(events=told)
    put(store, range(4))
    with file_of(root, 2).open("r+b") as file:
        file.seek(10_000)
        file.write(b"flipped")
    results = get(store, range(4))
    assert [result.outcome for result in results] == [Outcome.HIT, Outcome.HIT, Outcome.CORRUPT, Outcome.HIT]
    assert results[2].reason == "payload_crc"
    assert store.contains([key(2)]) == [False]
    assert not file_of(root, 2).exists()
    assert told.removed == [key(2)]
    assert put(store, [2])[0].outcome is Outcome.STORED
    assert get(store, [2])[0].outcome is Outcome.HIT
    assert books_are_right(store, root)


def test_a_buffer_of_the_wrong_length_is_no_hit_and_a_pinned_block_survives_it(opened: Opened, root: Path) -> None:
    store = opened()
    put(store, [1, 2])
    store.close()
    file_of(root, 2).chmod(0o400)
    store = opened()
    results = [store.get_into([key(n)], [memoryview(bytearray(4096))]).result(10)[0] for n in (1, 2)]
    assert [(result.outcome, result.reason) for result in results] == [
        (Outcome.CORRUPT, "length"),
        (Outcome.MISS, "length"),
    ]
    assert store.contains([key(1), key(2)]) == [False, True]
    assert put(store, [1])[0].outcome is Outcome.STORED


def test_a_block_that_somebody_removed_is_a_miss_and_leaves_the_books(opened: Opened, root: Path) -> None:
    told = Told()
    store = opened(events=told)
    put(store, [1, 2])
    file_of(root, 1).unlink()
    assert [(result.outcome, result.reason) for result in get(store, [1])] == [(Outcome.MISS, "lost")]
    assert store.contains([key(1)]) == [False]
    assert told.removed == [key(1)]
    assert books_are_right(store, root)
    assert put(store, [1])[0].outcome is Outcome.STORED


def test_a_block_that_somebody_put_there_is_adopted_and_checked(opened: Opened, root: Path) -> None:
    store = opened()
    put(store, [1])
    kept = file_of(root, 1).read_bytes()
    store.delete([key(1)]).result(10)
    file_of(root, 1).parent.mkdir(parents=True, exist_ok=True)
    file_of(root, 1).write_bytes(kept)
    assert put(store, [1])[0].outcome is Outcome.PRESENT
    assert get(store, [1])[0].outcome is Outcome.HIT
    assert books_are_right(store, root)


def test_the_listing_pages_through_every_block_once(opened: Opened) -> None:
    store = opened()
    put(store, range(25), 4096)
    put(store, range(5), 4096, salt="tenant")
    whole = list(store.scan())
    paged, token = [], None
    while page := list(store.scan(after=token, limit=7)):
        paged += page
        token = page[-1].token
    assert [info.key for info in paged] == [info.key for info in whole]
    assert {info.key for info in whole} == {key(n) for n in range(25)} | {key(n, "tenant") for n in range(5)}
    assert {info.cls for info in whole} == {"normal"}


def test_usage_tells_namespaces_and_salts_apart_and_lasts_over_a_restart(opened: Opened) -> None:
    store = opened()
    put(store, range(3))
    put(store, range(2), salt="tenant")
    before = store.usage()
    assert {names: blocks for names, (blocks, _) in before.by_namespace.items()} == {
        ("model", ""): 3,
        ("model", "tenant"): 2,
    }
    store.close()
    after = opened().usage()
    assert (after.used, after.blocks, after.by_namespace) == (before.used, before.blocks, before.by_namespace)


def test_events_tell_outcome_reason_and_bytes(opened: Opened, root: Path) -> None:
    told = Told()
    store = opened(events=told)
    put(store, [1])
    get(store, [1, 2])
    assert told.scanned == [0]
    assert told.stores == [(256 << 10, "stored", "")]
    assert sorted(told.loads) == [(256 << 10, "hit", ""), (256 << 10, "miss", "")]


def test_events_that_raise_do_no_harm(opened: Opened) -> None:
    class Broken(NoEvents):
        def on_store(self, nbytes: int, seconds: float, outcome: str, reason: str) -> None:
            raise RuntimeError("a broken listener")

        def on_removed(self, keys: Sequence[BlockKey], sizes: Sequence[int]) -> None:
            raise RuntimeError("a broken listener")

    store = opened(events=Broken())
    assert outcomes(put(store, range(3))) == {"stored"}
    assert outcomes(store.delete([key(1)]).result(10)) == {"deleted"}
    assert outcomes(get(store, [0, 2])) == {"hit"}


def test_a_closed_store_answers_without_hanging(opened: Opened) -> None:
    store = opened()
    put(store, [1])
    store.close()
    store.close()
    assert store.contains([key(1)]) == [False]
    assert [(r.outcome, r.reason) for r in put(store, [2])] == [(Outcome.ERROR, "closed")]
    assert [(r.outcome, r.reason) for r in get(store, [1])] == [(Outcome.ERROR, "closed")]


def test_close_ends_what_is_under_way(opened: Opened, root: Path) -> None:
    store = opened()
    futures = [store.put([key(n)], [memoryview(data(n))]) for n in range(100)]
    store.close()
    assert all(future.done() for future in futures)
    stored = [n for n, future in enumerate(futures) if future.result()[0].outcome is Outcome.STORED]
    store = opened()
    assert {n for n in range(100) if store.contains([key(n)])[0]} >= set(stored)
    assert books_are_right(store, root)


def test_keys_and_buffers_must_be_of_one_number(opened: Opened) -> None:
    with pytest.raises(ValueError, match="2 keys and 1 buffers"):
        opened().put([key(1), key(2)], [memoryview(b"x")])


def test_buffers_of_any_shape_count_by_their_bytes_and_unusable_ones_are_refused(opened: Opened) -> None:
    store, numbers = opened(), array("i", range(5000))
    assert outcomes(store.put([key(1)], [memoryview(numbers)], itemsize=4).result(10)) == {"stored"}
    target = array("i", [0] * 5000)
    assert outcomes(store.get_into([key(1)], [memoryview(target)]).result(10)) == {"hit"}
    assert target == numbers
    with pytest.raises(ValueError, match="read-only"):
        store.get_into([key(1)], [memoryview(b"x")])
    with pytest.raises(ValueError, match="item size 0"):
        store.put([key(2)], [memoryview(b"x")], itemsize=0)
    with pytest.raises(ValueError, match="gaps"):
        store.put([key(2)], [memoryview(bytearray(8))[::2]])


def test_an_empty_batch_is_done_at_once(opened: Opened) -> None:
    store = opened()
    assert store.put([], []).result(1) == store.get_into([], []).result(1) == store.delete([]).result(1) == []


def test_a_codec_that_loses_bytes_is_refused_at_start(opened: Opened) -> None:
    with pytest.raises(StoreError, match="lossy"):
        opened(codec="fp8")
    assert opened().usage().blocks == 0, "the refused one had kept the lock"


def test_last_uses_reach_the_disk_while_the_store_runs(opened: Opened, root: Path) -> None:
    store = opened()
    put(store, range(3))
    before = file_of(root, 1).stat().st_mtime_ns
    store.touch([key(1), key(7)])
    assert wait_for(lambda: file_of(root, 1).stat().st_mtime_ns > before)
    assert max(range(3), key=lambda n: file_of(root, n).stat().st_mtime_ns) == 1


def test_a_kept_future_does_not_keep_the_callers_memory(opened: Opened) -> None:
    store, memory = opened(), mmap.mmap(-1, 8192)
    view = memoryview(memory)
    futures = [store.put([key(1)], [view]), store.get_into([key(2)], [view])]
    for future in futures:
        future.result(10)
    view.release()
    assert wait_for(lambda: _unmapped(memory))
    assert all(future.done() for future in futures)


def _unmapped(memory: mmap.mmap) -> bool:
    try:
        memory.close()
    except BufferError:
        return False
    return True


def test_the_callback_of_a_future_may_close_the_store(opened: Opened) -> None:
    store, closed = opened(), threading.Event()

    def close(_: object) -> None:
        store.close()
        closed.set()

    store.put([key(1)], [memoryview(data(1))]).add_done_callback(close)
    assert closed.wait(20)
    assert outcomes(get(opened(), [1])) == {"hit"}


def test_calls_that_race_with_close_all_end(opened: Opened) -> None:
    for _ in range(5):
        store, futures = opened(), []

        def keep_asking(store: BlockStore = store, futures: list[Future[list[Result]]] = futures) -> None:
            for number in range(200):
                futures.append(store.put([key(number)], [memoryview(b"x" * 100)]))
                futures.append(store.get_into([key(number)], [memoryview(bytearray(100))]))

        asking = threading.Thread(target=keep_asking)
        asking.start()
        store.close()
        asking.join()
        for future in futures:
            assert len(future.result(10)) == 1


def test_a_big_load_gets_more_time_than_the_setting_says(opened: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a healthy disk looks hung when a long prompt comes back, and nothing hits for a while."""
    store, given = opened(load_deadline_s=10.0), list[float]()
    real = store._gate.admit

    def spy(keys: Sequence[BlockKey], buffers: Sequence[memoryview], deadline_s: float, kind: int | None) -> object:
        given.append(deadline_s)
        return real(keys, buffers, deadline_s, kind)

    monkeypatch.setattr(store._gate, "admit", spy)
    big = memoryview(mmap.mmap(-1, 256 * MIB))
    store.get_into([key(1)], [big]).result(10)
    store.get_into([key(1)], [memoryview(bytearray(1))], deadline_s=3.0).result(10)
    assert given == [10.5, 3.0]
