"""What is in the store, in memory: blocks, their order of use, who holds them, and every byte that they take."""

from __future__ import annotations

import threading
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum

from kvstrata.store.entries import Entries
from kvstrata.store.recency import LruLists
from kvstrata.store.scan import Found
from kvstrata.store.settings import CLASSES

__all__ = ["PIN", "Claim", "Counts", "Index", "Victim"]

PIN = CLASSES.index("pin")


class Claim(Enum):
    """What a put may do about a key."""

    MINE = 0
    PRESENT = 1
    LEAVING = 2


@dataclass(frozen=True, slots=True)
class Victim:
    """A block on its way out: no longer found, its bytes counted until `gone`. `evicted`: to make room."""

    entry: bytes
    nbytes: int
    used_ns: int
    cls: int
    evicted: bool = False


@dataclass(frozen=True, slots=True)
class Counts:
    """Bytes on disk: `used` = blocks + what holds them (folders, JSON files, foreign files); `reserved` for puts."""

    blocks: int
    used: int
    reserved: int
    held: int


class Index:
    """Thread-safe; every call holds one lock for microseconds and does no I/O.

    A block takes its entry, a dict item and 29 bytes in arrays (tests/store/test_index.py measures the sum).
    """

    def __init__(self, names: Entries) -> None:
        self.names = names
        self._lock = threading.Lock()
        self._slots: dict[bytes, int] = {}
        self._lru = LruLists(len(CLASSES))
        self._entries: list[bytes] = [b""] * len(CLASSES)
        self._bytes = array("q", [0] * len(CLASSES))
        self._used_at = array("q", [0] * len(CLASSES))
        self._births = array("I", [0] * len(CLASSES))
        self._born = 0
        self._vacant: list[int] = []
        self._holds: dict[bytes, int] = {}
        self._writing: dict[bytes, int] = {}
        self._leaving: dict[bytes, int] = {}
        self._shelves: dict[int, int] = {}
        self._extras: dict[str, int] = {}
        self._block_bytes = self._extra_bytes = self._reserved = self._leaving_bytes = 0

    # -- questions

    def counts(self) -> Counts:
        """The sums of this moment."""
        with self._lock:
            return Counts(len(self._slots), self._used(), self._reserved, len(self._holds))

    def by_names(self) -> dict[tuple[str, str], tuple[int, int]]:
        """(namespace, salt) -> (blocks, bytes on disk), where there are blocks and the names are known."""
        with self._lock:
            return {
                (folder.namespace, folder.salt): (folder.blocks, folder.nbytes)
                for folder in self.names.folders
                if folder.blocks and folder.namespace is not None and folder.salt is not None
            }

    def contains(self, entries: Iterable[bytes]) -> list[bool]:
        """Which are there."""
        with self._lock:
            slots = self._slots
            return [entry in slots for entry in entries]

    def entries(self) -> list[bytes]:
        """All of them, in no order."""
        with self._lock:
            return list(self._slots)

    def facts(self, entry: bytes) -> tuple[int, int, int] | None:
        """(bytes on disk, last use, class), or None."""
        with self._lock:
            slot = self._slots.get(entry)
            return None if slot is None else (self._bytes[slot], self._used_at[slot], self._lru.cls(slot))

    def birth(self, entry: bytes) -> int:
        """A number of this very block: another one that comes under its key has another number. 0: not there."""
        with self._lock:
            slot = self._slots.get(entry)
            return 0 if slot is None else self._births[slot]

    # -- holds

    def hold(self, entries: Iterable[bytes]) -> list[bool]:
        """Those that are there get one more holder: they cannot be evicted or deleted."""
        with self._lock:
            slots, holds = self._slots, self._holds
            answer = []
            for entry in entries:
                there = entry in slots
                if there:
                    holds[entry] = holds.get(entry, 0) + 1
                answer.append(there)
            return answer

    def release(self, entries: Iterable[bytes]) -> None:
        """One holder less each; those that nobody holds are ignored."""
        with self._lock:
            for entry in entries:
                count = self._holds.get(entry, 0)
                if count > 1:
                    self._holds[entry] = count - 1
                else:
                    self._holds.pop(entry, None)

    def touch(self, entry: bytes, used_ns: int) -> bool:
        """The block was used; False if it is not there."""
        with self._lock:
            slot = self._slots.get(entry)
            if slot is None:
                return False
            if used_ns > self._used_at[slot]:
                self._used_at[slot] = used_ns
                self._lru.remove(slot)
                self._lru.append(slot, self._lru.cls(slot))
            return True

    # -- puts

    def claim(self, entries: Iterable[bytes]) -> list[Claim]:
        """First writer wins: only MINE may be written, and must end with `written`."""
        with self._lock:
            answer = []
            for entry in entries:
                if entry in self._slots or entry in self._writing:
                    answer.append(Claim.PRESENT)
                elif entry in self._leaving:
                    answer.append(Claim.LEAVING)
                else:
                    self._writing[entry] = 0
                    answer.append(Claim.MINE)
            return answer

    def move_claim(self, entry: bytes, to: bytes) -> Claim:
        """A claim and what is set aside for it pass to another entry, if that one may be claimed."""
        with self._lock:
            if to in self._slots or to in self._writing:
                return Claim.PRESENT
            if to in self._leaving:
                return Claim.LEAVING
            self._writing[to] = self._writing.pop(entry)
            return Claim.MINE

    def reserve(self, entry: bytes, nbytes: int, limit: int) -> bool:
        """Set bytes aside for a claimed entry, if all the bytes then stay within the limit."""
        with self._lock:
            if self._used() + self._reserved + nbytes > limit:
                return False
            self._writing[entry] += nbytes
            self._reserved += nbytes
            return True

    def written(self, entry: bytes, nbytes: int | None, used_ns: int = 0) -> None:
        """A claim ends: with a block of `nbytes` on disk, or (None) with nothing."""
        with self._lock:
            self._reserved -= self._writing.pop(entry, 0)
            if nbytes is not None and entry not in self._slots:
                self._insert(entry, nbytes, used_ns, self.names.folder(entry).cls, old=False)

    # -- ways out

    def take(self, entries: Iterable[bytes]) -> list[Victim]:
        """Take blocks out to remove their files. Held and `pin` ones stay."""
        with self._lock:
            victims = []
            for entry in entries:
                slot = self._slots.get(entry)
                if slot is not None and entry not in self._holds and self._lru.cls(slot) != PIN:
                    victims.append(self._take(slot))
            return victims

    def take_bad(self, entry: bytes, birth: int) -> list[Victim]:
        """Take out a block that was found corrupt or lost, whoever holds it; not one that came in its place since."""
        with self._lock:
            slot = self._slots.get(entry)
            return [] if slot is None or self._births[slot] != birth else [self._take(slot)]

    def take_oldest(self, nbytes: int, limit: int) -> list[Victim]:
        """At most `limit` blocks that nobody holds, in the order of eviction, until `nbytes` are reached."""
        with self._lock:
            slots: list[int] = []
            for cls in range(PIN):
                for slot in self._lru.oldest(cls):
                    if nbytes <= 0 or len(slots) == limit:
                        break
                    if self._entries[slot] not in self._holds:
                        slots.append(slot)
                        nbytes -= self._bytes[slot]
            return [self._take(slot, evicted=True) for slot in slots]

    def gone(self, victim: Victim) -> bool:
        """The file is removed. True if its directory holds no block any more."""
        with self._lock:
            self._leaving_bytes -= self._leaving.pop(victim.entry, 0)
            return self._shelves.get(self.names.shelf(victim.entry), 0) == 0

    def stays(self, victims: Sequence[Victim], *, pinned: bool = False, young: bool = False) -> None:
        """They could not be removed, or turned out to be pinned: back to their places, or (`young`) behind all others
        of their class.
        """
        with self._lock:
            for victim in reversed(victims):
                self._leaving_bytes -= self._leaving.pop(victim.entry, 0)
                if victim.entry not in self._slots:
                    cls = PIN if pinned else victim.cls
                    self._insert(victim.entry, victim.nbytes, victim.used_ns, cls, old=not young)

    # -- the disk's own words

    def load(self, found: Found) -> None:
        """Fill an empty index from a scan."""
        with self._lock:
            for path, size in found.extras.items():
                self._set_extra(path, size)
            first = len(self._entries)
            self._slots = dict(zip(found.entries, range(first, first + len(found.entries)), strict=True))
            self._entries += found.entries
            self._bytes += found.sizes
            self._used_at += found.uses
            self._births.extend(range(1, len(found.entries) + 1))
            self._born = len(found.entries)
            for shelf, blocks, nbytes in found.shelves:
                self._add_up(shelf, nbytes, blocks)
            # The shelves come in the order of the entries.
            folders = self.names.folders
            classes = bytearray().join(bytes([folders[shelf >> 8].cls]) * blocks for shelf, blocks, _ in found.shelves)
            for entry in found.pinned:
                classes[self._slots[entry] - first] = PIN
            order = sorted(range(first, first + len(found.uses)), key=self._used_at.__getitem__)
            self._lru.fill(order, classes, first)

    def measured(self, path: str, size: int, claimed: bytes = b"") -> None:
        """A folder or another file that is no block takes this many bytes now (0: it is gone). What it grew was set
        aside for the `claimed` entry, if there is one.
        """
        with self._lock:
            grown = size - self._extras.get(path, 0)
            self._set_extra(path, size)
            if claimed in self._writing and grown > 0:
                covered = min(grown, self._writing[claimed])
                self._writing[claimed] -= covered
                self._reserved -= covered

    def empty(self, number: int) -> bool:
        """True if a folder (by its number) holds no block."""
        with self._lock:
            return not self.names.folders[number].blocks

    def extras(self) -> list[str]:
        """The paths of all those."""
        with self._lock:
            return list(self._extras)

    def known_extra(self, path: str) -> bool:
        """True if the path's bytes are counted."""
        return path in self._extras

    def resized(self, entry: bytes, nbytes: int) -> None:
        """The file system changed its mind about a block's bytes (extent blocks come with the write-back)."""
        with self._lock:
            slot = self._slots.get(entry)
            if slot is not None:
                self._account(entry, nbytes - self._bytes[slot], 0)
                self._bytes[slot] = nbytes

    # -- under the lock

    def _used(self) -> int:
        return self._block_bytes + self._extra_bytes + self._leaving_bytes

    def _set_extra(self, path: str, size: int) -> None:
        self._extra_bytes += size - self._extras.pop(path, 0)
        if size:
            self._extras[path] = size

    def _account(self, entry: bytes, nbytes: int, blocks: int) -> None:
        self._add_up(self.names.shelf(entry), nbytes, blocks)

    def _add_up(self, shelf: int, nbytes: int, blocks: int) -> None:
        folder = self.names.folders[shelf >> 8]
        folder.blocks += blocks
        folder.nbytes += nbytes
        self._block_bytes += nbytes
        if blocks:
            count = self._shelves.get(shelf, 0) + blocks
            if count:
                self._shelves[shelf] = count
            else:
                del self._shelves[shelf]

    def _insert(self, entry: bytes, nbytes: int, used_ns: int, cls: int, *, old: bool) -> None:
        if self._vacant:
            slot = self._vacant.pop()
        else:
            slot = self._lru.grow()
            self._entries.append(b"")
            self._bytes.append(0)
            self._used_at.append(0)
            self._births.append(0)
        self._slots[entry] = slot
        self._entries[slot] = entry
        self._bytes[slot] = nbytes
        self._used_at[slot] = used_ns
        self._born = self._born % 0xFFFFFFFF + 1
        self._births[slot] = self._born
        (self._lru.prepend if old else self._lru.append)(slot, cls)
        self._account(entry, nbytes, 1)

    def _take(self, slot: int, *, evicted: bool = False) -> Victim:
        entry, nbytes = self._entries[slot], self._bytes[slot]
        victim = Victim(entry, nbytes, self._used_at[slot], self._lru.cls(slot), evicted)
        self._lru.remove(slot)
        del self._slots[entry]
        self._entries[slot] = b""
        self._vacant.append(slot)
        self._account(entry, -nbytes, -1)
        self._leaving[entry] = nbytes
        self._leaving_bytes += nbytes
        return victim
