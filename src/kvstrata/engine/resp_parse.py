"""RESP commands out of a stream of bytes.

Nothing is allocated because a length was announced: small arguments are copied out of bytes that have arrived, and
whoever wants a large one hands out the buffer for it, or has it skipped. However the stream is cut, the commands are
the same.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

from kvstrata.engine.connection import Cut

__all__ = ["SMALL", "Broken", "Command", "Limits", "Source", "Take", "Value", "Wire"]

SMALL = 16 << 10
"""Bytes up to which an argument is copied; above it `Take` is asked. A peer that pauses may have left us as much of a
command as this without a thread that waits for the rest."""


class Broken(Exception):
    """These bytes are no RESP. The text is for the peer; after it the connection must be closed."""


@dataclass(frozen=True, slots=True)
class Limits:
    """`args`: how many of one command. `head`: bytes of its small arguments together. `bulk`: bytes of the largest one.
    `line`: bytes of an inline command. `patient`: what is beyond `head` is skipped, else the connection ends."""

    args: int = 65_536
    head: int = 1 << 20
    bulk: int = 512 << 20
    line: int = 16 << 10
    patient: bool = True

    @classmethod
    def of_a_stranger(cls) -> Limits:
        """For whoever has not said a password yet."""
        return cls(args=10, head=SMALL, bulk=SMALL, patient=False)


class Source(Protocol):
    """Where the bytes come from."""

    @property
    def buffered(self) -> bytearray:
        """Bytes that have arrived. The reader removes what it used from the front."""

    def more(self, wait: bool) -> bool:
        """Make `buffered` grow; False: there will be no more. Without `wait` it may raise NotYet instead."""

    def read_into(self, view: memoryview) -> None:
        """Fill all of it with the next bytes, `buffered` first. Raises Cut."""

    def skip(self, size: int) -> None:
        """Read so many bytes and forget them. Raises Cut."""


class Value(Protocol):
    """Where the bytes of a large argument go."""

    def receive(self, read_into: Callable[[memoryview], None]) -> None:
        """Take all of the announced bytes, by as many calls of `read_into` as it likes. Raises Cut."""


Take = Callable[[Sequence[bytes], int], Value | None]
"""(arguments before this one, its announced length > SMALL) -> who takes its bytes; None: skip them."""


@dataclass(slots=True)
class Command:
    """`args` without the name. A skipped argument is an empty one, and `skipped` says that there was one."""

    name: bytes
    args: list[bytes | Value]
    skipped: bool = False

    def words(self) -> list[bytes]:
        """The arguments as bytes; for commands that want no large one."""
        return [arg if isinstance(arg, bytes) else b"" for arg in self.args]


_T = TypeVar("_T")
_Needs = Generator[bool, None, _T]
"""Yields when it needs more bytes: whether to wait for them, whatever it takes."""


class Wire:
    """Reads commands from a source."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self._reading: _Needs[Command | None] | None = None
        self._ended = self._inside = False

    @property
    def inside(self) -> bool:
        """A part of a command has been taken out of `buffered`, and its end has not come yet."""
        return self._inside

    def command(self, limits: Limits, take: Take) -> Command | None:
        """The next command, None where the stream ends before one begins.

        Raises Broken, Cut, and what the source raises. After NotYet the next call goes on where this one stopped, with
        the limits of this one.
        """
        reading = self._reading or self._command(limits, take)
        self._reading = None
        while True:
            try:
                wait = next(reading)
            except StopIteration as done:
                found: Command | None = done.value
                self._inside = False
                return found
            self._reading = reading
            self._ended = not self._source.more(wait)
            self._reading = None

    def _command(self, limits: Limits, take: Take) -> _Needs[Command | None]:
        while True:
            line = yield from self._line(limits.line, first=True)
            if line is None:
                return None
            if not line.startswith(b"*"):
                words = _inline(line, limits)
                if words:
                    return Command(words[0].upper(), [*words[1:]])
                continue
            count = _number(line[1:])
            if count is None or count > limits.args:
                raise Broken("invalid multibulk length")
            if count > 0:
                self._inside = True
                return (yield from self._arguments(count, limits, take))

    def _arguments(self, count: int, limits: Limits, take: Take) -> _Needs[Command]:
        before: list[bytes] = []
        found = Command(b"", [])
        used, wait = 0, False
        for _ in range(count):
            size = yield from self._size(limits, wait)
            arg: bytes | Value = b""
            if size <= SMALL and used + size <= limits.head:
                used += size
                wait = wait or used > SMALL
                arg = yield from self._small(size, wait)
            elif not limits.patient:  # waiting for the rest would hold a thread
                raise Broken("too much before AUTH")
            else:
                wait = True  # a command that holds a buffer is not left alone with it
                value = take(before, size) if size > SMALL else None
                if value is None:
                    self._source.skip(size)
                    found.skipped = True
                else:
                    value.receive(self._source.read_into)
                    arg = value
            if (yield from self._small(2, wait)) != b"\r\n":
                raise Broken("an argument is longer than its announced length")
            found.args.append(arg)
            before.append(arg if isinstance(arg, bytes) else b"")
            used += _OVERHEAD
        found.args.pop(0)
        found.name = before[0].upper()
        return found

    def _size(self, limits: Limits, wait: bool) -> _Needs[int]:
        line = (yield from self._line(limits.line, wait)) or b""
        if not line.startswith(b"$"):
            raise Broken(f"expected '$', got '{line[:1].decode('ascii', 'backslashreplace')}'")
        size = _number(line[1:])
        if size is None or size < 0 or size > limits.bulk:
            raise Broken("invalid bulk length")
        return size

    def _line(self, limit: int, wait: bool = False, *, first: bool = False) -> _Needs[bytes | None]:
        """Up to the next line feed, without it and a carriage return before it. None: the end, if `first`."""
        data, seen = self._source.buffered, 0
        while (end := data.find(b"\n", seen)) < 0:
            seen = len(data)
            if seen > limit:
                raise Broken("too big inline request")
            yield wait
            if self._ended:
                if first and not data:
                    return None
                raise Cut
        if end > limit:
            raise Broken("too big inline request")
        line = bytes(data[: end - 1 if end and data[end - 1] == 13 else end])
        del data[: end + 1]
        return line

    def _small(self, size: int, wait: bool) -> _Needs[bytes]:
        data = self._source.buffered
        while len(data) < size:
            yield wait
            if self._ended:
                raise Cut
        found = bytes(data[:size])
        del data[:size]
        return found


#: What an argument costs beside its bytes; without it 65,536 empty ones would count as nothing.
_OVERHEAD = 64


def _number(digits: bytes) -> int | None:
    """A decimal number as Redis writes them, None for anything else."""
    bare = digits[1:] if digits.startswith(b"-") else digits
    if not bare.isdigit() or len(bare) > 10 or (len(bare) > 1 and bare.startswith(b"0")):
        return None
    return int(digits)


def _inline(line: bytes, limits: Limits) -> list[bytes]:
    words = line.split()
    # A browser that was told to talk to this port must not get one word of its body executed.
    if words and (words[0].upper() in (b"POST", b"PUT", b"HOST:") or words[-1].startswith(b"HTTP/")):
        raise Broken("this port speaks RESP, not HTTP")
    if len(words) > limits.args:
        raise Broken("too many words in an inline request")
    return words
