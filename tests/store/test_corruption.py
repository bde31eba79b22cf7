"""Damage of every kind at every place: the block is refused for the right reason, and wrong bytes are never served."""

import os
import shutil
import struct
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvstrata.store.blockfile import UNLIMITED, BlockIO
from kvstrata.store.codecs import codec as find_codec
from kvstrata.store.format import HEADER_BYTES, BadBlock
from kvstrata.store.keys import BlockKey
from tests.store.blocks import CODECS, KEY, OTHER, drop_pages, forge, outcome, patch, put, smooth

pytestmark = pytest.mark.usefixtures("reader")
SUB = 64 << 10
DATA = smooth(4 * SUB - 77)
TABLE = 1096
FIELDS = {
    "magic": (0, "magic"),
    "magic's end": (7, "magic"),
    "format": (8, "format"),
    "format, high byte": (9, "format"),
    "codec": (10, "header_crc"),
    "item size": (11, "header_crc"),
    "sub-block size": (12, "header_crc"),
    "sub-block count": (16, "header_crc"),
    "raw length": (20, "header_crc"),
    "stored length": (28, "header_crc"),
    "digest": (36, "header_crc"),
    "key length": (68, "header_crc"),
    "key": (70, "header_crc"),
    "key's room": (1000, "header_crc"),
    "table": (TABLE, "header_crc"),
    "table, a checksum": (TABLE + 4, "header_crc"),
    "table, the last row": (TABLE + 24, "header_crc"),
    "unused": (3000, "header_crc"),
    "header's checksum": (4092, "header_crc"),
    "payload": (4096, "payload_crc"),
    "payload, in the middle": (HEADER_BYTES + 40_000, "payload_crc"),
    "payload, last byte": (-1, "payload_crc"),
}


@dataclass
class Stored:
    io: BlockIO
    file: Path

    @property
    def outcome(self) -> str:
        hot = outcome(self.io, DATA)
        drop_pages(self.file)
        assert outcome(self.io, DATA) == hot
        return hot


@pytest.fixture(params=[(codec, direct) for codec in CODECS for direct in (False, True)], ids=str)
def block(request: pytest.FixtureRequest, tmp_path: Path) -> Stored:
    codec, direct = request.param
    io = BlockIO(tmp_path, codec=codec, direct=direct, sub_bytes=SUB)
    stored = Stored(io, put(io, DATA))
    assert stored.outcome == "good"
    assert io.check(stored.file).codec == codec
    return stored


@pytest.mark.parametrize("bit", [0, 7])
@pytest.mark.parametrize("field", FIELDS)
def test_a_flipped_bit_is_found(block: Stored, field: str, bit: int) -> None:
    offset, reason = FIELDS[field]
    patch(block.file, offset, bytes([block.file.read_bytes()[offset] ^ 1 << bit]))
    assert block.outcome == reason


@pytest.mark.parametrize("value", [b"\0", b"\xff"])
@pytest.mark.parametrize(
    ("offset", "size", "reason"),
    [
        (0, 4096, "magic"),
        (0, 512, "magic"),
        (1024, 512, "header_crc"),
        (3584, 512, "header_crc"),
        (4096, 4096, "payload_crc"),
        (8192, 512, "payload_crc"),
        (-512, 512, "payload_crc"),
    ],
)
def test_a_wiped_sector_is_found(block: Stored, offset: int, size: int, reason: str, value: bytes) -> None:
    patch(block.file, offset, value * size)
    assert block.outcome == reason


@pytest.mark.parametrize("length", [0, 1, 100, 4095, 4096, 4097, 8192, -65536, -4096, -1])
def test_a_cut_file_is_found(block: Stored, length: int) -> None:
    os.truncate(block.file, length if length >= 0 else block.file.stat().st_size + length)
    assert block.outcome == "truncated"


@pytest.mark.parametrize("more", [1, 511, 4096, 1 << 20])
def test_a_grown_file_is_found(block: Stored, more: int) -> None:
    os.truncate(block.file, block.file.stat().st_size + more)
    assert block.outcome == "length"


def test_two_swapped_files_are_found(block: Stored) -> None:
    other = put(block.io, DATA, OTHER)
    spare = block.file.with_name("spare")
    block.file.rename(spare)
    other.rename(block.file)
    spare.rename(other)
    assert block.outcome == "key"
    assert outcome(block.io, DATA, OTHER) == "key"


