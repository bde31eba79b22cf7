"""Folders of the settings: what cannot hold data is refused in words, and a refused run has changed nothing."""

from __future__ import annotations

import os
import shutil
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from kvstrata.deploy import dotenv, envfile, folders, settings, up
from kvstrata.deploy.errors import KvError
from kvstrata.deploy.steps import Steps

ROOT = Path(__file__).parents[2]
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="gives folders to other users")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    shutil.copy(ROOT / ".env.example", tmp_path)
    envfile.ensure(tmp_path)
    return tmp_path


def load(root: Path, **env: str) -> settings.Settings:
    return settings.load(root, env)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def a_file(place: Path) -> None:
    place.write_text("")


def a_dangling_link(place: Path) -> None:
    place.symlink_to(place.parent / "nowhere")


def a_link_to_a_file(place: Path) -> None:
    (place.parent / "file").write_text("")
    place.symlink_to("file")


def a_loop(place: Path) -> None:
    place.symlink_to(place)


@pytest.mark.parametrize("knob", ["KV_CACHE_DIR", "KV_DATA_DIR"])
@pytest.mark.parametrize("below", ["", "x"])
@pytest.mark.parametrize("make", [a_file, a_dangling_link, a_link_to_a_file, a_loop])
def test_no_folder_and_no_place_for_one(root: Path, make: Callable[[Path], None], knob: str, below: str) -> None:
    place = root / "place"
    make(place)
    with pytest.raises(KvError) as caught:
        envfile.ensure_secrets(load(root, **{knob: str(place / below)}))
    assert f"{knob}={place / below}" in caught.value.found and str(place) in caught.value.found
    assert knob in caught.value.fix
    assert not (root / "data").exists(), "a refused run has made nothing"


@pytest.mark.parametrize("folder", ["/", "/etc", "/etc/kv", "/usr/local/kv", "/proc/x", "/sys/x", "/var", "/dev"])
def test_system_folders_are_refused_and_no_chmod_is_advised(root: Path, folder: str) -> None:
    with pytest.raises(KvError) as caught:
        envfile.ensure_secrets(load(root, KV_CACHE_DIR=folder))
    assert f"KV_CACHE_DIR={folder}" in caught.value.found
    assert "chmod" not in caught.value.fix and "chown" not in caught.value.fix
    assert not (root / "data").exists()


def test_memory_file_systems_below_dev_are_no_system_folder(root: Path) -> None:
    folders.check("KV_CACHE_DIR", Path("/dev/shm/kvstrata-test"), load(root), private=True)


@as_root
@pytest.mark.parametrize("link", [False, True])
def test_a_folder_of_another_user_is_refused_as_it_is(root: Path, link: bool) -> None:
    place = root / "mine"
    place.mkdir(mode=0o755)
    given = place
    if link:
        given = root / "link"
        given.symlink_to(place)
    with pytest.raises(KvError, match="belongs to uid 0"):
        envfile.ensure_secrets(load(root, KV_CACHE_DIR=str(given)))
    assert mode(place) == 0o755
    assert not (root / "data").exists()


@as_root
def test_our_own_empty_folder_is_closed(root: Path) -> None:
    place = root / "mine"
    place.mkdir(mode=0o755)
    os.chown(place, 10001, 10001)
    envfile.ensure_secrets(load(root, KV_CACHE_DIR=str(place)))
    assert mode(place) == 0o700


@as_root
@pytest.mark.parametrize("owner", [0, 10001])
def test_a_mount_point_is_neither_closed_nor_advised_to_be(
    root: Path, monkeypatch: pytest.MonkeyPatch, owner: int
) -> None:
    place = root / "disk"
    place.mkdir(mode=0o755)
    (place / "lost+found").mkdir()
    os.chown(place, owner, owner)
    monkeypatch.setattr(os.path, "ismount", lambda path: Path(path) == place)
    with pytest.raises(KvError) as caught:
        envfile.ensure_secrets(load(root, KV_CACHE_DIR=str(place)))
    assert f"KV_CACHE_DIR={place / 'kvstrata'}" in caught.value.fix
    assert "chmod" not in caught.value.fix and "chown" not in caught.value.fix
    assert mode(place) == 0o755


def test_plain_vllm_does_not_ask_for_the_cache_folder(root: Path) -> None:
    envfile.ensure_secrets(load(root, KV_CACHE_DIR="/proc/x", KV_PERSIST="0"))


@pytest.mark.parametrize("verb", ["up", "rollback"])
def test_a_bad_cache_folder_is_refused_first_of_all_and_never_keeps_from_a_rollback(
    root: Path, monkeypatch: pytest.MonkeyPatch, verb: str
) -> None:
    """ "engine" = the step after the folders were looked at."""

    def reached(*_: object) -> None:
        raise KvError("engine", "", "")

    monkeypatch.setattr(up.engine, "ensure", reached)
    envfile.set_value(root, "KV_CACHE_DIR", "/proc/x")
    with pytest.raises(KvError, match="engine" if verb == "rollback" else "/proc/x"):
        getattr(up, verb)(root, Steps())


# -- .env itself -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "found"),
    [
        ("KV_MODEL=ä\n".encode("latin-1"), ":1: byte 0xe4"),
        ("# ok\nKV_MODEL=ä\n".encode("latin-1"), ":2: byte 0xe4"),
        ("KV_PORT=8000\n".encode("utf-16"), "UTF-16"),
        ("KV_PORT=8000\n".encode("utf-16-be"), "UTF-16"),
    ],
)
def test_an_env_file_that_is_not_utf8_is_refused_with_its_line(tmp_path: Path, content: bytes, found: str) -> None:
    (tmp_path / ".env").write_bytes(content)
    with pytest.raises(KvError) as caught:
        load(tmp_path)
    assert found in caught.value.found
    assert "UTF-8" in caught.value.needed and "iconv" in caught.value.fix


def test_a_byte_order_mark_is_read_over_and_not_written_again(root: Path) -> None:
    path = root / ".env"
    path.write_bytes(b"\xef\xbb\xbfKV_PORT=8123\n")
    assert load(root).port == 8123
    envfile.set_value(root, "KV_MODEL", "x")
    assert path.read_bytes() == b"KV_PORT=8123\nKV_MODEL=x\n"


def test_an_env_file_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    (tmp_path / ".env").mkdir()
    with pytest.raises(KvError, match=r"\.env cannot be read"):
        load(tmp_path)
    with pytest.raises(KvError, match="cannot be read"):
        dotenv.read(tmp_path / ".env")


def test_a_home_of_nobody_is_refused(tmp_path: Path) -> None:
    with pytest.raises(KvError, match=r"~nobody-of-that-name/x in \.env names a home"):
        load(tmp_path, KV_CACHE_DIR="~nobody-of-that-name/x")
