"""One table of values: written by us and read by both Compose versions, and lines by hand read by all three alike."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvstrata.deploy import dotenv
from kvstrata.deploy.errors import KvError
from tests.compose.rendering import Version

VALUES = [
    "", "plain", "a b", "a#b", "a # b", "#", "it's", 'say "x"', "both ' and \"", "$HOME", "${HOME}", "$$", "a$",
    "back\\slash", "\\n", "two\nlines", "tab\there", "é ü 漢", "'", '"', "''", "a=b", " lead and trail ",
    '--x \'{"a": "b$c", "d": [1]}\'', "`id`", "!x", "%s", "~/x",
    "C:\\dir\\", "end\\", "\\$x", "\r", "\\'", "\\\"",
]  # fmt: skip
LINES = [
    "K=a b # c", "K=a#b", "K=", "export K=a", "K='a # $b' # c", 'K="a\\nb \\"c\\" \\$d" # e', "K=${HOME}/x",
    "K=$HOME/x", "K=$$x", "A=1\nK=$A$A", "K = a", "K='$HOME'", 'K="$HOME"',
    "K=~/x", "K=a'b'c", 'K=a"b"', "K=''", 'K="" # c', "K='a\\nb'",
]  # fmt: skip


def read_by(compose: Version, folder: Path, text: str) -> str:
    (folder / ".env").write_text(text)
    (folder / "compose.yaml").write_text("services:\n  a:\n    image: x\n    environment:\n      V: ${K?}\n")
    done = compose.run(folder, "config", "--format", "json", HOME="/home/me")
    assert done.returncode == 0, done.stderr
    environment = json.loads(done.stdout)["services"]["a"]["environment"]
    value = environment["V"] if isinstance(environment, dict) else environment[0].removeprefix("V=")
    return str(value).replace("$$", "$")  # config escapes what it prints


@pytest.mark.parametrize("value", VALUES)
def test_what_we_write_is_what_compose_reads(compose: Version, tmp_path: Path, value: str) -> None:
    text = f"K={dotenv.quote(value)}\n"
    assert dotenv.parse_text(text, ".env", {})[0].value == value
    assert read_by(compose, tmp_path, text) == value


@pytest.mark.parametrize("text", LINES)
def test_what_a_person_writes_means_the_same_to_us(compose: Version, tmp_path: Path, text: str) -> None:
    ours = dotenv.parse_text(text, ".env", {"HOME": "/home/me"})[-1].value
    assert read_by(compose, tmp_path, text) == ours


def test_a_comment_in_place_of_a_value_is_refused_because_compose_would_take_it(
    compose: Version, tmp_path: Path
) -> None:
    assert read_by(compose, tmp_path, "K= # c") == "# c"
    with pytest.raises(KvError, match="comment"):
        dotenv.parse_text("K= # c", ".env", {})
