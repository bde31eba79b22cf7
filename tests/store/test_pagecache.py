"""Both ways to read and check what is in the page cache say the same, and which one is taken."""

import errno
import os
import resource
import signal
import socket
import stat
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvstrata.store import pagecache
from kvstrata.store.errors import StoreError
from kvstrata.store.lease import UNLIMITED, Expired
from kvstrata.store.pagecache import CachedReader, NativeReader, PythonReader, cached_reader
from tests.sockets import received
from tests.store.blocks import FILLER, drop_pages

SIZES = st.integers(1, 3 << 20) | st.sampled_from([1, 4096, 256 << 10, 1 << 20, 3 << 20])
STEPS = st.integers(1000, 2 << 20) | st.sampled_from([4096, 256 << 10, 1 << 20])


@pytest.fixture
def way(reader: str) -> CachedReader:
    found = cached_reader("auto")
    assert found.name == reader
    return found


@pytest.fixture(scope="module")
def content() -> bytes:
    return os.urandom(3 << 20)


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory, content: bytes) -> Path:
    made = tmp_path_factory.mktemp("cached") / "file"
    made.write_bytes(content)
    return made


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60, deadline=None)
@given(size=SIZES, start=st.integers(0, 3 << 20), step=STEPS, cold=st.none() | st.integers(0, 3 << 20))
def test_what_comes_is_a_beginning_of_what_was_asked_for_with_its_checksums(
    way: CachedReader, file: Path, content: bytes, size: int, start: int, step: int, cold: int | None
) -> None:
    around = bytearray([FILLER]) * (size + 200)
    fd = os.open(file, os.O_RDONLY)
    try:
        os.fsync(fd)
        if cold is None:
            os.pread(fd, len(content), 0)
        else:
            os.posix_fadvise(fd, cold, 0, os.POSIX_FADV_DONTNEED)
        done, sums = way.read(fd, memoryview(around)[100:-100], start, step)
    finally:
        os.close(fd)
    wanted = content[start : start + size]
    assert done <= len(wanted) and (cold is not None or done == len(wanted))
    assert around[100 : 100 + done] == wanted[:done]
    assert sums == [zlib.crc32(wanted[at : min(at + step, done)]) for at in range(0, done, step)]
    assert set(around[:100] + around[-100:]) == {FILLER}


def test_what_would_have_to_come_from_the_device_does_not_come(way: CachedReader, file: Path, content: bytes) -> None:
    target = bytearray([FILLER]) * len(content)
    for reader in (PythonReader(), way):
        drop_pages(file)
        with file.open("rb") as cold:
            answer = reader.read(cold.fileno(), memoryview(target), 0, 1 << 20)
        if answer[0] and reader is not way:
            pytest.skip("this file system keeps its pages")
    assert answer == (0, []) and set(target) == {FILLER}


@pytest.mark.parametrize("size", [0, 1, 4096, 4097, 3 << 20])
def test_opening_tells_what_lies_there_and_reads_its_first_page(
    way: CachedReader, tmp_path: Path, content: bytes, size: int
) -> None:
    file = tmp_path / "opened"
    file.write_bytes(content[:size])
    page = memoryview(bytearray([FILLER]) * 4096)
    found = way.open(str(file), os.O_RDONLY, page)
    os.close(found.fd)
    assert stat.S_ISREG(found.mode) and (found.size, found.got) == (size, min(size, 4096))
    assert found.cached == (size > 4096)
    assert page[: found.got] == content[: found.got] and set(page[found.got :]) <= {FILLER}


