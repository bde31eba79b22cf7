"""Which folders a store takes, and what it says about the others."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from kvstrata.store import root as root_module
from kvstrata.store.errors import StoreError
from kvstrata.store.mounts import file_system, objection
from kvstrata.store.root import open_root
from kvstrata.store.settings import ClassRule, StoreSettings
from kvstrata.store.store import BlockStore
from tests.store.stores import du, file_of, key, put, settings

MOUNTS = """\
22 1 254:0 / / rw,relatime - ext4 /dev/vda rw
30 22 0:30 / /mnt/with\\040space rw - nfs4 server:/x rw
31 22 0:31 / /data rw shared:1 - xfs /dev/vdb rw
32 31 0:32 / /data/inner rw master:2 - fuse.sshfs host: rw
33 22 0:33 / /twice rw - xfs /dev/vdc rw
34 33 0:34 / /twice rw - tmpfs tmpfs rw
"""


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/srv/store", "ext4"),
        ("/mnt/with space/store", "nfs4"),
        ("/data/store", "xfs"),
        ("/database", "ext4"),
        ("/data/inner/x", "fuse.sshfs"),
        ("/twice/x", "tmpfs"),
    ],
)
def test_the_innermost_and_latest_mount_tells_the_file_system(path: str, kind: str) -> None:
    assert file_system(Path(path), MOUNTS) == kind


@pytest.mark.parametrize(
    "kind", ["nfs", "nfs4", "cifs", "overlay", "tmpfs", "fuse.sshfs", "fuse", "9p", "vfat", "virtiofs"]
)
def test_volatile_network_and_stacked_file_systems_are_objected_to(kind: str) -> None:
    assert objection(kind)


@pytest.mark.parametrize("kind", ["ext4", "xfs", "btrfs", "zfs", "f2fs", "bcachefs", "", "somethingnew"])
def test_local_and_unknown_file_systems_are_left_to_the_probe(kind: str) -> None:
    assert not objection(kind)


def test_a_file_system_that_is_objected_to_names_the_override_and_obeys_it(
    root: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(root_module, "file_system", lambda path: "fuse.sshfs")
    with pytest.raises(StoreError, match=r"KV_CACHE_ALLOW_FS=fuse\.sshfs"):
        open_root(settings(root, allow_fs=("nfs",)))
    for allowed in ("fuse", "fuse.sshfs"):
        open_root(settings(root, allow_fs=(allowed,))).close()
    assert "KV_CACHE_ALLOW_FS allows it" in caplog.text


def test_a_new_root_is_private_whatever_the_umask(root: Path) -> None:
    before = os.umask(0)
    try:
        open_root(settings(root)).close()
    finally:
        os.umask(before)
    assert {path.name: path.stat().st_mode & 0o777 for path in [root, *root.iterdir()]} == {
        "store": 0o700,
        ".lock": 0o600,
        "FORMAT.json": 0o600,
    }


def test_modes_that_let_others_in_are_tightened(root: Path, caplog: pytest.LogCaptureFixture) -> None:
    open_root(settings(root)).close()
    for path in (root, root / ".lock", root / "FORMAT.json"):
        path.chmod(0o777)
    open_root(settings(root)).close()
    assert root.stat().st_mode & 0o777 == 0o700
    assert {path.stat().st_mode & 0o777 for path in root.iterdir()} == {0o600}
    assert "had mode 777" in caplog.text


def test_a_symlink_is_refused_and_its_target_named(root: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    root.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(StoreError, match=r"set KV_STORE_ROOT to .*elsewhere"):
        open_root(settings(root))
    assert not list((tmp_path / "elsewhere").iterdir())


def test_a_file_is_refused(root: Path) -> None:
    root.write_text("x")
    with pytest.raises(StoreError, match="no folder"):
        open_root(settings(root))


def test_somebody_elses_folder_is_refused_untouched(root: Path) -> None:
    root.mkdir(mode=0o755)
    (root / "thesis.tex").write_text("x")
    with pytest.raises(StoreError, match=r"thesis\.tex"):
        open_root(settings(root))
    assert [path.name for path in root.iterdir()] == ["thesis.tex"]
    assert root.stat().st_mode & 0o777 == 0o755


def test_a_fresh_disk_and_a_store_that_lost_its_format_file_are_taken(root: Path) -> None:
    root.mkdir()
    (root / "lost+found").mkdir()
    (root / ("a" * 32)).mkdir()
    open_root(settings(root)).close()
    assert json.loads((root / "FORMAT.json").read_text())["format"] == 1


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can take other users' rights")
def test_a_fresh_disk_of_another_user_is_taken_with_its_closed_lost_and_found(tmp_path: Path) -> None:
    """As mkfs leaves it: lost+found is root's alone, and the store is not root."""
    root = Path(tempfile.mkdtemp(prefix="kvstrata-"))  # pytest's own folders are closed to others
    try:
        (root / "lost+found").mkdir(mode=0o700)
        os.chown(root, 1000, 1000)
        script = (
            "import os; from pathlib import Path; from tests.store.stores import *; os.setuid(1000)\n"
            f"store = BlockStore.open(settings(Path({str(root)!r})))\n"
            "assert put(store, [1])[0].outcome == 'stored'; store.close()"
        )
        env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        done = subprocess.run([sys.executable, "-c", script], env=env, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
    finally:
        shutil.rmtree(root)


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_nothing_is_written_through_a_symlink_inside_the_root(root: Path, tmp_path: Path, depth: int) -> None:
    """A namespace moved to another disk and linked: the cap does not see there, nor the next start's scan."""
    store = BlockStore.open(settings(root))
    put(store, [1], salt="s")
    store.close()
    elsewhere, moved = tmp_path / "elsewhere", file_of(root, 1, "s").parents[2 - depth]
    shutil.move(moved, elsewhere)
    moved.symlink_to(elsewhere)
    before = du(elsewhere)
    store = BlockStore.open(settings(root))
    assert {result.reason for result in put(store, range(1, 30), salt="s")} >= {"eloop"}
    assert store.contains([key(1, "s")]) == [False]
    store.close()
    assert du(elsewhere) == before


def test_nothing_is_made_through_a_symlink_that_comes_while_the_store_runs(root: Path, tmp_path: Path) -> None:
    store = BlockStore.open(settings(root))
    put(store, range(1, 30), salt="s")
    elsewhere, moved = tmp_path / "elsewhere", file_of(root, 1, "s").parents[1]
    shutil.move(moved, elsewhere)
    moved.symlink_to(elsewhere)
    before = sorted(elsewhere.rglob("*"))
    put(store, range(30, 90), salt="s")
    assert sorted(elsewhere.rglob("*")) == before
    store.close()


@pytest.mark.parametrize("text", ['{"format": 2}', '{"format": 0}', "{}", "[]", "nonsense", ""])
def test_another_format_is_refused_and_the_root_left_free(root: Path, text: str) -> None:
    open_root(settings(root)).close()
    (root / "FORMAT.json").write_text(text)
    with pytest.raises(StoreError, match=r"FORMAT\.json"):
        open_root(settings(root))
    (root / "FORMAT.json").unlink()
    open_root(settings(root)).close()


def test_a_second_process_is_told_who_owns_the_root(root: Path) -> None:
    owner = open_root(settings(root))
    program = (
        "import sys\n"
        "from pathlib import Path\n"
        "from tests.store.stores import settings\n"
        "from kvstrata.store.root import open_root\n"
        "from kvstrata.store.errors import StoreError\n"
        "try:\n    open_root(settings(Path(sys.argv[1])))\n"
        "except StoreError as error:\n    print(error.owned, error)\n"
        "else:\n    print('opened')\n"
    )

    def second() -> str:
        env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        return subprocess.run(
            [sys.executable, "-c", program, str(root)], env=env, capture_output=True, text=True, check=True
        ).stdout

    assert f"True block store: found {root} owned by another process (pid {os.getpid()})" in second()
    owner.close()
    assert second() == "opened\n"


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_without_the_right_to_write_is_refused(root: Path) -> None:
    root.mkdir()
    root.parent.chmod(0o500)
    try:
        with pytest.raises(StoreError, match="may write"):
            open_root(settings(root / "deeper"))
    finally:
        root.parent.chmod(0o700)


def test_healing_makes_a_removed_root_anew_and_owns_it(root: Path) -> None:
    owner = open_root(settings(root))
    assert owner.heal() is False
    root.rename(root.with_name("away"))
    assert owner.heal() is True
    assert {path.name for path in root.iterdir()} == {".lock", "FORMAT.json"}
    with pytest.raises(StoreError, match="owned by another process"):
        open_root(settings(root))
    owner.close()


def test_the_environment_spells_every_setting(tmp_path: Path) -> None:
    rules = tmp_path / "classes.json"
    rules.write_text('[{"namespace": "demo*", "class": "bulk"}, {"salt": "vip", "class": "keep"}]')
    chosen = StoreSettings.from_env(
        {
            "KV_STORE_ROOT": "/srv/store",
            "KV_STORE_CAPACITY_BYTES": "10000000000",
            "KV_STORE_CODEC": "zstd",
            "KV_STORE_IO": "direct",
            "KV_STORE_NATIVE": "off",
            "KV_STORE_WORKERS": "3",
            "KV_STORE_LOAD_DEADLINE": "2.5",
            "KV_STORE_STORE_DEADLINE": "30",
            "KV_STORE_FREE_FLOOR_GB": "0.5",
            "KV_STORE_CLASSES": str(rules),
            "KV_CACHE_ALLOW_FS": "tmpfs, overlay",
        }
    )
    assert chosen == StoreSettings(
        root=Path("/srv/store"),
        capacity=10**10,
        codec="zstd",
        io="direct",
        native="off",
        workers=3,
        load_deadline_s=2.5,
        store_deadline_s=30.0,
        free_floor=1 << 29,
        allow_fs=("tmpfs", "overlay"),
        classes=(ClassRule("demo*", "*", "bulk"), ClassRule("*", "vip", "keep")),
    )
    assert chosen.class_of("demo-1", "vip") == "bulk"
    assert chosen.class_of("other", "vip") == "keep"
    assert chosen.class_of("other", "") is None


@pytest.mark.parametrize(
    ("knob", "value"),
    [
        ("KV_STORE_ROOT", ""),
        ("KV_STORE_CAPACITY_BYTES", ""),
        ("KV_STORE_CAPACITY_BYTES", "0"),
        ("KV_STORE_CAPACITY_BYTES", "lots"),
        ("KV_STORE_CAPACITY_BYTES", "nan"),
        ("KV_STORE_IO", "mmap"),
        ("KV_STORE_NATIVE", "maybe"),
        ("KV_STORE_WORKERS", "-1"),
        ("KV_STORE_LOAD_DEADLINE", "0"),
        ("KV_STORE_LOAD_DEADLINE", "inf"),
        ("KV_STORE_FREE_FLOOR_GB", "-1"),
        ("KV_STORE_CLASSES", "/nonexistent"),
    ],
)
def test_a_wrong_setting_is_named(knob: str, value: str) -> None:
    env = {"KV_STORE_ROOT": "/srv/store", "KV_STORE_CAPACITY_BYTES": "10000000000", knob: value}
    with pytest.raises(StoreError, match=knob):
        StoreSettings.from_env(env)