@pytest.mark.parametrize(
    "moved",
    [
        OTHER,
        BlockKey(KEY.namespace, KEY.salt, KEY.chunk, KEY.rank + 1, KEY.group),
        BlockKey(KEY.namespace, KEY.salt, KEY.chunk, KEY.rank, KEY.group + 1),
        BlockKey(KEY.namespace, "", KEY.chunk, KEY.rank, KEY.group),
        BlockKey("another model", KEY.salt, KEY.chunk, KEY.rank, KEY.group),
    ],
    ids=["chunk", "rank", "group", "salt", "namespace"],
)
def test_a_file_under_another_name_is_found(block: Stored, moved: BlockKey) -> None:
    place = block.file.parents[3] / moved.path
    place.parent.mkdir(parents=True, exist_ok=True)
    shutil.copy(block.file, place)
    assert outcome(block.io, DATA, moved) == "key"
    with pytest.raises(BadBlock, match="key"):
        block.io.check(place)
    assert block.outcome == "good"


def test_halves_of_two_blocks_are_no_block(block: Stored) -> None:
    other = put(block.io, smooth(len(DATA)), BlockKey("m", "", b"other"))
    size = min(block.file.stat().st_size, other.stat().st_size)
    patch(block.file, size // 2, other.read_bytes()[size // 2 : size])
    assert block.outcome == "payload_crc"


# --- headers that are wrong and have a checksum that fits


def _u(size: int, value: int) -> bytes:
    return value.to_bytes(size, "little")


FORGED = {
    "version 0": (8, _u(2, 0), "format"),
    "version 2": (8, _u(2, 2), "format"),
    "version 65535": (8, _u(2, 65535), "format"),
    "codec 3": (10, _u(1, 3), "codec"),
    "codec 255": (10, _u(1, 255), "codec"),
    "item size 0": (11, _u(1, 0), "length"),
    "sub-blocks of 0": (12, _u(4, 0), "length"),
    "sub-blocks of 3000": (12, _u(4, 3000), "length"),
    "sub-blocks of 2 KiB": (12, _u(4, 2048), "length"),
    "sub-blocks of 128 KiB": (12, _u(4, 128 << 10), "length"),
    "sub-blocks of 2 GiB": (12, _u(4, 2 << 30), "length"),
    "no sub-blocks": (16, _u(4, 0), "length"),
    "a sub-block more": (16, _u(4, 5), "length"),
    "2**32 - 1 sub-blocks": (16, _u(4, 2**32 - 1), "length"),
    "raw length 0": (20, _u(8, 0), "length"),
    "raw length - 1": (20, _u(8, len(DATA) - 1), "length"),
    "raw length + 1": (20, _u(8, len(DATA) + 1), "length"),
    "raw length 2**63": (20, _u(8, 1 << 63), "length"),
    "raw length 2**64 - 1": (20, _u(8, 2**64 - 1), "length"),
    "stored length 0": (28, _u(8, 0), "length"),
    "stored length 2**64 - 1": (28, _u(8, 2**64 - 1), "length"),
    "another digest": (36, bytes(32), "key"),
    "a key that is cut": (68, _u(2, 10), "key"),
    "a key of 1025 bytes": (68, _u(2, 1025), "length"),
    "a key of 65535 bytes": (68, _u(2, 65535), "length"),
    "another key": (74, b"another", "key"),
    "an empty sub-block": (TABLE, _u(4, 0), "length"),
    "a sub-block of 4 GiB": (TABLE, _u(4, 2**32 - 1), "length"),
    "a sub-block too long": (TABLE, _u(4, SUB + 1), "length"),
    "another checksum": (TABLE + 4, _u(4, 1), "payload_crc"),
    "another last checksum": (TABLE + 28, _u(4, 1), "payload_crc"),
}


@pytest.mark.parametrize("what", FORGED)
def test_a_header_that_disagrees_with_itself_is_refused(block: Stored, what: str) -> None:
    offset, value, reason = FORGED[what]
    forge(block.file, offset, value)
    got = outcome_of_read(block) if what.startswith("raw length") else block.outcome
    assert got == reason


def outcome_of_read(block: Stored) -> str:
    """For headers that are wrong only for somebody who knows the length: an encoded block may have been shorter."""
    with pytest.raises(BadBlock) as caught, block.io.open(KEY) as opened:
        opened.read(0, opened.header.sub_count, memoryview(bytearray(len(DATA))), UNLIMITED)
    return caught.value.reason


def test_lengths_moved_from_one_sub_block_to_the_next_are_refused(block: Stored) -> None:
    rows = struct.unpack_from("<4I", block.file.read_bytes(), TABLE)
    forge(block.file, TABLE, struct.pack("<4I", rows[0] - 1, rows[1], rows[2] + 1, rows[3]))
    assert block.outcome in ("length", "payload_crc")


@pytest.mark.parametrize("codec", ["lz4", "zstd"])
@pytest.mark.parametrize("of", [SUB - 4096, SUB + 4096, 2 * SUB, 0])
def test_a_chunk_of_another_length_than_its_place_has_is_refused(codec: str, of: int, tmp_path: Path) -> None:
    io = BlockIO(tmp_path, codec=codec, sub_bytes=SUB)
    file = put(io, bytes(SUB))
    chunk = find_codec(codec).encode(memoryview(bytes(of)), 2) or b"\2\1\1\2" + bytes(12)
    os.truncate(file, HEADER_BYTES + len(chunk))
    patch(file, HEADER_BYTES, chunk)
    forge(file, 28, _u(8, len(chunk)))
    forge(file, TABLE, _u(4, len(chunk)) + _u(4, zlib.crc32(chunk)))
    assert outcome(io, bytes(SUB)) == "decode"


@pytest.mark.parametrize("codec", ["lz4", "zstd"])
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=50)
@given(data=st.data())
def test_a_chunk_that_is_damaged_under_a_good_checksum_is_never_more_than_refused(
    codec: str, tmp_path: Path, data: st.DataObject
) -> None:
    io = BlockIO(tmp_path, codec=codec, sub_bytes=SUB)
    io.remove(KEY)
    file = put(io, DATA[:SUB])
    chunk = bytearray(file.read_bytes()[HEADER_BYTES:])
    for _ in range(data.draw(st.integers(1, 4))):
        chunk[data.draw(st.integers(0, 40) | st.integers(0, len(chunk) - 1))] ^= data.draw(st.integers(1, 255))
    patch(file, HEADER_BYTES, bytes(chunk))
    forge(file, TABLE + 4, _u(4, zlib.crc32(chunk)))
    around = bytearray(b"\xa5" * (SUB + 4096))
    with io.open(KEY) as opened:
        try:
            opened.read(0, 1, memoryview(around)[:SUB], UNLIMITED)
        except BadBlock as error:
            assert error.reason == "decode"
    assert around[SUB:] == b"\xa5" * 4096


