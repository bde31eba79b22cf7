"""Blocks as files: what is written comes back, whole or not at all, and a caller's buffer is left alone in time."""

import errno
import json
import os
import stat
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvstrata.store.blockfile import UNLIMITED, BlockIO
from kvstrata.store.format import HEADER_BYTES, BadBlock
from kvstrata.store.keys import BlockKey
from tests.store.blocks import CODECS, FILLER, KEY, MODES, OTHER, block_files, drop_pages, put, read, smooth
from tests.store.filesystems import KINDS, folder_on

pytestmark = pytest.mark.usefixtures("reader")
LENGTHS = (0, 1, 4095, 4096, (1 << 20) - 1, 1 << 20, (1 << 20) + 1, 3 << 20)


@pytest.fixture
def io(tmp_path: Path) -> BlockIO:
    return BlockIO(tmp_path)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("direct", MODES)
def test_what_is_written_comes_back_hot_and_cold(kind: str, codec: str, direct: bool, tmp_path: Path) -> None:
    with folder_on(kind, tmp_path) as root:
        io = BlockIO(root, codec=codec, direct=direct)
        for number, length in enumerate(LENGTHS):
            for name, data in (("random", os.urandom(length)), ("smooth", smooth(length)), ("zero", bytes(length))):
                key = BlockKey("model", name, number.to_bytes(4, "big"))
                try:
                    file = put(io, data, key)
                except OSError as error:
                    if direct and kind == "tmpfs" and error.errno == errno.EINVAL:
                        pytest.skip("this kernel's tmpfs has no O_DIRECT")
                    raise
                assert read(io, length, key) == data
                drop_pages(file)
                assert read(io, length, key) == data
                assert io.check(Path(key.path)).key == key
                assert file.stat().st_size <= length + HEADER_BYTES
                assert io.remove(key) > 0 and not file.exists()


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("direct", MODES)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=40)
@given(data=st.data())
def test_any_length_item_size_and_sub_block_size_comes_back(
    codec: str, direct: bool, tmp_path: Path, data: st.DataObject
) -> None:
    io = BlockIO(tmp_path, codec=codec, direct=direct, sub_bytes=1 << data.draw(st.integers(12, 16)))
    length = data.draw(st.integers(0, 200_000) | st.sampled_from([4096, 65536, 131072]))
    source = bytearray(data.draw(st.sampled_from([os.urandom, smooth, bytes]))(length))
    key = BlockKey("model", "", os.urandom(16))
    written = io.write(key, memoryview(source), data.draw(st.integers(1, 255)), UNLIMITED)
    assert read(io, length, key) == source
    file = tmp_path / key.path
    assert file.stat().st_size == HEADER_BYTES + written.stored_len <= HEADER_BYTES + length
    assert written.allocated == file.stat().st_blocks * 512
    header = io.check(file)
    assert header.codec == "raw" or header.stored_len <= length - 4096


@pytest.mark.parametrize("codec", CODECS)
def test_a_block_that_saves_less_than_a_page_is_stored_raw(codec: str, tmp_path: Path) -> None:
    io = BlockIO(tmp_path, codec=codec)
    for spare in (3000, 6000, 9000):
        data = bytes(spare) + os.urandom((1 << 20) - spare)
        file = put(io, data, BlockKey("m", str(spare), b"c"), itemsize=1)
        header = io.check(file)
        assert (header.codec == "raw") == (codec == "raw" or spare < 4096)
        assert file.stat().st_size == HEADER_BYTES + header.stored_len


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("direct", MODES)
def test_sub_blocks_that_shrink_and_others_share_a_block(codec: str, direct: bool, tmp_path: Path) -> None:
    io = BlockIO(tmp_path, codec=codec, direct=direct, sub_bytes=8192)
    data = smooth(20_000) + os.urandom(30_000) + bytes(20_000) + os.urandom(5_000)
    file = put(io, data)
    header = io.check(file)
    kept = [length == 8192 for length in header.lengths[:-1]]
    assert any(kept) and (codec == "raw") == all(kept)
    assert read(io, len(data)) == data
    drop_pages(file)
    assert read(io, len(data)) == data


def test_a_block_of_one_codec_is_read_by_a_store_of_another(tmp_path: Path) -> None:
    data = smooth(2 << 20)
    for number, writer in enumerate(CODECS):
        key = BlockKey("m", "", bytes([number]))
        put(BlockIO(tmp_path, codec=writer), data, key)
        assert all(read(BlockIO(tmp_path, codec=reader), len(data), key) == data for reader in CODECS)


@pytest.mark.parametrize("direct", MODES)
@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("start", [0, 1, 2048])
def test_buffers_need_no_alignment(codec: str, direct: bool, start: int, tmp_path: Path) -> None:
    io = BlockIO(tmp_path, codec=codec, direct=direct)
    data = smooth((2 << 20) + 77)
    around = bytearray(start) + data
    io.write(KEY, memoryview(around)[start:], 2, UNLIMITED)
    target = bytearray([FILLER]) * (len(around) + 9)
    with io.open(KEY) as block:
        block.read(0, 3, memoryview(target)[start : start + len(data)], UNLIMITED)
    assert target == bytes([FILLER]) * start + data + bytes([FILLER]) * 9


