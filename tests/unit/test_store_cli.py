"""`kvstrata store`: on a stopped store, beside a running one, and among files that nobody expects."""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from kvstrata import cli
from kvstrata.store import admin, survey
from kvstrata.store.blockfile import UNLIMITED, BlockIO
from kvstrata.store.errors import StoreError
from kvstrata.store.keys import BlockKey

SIZE = 300_000
ODD_NAMESPACE = "m\ud800\x1b[31m/../x"
MODELS = ("llama--0123", ODD_NAMESPACE)
SALTS = ("", "s1")
BLOCKS = 3


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """2 namespaces x 2 salts x 3 blocks, used one second after the other."""
    place = tmp_path / "store"
    place.mkdir(mode=0o700)
    (place / "FORMAT.json").write_text('{"format": 1}')
    (place / ".lock").touch(0o600)
    instants = iter(range(10**9, 10**12, 10**9))
    io = BlockIO(place, clock=lambda: next(instants))
    for namespace in MODELS:
        for salt in SALTS:
            for index in range(BLOCKS):
                key = BlockKey(namespace, salt, bytes([index]) * 32, rank=index)
                io.write(key, memoryview(bytearray(os.urandom(SIZE))), 2, UNLIMITED)
    return place


@pytest.fixture
def kv(root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    """Run `kvstrata store …`: (exit code, stdout, stderr)."""

    def run(*words: str, at: Path = root) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["kvstrata", "store", *words, "--root", str(at)])
        code = cli.main()
        out = capsys.readouterr()
        return code, out.out, out.err

    return run


