"""The header page of a block: packed and parsed as docs/format.md says; nothing in it is believed unchecked."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from hashlib import sha256
from itertools import accumulate
from typing import NamedTuple

from kvstrata.store.checksum import crc32
from kvstrata.store.keys import BlockKey

__all__ = [
    "CODEC_IDS",
    "FORMAT",
    "HEADER_BYTES",
    "LONGEST_KEY",
    "MOST_SUBS",
    "RAW_LIMIT",
    "SUB_LIMIT",
    "SUB_SMALLEST",
    "BadBlock",
    "Header",
    "fitting_sub_bytes",
    "pack_header",
    "parse_header",
]

FORMAT = 1
HEADER_BYTES = 4096
"""The header, and where the payload begins."""
LONGEST_KEY = 1024
CODEC_IDS = {"raw": 0, "lz4": 1, "zstd": 2}
SUB_SMALLEST = 4096
SUB_LIMIT = 64 << 20
"""The largest sub-block: what a reader has to hold at once, whatever a header says."""

_MAGIC = b"KVSTRATA"
_START = struct.Struct("<8sHBBIIQQ32sH")
_KEY_AT = _START.size
_TABLE_AT = 1096
_CRC_AT = HEADER_BYTES - 4
_ROW = 8
MOST_SUBS = (_CRC_AT - _TABLE_AT) // _ROW
RAW_LIMIT = MOST_SUBS * SUB_LIMIT
Page = bytes | bytearray | memoryview
_CODEC_NAMES = {number: name for name, number in CODEC_IDS.items()}


class BadBlock(Exception):
    """A file that is not the block asked for. `reason`: magic, format, header_crc, codec, key, length, truncated,
    payload_crc or decode, as docs/format.md says.
    """

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason = reason
        self.detail = detail


class Header(NamedTuple):
    """A header that agrees with itself and with the size of its file. Lengths in bytes.

    `lengths`, `crcs`: of the stored bytes, a sub-block each; `starts`: where each begins in the file;
    `key`: None where it was too long for the page.
    """

    codec: str
    itemsize: int
    sub_bytes: int
    raw_len: int
    stored_len: int
    key_digest: bytes
    key: BlockKey | None
    lengths: tuple[int, ...]
    crcs: tuple[int, ...]
    starts: tuple[int, ...]

    @property
    def sub_count(self) -> int:
        """How many sub-blocks."""
        return len(self.lengths)

    def raw_range(self, sub: int) -> tuple[int, int]:
        """Where a sub-block's bytes belong in the whole raw block."""
        start = sub * self.sub_bytes
        return start, min(start + self.sub_bytes, self.raw_len)


def fitting_sub_bytes(raw_len: int, sub_bytes: int) -> int:
    """`sub_bytes`, doubled until the table holds a block of `raw_len` bytes. ValueError beyond RAW_LIMIT."""
    if raw_len > RAW_LIMIT:
        raise ValueError(f"found: a block of {raw_len} bytes; needed: {RAW_LIMIT} at most; to fix: smaller chunks")
    while raw_len > sub_bytes * MOST_SUBS:
        sub_bytes *= 2
    return sub_bytes


def pack_header(
    key: BlockKey, codec: str, itemsize: int, sub_bytes: int, raw_len: int, lengths: Sequence[int], crcs: Sequence[int]
) -> bytes:
    """The page. `lengths`, `crcs`: of the stored bytes of each sub-block. Sizes that do not fit raise struct.error."""
    encoded = key.encode()
    kept = encoded if len(encoded) <= LONGEST_KEY else b""
    page = bytearray(HEADER_BYTES)
    _START.pack_into(
        page, 0, _MAGIC, FORMAT, CODEC_IDS[codec], itemsize, sub_bytes, len(lengths), raw_len, sum(lengths),
        sha256(encoded).digest(), len(kept),
    )  # fmt: skip
    page[_KEY_AT : _KEY_AT + len(kept)] = kept
    rows = [number for row in zip(lengths, crcs, strict=True) for number in row]
    struct.pack_into(f"<{len(rows)}I", page, _TABLE_AT, *rows)
    struct.pack_into("<I", page, _CRC_AT, crc32(memoryview(page)[:_CRC_AT]))
    return bytes(page)


