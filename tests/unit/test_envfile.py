""".env is created once, filled in place, and rewritten only where and when it has to be."""

from __future__ import annotations

import io
import os
import shutil
import stat
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from kvstrata.deploy import dotenv, envfile, settings, up
from kvstrata.deploy.errors import KvError
from kvstrata.deploy.knobs import MANAGED_KEYS
from kvstrata.deploy.steps import Steps

ROOT = Path(__file__).parents[2]
VALUES = {key: f"value of {key}" for key in MANAGED_KEYS}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    shutil.copy(ROOT / ".env.example", tmp_path)
    return tmp_path


def text_of(root: Path) -> str:
    return (root / ".env").read_text()


def test_it_is_created_once_with_the_owner_and_never_overwritten(root: Path) -> None:
    assert envfile.ensure(root) is True
    found = settings.load(root, {})
    expected = (10001, 10001) if os.geteuid() == 0 else (os.geteuid(), os.getegid())
    assert (found.uid, found.gid) == expected
    (root / ".env").write_text("KV_UID=7\nKV_GID=8\n# mine\n")
    assert envfile.ensure(root) is False
    assert text_of(root) == "KV_UID=7\nKV_GID=8\n# mine\n"


def test_rootless_engines_get_id_0(root: Path) -> None:
    envfile.ensure(root, rootless=True)
    assert settings.load(root, {}).uid == 0


def test_a_checkout_without_the_example_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(KvError, match=r"no .*example"):
        envfile.ensure(tmp_path)


def test_blank_knobs_are_filled_in_place_and_nothing_else_changes(root: Path) -> None:
    (root / ".env").write_text(
        "# top\nKV_DEVICE=''   # which\nKV_PORT=1\nKV_MODEL=''\n\n" + f"{dotenv.BEGIN}\nX=1\n{dotenv.END}\n"
    )
    changed = envfile.set_blank(
        root, {"KV_DEVICE": "cpu", "KV_PORT": "2", "KV_MODEL": "a b", "KV_UID": "5", "KV_GID": ""}
    )
    assert changed == ["KV_DEVICE", "KV_MODEL", "KV_UID"]
    lines = text_of(root).split("\n")
    assert lines[:5] == ["# top", "KV_DEVICE=cpu   # which", "KV_PORT=1", "KV_MODEL='a b'", "KV_UID=5"]
    assert lines[6:] == [dotenv.BEGIN, "X=1", dotenv.END, ""]
    before = (root / ".env").stat()
    assert envfile.set_blank(root, {"KV_DEVICE": "nvidia"}) == []
    after = (root / ".env").stat()
    assert (before.st_mtime_ns, before.st_ino) == (after.st_mtime_ns, after.st_ino)
    with pytest.raises(KvError):
        envfile.set_blank(root, {"KV_NO_KNOB": "1"})


def test_a_knob_can_be_set_whatever_it_says(root: Path) -> None:
    (root / ".env").write_text("KV_IMAGE_SOURCE=pull  # now\n")
    assert envfile.set_value(root, "KV_IMAGE_SOURCE", "build") is True
    assert text_of(root) == "KV_IMAGE_SOURCE=build  # now\n"
    assert envfile.set_value(root, "KV_IMAGE_SOURCE", "build") is False


def test_the_managed_block_is_written_on_a_change_only(root: Path) -> None:
    envfile.ensure(root)
    user = text_of(root)
    assert envfile.write_managed(root, VALUES) is True
    before = (root / ".env").stat()
    assert envfile.write_managed(root, VALUES) is False
    after = (root / ".env").stat()
    assert (before.st_mtime_ns, before.st_ino) == (after.st_mtime_ns, after.st_ino)
    assert settings.load(root, {}).managed == VALUES
    assert envfile.write_managed(root, {**VALUES, "KV_IDENTITY": "new"}) is True
    assert settings.load(root, {}).managed["KV_IDENTITY"] == "new"
    assert text_of(root).startswith(user.rstrip())
    assert text_of(root).count(dotenv.BEGIN) == 1


@pytest.mark.parametrize("cut", ["whole", "end marker lost", "text after"])
def test_a_damaged_block_is_mended_without_loss_of_the_users_lines(root: Path, cut: str) -> None:
    envfile.ensure(root)
    envfile.write_managed(root, VALUES)
    text = text_of(root)
    if cut == "end marker lost":
        text = text.replace(f"{dotenv.END}\n", "")
    if cut == "text after":
        text += "\n# mine\n"
    (root / ".env").write_text(text)
    envfile.write_managed(root, {**VALUES, "KV_IDENTITY": "new"})
    assert settings.load(root, {}).managed == {**VALUES, "KV_IDENTITY": "new"}
    assert ("# mine" in text_of(root)) == (cut == "text after")
    assert text_of(root).count(dotenv.BEGIN) == text_of(root).count(dotenv.END) == 1