def test_opening_reads_no_device_and_says_which_file_failed(way: CachedReader, tmp_path: Path) -> None:
    page = memoryview(bytearray(4096))
    found = way.open("/dev/zero", os.O_RDONLY, page)
    os.close(found.fd)
    assert stat.S_ISCHR(found.mode) and found.got == 0 and not found.cached
    with pytest.raises(FileNotFoundError, match="absent"):
        way.open(str(tmp_path / "absent"), os.O_RDONLY, page)
    before = len(list(Path("/proc/self/fd").iterdir()))
    (tmp_path / "unreadable").touch()
    with pytest.raises(OSError):  # opened, then not readable: nothing stays open
        way.open(str(tmp_path / "unreadable"), os.O_WRONLY, page)
    assert len(list(Path("/proc/self/fd").iterdir())) == before


def test_what_fails_is_an_error_of_the_system_and_what_cannot_say_is_nothing(way: CachedReader, file: Path) -> None:
    fd = os.open(file, os.O_WRONLY)
    target = memoryview(bytearray(8192))
    with pytest.raises(OSError) as caught:
        way.read(fd, target, 0, 4096)
    assert caught.value.errno == errno.EBADF
    os.close(fd)
    there, end = os.pipe()
    os.close(end)
    with pytest.raises(OSError):
        way.read(there, target, 0, 4096)
    os.close(there)
    with Path("/proc/self/status").open("rb") as proc:  # knows no RWF_NOWAIT
        assert way.read(proc.fileno(), target, 0, 4096) in [(0, [])]


def test_the_reader_is_the_one_that_was_chosen(library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = tmp_path / "broken.so"
    broken.write_bytes(b"no library")
    foreign = Path(pagecache.checksum.LIBRARY)
    for file, auto in ((library, "native"), (tmp_path / "none", "python"), (broken, "python"), (foreign, "python")):
        monkeypatch.setattr(pagecache, "LIBRARY", file)
        assert cached_reader("auto").name == auto
        assert cached_reader("off").name == "python"
        if auto == "native":
            assert cached_reader("on").name == "native"
        else:
            with pytest.raises(StoreError, match="KV_STORE_NATIVE=on"):
                cached_reader("on")


def test_another_checksum_behind_the_same_name_is_not_used(library: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pagecache, "LIBRARY", library)
    monkeypatch.setattr(pagecache, "crc32", zlib.adler32)
    assert cached_reader("auto").name == "python"


def sent(way: CachedReader, fd: int, size: int, step: int, sums: list[int]) -> tuple[int, bytes]:
    """What `send` says, and what came out at the other end."""
    done: list[int] = []

    def send(sock: socket.socket) -> None:
        done.append(way.send(fd, sock.fileno(), memoryview(bytearray(step)), size, 0, sums, b"he\0ad", b"tail"))

    got = received(send)
    return done[0], got


STEP = 256 << 10


@pytest.fixture
def native(library: Path) -> CachedReader:
    return NativeReader(library)


@pytest.mark.parametrize("size", [1, STEP - 1, STEP, STEP + 1, 3 << 20])
def test_what_is_cached_is_sent_between_head_and_tail(
    native: CachedReader, file: Path, content: bytes, size: int
) -> None:
    sums = [zlib.crc32(content[at : min(at + STEP, size)]) for at in range(0, size, STEP)]
    fd = native.open(str(file), os.O_RDONLY, memoryview(bytearray(4096))).fd
    file.read_bytes()
    assert sent(native, fd, size, STEP, sums) == (size, b"he\0ad" + content[:size] + b"tail")
    with pytest.raises(OSError):  # closed with the last piece
        os.fstat(fd)


@pytest.mark.parametrize("bad", [0, 1, 11])
def test_nothing_is_sent_of_a_piece_that_is_wrong_nor_of_what_follows(
    native: CachedReader, file: Path, content: bytes, bad: int
) -> None:
    sums = [zlib.crc32(content[at : at + STEP]) for at in range(0, 3 << 20, STEP)]
    sums[bad] ^= 1
    with file.open("rb") as opened:
        opened.read()
        found = sent(native, opened.fileno(), 3 << 20, STEP, sums)
    assert found == (bad * STEP, b"he\0ad" + content[: bad * STEP] if bad else b"")


def test_nothing_is_sent_of_what_would_have_to_come_from_the_device(
    native: CachedReader, file: Path, content: bytes
) -> None:
    sums = [zlib.crc32(content[at : at + STEP]) for at in range(0, 3 << 20, STEP)]
    with file.open("rb") as opened:
        os.fsync(opened.fileno())
        os.posix_fadvise(opened.fileno(), 2 * STEP, 0, os.POSIX_FADV_DONTNEED)
        done, got = sent(native, opened.fileno(), 3 << 20, STEP, sums)
    if done == 3 << 20:
        pytest.skip("this file system keeps its pages")
    assert done % STEP == 0 and got == (b"he\0ad" + content[:done] if done else b"")


def test_a_peer_that_has_gone_is_an_error_and_no_signal(native: CachedReader, file: Path, content: bytes) -> None:
    ours, theirs = socket.socketpair()
    theirs.close()
    with file.open("rb") as opened, ours, pytest.raises(BrokenPipeError):
        opened.read()
        native.send(opened.fileno(), ours.fileno(), memoryview(bytearray(9)), 9, 0, [zlib.crc32(content[:9])], b"", b"")


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60, deadline=None)
@given(size=SIZES, start=st.integers(0, 9000), step=STEPS)
def test_what_is_written_is_there_with_its_checksums(
    native: CachedReader, tmp_path: Path, content: bytes, size: int, start: int, step: int
) -> None:
    with (tmp_path / "made").open("w+b") as made:
        sums = native.write(made.fileno(), memoryview(bytearray(content[:size])), start, step, UNLIMITED)
        assert made.read() == bytes(start) + content[:size]
    assert sums == [zlib.crc32(content[at : min(at + step, size)]) for at in range(0, size, step)]