Damage = Callable[[bytearray], bytes]


@st.composite
def damages(draw: st.DrawFn) -> Damage:
    kind = draw(st.sampled_from(["flip", "zero", "copy", "cut", "insert", "grow"]))
    where, to = draw(st.floats(0, 0.999999)), draw(st.floats(0, 0.999999))
    size, value = draw(st.sampled_from([1, 2, 7, 512, 4096])), draw(st.integers(1, 255))

    def damage(content: bytearray) -> bytes:
        at, other = int(where * len(content)), int(to * len(content))
        if kind == "flip":
            content[at] ^= value
        elif kind == "zero":
            content[at : at + size] = bytes(len(content[at : at + size]))
        elif kind == "copy":
            content[at : at + size] = content[other : other + len(content[at : at + size])].ljust(
                len(content[at : at + size]), b"\0"
            )
        elif kind == "cut":
            del content[at : at + size]
        elif kind == "insert":
            content[at:at] = bytes([value]) * size
        else:
            content += bytes([value]) * size
        return bytes(content)

    return damage


@pytest.mark.parametrize("codec", CODECS)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=150)
@given(damage=st.lists(damages(), min_size=1, max_size=3))
def test_any_damage_is_a_refusal_or_did_not_change_the_block(codec: str, tmp_path: Path, damage: list[Damage]) -> None:
    io = BlockIO(tmp_path, codec=codec, sub_bytes=4096)
    file = tmp_path / KEY.path
    content = GOOD.get(codec)
    if content is None:
        content = GOOD[codec] = put(io, DATA[:20_000]).read_bytes()
    changed = content
    for step in damage:
        changed = step(bytearray(changed)) if changed else changed
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(changed)
    assert (outcome(io, DATA[:20_000]) == "good") == (changed == content)


GOOD: dict[str, bytes] = {}
