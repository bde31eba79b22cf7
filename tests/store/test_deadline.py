"""Leases, batches, the watch and the pool by themselves; whole stores on stuck disks are in inside_faults.py."""

from __future__ import annotations

import threading
import time

import pytest

from kvstrata.store.deadline import Batch, Outcome, Result, TaskLease, Watch
from kvstrata.store.keys import BlockKey
from kvstrata.store.lease import Expired
from kvstrata.store.pool import LOAD, STORE, Pool
from tests.store.stores import wait_for

SOON = 60.0


def _batch(count: int = 2, deadline_s: float = SOON, told: list[Result] | None = None) -> Batch:
    keys = [BlockKey("m", "", bytes([number + 1])) for number in range(count)]

    def tell(kind: int | None, nbytes: int, seconds: float, result: Result) -> None:
        if told is not None:
            told.append(result)

    return Batch(keys, [key.chunk for key in keys], [memoryview(b"x")] * count, deadline_s, LOAD, tell)


def test_the_end_of_a_lease_waits_for_those_who_touch_and_lets_nobody_else_begin() -> None:
    lease, inside, leave, ended = TaskLease(), threading.Event(), threading.Event(), threading.Event()

    def touch() -> None:
        with lease.touching():
            inside.set()
            leave.wait(10)
            assert not ended.is_set()

    def end() -> None:
        lease.end()
        ended.set()

    toucher, ender = threading.Thread(target=touch), threading.Thread(target=end)
    toucher.start()
    inside.wait(10)
    ender.start()
    assert wait_for(lambda: lease.ended)
    with pytest.raises(Expired), lease.touching():
        pytest.fail("touched after the end")
    assert not ended.wait(0.05)
    leave.set()
    assert ended.wait(10)
    assert not lease.publish()
    toucher.join()
    ender.join()


def test_the_end_of_a_lease_stops_those_who_look_for_themselves_and_waits_for_nothing_else_of_theirs() -> None:
    lease, stopped = TaskLease(), []
    with lease.ending(lambda: stopped.append("over")):
        pass
    with lease.ending(lambda: stopped.append("inside")):
        lease.end()
        assert stopped == ["inside"]
    lease.end()
    with pytest.raises(Expired), lease.ending(lambda: stopped.append("late")):
        pytest.fail("began after the end")
    assert stopped == ["inside"]


def test_a_batch_is_done_with_its_last_key_and_keeps_the_order_of_keys() -> None:
    batch = _batch()
    assert batch.settle(1, Result(Outcome.HIT))
    assert not batch.future.done()
    assert batch.settle(0, Result(Outcome.MISS))
    assert [result.outcome for result in batch.future.result(0)] == [Outcome.MISS, Outcome.HIT]
    assert batch.over


def test_a_report_keeps_results_that_were_there_and_refuses_later_ones() -> None:
    told: list[Result] = []
    batch = _batch(told=told)
    batch.settle(0, Result(Outcome.HIT))
    assert batch.expire(Outcome.EXPIRED, "deadline")
    assert not batch.settle(1, Result(Outcome.HIT))
    assert not batch.expire(Outcome.EXPIRED, "deadline")
    assert [result.outcome for result in batch.future.result(0)] == [Outcome.HIT, Outcome.EXPIRED]
    assert [result.outcome for result in told] == [Outcome.HIT, Outcome.EXPIRED]


def test_settling_and_expiring_at_once_completes_the_future_once() -> None:
    for _ in range(200):
        batch = _batch(1)
        threads = [
            threading.Thread(target=batch.settle, args=(0, Result(Outcome.HIT))),
            threading.Thread(target=batch.expire, args=(Outcome.EXPIRED, "deadline")),
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(batch.future.result(0)) == 1


def test_the_watch_reports_each_batch_at_its_own_deadline() -> None:
    watch = Watch(lambda batch: batch.expire(Outcome.EXPIRED, "deadline"))
    patient, hasty = _batch(deadline_s=SOON), _batch(deadline_s=0.1)
    watch.add(patient)
    watch.add(hasty)
    assert {result.outcome for result in hasty.future.result(10)} == {Outcome.EXPIRED}
    assert watch.waiting() == [patient]
    assert not watch.drain(0.01)
    patient.expire(Outcome.EXPIRED, "closed")
    assert watch.drain(1)
    watch.stop(1)


def test_loads_go_before_stores_and_neither_takes_all_threads() -> None:
    pool, go, order = Pool(2), threading.Event(), []
    lock = threading.Lock()

    def hang(name: str) -> None:
        with lock:
            order.append(name)
        go.wait(10)

    pool.submit(STORE, [lambda: hang("store")] * 5)
    assert wait_for(lambda: len(order) == 2)
    pool.submit(LOAD, [lambda: hang("load")] * 5)
    assert wait_for(lambda: len(order) == 3)
    time.sleep(0.05)
    assert order == ["store", "store", "load"]
    go.set()
    assert wait_for(lambda: len(order) == 10)
    assert pool.stop(10)
    assert order[3] == "load"


def test_a_task_that_raises_does_not_take_its_thread_along() -> None:
    pool, done = Pool(1), threading.Event()

    def fail() -> None:
        raise RuntimeError("a broken task")

    pool.submit(LOAD, [fail, fail, done.set])
    assert done.wait(10)
    assert pool.stop(10)


def test_stopping_a_pool_does_not_wait_for_a_task_that_hangs() -> None:
    pool, begun, go = Pool(1), threading.Event(), threading.Event()

    def hang() -> None:
        begun.set()
        go.wait(30)

    pool.submit(LOAD, [hang])
    assert begun.wait(10)
    assert not pool.stop(0.1)
    go.set()
    assert pool.stop(10)
