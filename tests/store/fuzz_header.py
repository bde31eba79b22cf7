"""Fuzz the header parser. As a program: under atheris, with its arguments. As a module: `check`, for any bytes.

The input is laid over a good page; its first byte says how, and whether the page gets a checksum that fits.
"""

from __future__ import annotations

import sys

from kvstrata.store.format import HEADER_BYTES, MOST_SUBS, RAW_LIMIT, BadBlock, pack_header, parse_header
from tests.store.blocks import KEY, seal

REASONS = {"magic", "format", "header_crc", "codec", "key", "length", "truncated"}
PAGE = pack_header(KEY, "zstd", 2, 1 << 20, (3 << 20) - 5, [900_000, 1 << 20, 800_000], [1, 2, 3])
_PATCH = 5


def page_of(data: bytes) -> bytes:
    """The page that the input stands for."""
    how, rest = (data[0], data[1:]) if data else (0, b"")
    if how & 2:
        page = bytearray(rest[:HEADER_BYTES]) if how & 4 else bytearray(PAGE)
        page[: len(rest)] = rest[:HEADER_BYTES]
    else:
        page = bytearray(PAGE)
        for at in range(0, len(rest) - _PATCH + 1, _PATCH):
            place = int.from_bytes(rest[at : at + 2], "little") % HEADER_BYTES
            page[place : place + 3] = rest[at + 2 : at + _PATCH]
        del page[HEADER_BYTES:]
    if how & 1 and len(page) == HEADER_BYTES:
        seal(page)
    return bytes(page)


def check(data: bytes) -> str:
    """Parse; how it ended. AssertionError where a header is believed that cannot be."""
    page = page_of(data)
    stored = int.from_bytes(page[28:36], "little")
    sizes = {HEADER_BYTES + stored, len(data), 2**63 - 1}
    ended = "refused"
    for size in sizes:
        for key in (KEY, None):
            try:
                header = parse_header(page, key, size)
            except BadBlock as error:
                assert error.reason in REASONS, error
                continue
            assert size == HEADER_BYTES + header.stored_len == HEADER_BYTES + sum(header.lengths)
            assert header.sub_count == -(-header.raw_len // header.sub_bytes) <= MOST_SUBS
            assert header.stored_len <= header.raw_len <= RAW_LIMIT
            assert key is None or header.key == KEY
            assert header.key is None or header.key.digest == header.key_digest
            ended = "good"
    return ended


if __name__ == "__main__":
    import atheris

    atheris.Setup(sys.argv, check)
    atheris.instrument_all()
    atheris.Fuzz()
