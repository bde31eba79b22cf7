"""Path A: LMCache's `native_plugin` client (0.5.3) over HTTP to a KV engine, ours or any server of /kv.

    --l2-adapter '{"type": "native_plugin", "module_path": "kvstrata.doors.l2_remote", "class_name": "KvstrataRemote",
                   "adapter_params": {}}'

Configured by KV_REMOTE_* (remote_settings.py): LMCache prints adapter_params. LMCache's wrapper
(l2_adapters/native_connector_l2_adapter.py) makes the keys, keeps locks on its own side and takes one flag a block for
loads and lookups, so that a block which does not come is a cleared bit, where the prefetch cuts the prefix.

- An engine that is down, slow, hung or answers rubbish is a miss within the task's deadline; then the breaker says so
  at once, until the engine answers a probe.
- A task is reported when no thread touches its buffers any more (remote_tasks.py).
- submit_* never raise: LMCache would leak its own locks, or wait for ever.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from kvstrata.doors.remote_breaker import Breaker
from kvstrata.doors.remote_metrics import RemoteMetrics
from kvstrata.doors.remote_settings import RemoteSettings
from kvstrata.doors.remote_tasks import Lane, Task, Timer
from kvstrata.doors.remote_touch import Touches
from kvstrata.doors.remote_wire import Corrupt, Down, Refused, Wire

__all__ = ["KvstrataRemote"]

logger = logging.getLogger("lmcache.kvstrata.remote")

#: (future id, all of it done, error, one flag a key): what drain_completions gives.
Completion = tuple[int, bool, str, list[bool]]
_PROBE_KEY = "kvstrata-probe"
_PROBE_S = 2.0
_BAD_KEPT = 65536
_TRIES = 2
_TOUCH_LEASE_S = 0.1  # counted as a use like any other, and promises nobody anything


class KvstrataRemote:
    """See the module. Raises RemoteError (a ValueError) for settings; an engine that is not there is no error."""

    def __init__(self, *, env: Mapping[str, str] | None = None, **params: Any) -> None:
        if params:
            raise ValueError(
                f"found: adapter_params {sorted(params)}; needed: none, LMCache prints them in logs and status; "
                "fix: set KV_REMOTE_* in the environment of the server"
            )
        self._settings = RemoteSettings.from_env(os.environ if env is None else env)
        self._ids = itertools.count(1)
        self._fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._done_lock = threading.Lock()
        self._done: list[Completion] = []
        self._closed = False
        self._bad = _Bad()
        self._probe_wire = Wire(self._settings)
        self._breaker = Breaker(self._probe, f"{self._settings.url.scheme}://{self._settings.url.netloc}")
        self._metrics = RemoteMetrics(lambda: self._breaker.open)
        readers, writers = self._settings.connections, max(1, self._settings.connections // 2)
        self._wires = [Wire(self._settings) for _ in range(readers + writers)]
        self._timer = Timer()
        # Stores have connections of their own: a load, which a request waits for, never queues behind them.
        self._read = Lane("remote-read", self._wires[:readers])
        self._write = Lane("remote-write", self._wires[readers:])
        self._touches = Touches(self._touch)
        self._touches.listen()

    # -- LMCache's interface ----------------------------------------------------------------------------------------

    def event_fd(self) -> int:
        return self._fd

    def submit_batch_get(self, keys: Sequence[str], buffers: Sequence[Any]) -> int:
        """One flag a key: the buffer holds what was stored under the key. A False one's content is undefined."""
        return self._each("get", keys, buffers, self._read, self._get)

    def submit_batch_set(self, keys: Sequence[str], buffers: Sequence[Any]) -> int:
        """One flag a key: the engine has the block, this one or an earlier one of the same key."""
        return self._each("set", keys, buffers, self._write, self._set)

    def submit_batch_exists(self, keys: Sequence[str]) -> int:
        """One flag a key. Our engine keeps what it said yes to for a while (a lease)."""
        future, keys = next(self._ids), list(keys)
        task = self._task(future, "exists", len(keys), 0)
        if task is not None:
            every = range(len(keys))
            self._read.put(lambda wire: self._exists(wire, task, keys, every))
        return future

    def submit_batch_delete(self, keys: Sequence[str]) -> int:
        """One flag a key: it is gone. False where the server cannot delete."""
        return self._each("delete", keys, None, self._write, self._delete)

    def drain_completions(self) -> list[Completion]:
        with self._done_lock:
            if self._closed:
                return []
            with contextlib.suppress(BlockingIOError):
                os.eventfd_read(self._fd)
            done, self._done = self._done, []
        return done

    def close(self) -> None:
        """Returns when no thread of this client runs: LMCache unmaps L1 right after. Idempotent."""
        with self._done_lock:
            if self._closed:
                return
            self._closed = True
        for wire in (*self._wires, self._probe_wire):
            wire.abort()
        self._touches.close()
        self._timer.close()
        self._read.close()
        self._write.close()
        self._breaker.close()
        self._metrics.close()
        for wire in (*self._wires, self._probe_wire):
            wire.close()
        os.close(self._fd)

    # -- tasks ------------------------------------------------------------------------------------------------------

    def _each(
        self, op: str, keys: Sequence[str], buffers: Sequence[Any] | None, lane: Lane[Wire],
        call: Callable[[Wire, str, memoryview, float], bool],
    ) -> int:  # fmt: skip
        """A task of one call a key."""
        future = next(self._ids)
        try:
            views = [memoryview(b).cast("B") for b in buffers] if buffers is not None else [memoryview(b"")] * len(keys)
            if len(views) != len(keys):
                raise ValueError(f"{len(keys)} keys and {len(views)} buffers")
        except (TypeError, ValueError) as error:
            logger.error("kvstrata: a %s of %d blocks was not taken: %s", op, len(keys), error)
            self._report(future, op, [False] * len(keys))
            return future
        task = self._task(future, op, len(keys), sum(view.nbytes for view in views))
        for part, (key, view) in enumerate(zip(keys, views, strict=True)) if task is not None else ():
            lane.put(lambda wire, t=task, p=part, k=key, v=view: self._part(wire, t, p, op, k, v, call))  # type: ignore[misc]
        return future

    def _task(self, future: int, op: str, count: int, nbytes: int) -> Task | None:
        """None when it is answered already: nothing was asked for, or the engine is not to be asked."""
        if not count or self._breaker.open or self._closed:
            if count:
                self._metrics.calls.labels(op, "down").inc(count)
            self._report(future, op, [False] * count)
            return None
        deadline = time.monotonic() + self._settings.deadline_for(nbytes)
        task = Task(count, deadline, lambda results: self._report(future, op, results))
        self._timer.watch(task)
        return task

    def _report(self, future: int, op: str, results: Sequence[bool]) -> None:
        good = all(results)
        with self._done_lock:
            if self._closed:
                return
            # In a lookup or a load the flags are the answer and a miss is no fault; a store has nothing but `good`.
            error = "" if good else f"{op}: not all"
            self._done.append((future, good or op in ("exists", "get"), error, list(results)))
            os.eventfd_write(self._fd, 1)

    def _part(
        self, wire: Wire, task: Task, part: int, op: str, key: str, view: memoryview,
        call: Callable[[Wire, str, memoryview, float], bool],
    ) -> None:  # fmt: skip
        if task.begin([part]):
            done = self._try(op, wire, task.deadline, lambda: call(wire, key, view, task.deadline), 1)
            task.end([part], [bool(done)])

    def _try(self, op: str, wire: Wire, deadline: float, call: Callable[[], Any], count: int) -> Any:
        """What `call` gives, or None for every fault. Tried twice: a connection may have been closed while idle."""
        began = time.monotonic()
        for last in (tried + 1 == _TRIES for tried in range(_TRIES)):
            if self._breaker.open or self._closed:
                break
            stale = wire.reused
            try:
                result = call()
            except Down as down:
                late = time.monotonic() >= deadline
                self._metrics.faults.labels(str(down)).inc()
                closed_while_idle = stale and not down.timed_out and not last
                if not closed_while_idle:
                    self._breaker.failure(down.said, at_once=down.timed_out or down.lasting)
                if last or late or down.timed_out or down.lasting:
                    break
            except Refused as refused:
                self._metrics.faults.labels(f"status {refused}").inc()
                self._metrics.calls.labels(op, "refused").inc(count)
                return None
            except Corrupt as corrupt:
                self._metrics.faults.labels(f"corrupt: {corrupt}").inc()
                self._metrics.calls.labels(op, "corrupt").inc(count)
                self._breaker.failure(f"corrupt: {corrupt}")
                return None
            except Exception:  # nothing may end a thread, or a task would never be answered
                logger.exception("kvstrata: a %s failed", op)
                wire.close()
                break
            else:
                self._breaker.success()
                self._metrics.seconds.labels(op).observe(time.monotonic() - began)
                return result
        self._metrics.calls.labels(op, "down").inc(count)
        return None

    # -- calls ------------------------------------------------------------------------------------------------------

    def _get(self, wire: Wire, key: str, view: memoryview, deadline: float) -> bool:
        try:
            hit = wire.get_into(key, view, deadline)
        except Corrupt as corrupt:
            logger.warning("kvstrata: the engine's block is not what was stored (%s); it counts as a miss", corrupt)
            self._bad.add(key)
            with contextlib.suppress(Down, Refused):
                if wire.delete(key, deadline):
                    self._bad.discard(key)
            raise
        self._metrics.calls.labels("get", "hit" if hit else "miss").inc()
        self._metrics.bytes.labels("get").inc(view.nbytes if hit else 0)
        return hit

    def _set(self, wire: Wire, key: str, view: memoryview, deadline: float) -> bool:
        new = wire.put(key, view, deadline)
        if new:
            self._bad.discard(key)
        self._metrics.calls.labels("set", "stored" if new else "present").inc()
        self._metrics.bytes.labels("set").inc(view.nbytes)
        return True

    def _delete(self, wire: Wire, key: str, _view: memoryview, deadline: float) -> bool:
        return wire.delete(key, deadline)

    def _exists(self, wire: Wire, task: Task, keys: Sequence[str], parts: Sequence[int]) -> None:
        """All in one call where the server has that, else one call a key, over all connections."""
        if not task.begin(parts):
            return
        every = [keys[part] for part in parts]
        found = self._try("exists", wire, task.deadline, lambda: self._many(wire, every, task.deadline), len(parts))
        if found != "singly":
            self._found(task, keys, parts, found or [False] * len(parts))
            return
        task.release(parts)
        for part in parts:
            self._read.put(lambda wire, p=part: self._one(wire, task, keys, p))  # type: ignore[misc]

    def _many(self, wire: Wire, keys: Sequence[str], deadline: float) -> Any:
        found = wire.exists_many(keys, deadline, self._settings.lease_s)
        return "singly" if found is None else found

    def _touch(self, keys: Sequence[str]) -> None:
        """Being asked for is a use. Nobody waits for the answer; servers without this call are left alone."""
        if not self._breaker.open and not self._closed:
            deadline = time.monotonic() + self._settings.deadline_s
            self._write.put(
                lambda wire: self._try("touch", wire, deadline, lambda: self._used(wire, keys, deadline), 0)
            )

    def _used(self, wire: Wire, keys: Sequence[str], deadline: float) -> bool:
        return time.monotonic() < deadline and wire.exists_many(keys, deadline, _TOUCH_LEASE_S) is not None

    def _one(self, wire: Wire, task: Task, keys: Sequence[str], part: int) -> None:
        if task.begin([part]):
            found = self._try("exists", wire, task.deadline, lambda: wire.exists(keys[part], task.deadline), 1)
            self._found(task, keys, [part], [bool(found)])

    def _found(self, task: Task, keys: Sequence[str], parts: Sequence[int], found: Sequence[bool]) -> None:
        good = [there and keys[part] not in self._bad for part, there in zip(parts, found, strict=True)]
        self._metrics.calls.labels("exists", "hit").inc(sum(good))
        self._metrics.calls.labels("exists", "miss").inc(len(good) - sum(good))
        task.end(parts, good)

    def _probe(self) -> str:
        """Ask for one key, by the deadline of a request at most. "" when the engine answers as it should."""
        try:
            self._probe_wire.exists(_PROBE_KEY, time.monotonic() + min(_PROBE_S, self._settings.deadline_s))
        except (Down, Refused) as error:
            return f"status {error}" if isinstance(error, Refused) else error.said
        return ""


class _Bad:
    """Keys whose block was refused and could not be deleted: asked for again, each request would read it again."""

    def __init__(self) -> None:
        self._keys: OrderedDict[str, None] = OrderedDict()
        self._lock = threading.Lock()

    def add(self, key: str) -> None:
        with self._lock:
            self._keys[key] = None
            if len(self._keys) > _BAD_KEPT:
                self._keys.popitem(last=False)

    def discard(self, key: str) -> None:
        with self._lock:
            self._keys.pop(key, None)

    def __contains__(self, key: object) -> bool:
        return key in self._keys
