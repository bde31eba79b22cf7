"""The RESP parser: the same commands however the stream is cut, and nothing that hurts whatever the bytes are."""

from __future__ import annotations

import itertools
import random
import tracemalloc
from collections.abc import Callable, Iterator, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstrata.engine.connection import Cut, NotYet
from kvstrata.engine.resp_parse import SMALL, Broken, Command, Limits, Wire

LIMITS = Limits(bulk=1 << 20)


class Bytes:
    """A stream in pieces. Between two of them there may be a pause, and then whoever does not wait gets NotYet."""

    def __init__(self, pieces: Sequence[bytes], pauses: bool = False) -> None:
        self.buffered = bytearray()
        self._pieces: Iterator[bytes] = iter(piece for piece in pieces if piece)
        self._pauses, self._paused = pauses, False

    def more(self, wait: bool) -> bool:
        self._paused = self._pauses and not self._paused
        if self._paused and not wait:
            raise NotYet
        piece = next(self._pieces, b"")
        self.buffered += piece
        return bool(piece)

    def read_into(self, view: memoryview) -> None:
        while len(self.buffered) < len(view):
            if not self.more(True):
                raise Cut
        view[:] = self.buffered[: len(view)]
        del self.buffered[: len(view)]

    def skip(self, size: int) -> None:
        while size:
            if not self.buffered and not self.more(True):
                raise Cut
            done = min(size, len(self.buffered))
            del self.buffered[:done]
            size -= done


class Kept(bytearray):
    """Takes a value in two pieces, and compares as its bytes."""

    def receive(self, read_into: Callable[[memoryview], None]) -> None:
        half = len(self) // 2
        with memoryview(self) as view, view[:half] as one, view[half:] as two:
            read_into(one)
            read_into(two)


def read_all(source: Bytes, limits: Limits = LIMITS, hand_out: bool = True) -> list[tuple[bytes, list[bytes], bool]]:
    """Every command until the stream ends."""
    wire, found = Wire(source), []

    def take(before: Sequence[bytes], size: int) -> Kept | None:
        assert SMALL < size <= limits.bulk
        return Kept(size) if hand_out and len(before) == 2 else None

    while True:
        try:
            command = wire.command(limits, take)
        except NotYet:
            continue
        if command is None:
            return found
        words = [bytes(arg) for arg in command.args]  # type: ignore[arg-type]
        found.append((command.name, words, command.skipped))


def encoded(words: Sequence[bytes]) -> bytes:
    return b"*%d\r\n" % len(words) + b"".join(b"$%d\r\n%b\r\n" % (len(word), word) for word in words)


def cut(data: bytes, places: Sequence[int]) -> list[bytes]:
    marks = [0, *sorted(place % (len(data) + 1) for place in places), len(data)]
    return [data[a:b] for a, b in itertools.pairwise(marks)]


short = st.binary(max_size=40)
value = st.one_of(
    short,
    st.builds(lambda seed, size: random.Random(seed).randbytes(size), st.integers(), st.integers(SMALL - 2, 3 * SMALL)),
)
commands = st.lists(
    st.builds(lambda name, key, *rest: [name, key, *rest], short, short, value, short), min_size=1, max_size=6
)
cuts = st.lists(st.integers(0, 1 << 20), max_size=30)


@settings(deadline=None, max_examples=200)
@given(sent=commands, places=cuts, pauses=st.booleans())
def test_however_the_stream_is_cut_the_commands_are_the_same(
    sent: list[list[bytes]], places: list[int], pauses: bool
) -> None:
    stream = b"".join(map(encoded, sent))
    expected = [(words[0].upper(), words[1:], False) for words in sent]
    assert read_all(Bytes(cut(stream, places), pauses)) == expected


@settings(deadline=None, max_examples=50)
@given(sent=st.lists(short, min_size=1, max_size=4), pauses=st.booleans())
def test_one_byte_at_a_time_is_enough(sent: list[bytes], pauses: bool) -> None:
    stream = encoded(sent)
    pieces = [stream[at : at + 1] for at in range(len(stream))]
    assert read_all(Bytes(pieces, pauses)) == [(sent[0].upper(), sent[1:], False)]


@settings(deadline=None, max_examples=100)
@given(sent=commands, places=cuts)
def test_a_skipped_argument_leaves_the_stream_in_step(sent: list[list[bytes]], places: list[int]) -> None:
    stream = b"".join(map(encoded, sent)) + b"PING\r\n"
    found = read_all(Bytes(cut(stream, places)), hand_out=False)
    assert found[-1] == (b"PING", [], False)
    assert [row[0] for row in found[:-1]] == [words[0].upper() for words in sent]
    assert [row[2] for row in found[:-1]] == [len(words[2]) > SMALL for words in sent]


fragments = st.lists(
    st.one_of(
        st.binary(max_size=20),
        st.sampled_from([b"*", b"$", b"\r\n", b"\n", b"-1", b"0", b"00", b"3", b"99999999999", b"2147483648",
                         b"*1\r\n$4\r\nPING\r\n", b"$5\r\n", b"*3\r\n$3\r\nSET\r\n$1\r\nk\r\n$99999\r\n", b"*65536\r\n",
                         b"*1048577\r\n", b"+OK\r\n"]),
    ),
    max_size=30,
)  # fmt: skip


