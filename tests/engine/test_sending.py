"""A block on its way out, where C sends what is cached and where Python does: the client cannot tell them apart."""

import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstrata.engine.block import Block
from kvstrata.engine.content import Engine
from kvstrata.engine.errors import Corrupt
from tests.engine.engines import block_files, settings
from tests.sockets import received
from tests.store.conftest import library, reader  # noqa: F401 - fixtures

PIECE = 256 << 10
VALUE = os.urandom(4 * PIECE + 17)


@pytest.fixture
def engine(reader: str, tmp_path: Path) -> Iterator[Engine]:  # noqa: F811
    one = Engine.open(settings(tmp_path / "root"))
    assert one._core.tiers.stores[0].reader == reader
    one.put("a", b"k", memoryview(VALUE))
    yield one
    one.close()


def sent(block: Block, start: int = 0, stop: int | None = None) -> tuple[bytes, Corrupt | None]:
    """All that came out at the other end, and how the sending ended."""
    failed: list[Corrupt] = []

    def send(sock: socket.socket) -> None:
        try:
            with block:
                block.send_to(sock, start, stop, head=b"head", tail=b"tail")
        except Corrupt as error:
            failed.append(error)

    return received(send), failed[0] if failed else None


def opened(engine: Engine) -> Block:
    block = engine.open_block("a", b"k")
    assert block is not None
    return block


def damage(root: Path, at: int) -> None:
    (file,) = block_files(root)
    with file.open("r+b") as one:
        one.seek(4096 + at)
        byte = one.read(1)
        one.seek(4096 + at)
        one.write(bytes([byte[0] ^ 1]))


@pytest.mark.parametrize("part", [(0, None), (0, 1), (5, None), (PIECE, 3 * PIECE)])
def test_the_bytes_come_between_head_and_tail(engine: Engine, part: tuple[int, int | None]) -> None:
    got, failed = sent(opened(engine), *part)
    assert failed is None and got == b"head" + VALUE[slice(*part)] + b"tail"


@pytest.mark.parametrize("piece", range(5))
def test_what_is_not_right_does_not_leave_nor_what_is_behind_it(engine: Engine, tmp_path: Path, piece: int) -> None:
    damage(tmp_path / "root", piece * PIECE + 3)
    got, failed = sent(opened(engine))
    assert failed is not None and failed.sent == (piece > 0)
    assert got == (b"head" + VALUE[: piece * PIECE] if piece else b"")
    assert engine.open_block("a", b"k") is None and engine.stats("a")["corrupt"] == 1


def test_what_the_page_cache_has_only_in_part_comes_whole(engine: Engine, tmp_path: Path) -> None:
    (file,) = block_files(tmp_path)
    with file.open("rb") as one:
        os.fsync(one.fileno())
        os.posix_fadvise(one.fileno(), 4096 + 2 * PIECE, 0, os.POSIX_FADV_DONTNEED)
    got, failed = sent(opened(engine))
    assert failed is None and got == b"head" + VALUE + b"tail"
