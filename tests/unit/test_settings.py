"""The knobs: what is read, who wins, and what every wrong value is told."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import settings as how
from hypothesis import strategies as st

from kvstrata.deploy import dotenv, settings
from kvstrata.deploy.errors import KvError
from kvstrata.deploy.knobs import MANAGED_KEYS, RENAMED, USER_KEYS
from kvstrata.launch import config

ROOT = Path(__file__).parents[2]


def write(root: Path, text: str) -> Path:
    (root / ".env").write_text(text)
    return root


def test_the_example_holds_every_knob_with_its_default_and_a_comment() -> None:
    text = (ROOT / ".env.example").read_text()
    assert {e.key: e.value for e in dotenv.parse_text(text, ".env.example", {})} == dict(USER_KEYS)
    lines = text.splitlines()
    for number, line in enumerate(lines):
        if "=" in line and not line.startswith("#") and not line.startswith("KV_GID"):
            assert lines[number - 1].startswith("# "), f"{line} has no comment"


def test_without_a_file_the_defaults_hold(tmp_path: Path) -> None:
    found = settings.load(tmp_path, {})
    assert (found.persist, found.layers, found.port, found.metrics_port) == (True, ("nvme",), 8000, 9400)
    assert found.data_dir == tmp_path / "data"
    assert found.cache_dir == tmp_path / "data" / "cache"
    assert (found.device, found.l1_gb, found.uid) == ("", None, None)


def test_values_are_typed_and_paths_start_at_the_checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir("/")
    text = "KV_PERSIST=0\nKV_LAYERS=nvme, observability\nMODEL_DIR=../models/x\nKV_L1_GB=1.5\nKV_UID=0\n"
    found = settings.load(write(tmp_path, text + "KV_VLLM_EXTRA_ARGS=--a 'b c' --d\nKV_CACHE_DIR=/fast\n"), {})
    assert found.persist is False
    assert found.layers == ("nvme", "observability")
    assert found.model_dir == tmp_path.parent / "models" / "x"
    assert (found.l1_gb, found.uid, found.cache_dir) == (1.5, 0, Path("/fast"))
    assert found.vllm_extra_args == ("--a", "b c", "--d")


def test_the_environment_wins_over_the_file_for_knobs_only(tmp_path: Path) -> None:
    root = write(tmp_path, f"KV_PORT=8001\n{dotenv.BEGIN}\nKV_IDENTITY=abc\n{dotenv.END}\n")
    found = settings.load(root, {"KV_PORT": "8002", "KV_IDENTITY": "other", "KV_UNKNOWN": "1"})
    assert found.port == 8002
    assert found.managed == {"KV_IDENTITY": "abc"}


@pytest.mark.parametrize(
    ("text", "found", "fix"),
    [
        ("KV_PROT=1", r"\.env:1: unknown setting KV_PROT", "KV_PORT"),
        ("# c\n\nKV_PERSITS=0", r"\.env:3: unknown setting", "KV_PERSIST"),
        ("KV_MODEL_DIR=/m", r"\.env:1: KV_MODEL_DIR was renamed", "MODEL_DIR"),
        ("COMPOSE_FILE=x", r"\.env:1: COMPOSE_FILE is written by the CLI", "delete"),
        ("KV_PORT=1\nKV_PORT=2", r"\.env:2: KV_PORT stands twice, first at .*\.env:1", "delete"),
        ("KV_PORT 8000", r"\.env:1: KV_PORT 8000", "mend"),
        ("KV_MODEL='x", r"\.env:1: KV_MODEL: quotes", "quotes"),
        ("KV_MODEL=a$-b", r"\.env:1: KV_MODEL: a \$", "single quotes"),
        ("KV_DEVICE= # cpu", r"\.env:1: KV_DEVICE: a comment", "line of its own"),
        ("KV_ENV_VERSION=0", "KV_ENV_VERSION=0", "example"),
        ("COMPOSE_PROJECT_NAME=My App", "COMPOSE_PROJECT_NAME=My App", "lower-case"),
        ("KV_PORT=http", "KV_PORT=http", "1 to 65535"),
        ("KV_PORT=0", "KV_PORT=0", "1 to 65535"),
        ("KV_PORT=65536", "KV_PORT=65536", "1 to 65535"),
        ("KV_PORT=1_000", "KV_PORT=1_000", "1 to 65535"),
        ("KV_PORT=-1", "KV_PORT=-1", "1 to 65535"),
        ("KV_PORT=9400", "KV_METRICS_PORT=9400", "change one"),
        ("KV_PERSIST=yes", "KV_PERSIST=yes", "0 or 1"),
        ("KV_DEVICE=nvida", "KV_DEVICE=nvida", "nvidia"),
        ("KV_IMAGE_SOURCE=push", "KV_IMAGE_SOURCE=push", "pull"),
        ("KV_TRANSFER_MODE=shm", "KV_TRANSFER_MODE=shm", "engine_driven"),
        ("KV_L1_GB=lots", "KV_L1_GB=lots", "GiB"),
        ("KV_L1_GB=nan", "KV_L1_GB=nan", "GiB"),
        ("KV_L1_GB=inf", "KV_L1_GB=inf", "GiB"),
        ("KV_L1_GB=0", "KV_L1_GB=0", "GiB"),
        ("KV_L1_GB=-2", "KV_L1_GB=-2", "GiB"),
        ("KV_VLLM_KV_GB=1.5", "KV_VLLM_KV_GB=1.5", "whole"),
        ("KV_CHUNK_SIZE=0", "KV_CHUNK_SIZE=0", "tokens"),
        ("KV_UID=root", "KV_UID=root", "user or group id"),
        ("KV_WAIT_TIMEOUT=0", "KV_WAIT_TIMEOUT=0", "seconds"),
        ("KV_MQ_TIMEOUT=0", "KV_MQ_TIMEOUT=0", "seconds"),
        ("KV_MQ_TIMEOUT=1e1", "KV_MQ_TIMEOUT=1e1", "seconds"),
        ("KV_MQ_TIMEOUT=.5", r"KV_MQ_TIMEOUT=\.5", "seconds"),
        ("KV_MQ_TIMEOUT=5_0", "KV_MQ_TIMEOUT=5_0", "seconds"),
        ("KV_MQ_TIMEOUT=\u0665", "KV_MQ_TIMEOUT=\u0665", "seconds"),
        ("KV_HEARTBEAT=5.", r"KV_HEARTBEAT=5\.", "seconds"),
        ("KV_PORT=' 18000'", "KV_PORT=' 18000'", "white space"),
        ("KV_UID='10001 '", "KV_UID='10001 '", "KV_UID=10001"),
        ("KV_BASE_IMAGE='a b'", "KV_BASE_IMAGE=a b", "image"),
        ("KV_REGISTRY='a b'", "KV_REGISTRY=a b", "registry"),
        ('KV_VLLM_EXTRA_ARGS="--a \'b"', "KV_VLLM_EXTRA_ARGS", "balanced"),
    ],
)
def test_a_wrong_line_is_refused_with_its_place_and_the_way_out(
    tmp_path: Path, text: str, found: str, fix: str
) -> None:
    root = write(tmp_path, text + "\n")
    before = (root / ".env").stat().st_mtime_ns
    with pytest.raises(KvError) as caught:
        settings.load(root, {})
    assert re.search(found, caught.value.found)
    assert fix in f"{caught.value.needed} {caught.value.fix}"
    assert caught.value.exit_code == 2
    assert (root / ".env").stat().st_mtime_ns == before


@how(deadline=None)
@given(st.text(alphabet="0123456789.e_+- \u0665\n", max_size=6))
def test_what_is_taken_here_is_taken_by_the_launcher(text: str) -> None:
    try:
        found = settings.load(Path("/nowhere"), {"KV_MQ_TIMEOUT": text})
    except KvError:
        return
    assert config.number({"KV_MQ_TIMEOUT": text}, "KV_MQ_TIMEOUT") == found.mq_timeout


def test_a_wrong_exported_value_is_blamed_on_the_environment(tmp_path: Path) -> None:
    with pytest.raises(KvError) as caught:
        settings.load(write(tmp_path, "KV_PORT=8000\n"), {"KV_PORT": "x"})
    assert "KV_PORT of the environment" in caught.value.found


def test_every_renamed_knob_leads_to_one_that_exists() -> None:
    assert set(RENAMED.values()) <= set(USER_KEYS)
    assert not set(RENAMED) & (set(USER_KEYS) | set(MANAGED_KEYS))
    assert not set(USER_KEYS) & set(MANAGED_KEYS)
