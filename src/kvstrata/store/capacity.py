"""The hard cap: room for a put is set aside before a byte is written, and a thread of its own makes room."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from kvstrata.store.index import Index, Victim
from kvstrata.store.removal import Remover
from kvstrata.store.settings import StoreSettings

__all__ = ["ADMITTED", "Capacity", "Device"]

ADMITTED = ""
_DEFAULT_FLOOR = 1 << 30
_BATCH = 32
_PATIENCE_S = 0.5
_IDLE_S = 5.0
# Below this share of the capacity the store does not shrink for others that fill the device: it stops taking puts.
_SHARE_KEPT = 0.25
# A file system that frees blocks late must not make us throw away more and more.
_FLOOR_PAUSE_S = 2.0

log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Waiting:
    entry: bytes
    nbytes: int
    resume: Callable[[str], None]
    since: float = field(default_factory=time.monotonic)


class Device:
    """The device below the root, in bytes."""

    def __init__(self, root: Path, floor: int | None) -> None:
        self._root = root
        status = os.statvfs(root)
        self.unit = max(4096, status.f_frsize)
        self.size = status.f_blocks * status.f_frsize
        self.floor = min(_DEFAULT_FLOOR, self.size // 20) if floor is None else floor

    def free(self) -> int:
        """Bytes that this user may still fill. OSError."""
        status = os.statvfs(self._root)
        return status.f_bavail * status.f_frsize


class Capacity:
    """Admits puts and evicts. `used + reserved <= limit` holds from the end of `shrink_at_start` on.

    The limit is a little below the capacity: file systems add extent blocks to a file when they write it back, which
    no reservation foresees (the keeper finds them afterwards).
    """

    def __init__(self, settings: StoreSettings, index: Index, device: Device, remover: Remover) -> None:
        self.capacity = settings.capacity
        self.limit = settings.capacity - min(settings.capacity >> 8, 64 << 20)
        self._watermark = min(int(settings.capacity * settings.watermark), self.limit)
        self._target = min(int(settings.capacity * settings.target), self.limit)
        self._index = index
        self._device = device
        self._remover = remover
        self._wake = threading.Condition()
        self._waiting: deque[_Waiting] = deque()
        self._stopped = False
        self._floor_next = 0.0
        self._draining = False
        self._short = 0
        self._thread = threading.Thread(target=self._run, name="kvstrata-evict", daemon=True)

    # -- puts

    def room_for(self, nbytes: int, names: int = 0) -> int:
        """Bytes on disk that a put of `nbytes` may take at most: header, rounding, new and grown folders, their JSON
        files (`names`: their bytes) and extent blocks.
        """
        unit = self._device.unit
        return -(-nbytes // unit) * unit + 16 * unit + (nbytes >> 10) + 8 * names

    def admit(self, entry: bytes, nbytes: int, resume: Callable[[str], None]) -> str | None:
        """Reserve room: ADMITTED, or a reason to refuse, or None: `resume` is called with one of the two later on."""
        if nbytes > self._target:
            return "too_large"
        below_floor = self._floor_need(nbytes) > 0
        with self._wake:
            if self._stopped:
                return "closed"
            if not self._waiting and not below_floor and self._index.reserve(entry, nbytes, self.limit):
                if self._over() > 0:
                    self._wake.notify_all()
                return ADMITTED
            self._waiting.append(_Waiting(entry, nbytes, resume))
            self._wake.notify_all()
        return None

    def short(self, nbytes: int) -> None:
        """The device had no room for a put, though the books had: replace old blocks instead of growing."""
        with self._wake:
            self._short = max(self._short, nbytes)
            self._wake.notify_all()

    # -- life

    def shrink_at_start(self) -> None:
        """The capacity may be lower than at the last run: go down to it before anybody can ask. Not for the free-space
        floor: a disk that somebody else filled is no reason to throw a cache away at start.
        """
        while self._index.counts().used > self.limit:
            if not self._evict(self._index.counts().used - self._target):
                log.warning(
                    "block store: %d bytes in use, capacity %d: what is left is pinned or cannot be removed",
                    self._index.counts().used,
                    self.capacity,
                )
                break

    def start(self) -> None:
        """Begin to make room by itself."""
        self._thread.start()

    def evict(self, nbytes: int) -> int:
        """Evict at least so many bytes now, in the usual order; what came free."""
        freed = 0
        while freed < nbytes:
            gone = self._evict(nbytes - freed)
            if not gone:
                break
            freed += sum(victim.nbytes for victim in gone)
        return freed

    def stop(self, timeout_s: float) -> None:
        """No more room for anybody; ends within the timeout."""
        with self._wake:
            self._stopped = True
            self._wake.notify_all()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(timeout_s)
        self._answer("closed", all_of_them=True)

    # -- the thread

    def _run(self) -> None:
        while not self._stopped:
            with self._wake:
                busy = self._stopped or self._waiting or self._short or self._draining
                if not busy and self._over() <= 0:
                    self._wake.wait(_IDLE_S)
            try:
                self._round()
            except Exception:
                log.exception("block store: making room failed")
                time.sleep(1.0)

    def _round(self) -> None:
        need, why = self._need()
        progress = bool(need > 0 and self._evict(need))
        progress = self._serve() or progress
        if progress:
            return
        self._draining = False
        # Nothing could be evicted. Holders may let go and other puts may end: look again, but not in a frenzy.
        with self._wake:
            if not self._stopped:
                self._wake.wait(0.02 if self._waiting else 0.5)
        self._answer(why or "full", all_of_them=False)

    def _over(self) -> int:
        counts = self._index.counts()
        return counts.used + counts.reserved - self._watermark

    def _need(self) -> tuple[int, str]:
        """Bytes to evict now, and the reason word for those who wait in vain."""
        counts = self._index.counts()
        with self._wake:
            wanted = sum(waiting.nbytes for waiting in self._waiting)
            short, self._short = self._short, 0
        taken = counts.used + counts.reserved
        # From the watermark down to the target, however many batches that takes.
        self._draining = taken > (self._target if self._draining else self._watermark)
        need = taken - self._target if self._draining else 0
        need = max(need, taken + wanted - self.limit)
        kept = int(min(self.capacity, self._device.size) * _SHARE_KEPT)
        floor_need = min(max(self._floor_need(wanted), short), counts.used - kept)
        if floor_need > max(need, 0) and time.monotonic() >= self._floor_next:
            self._floor_next = time.monotonic() + _FLOOR_PAUSE_S
            return floor_need, "floor"
        return need, "floor" if need <= 0 else "full"

    def _floor_need(self, nbytes: int) -> int:
        """Bytes that are missing above the free-space floor."""
        if not self._device.floor:
            return 0
        try:
            return self._device.floor + self._index.counts().reserved + nbytes - self._device.free()
        except OSError:
            return 0

    def _evict(self, nbytes: int) -> list[Victim]:
        victims = self._index.take_oldest(nbytes, _BATCH)
        gone = self._remover.remove(victims)
        self._remover.announce_evicted(gone)
        return gone

    def _serve(self) -> bool:
        """Let those in who fit by now, first come first served."""
        served = False
        while True:
            # But for stop(), only this thread takes from the front. The device is asked without the lock: it may hang.
            first = self._waiting[0] if self._waiting else None
            if first is None or self._floor_need(first.nbytes) > 0:
                return served
            with self._wake:
                if not self._waiting or not self._index.reserve(first.entry, first.nbytes, self.limit):
                    return served
                self._waiting.popleft()
            first.resume(ADMITTED)
            served = True

    def _answer(self, reason: str, *, all_of_them: bool) -> None:
        latest = time.monotonic() - _PATIENCE_S
        while True:
            with self._wake:
                if not self._waiting or not (all_of_them or self._waiting[0].since < latest):
                    return
                first = self._waiting.popleft()
            first.resume(reason)