def parse_header(page: Page, key: BlockKey | None, file_size: int) -> Header:
    """Check the first 4096 bytes of a file of `file_size` bytes against themselves and, unless None, against `key`.

    Raises BadBlock. Reserves no more than the table's rows, of which there are at most MOST_SUBS.
    """
    if len(page) < HEADER_BYTES or file_size < HEADER_BYTES:
        raise BadBlock("truncated", f"{min(len(page), file_size)} bytes where the header has {HEADER_BYTES}")
    magic, version, codec_id, itemsize, sub_bytes, sub_count, raw_len, stored_len, digest, key_len = _START.unpack_from(
        page
    )
    if magic != _MAGIC:
        raise BadBlock("magic", f"begins with {magic!r}")
    if version != FORMAT:
        raise BadBlock("format", f"version {version}, not {FORMAT}")
    if struct.unpack_from("<I", page, _CRC_AT)[0] != crc32(memoryview(page)[:_CRC_AT]):
        raise BadBlock("header_crc", "the header's checksum does not fit")
    codec = _CODEC_NAMES.get(codec_id)
    if codec is None:
        raise BadBlock("codec", f"codec number {codec_id}")
    found_key = _key_of(page, digest, key_len, key)
    if not itemsize:
        raise BadBlock("length", "item size 0")
    _check_division(sub_bytes, sub_count, raw_len)
    numbers = struct.unpack_from(f"<{2 * sub_count}I", page, _TABLE_AT)
    lengths = numbers[::2]
    _check_table(lengths, codec, sub_bytes, raw_len, stored_len)
    if file_size != HEADER_BYTES + stored_len:
        short = file_size < HEADER_BYTES + stored_len
        raise BadBlock(
            "truncated" if short else "length", f"a file of {file_size} bytes, not {HEADER_BYTES + stored_len}"
        )
    starts = tuple(accumulate(lengths[:-1], initial=HEADER_BYTES)) if lengths else ()
    return Header(codec, itemsize, sub_bytes, raw_len, stored_len, digest, found_key, lengths, numbers[1::2], starts)


def _key_of(page: Page, digest: bytes, key_len: int, wanted: BlockKey | None) -> BlockKey | None:
    """The key in the page, proved to be the digest's; `wanted` where the page does not hold it."""
    if key_len > LONGEST_KEY:
        raise BadBlock("length", f"a key of {key_len} bytes")
    encoded = bytes(page[_KEY_AT : _KEY_AT + key_len])
    if wanted is not None:
        expected = wanted.encode()
        if sha256(expected).digest() != digest or (key_len and encoded != expected):
            raise BadBlock("key", "the block of another key")
        return wanted
    if not key_len:
        return None
    if sha256(encoded).digest() != digest:
        raise BadBlock("key", "the key and its digest differ")
    try:
        return BlockKey.decode(encoded)
    except ValueError as error:
        raise BadBlock("key", str(error)) from None


def _check_division(sub_bytes: int, sub_count: int, raw_len: int) -> None:
    if sub_bytes & (sub_bytes - 1) or not SUB_SMALLEST <= sub_bytes <= SUB_LIMIT:
        raise BadBlock("length", f"sub-blocks of {sub_bytes} bytes")
    if sub_count > MOST_SUBS or sub_count != -(-raw_len // sub_bytes):
        raise BadBlock("length", f"{sub_count} sub-blocks of {sub_bytes} bytes for {raw_len} bytes")


def _check_table(lengths: tuple[int, ...], codec: str, sub_bytes: int, raw_len: int, stored_len: int) -> None:
    if sum(lengths) != stored_len:
        raise BadBlock("length", f"sub-blocks of {sum(lengths)} bytes in a payload of {stored_len}")
    if codec == "raw":
        # Each row is compared, not only the sum: the rows say where a sub-block begins.
        good = stored_len == raw_len and all(length == sub_bytes for length in lengths[:-1])
    else:
        limits = [sub_bytes] * len(lengths)
        if limits:
            limits[-1] = raw_len - sub_bytes * (len(lengths) - 1)
        good = all(0 < length <= limit for length, limit in zip(lengths, limits, strict=True))
    if not good:
        raise BadBlock("length", f"stored lengths that no {codec} block of {raw_len} bytes has")