@pytest.mark.parametrize(
    "values", [{}, {**VALUES, "KV_MORE": "1"}, {k: v for k, v in VALUES.items() if k != "KV_IDENTITY"}]
)
def test_a_block_with_other_keys_is_a_bug_and_nothing_is_written(root: Path, values: dict[str, str]) -> None:
    envfile.ensure(root)
    before = text_of(root)
    with pytest.raises(KvError):
        envfile.write_managed(root, values)
    assert text_of(root) == before


def test_the_file_keeps_its_mode_and_a_link_stays_a_link(root: Path) -> None:
    envfile.ensure(root)
    real = root / "elsewhere.env"
    (root / ".env").rename(real)
    (root / ".env").symlink_to(real)
    real.chmod(0o600)
    envfile.write_managed(root, VALUES)
    assert (root / ".env").is_symlink()
    assert stat.S_IMODE(real.stat().st_mode) == 0o600
    assert not list(root.glob("..env*")), "no temporary file is left"


def test_data_folders_and_the_secret_are_for_their_owner_only(root: Path) -> None:
    envfile.ensure(root)
    (root / "data" / "cache").mkdir(parents=True, mode=0o755)
    found = settings.load(root, {})
    if os.geteuid() == 0:
        os.chown(found.cache_dir, 10001, 10001)
    made = envfile.ensure_secrets(found)
    assert made == [root / "data" / "secrets" / "salt_key"]
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in [found.cache_dir, found.secrets_dir, *made]}
    assert modes == {"cache": 0o700, "secrets": 0o700, "salt_key": 0o600}
    assert {made[0].stat().st_uid, found.secrets_dir.stat().st_uid} == {found.uid}
    key = made[0].read_text()
    assert len(bytes.fromhex(key.strip())) == 32
    assert envfile.ensure_secrets(found) == []
    assert made[0].read_text() == key
    made[0].write_text("")
    with pytest.raises(KvError, match="empty"):
        envfile.ensure_secrets(found)


def test_a_lost_salt_key_is_said_when_the_cache_holds_blocks(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(up.engine, "ensure", lambda *_: SimpleNamespace(warnings=()))
    monkeypatch.setattr(up.engine, "rootless", lambda: False)
    envfile.ensure(root)
    envfile.set_blank(root, {"KV_DEVICE": "cpu"})

    def prepare() -> str:
        shown = io.StringIO()
        up.prepare(root, Steps(Console(file=shown)))
        return shown.getvalue()

    assert "WARNING" not in prepare(), "nothing is lost on a first run"
    key = root / "data" / "secrets" / "salt_key"
    key.unlink()
    assert "WARNING" not in prepare(), "an empty cache loses nothing"
    (root / "data" / "cache" / "fs").mkdir()
    (root / "data" / "cache" / "fs" / "block").touch()
    key.unlink()
    said = prepare()
    assert f"WARNING: {key} is gone" in said and "cache_salt" in said
    assert key.exists() and "WARNING" not in prepare()


@given(st.text(alphabet=st.characters(exclude_characters="\0", exclude_categories=["Cs"])))
def test_any_value_reads_back_as_it_was_written(value: str) -> None:
    entry = dotenv.parse_text(f"K={dotenv.quote(value)}\nL=1", "env", {"a": "expanded"})[0]
    assert entry.value == value


@pytest.mark.parametrize(
    ("line", "value"),
    [
        ("K=", ""),
        ("K=a b # c", "a b"),
        ("K=a#b", "a#b"),
        ("export K=a", "a"),
        ("  K = a ", "a"),
        ("K='a # $b' # c", "a # $b"),
        ('K="a\\nb \\"c\\" \\$d"', 'a\nb "c" $d'),
        ("K=${HOME}/x", "/home/me/x"),
        ("K=$HOME/x", "/home/me/x"),
        ("K=$NONE/x", "/x"),
        ("K=$$x", "$x"),
        ("A=1\nK=$A", "1"),
    ],
)
def test_the_dialect_is_that_of_compose(line: str, value: str) -> None:
    assert dotenv.parse_text(line, "env", {"HOME": "/home/me"})[-1].value == value