def test_a_file_that_takes_no_more_is_an_error(native: CachedReader, tmp_path: Path) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (700_000, before[1]))  # a short write, then none
    try:
        with (tmp_path / "made").open("wb") as made, pytest.raises(OSError) as caught:
            native.write(made.fileno(), memoryview(bytearray(3 * STEP)), 0, STEP, UNLIMITED)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert caught.value.errno == errno.EFBIG and (tmp_path / "made").stat().st_size == 700_000


def test_nothing_is_touched_or_written_once_the_lease_has_ended(native: CachedReader, tmp_path: Path) -> None:
    class EndedBefore:
        def touching(self) -> AbstractContextManager[None]:
            raise AssertionError("held around I/O")

        @contextmanager
        def ending(self, stop: Callable[[], None]) -> Iterator[None]:
            stop()
            stop()
            yield

    with (tmp_path / "made").open("w+b") as made, pytest.raises(Expired):
        native.write(made.fileno(), memoryview(bytearray(STEP)), 0, 4096, EndedBefore())
    assert (tmp_path / "made").stat().st_size == 0


def test_memory_that_cannot_be_addressed_is_not_written_here(native: CachedReader, tmp_path: Path) -> None:
    with (tmp_path / "made").open("w+b") as made:
        assert native.write(made.fileno(), memoryview(b"read-only"), 0, 4096, UNLIMITED) == []


def test_a_signal_while_a_file_is_opened_is_no_error(way: CachedReader, tmp_path: Path) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    came: list[object] = []

    def open_it() -> None:
        try:
            found = way.open(str(fifo), os.O_RDONLY, memoryview(bytearray(4096)))
            os.close(found.fd)
            came.append(found.mode)
        except OSError as error:
            came.append(error)

    before = signal.signal(signal.SIGUSR1, lambda number, frame: None)
    opening = threading.Thread(target=open_it)
    try:
        opening.start()
        for _ in range(3):
            time.sleep(0.05)
            if not came and opening.ident:
                signal.pthread_kill(opening.ident, signal.SIGUSR1)
        time.sleep(0.05)
        if not came:
            fifo.open("wb").close()
        opening.join(10)
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert len(came) == 1 and isinstance(came[0], int) and stat.S_ISFIFO(came[0])