@contextmanager
def running(root: Path) -> Iterator[int]:
    """A process that owns the root, as a store does."""
    code = (
        "import fcntl, sys; f = open(sys.argv[1]); fcntl.flock(f, fcntl.LOCK_EX); print(flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, str(root / ".lock")], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as child:
        assert child.stdout is not None
        child.stdout.readline()
        yield child.pid
        child.kill()


def files(root: Path) -> list[str]:
    return sorted(block.path for _, block in survey.Survey(root).all())


def path_of(root: Path, key: BlockKey) -> Path:
    return root / key.path


FIRST = BlockKey(MODELS[0], "", bytes([0]) * 32, rank=0)


# -- looking ---------------------------------------------------------------------------------------------------------


def test_ls_lists_every_block_with_its_size_on_disk(kv: Any, root: Path) -> None:
    code, out, _ = kv("ls")
    *rows, last = out.splitlines()
    assert code == 0
    assert sorted(row.split()[-1] for row in rows) == files(root)
    disk = sum((root / path).stat().st_blocks * 512 for path in files(root))
    assert sum(int(row.split()[2]) for row in rows) == disk
    assert last == f"12 blocks, {disk / 1e6:.2f} MB"


def test_ls_by_age_begins_with_what_was_used_longest_ago(kv: Any) -> None:
    data = json.loads(kv("ls", "--sort", "age", "--limit", "5", "--json")[1])
    assert [block["last_use_ns"] for block in data["blocks"]] == [n * 10**9 for n in range(1, 6)]


@pytest.mark.parametrize(
    ("target", "count"),
    [(FIRST.path, 1), (FIRST.folder[0], 6), ("/".join(FIRST.folder), 3), ("llama*", 6), ("*", 12), ("0000", 4),
     (FIRST.chunk.hex(), 4), ("ffff", 0), ("/".join(FIRST.folder) + "/01", 1)],
)  # fmt: skip
def test_a_target_is_a_path_a_folder_a_models_name_or_the_beginning_of_a_hash(kv: Any, target: str, count: int) -> None:
    assert len(json.loads(kv("ls", target, "--json")[1])["blocks"]) == count


def test_an_absolute_path_names_a_block_too(kv: Any, root: Path) -> None:
    assert json.loads(kv("stat", str(path_of(root, FIRST)), "--json")[1])[0]["rank"] == 0


def test_stat_shows_key_codec_and_state(kv: Any) -> None:
    code, out, _ = kv("stat", FIRST.path, "--json")
    (row,) = json.loads(out)
    assert code == 0
    assert {"namespace": MODELS[0], "salt": "", "chunk": FIRST.chunk.hex(), "codec": "raw", "raw_len": SIZE,
            "state": "whole", "class": "normal", "pinned": False}.items() <= row.items()  # fmt: skip


def test_stat_of_nothing_ends_with_1(kv: Any) -> None:
    assert kv("stat", "ffff")[0] == 1


def test_stat_of_a_damaged_block_says_so(kv: Any, root: Path) -> None:
    path_of(root, FIRST).write_bytes(b"x" * 5000)
    assert json.loads(kv("stat", FIRST.path, "--json")[1])[0]["state"].startswith("bad: magic")


def test_namespaces_sum_up_their_blocks(kv: Any) -> None:
    rows = json.loads(kv("namespaces", "--json")[1])["folders"]
    assert {(row["namespace"], row["salt"]) for row in rows} == {(n, s) for n in MODELS for s in SALTS}
    assert {row["blocks"] for row in rows} == {BLOCKS}
    assert all(row["age_s"] > 0 and row["bytes"] > BLOCKS * SIZE for row in rows)


def test_names_cannot_steer_the_terminal(kv: Any) -> None:
    for command in (("namespaces",), ("report",), ("stat", "0000")):
        out = kv(*command)[1]
        assert "\x1b" not in out
        assert r"\ud800\x1b[31m" in out


def test_report_begins_with_what_is_kept_longest(kv: Any, root: Path) -> None:
    kv("pin", "/".join(FIRST.folder), "--class", "keep")
    rows = json.loads(kv("report", "--json")[1])["folders"]
    assert rows[0]["folder"] == "/".join(FIRST.folder)
    assert [row["last_use"] for row in rows[1:]] == sorted((row["last_use"] for row in rows[1:]), reverse=True)
    assert [row["upto"] for row in rows] == [sum(r["bytes"] for r in rows[: n + 1]) for n in range(len(rows))]


# -- verify ----------------------------------------------------------------------------------------------------------


def test_verify_of_a_whole_store_ends_with_0(kv: Any) -> None:
    code, out, _ = kv("verify", "--json")
    assert code == 0
    assert (json.loads(out)["whole"], json.loads(out)["bad"]) == (12, [])


@pytest.mark.parametrize(
    ("damage", "reason"),
    [(lambda data: data[:-1], "truncated"), (lambda data: data + b"x", "length"),
     (lambda data: b"X" + data[1:], "magic"), (lambda data: data[:4096] + bytes(100) + data[4196:], "payload_crc")],
    ids=["cut", "grown", "magic", "flipped"],
)  # fmt: skip
def test_verify_finds_damage_and_repair_removes_just_that(kv: Any, root: Path, damage: Any, reason: str) -> None:
    path = path_of(root, FIRST)
    path.write_bytes(damage(path.read_bytes()))
    before = files(root)
    code, out, _ = kv("verify", "--json")
    assert code == 1
    assert [(bad["path"], bad["reason"]) for bad in json.loads(out)["bad"]] == [(FIRST.path, reason)]
    assert files(root) == before
    code, out, _ = kv("verify", "--repair", "--json")
    assert (code, json.loads(out)["bad"][0]["removed"]) == (0, True)
    assert files(root) == [name for name in before if name != FIRST.path]
    assert kv("verify")[0] == 0


def test_verify_finds_two_blocks_that_were_swapped(kv: Any, root: Path) -> None:
    one, other = path_of(root, FIRST), path_of(root, BlockKey(MODELS[0], "", bytes([1]) * 32, rank=1))
    kept = one.read_bytes()
    one.write_bytes(other.read_bytes())
    other.write_bytes(kept)
    assert {bad["reason"] for bad in json.loads(kv("verify", "--json")[1])["bad"]} == {"key"}


def test_a_file_that_cannot_be_read_is_told_and_never_removed(
    kv: Any, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(BlockIO, "check", broken)
    code, out, _ = kv("verify", "--repair", "--json")
    assert code == 1
    assert {(bad["reason"], bad["removed"]) for bad in json.loads(out)["bad"]} == {("io", False)}
    assert len(files(root)) == 12


def test_a_block_that_goes_away_meanwhile_is_not_bad(root: Path) -> None:
    found = survey.Survey(root)
    rows = list(found.all())
    path_of(root, FIRST).unlink()
    result = admin.verify(found, rows)
    assert (result.whole, result.gone, result.bad) == (11, 1, [])


# -- changing --------------------------------------------------------------------------------------------------------


def test_evict_takes_the_oldest_first_and_stops_when_it_is_enough(kv: Any, root: Path) -> None:
    oldest = [block["path"] for block in json.loads(kv("ls", "--sort", "age", "--json")[1])["blocks"]]
    code, out, _ = kv("evict", "--bytes", f"{SIZE + 5000}", "--json")
    assert code == 0
    assert json.loads(out)["blocks"] == 1
    assert files(root) == sorted(oldest[1:])


def test_evict_takes_bulk_before_older_blocks_of_a_higher_class(kv: Any, root: Path) -> None:
    bulk = BlockKey(MODELS[1], "s1", b"").folder
    kv("pin", "/".join(bulk), "--class", "bulk")
    kv("evict", "--bytes", "500k")
    gone = 12 - len(files(root))
    assert gone == 2
    assert sum(name.startswith("/".join(bulk)) for name in files(root)) == BLOCKS - gone


def test_evict_never_takes_pins_and_says_that_it_fell_short(kv: Any, root: Path) -> None:
    kv("pin", FIRST.path)
    kv("pin", FIRST.folder[0] + "/-", "--class", "keep")
    code, out, _ = kv("evict", "--bytes", "1G", "--json")
    assert code == 1
    assert json.loads(out)["short"] > 0
    assert files(root) == [FIRST.path]


@pytest.mark.parametrize("text", ["", "-1", "1x", "G", "1e3", "i"])
def test_a_size_that_is_none_is_refused(kv: Any, text: str) -> None:
    assert kv("evict", f"--bytes={text}")[0] == 2


def test_pin_and_unpin_change_the_mode_and_leave_the_last_use(kv: Any, root: Path) -> None:
    path = path_of(root, FIRST)
    used = path.stat().st_mtime_ns
    assert kv("pin", FIRST.path)[0] == 0
    assert path.stat().st_mode & 0o777 == 0o400
    assert json.loads(kv("stat", FIRST.path, "--json")[1])[0]["class"] == "pin"
    assert kv("unpin", FIRST.path)[0] == 0
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.stat().st_mtime_ns == used


@pytest.mark.parametrize("target", [FIRST.folder[0], "llama*"])
def test_a_namespace_gets_a_class_for_all_its_salts(kv: Any, root: Path, target: str) -> None:
    assert kv("pin", target, "--class", "keep")[0] == 0
    file = root / FIRST.folder[0] / "ns.json"
    assert json.loads(file.read_bytes()) == {"namespace": MODELS[0], "class": "keep"}
    assert file.stat().st_mode & 0o777 == 0o600
    classes = {row["folder"]: row["class"] for row in json.loads(kv("namespaces", "--json")[1])["folders"]}
    assert sorted(classes.values()) == ["keep", "keep", "normal", "normal"]
    assert kv("unpin", target)[0] == 0
    assert json.loads(file.read_bytes())["class"] == "normal"


def test_a_salts_own_class_outranks_its_namespaces(kv: Any) -> None:
    kv("pin", FIRST.folder[0], "--class", "bulk")
    code, out, _ = kv("pin", "/".join(FIRST.folder), "--class", "keep", "--json")
    assert (code, json.loads(out)) == (0, [{"folder": "/".join(FIRST.folder), "class": "keep"}])
    code, out, _ = kv("unpin", "/".join(FIRST.folder), "--json")
    assert json.loads(out)[0]["class"] == "bulk"


def test_the_store_reads_the_classes_that_the_command_wrote(kv: Any, root: Path) -> None:
    from kvstrata.store.settings import StoreSettings
    from kvstrata.store.store import BlockStore

    kv("pin", FIRST.folder[0], "--class", "keep")
    kv("pin", FIRST.path)
    allowed = ("tmpfs", "overlay", "ramfs")
    store = BlockStore.open(StoreSettings(root, 1 << 30, free_floor=0, allow_fs=allowed))
    try:
        classes = {info.key: info.cls for info in store.scan()}
    finally:
        store.close()
    assert classes[FIRST] == "pin"
    assert {cls for key, cls in classes.items() if key.namespace == MODELS[0] and key != FIRST} == {"keep"}


@pytest.mark.parametrize(
    ("words", "needed"),
    [(("pin", FIRST.path, "--class", "bulk"), "a namespace or salt folder"), (("pin", "ffff"), "that is there"),
     (("pin", FIRST.path, "--class", "gold"), "one of bulk, normal, keep, pin")],
)  # fmt: skip
def test_a_pin_that_cannot_be_is_refused(kv: Any, words: tuple[str, ...], needed: str) -> None:
    code, _, err = kv(*words)
    assert code == 2
    assert needed in err


# -- beside a running store, odd files, wrong places -----------------------------------------------------------------


@pytest.mark.parametrize("words", [("ls",), ("stat", "0000"), ("namespaces",), ("report",), ("verify",)])
def test_looking_works_beside_a_running_store(kv: Any, root: Path, words: tuple[str, ...]) -> None:
    with running(root):
        assert kv(*words)[0] == 0


@pytest.mark.parametrize(
    "words", [("verify", "--repair"), ("evict", "--bytes", "1"), ("pin", "0000"), ("unpin", "0000")]
)
def test_changing_a_running_store_is_refused_and_its_owner_named(kv: Any, root: Path, words: tuple[str, ...]) -> None:
    before = files(root)
    with running(root) as pid:
        code, _, err = kv(*words)
    assert code == 2
    assert f"process {pid} (" in err
    assert "docker compose stop lmcache" in err
    assert files(root) == before


def test_a_command_gives_the_lock_back(kv: Any, root: Path) -> None:
    kv("evict", "--bytes", "1")
    with (root / ".lock").open() as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_strange_files_are_told_and_left_alone(kv: Any, root: Path) -> None:
    ns, salt = FIRST.folder
    shelf = path_of(root, FIRST).parent
    (root / "notes.txt").write_text("x")
    (root / ns / "sub").mkdir()
    (root / ns / salt / "zz").mkdir()
    (shelf / "cat\udcff\n.jpg").write_text("x")
    (shelf / ("ab" * 32 + ".0.0")).write_text("in the wrong folder")
    os.mkfifo(shelf / ("00" * 32 + ".5.0"))
    (shelf / ("00" * 32 + ".6.0")).symlink_to("/etc/passwd")
    (shelf / ("00" * 32 + ".7.ffffffff")).write_bytes(b"")
    os.mkfifo(root / ns / "s1.json")
    before = sorted(str(path) for path in root.rglob("*"))
    for words in (("ls",), ("ls", "--json"), ("namespaces",), ("report",), ("stat", "0000"), ("verify",)):
        code, _, err = kv(*words)
        assert code in (0, 1), err
    data = json.loads(kv("ls", "--json")[1])
    assert len(data["odd"]) == 8
    assert kv("verify", "--repair")[0] == 0
    gone = set(before) - {str(path) for path in root.rglob("*")}
    assert {Path(path).name for path in gone} == {"00" * 32 + ".7.ffffffff"}


@pytest.mark.parametrize("text", ["", "[]", "{", '{"namespace": 5, "class": []}', '{"namespace": "other"}', "[" * 9999])
def test_a_damaged_name_file_costs_the_name_and_nothing_else(kv: Any, root: Path, text: str) -> None:
    (root / FIRST.folder[0] / "ns.json").write_text(text)
    rows = json.loads(kv("namespaces", "--json")[1])["folders"]
    assert [row["namespace"] for row in rows if row["folder"].startswith(FIRST.folder[0])] == [None, None]
    assert kv("verify")[0] == 0
    assert kv("pin", FIRST.folder[0])[0] == 2


@pytest.mark.parametrize("text", [None, "", "[]", '{"format": "x"}', '{"format": 2}'])
def test_a_root_that_is_no_store_of_this_version_is_refused(kv: Any, root: Path, text: str | None) -> None:
    file = root / "FORMAT.json"
    file.unlink() if text is None else file.write_text(text)
    for words in (("ls",), ("evict", "--bytes", "1")):
        code, _, err = kv(*words)
        assert code == 2
        assert "to fix:" in err


def test_a_folder_that_is_not_there_is_refused(kv: Any, tmp_path: Path) -> None:
    code, _, err = kv("ls", at=tmp_path / "nowhere")
    assert code == 2
    assert "--root" in err


@pytest.mark.skipif(os.getuid() != 0, reason="needs another user to fail as")
def test_somebody_elses_store_is_a_clear_refusal(root: Path) -> None:
    os.seteuid(65534)
    try:
        with pytest.raises(StoreError) as error:
            survey.check_root(root)
    finally:
        os.seteuid(0)
    assert "is closed to uid 65534" in error.value.found
    assert "sudo" in error.value.fix


@pytest.mark.parametrize("named", [False, True])
def test_the_root_and_its_classes_are_those_of_env(
    named: bool, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rules = [{"namespace": "llama*", "class": "keep"}]
    (tmp_path / "classes.json").write_text(json.dumps(rules))
    (tmp_path / ".env").write_text(f"KV_ENV_VERSION=1\nKV_CACHE_DIR={root.parent}\nKV_STORE_CLASSES=classes.json\n")
    monkeypatch.setenv("KVSTRATA_ROOT", str(tmp_path))
    monkeypatch.setattr(
        sys, "argv", ["kvstrata", "store", "namespaces", "--json", *(["--root", str(root)] if named else [])]
    )
    assert cli.main() == 0
    rows = json.loads(capsys.readouterr().out)["folders"]
    assert {(row["namespace"], row["class"]) for row in rows} == {(MODELS[0], "keep"), (ODD_NAMESPACE, "normal")}


def test_a_reader_that_stops_reading_is_no_error(root: Path) -> None:
    words = [sys.executable, "-m", "kvstrata.cli", "store", "ls", "--root", str(root)]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        ["bash", "-c", '"$@" | true; exit "${PIPESTATUS[0]}"', "-", *words], env=env, capture_output=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, b"")