def test_only_the_sub_blocks_asked_for_are_written(io: BlockIO) -> None:
    data = os.urandom(3 << 20)
    put(io, data)
    target = bytearray([FILLER]) * len(data)
    with io.open(KEY) as block:
        block.read(1, 2, memoryview(target), UNLIMITED)
    assert target[1 << 20 : 2 << 20] == data[1 << 20 : 2 << 20]
    assert set(target[: 1 << 20]) == set(target[2 << 20 :]) == {FILLER}


def test_several_threads_read_parts_of_one_block(tmp_path: Path) -> None:
    io = BlockIO(tmp_path, codec="zstd", sub_bytes=64 << 10)
    data = smooth(4 << 20)
    put(io, data)
    target = bytearray(len(data))
    with io.open(KEY) as block, ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda sub: block.read(sub, sub + 1, memoryview(target), UNLIMITED), range(64)))
    assert target == data


def test_a_buffer_of_another_length_is_refused_and_not_written(io: BlockIO) -> None:
    put(io, os.urandom(8192))
    for length in (0, 8191, 8193):
        target = bytearray([FILLER]) * length
        with io.open(KEY) as block, pytest.raises(BadBlock, match="length"):
            block.read(0, 1, memoryview(target), UNLIMITED)
        assert set(target) <= {FILLER}


def test_a_key_that_is_not_there_is_not_found(io: BlockIO) -> None:
    with pytest.raises(FileNotFoundError):
        io.open(KEY)
    assert io.remove(KEY) == 0


def test_the_first_writer_wins(io: BlockIO) -> None:
    first, second = os.urandom(5000), os.urandom(5000)
    file = put(io, first)
    before = file.stat()
    assert io.write(KEY, memoryview(second), 2, UNLIMITED).existed
    assert read(io, 5000) == first
    assert (file.stat().st_ino, file.stat().st_mtime_ns) == (before.st_ino, before.st_mtime_ns)


def test_of_many_writers_of_one_key_one_publishes_and_readers_see_it_whole(io: BlockIO, tmp_path: Path) -> None:
    contents = [bytes([number]) * (1 << 20) for number in range(12)]
    barrier = threading.Barrier(len(contents))

    def write(data: bytes) -> bool:
        barrier.wait()
        existed = io.write(KEY, memoryview(data), 2, UNLIMITED).existed
        assert read(io, 1 << 20) in contents
        return existed

    with ThreadPoolExecutor(len(contents)) as pool:
        existed = list(pool.map(write, contents))
    assert existed.count(False) == 1
    assert read(io, 1 << 20) == contents[existed.index(False)]
    assert len(block_files(tmp_path)) == 1


@pytest.mark.parametrize("umask", [0o000, 0o022, 0o077, 0o277, 0o777])
def test_modes_do_not_depend_on_the_umask(io: BlockIO, tmp_path: Path, umask: int) -> None:
    old = os.umask(umask)
    try:
        put(io, b"x" * 100)
    finally:
        os.umask(old)
    for path in tmp_path.rglob("*"):
        assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600), path


def test_a_new_block_gets_its_time_from_the_clock_that_was_given(tmp_path: Path) -> None:
    io = BlockIO(tmp_path, clock=lambda: 1_234_567_890_123_456_789)
    assert io.write(KEY, memoryview(b"abc"), 1, UNLIMITED).mtime_ns == 1_234_567_890_123_456_789
    assert (tmp_path / KEY.path).stat().st_mtime_ns == 1_234_567_890_123_456_789


@pytest.mark.parametrize("namespace", ["plain", "../../x", 'quo"te\n', "\ud800\udc00", "\U00010000", "n" * 5000])
def test_folders_spell_out_what_their_names_hash(io: BlockIO, tmp_path: Path, namespace: str) -> None:
    key = BlockKey(namespace, "salt-" + namespace, b"c")
    put(io, b"x", key)
    outer, inner = key.folder
    assert json.loads((tmp_path / outer / "ns.json").read_bytes()) == {"namespace": namespace, "class": "normal"}
    assert json.loads((tmp_path / outer / inner / "salt.json").read_bytes()) == {"salt": key.salt, "class": None}


def test_a_folder_file_is_mended_when_damaged_and_kept_when_its_class_was_set(io: BlockIO, tmp_path: Path) -> None:
    put(io, b"x")
    spelled, salt = tmp_path / KEY.folder[0] / "ns.json", tmp_path / KEY.folder[0] / KEY.folder[1] / "salt.json"
    spelled.write_text(json.dumps({"namespace": KEY.namespace, "class": "keep"}))
    salt.write_text("{")
    put(io, b"x", OTHER)
    assert json.loads(spelled.read_bytes())["class"] == "keep"
    assert json.loads(salt.read_bytes())["salt"] == KEY.salt


def test_a_folder_that_goes_away_is_made_again_and_a_root_that_goes_away_is_not(tmp_path: Path) -> None:
    root = tmp_path / "root"
    root.mkdir()
    io = BlockIO(root)
    file = put(io, b"x")

    def empty_it() -> bool:
        file.unlink()
        file.parent.rmdir()
        return True

    put(io, b"z", OTHER)
    assert not io.write(replace_chunk(KEY), memoryview(b"y"), 1, UNLIMITED, publish=empty_it).existed
    for path in sorted(root.rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    root.rmdir()
    with pytest.raises(FileNotFoundError):
        io.write(KEY, memoryview(b"x"), 1, UNLIMITED)
    assert not root.exists()


def replace_chunk(key: BlockKey) -> BlockKey:
    """Another key of the same innermost folder."""
    return BlockKey(key.namespace, key.salt, key.chunk + b"x", key.rank, key.group)
