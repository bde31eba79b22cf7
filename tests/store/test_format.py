"""The header page: what is packed comes back, and what docs/format.md says about it is so."""

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstrata.store import format as form
from kvstrata.store.format import (
    HEADER_BYTES,
    MOST_SUBS,
    RAW_LIMIT,
    BadBlock,
    fitting_sub_bytes,
    pack_header,
    parse_header,
)
from kvstrata.store.keys import BlockKey
from tests.store.blocks import CODECS, KEY, OTHER
from tests.store.test_keys import KEYS

DOCUMENT = Path(__file__).parents[2] / "docs" / "format.md"


@st.composite
def blocks(draw: st.DrawFn) -> tuple[str, int, int, int, list[int], list[int]]:
    codec = draw(st.sampled_from(CODECS))
    sub_bytes = 1 << draw(st.integers(12, 26))
    raw_len = draw(st.integers(0, MOST_SUBS * sub_bytes))
    count = -(-raw_len // sub_bytes)
    lengths = [min(sub_bytes, raw_len - index * sub_bytes) for index in range(count)]
    if codec != "raw":
        lengths = [draw(st.integers(1, length)) for length in lengths[:5]] + lengths[5:]
    crcs = draw(st.lists(st.integers(0, 2**32 - 1), min_size=min(count, 5), max_size=min(count, 5)))
    return codec, draw(st.integers(1, 255)), sub_bytes, raw_len, lengths, crcs + [7] * (count - len(crcs))


@given(KEYS, blocks())
def test_a_packed_header_comes_back(key: BlockKey, block: tuple[str, int, int, int, list[int], list[int]]) -> None:
    page = pack_header(key, *block)
    codec, itemsize, sub_bytes, raw_len, lengths, crcs = block
    assert len(page) == HEADER_BYTES
    for asked in (key, None):
        header = parse_header(page, asked, HEADER_BYTES + sum(lengths))
        assert (header.codec, header.itemsize, header.sub_bytes, header.raw_len) == (
            codec,
            itemsize,
            sub_bytes,
            raw_len,
        )
        assert (list(header.lengths), list(header.crcs)) == (lengths, crcs)
        assert (header.stored_len, header.key_digest) == (sum(lengths), key.digest)
        assert list(header.starts) == [HEADER_BYTES + sum(lengths[:index]) for index in range(len(lengths))]
        ranges = [header.raw_range(sub) for sub in range(header.sub_count)]
        assert [0, *(end for _, end in ranges)] == [*(start for start, _ in ranges), raw_len]
    assert header.key == (key if len(key.encode()) <= 1024 else None)


def test_a_key_too_long_for_the_page_is_known_by_its_digest() -> None:
    key = BlockKey("n" * 2000, "", b"c")
    page = pack_header(key, "raw", 1, 4096, 0, [], [])
    assert parse_header(page, None, HEADER_BYTES).key is None
    assert parse_header(page, key, HEADER_BYTES).key == key
    with pytest.raises(BadBlock, match="key"):
        parse_header(page, OTHER, HEADER_BYTES)


def test_sub_blocks_grow_until_the_table_holds_them() -> None:
    assert fitting_sub_bytes(3 << 20, 1 << 20) == 1 << 20
    assert fitting_sub_bytes(MOST_SUBS << 20, 1 << 20) == 1 << 20
    assert fitting_sub_bytes((MOST_SUBS << 20) + 1, 1 << 20) == 2 << 20
    assert fitting_sub_bytes(RAW_LIMIT, 4096) == form.SUB_LIMIT
    with pytest.raises(ValueError, match="needed"):
        fitting_sub_bytes(RAW_LIMIT + 1, 1 << 20)


def test_the_document_gives_the_offsets_that_are_written() -> None:
    rows = re.findall(r"^\| (\d+) \| (\d+)(?: each)? \| ([^|]+) \|", DOCUMENT.read_text(), re.M)
    offsets = {text.split(":")[0].split(",")[0].split(";")[0].split("`")[0].strip(): int(at) for at, _, text in rows}
    page = pack_header(KEY, "zstd", 2, 1 << 20, (2 << 20) - 5, [11, 13], [0x01020304, 0x05060708])
    encoded = KEY.encode()

    def at(field: str, size: int) -> int:
        return int.from_bytes(page[offsets[field] : offsets[field] + size], "little")

    assert page[offsets["magic"] :].startswith(b"KVSTRATA")
    assert (at("format", 2), at("codec", 1), at("item size", 1)) == (1, 2, 2)
    assert (at("sub-block size in raw bytes", 4), at("sub-block count", 4)) == (1 << 20, 2)
    assert (at("raw length", 8), at("stored length", 8)) == ((2 << 20) - 5, 24)
    assert page[offsets["SHA-256 of the encoded key"] :].startswith(KEY.digest)
    assert at("key length", 2) == len(encoded) and page[offsets["encoded key"] :].startswith(encoded)
    row = offsets["a row a sub-block"]
    assert page[row : row + 16] == bytes.fromhex("0b000000040302010d00000008070605")


def test_the_document_names_every_reason() -> None:
    said = set(re.findall(r"`([a-z_]+)`", DOCUMENT.read_text()))
    source = "".join(path.read_text() for path in Path(form.__file__).parent.glob("*.py"))
    assert set(re.findall(r'BadBlock\(\s*"([a-z_]+)"', source)) | {"truncated"} <= said
