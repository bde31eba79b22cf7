"""The start-up scan: what is taken, what goes, what is left alone; order and sums as they were."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvstrata.store.errors import StoreError
from kvstrata.store.format import HEADER_BYTES
from kvstrata.store.keys import BlockKey, namespace_folder, salt_folder
from kvstrata.store.recency import LATEST_NS
from kvstrata.store.settings import ClassRule
from kvstrata.store.store import BlockStore
from tests.store.stores import MIB, books_are_right, data, du, file_of, get, key, outcomes, put, put_in_order, settings

Opened = Callable[..., BlockStore]


def _litter(folder: Path, shelf: str) -> list[Path]:
    """What cannot be a block, in a directory of blocks."""
    good = shelf + "00" * 31
    names = [
        "core",
        f"{good}.0",
        f"{good}.0.0.0",
        f"{good}.00.0",
        f"{good.upper()}x.0.0",
        f"{good}.0.0.tmp",
        f"{'ff' if shelf != 'ff' else '00'}{'00' * 31}.0.0",
        f"{shelf} 0.0.0",
        f".{good}.0.0",
        f"~{good}.0.0.",
    ]
    files = [folder / name for name in names]
    for file in files:
        file.write_bytes(bytes(2 * HEADER_BYTES))
    short = folder / f"{good}.1.0"
    short.write_bytes(bytes(HEADER_BYTES - 1))
    empty = folder / f"{good}.2.0"
    empty.touch()
    link = folder / f"{good}.3.0"
    link.symlink_to("/etc/passwd")
    pipe = folder / f"{good}.4.0"
    os.mkfifo(pipe)
    return [*files, short, empty, link, pipe]


def test_what_cannot_be_a_block_is_removed_from_directories_of_blocks(opened: Opened, root: Path) -> None:
    store = opened()
    put(store, [1, 2])
    store.close()
    folder = file_of(root, 1).parent
    litter = _litter(folder, folder.name)
    store = opened()
    assert not [path.name for path in litter if path.is_symlink() or path.exists()]
    assert Path("/etc/passwd").exists()
    assert outcomes(get(store, [1, 2])) == {"hit"}
    assert books_are_right(store, root)


def test_foreign_files_and_folders_are_left_alone_and_counted(opened: Opened, root: Path) -> None:
    store = opened()
    put(store, [1])
    store.close()
    block = file_of(root, 1)
    strangers = [
        root / "README",
        root / "lost+found" / "x",
        root / ("b" * 31) / "deep" / "er",
        block.parent.parent.parent / "notes",
        block.parent.parent / "notes",
        block.parent / "folder" / "x",
    ]
    for stranger in strangers:
        stranger.parent.mkdir(parents=True, exist_ok=True)
        stranger.write_bytes(b"x" * 5000)
    store = opened()
    assert all(stranger.read_bytes() == b"x" * 5000 for stranger in strangers)
    assert store.usage().blocks == 1
    assert books_are_right(store, root)


def test_foreign_folders_may_be_deeper_than_python_recurses(opened: Opened, root: Path) -> None:
    store = opened()
    put(store, [1])
    store.close()
    deep = root
    for _ in range(1500):
        deep /= "d"
        deep.mkdir()
    try:
        store = opened()
    finally:
        subprocess.run(["rm", "-rf", root / "d"], check=True)  # pytest's own clean-up recurses
    assert outcomes(get(store, [1])) == {"hit"}


def test_a_damaged_directory_costs_its_own_blocks_only(
    opened: Opened, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, listed = opened(), os.scandir
    put(store, range(4))
    store.close()
    bad = str(file_of(root, 1).parent)

    def damaged(path: str) -> Iterator[os.DirEntry[str]]:
        if str(path) == bad:
            raise OSError(errno.EIO, "Input/output error", path)
        return listed(path)

    monkeypatch.setattr(os, "scandir", damaged)
    store = opened()
    assert [str(result.outcome) for result in get(store, range(4))] == ["hit", "miss", "hit", "hit"]
    assert file_of(root, 1).exists()


def test_a_root_that_is_mostly_foreign_is_refused_before_anything_is_evicted(opened: Opened, root: Path) -> None:
    store = opened(capacity=8 * MIB)
    put(store, range(4))
    store.close()
    (root / "film.mkv").write_bytes(os.urandom(MIB))
    with pytest.raises(StoreError, match="not the store's"):
        opened(capacity=8 * MIB)
    (root / "film.mkv").unlink()
    assert outcomes(get(opened(capacity=8 * MIB), range(4))) == {"hit"}


def test_blocks_of_other_namespaces_stay_even_if_nobody_knows_their_name(opened: Opened, root: Path) -> None:
    store = opened()
    keys = [BlockKey("other", salt, os.urandom(32)) for salt in ("", "tenant")]
    store.put(keys, [memoryview(data(1))] * 2).result(10)
    store.close()
    for name in ("ns.json", "-/salt.json"):
        (root / namespace_folder("other") / name).unlink()
    (root / namespace_folder("other") / salt_folder("tenant") / "salt.json").write_text('{"salt": "wrong"}')
    store = opened()
    assert store.usage().blocks == 2
    assert store.contains(keys) == [True, True]
    # The names came back from the blocks' own headers.
    assert {info.key for info in store.scan()} == set(keys)
    assert books_are_right(store, root)


def test_names_that_no_header_tells_come_back_with_the_first_request(opened: Opened, root: Path) -> None:
    store = opened()
    put(store, [1])
    store.close()
    ns = root / namespace_folder("model")
    (ns / "ns.json").unlink()
    kept = file_of(root, 1).read_bytes()
    file_of(root, 1).write_bytes(bytes(HEADER_BYTES) + kept[HEADER_BYTES:])
    store = opened()
    assert store.usage().blocks == 1
    assert not list(store.scan())
    assert [(str(r.outcome), r.reason) for r in get(store, [1])] == [("corrupt", "magic")]
    assert put(store, [1])[0].outcome == "stored"
    assert [info.key for info in store.scan()] == [key(1)]
    assert books_are_right(store, root)


def test_empty_folders_of_ours_go(opened: Opened, root: Path) -> None:
    store = opened()
    put(store, [1], salt="gone")
    put(store, [2], salt="stays")
    store.delete([key(1, "gone")]).result(10)
    store.close()
    store = opened()
    assert not (root / namespace_folder("model") / salt_folder("gone")).exists()
    assert outcomes(get(store, [2], salt="stays")) == {"hit"}
    assert books_are_right(store, root)


def test_order_of_use_survives_a_restart(opened: Opened) -> None:
    store = opened(capacity=16 * MIB)
    put_in_order(store, range(40))
    get(store, [3, 1])
    store.touch([key(0)])
    store.close()
    store = opened(capacity=8 * MIB)
    held = store.contains([key(number) for number in range(40)])
    left = {number for number in range(40) if held[number]}
    assert left == {0, 1, 3} | set(range(40 - (len(left) - 3), 40))


@pytest.mark.parametrize("jump_ns", [-365 * 86_400 * 10**9, 365 * 86_400 * 10**9])
def test_a_clock_that_jumps_by_a_year_does_not_disturb_the_order(opened: Opened, jump_ns: int) -> None:
    wall = [time.time_ns()]
    store = opened(capacity=16 * MIB, clock=lambda: wall[0])
    put_in_order(store, range(20))
    wall[0] += jump_ns
    put_in_order(store, range(20, 40))
    get(store, [5])
    store.close()
    store = opened(capacity=8 * MIB, clock=lambda: wall[0])
    held = store.contains([key(number) for number in range(40)])
    left = {number for number in range(40) if held[number]}
    assert left == {5} | set(range(40 - (len(left) - 1), 40))


def test_a_timestamp_from_the_far_future_does_not_stop_the_clock(opened: Opened, root: Path) -> None:
    store = opened()
    put(store, range(3))
    store.close()
    os.utime(file_of(root, 1), ns=(LATEST_NS + 10**18, LATEST_NS + 10**18))
    store = opened()
    assert outcomes(get(store, range(3))) == {"hit"}
    assert outcomes(put(store, [7, 8])) == {"stored"}
    assert file_of(root, 7).stat().st_mtime_ns != file_of(root, 8).stat().st_mtime_ns
    assert max(info.last_use_ns for info in store.scan()) < 2 * time.time_ns()


def test_a_class_of_a_namespace_holds_for_salts_that_come_later_and_outlives_its_blocks(
    opened: Opened, root: Path
) -> None:
    store = opened()
    put(store, [1], salt="first")
    store.close()
    spelled = root / namespace_folder("model") / "ns.json"
    spelled.write_text('{"namespace": "model", "class": "keep"}')
    own = file_of(root, 1, "first").parent.parent / "salt.json"
    own.write_text('{"salt": "first", "class": "bulk"}')
    store = opened()
    put(store, [2], salt="second")
    assert {info.key.salt: info.cls for info in store.scan()} == {"first": "bulk", "second": "keep"}
    while store.evict(1):
        pass
    store.close()
    store = opened()
    put(store, [3], salt="third")
    put(store, [3], salt="first")
    assert {info.key.salt: info.cls for info in store.scan()} == {"first": "bulk", "third": "keep"}
    assert books_are_right(store, root)


def test_classes_come_from_modes_salt_files_rules_and_namespace_files_in_this_order(opened: Opened, root: Path) -> None:
    store = opened()
    for salt in ("", "bulk", "vip"):
        put(store, [1, 2], salt=salt)
    store.close()
    ns = root / namespace_folder("model")
    (ns / "ns.json").write_text('{"namespace": "model", "class": "keep"}')
    (ns / salt_folder("vip") / "salt.json").write_text('{"salt": "vip", "class": "pin"}')
    file_of(root, 2).chmod(0o400)
    store = opened(classes=(ClassRule("model", "bulk", "bulk"), ClassRule("model", "vip", "bulk")))
    classes = {(info.key.salt, info.key == key(2, info.key.salt)): info.cls for info in store.scan()}
    assert classes == {
        ("", False): "keep",
        ("", True): "pin",
        ("bulk", False): "bulk",
        ("bulk", True): "bulk",
        ("vip", False): "pin",
        ("vip", True): "pin",
    }


def test_progress_counts_up_to_all_blocks(root: Path) -> None:
    store = BlockStore.open(settings(root))
    put(store, range(5), 4096)
    store.close()
    told: list[int] = []
    BlockStore.open(settings(root), progress=told.append).close()
    assert told == [5]


def test_modes_of_blocks_that_let_others_in_are_tightened(opened: Opened, root: Path) -> None:
    store = opened()
    put(store, [1])
    store.close()
    file_of(root, 1).chmod(0o644)
    opened()
    assert file_of(root, 1).stat().st_mode & 0o777 == 0o600


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
def test_a_block_that_somebody_else_owns_does_not_keep_the_store_from_starting(opened: Opened, root: Path) -> None:
    store = opened()
    put(store, [1, 2])
    store.close()
    theirs = file_of(root, 1)
    theirs.chmod(0o644)
    with tempfile.TemporaryDirectory() as place:
        home = Path(place, "root")
        shutil.copytree(root, home)  # as root: a copy that keeps modes
        for path in (Path(place), home, *home.rglob("*")):
            if path.name != theirs.name:
                os.chown(path, 65534, 65534)
        program = (
            "import os, sys; from pathlib import Path; from tests.store.stores import get, outcomes, settings\n"
            "from kvstrata.store.store import BlockStore\n"
            "os.setgroups([]); os.setgid(65534); os.setuid(65534)\n"
            "store = BlockStore.open(settings(Path(sys.argv[1])))\n"
            "print(*outcomes(get(store, [1, 2])), store.usage().blocks); store.close()"
        )
        env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        ran = subprocess.run(
            [sys.executable, "-c", program, str(home)], env=env, capture_output=True, text=True, check=False
        )
        assert ran.stdout == "hit 2\n", ran.stderr


def test_400_000_blocks_are_scanned_to_the_byte(root: Path) -> None:
    count, base = 400_000, root / namespace_folder("model") / salt_folder("t")
    store = BlockStore.open(settings(root, 1 << 40))
    keys = [BlockKey("model", "t", bytes([shelf]) + bytes(31)) for shelf in range(256)]
    store.put(keys, [memoryview(b"x")] * 256).result(60)
    store.close()
    for number in range(count - 256):
        chunk = os.urandom(31).hex()
        fd = os.open(f"{base}/{number % 256:02x}/{number % 256:02x}{chunk}.0.0", os.O_CREAT | os.O_WRONLY, 0o600)
        os.ftruncate(fd, HEADER_BYTES + (3 << 20))
        os.close(fd)
    for state in ("first", "warm"):
        began, cpu = time.monotonic(), time.process_time()
        store = BlockStore.open(settings(root, 1 << 40))
        print(f"{state}: {time.monotonic() - began:.2f} s, {time.process_time() - cpu:.2f} s of them on the processor")
        usage = store.usage()
        store.close()
        assert usage.blocks == count
        assert usage.used == du(root)