@settings(deadline=None, max_examples=500)
@given(parts=fragments, places=cuts, pauses=st.booleans())
def test_any_bytes_end_as_commands_an_error_or_a_cut(parts: list[bytes], places: list[int], pauses: bool) -> None:
    stream = b"".join(parts)
    try:
        found: list[object] = list(read_all(Bytes(cut(stream, places), pauses)))
    except (Broken, Cut) as error:
        assert error is not None
    else:
        assert len(found) <= len(stream)


@pytest.mark.parametrize(
    "head",
    [b"*3\r\n$3\r\nSET\r\n$1\r\nk\r\n$536870912\r\n", b"*65536\r\n",
     b"*65536\r\n$3\r\nSET\r\n$16384\r\n", b"*2\r\n$536870912\r\n"],
)  # fmt: skip
def test_an_announced_length_costs_no_memory(head: bytes) -> None:
    asked = []

    def take(before: Sequence[bytes], size: int) -> Kept | None:
        asked.append(size)
        return None

    tracemalloc.start()
    try:
        with pytest.raises(Cut):
            Wire(Bytes([head])).command(Limits(), take)
        assert tracemalloc.get_traced_memory()[1] < 1 << 18
    finally:
        tracemalloc.stop()
    assert asked in ([], [512 << 20])


def test_small_arguments_together_are_bounded() -> None:
    words = [b"MGET", *[b"x" * SMALL] * 100, b"last"]
    source = Bytes([encoded(words), b"PING\r\n"])
    wire = Wire(source)
    found = wire.command(Limits(head=4 * SMALL), lambda before, size: None)
    assert found is not None
    assert found.skipped
    assert sum(map(len, found.args)) <= 4 * SMALL
    assert wire.command(LIMITS, lambda before, size: None) == Command(b"PING", [])


def test_empty_arguments_are_not_free_either() -> None:
    source = Bytes([encoded([b""] * 60_000)])
    found = Wire(source).command(Limits(head=SMALL), lambda before, size: None)
    assert found is not None
    assert found.skipped


def test_who_leaves_a_little_of_a_command_holds_no_thread_and_who_leaves_more_is_waited_for() -> None:
    def read(pieces: list[bytes]) -> Command | None:
        return Wire(Bytes(pieces, pauses=True)).command(LIMITS, lambda before, size: Kept(size))

    whole = encoded([b"SET", b"k", b"v"])
    with pytest.raises(NotYet):
        read([whole[:7], whole[7:]])
    head, rest = encoded([b"SET", b"k", bytes(SMALL + 1), b"EX", b"9"]).split(b"\0", 1)

    class Patient(Bytes):
        def more(self, wait: bool) -> bool:
            assert wait
            return super().more(wait)

    source = Patient([rest[:100], rest[100:-3], rest[-3:]], pauses=True)
    source.buffered += head + b"\0"
    found = Wire(source).command(LIMITS, lambda before, size: Kept(size))
    assert found is not None
    assert found.args[2:] == [b"EX", b"9"]


@pytest.mark.parametrize(
    ("stream", "text"),
    [
        (b"*x\r\n", "multibulk length"), (b"*65537\r\n", "multibulk length"), (b"*1\r\n$x\r\n", "bulk length"),
        (b"*1\r\n$-1\r\n", "bulk length"), (b"*1\r\n$1048577\r\n", "bulk length"), (b"*1\r\n:1\r\n", "expected"),
        (b"*1\r\n$01\r\na\r\n", "bulk length"), (b"*1\r\n$1\r\nab\r\n", "announced length"),
        (b"*+1\r\n", "multibulk length"), (b"x" * 20_000, "too big"), (b"*" + b"1" * 20_000, "too big"),
        (b"POST /kv/a HTTP/1.1\r\n", "HTTP"), (b"GET /kv/a HTTP/1.1\r\n", "HTTP"), (b"Host: here\r\n", "HTTP"),
    ],
)  # fmt: skip
def test_what_is_no_resp_is_refused_with_a_reason(stream: bytes, text: str) -> None:
    with pytest.raises(Broken, match=text):
        read_all(Bytes([stream]))


@pytest.mark.parametrize("stream", [b"*", b"*1", b"*1\r\n", b"*1\r\n$4\r\nPI", b"*1\r\n$4\r\nPING", b"PING"])
def test_a_stream_that_ends_inside_a_command_is_a_cut(stream: bytes) -> None:
    with pytest.raises(Cut):
        read_all(Bytes([stream]))


def test_inline_commands_and_empty_ones() -> None:
    stream = b"\r\n*0\r\n*-1\r\nping\r\n  echo   hello \nset a b\r\n"
    assert read_all(Bytes([stream])) == [
        (b"PING", [], False), (b"ECHO", [b"hello"], False), (b"SET", [b"a", b"b"], False),
    ]  # fmt: skip
