"""The header parser takes any page: it answers or refuses, and does nothing else."""

import importlib.util
import os
import random
import subprocess
import sys
import tracemalloc
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.store.fuzz_header import PAGE, check

ROOT = Path(__file__).parents[2]
FIELD_OFFSETS = (0, 8, 10, 11, 12, 16, 20, 24, 28, 32, 36, 68, 70, 1096, 1100, 1104, 4092)
#: A minute for 200 000, on one of two workers of the whole run.
RUNS = os.environ.get("KVSTRATA_FUZZ_RUNS", "60000")
ODD_BYTES = (0, 1, 2, 3, 0x10, 0x7F, 0x80, 0xFF)


def test_the_seed_is_a_good_page() -> None:
    assert check(b"\0") == check(b"\3" + PAGE) == "good"


@given(st.binary(max_size=5000))
def test_any_bytes_are_parsed_or_refused(data: bytes) -> None:
    check(data)


@given(
    st.lists(
        st.tuples(st.sampled_from(FIELD_OFFSETS) | st.integers(0, 4093), st.binary(min_size=3, max_size=3)), max_size=6
    )
)
def test_any_fields_under_a_good_checksum_are_parsed_or_refused(patches: list[tuple[int, bytes]]) -> None:
    check(b"\1" + b"".join(place.to_bytes(2, "little") + value for place, value in patches))


def _mutations(count: int) -> int:
    chance = random.Random(20261130)
    good = 0
    for _ in range(count):
        data = bytearray(b"\1")
        for _ in range(chance.randint(0, 4)):
            place = chance.choice(FIELD_OFFSETS) if chance.random() < 0.8 else chance.randrange(4094)
            data += place.to_bytes(2, "little") + bytes(chance.choice(ODD_BYTES) for _ in range(3))
        good += check(bytes(data)) == "good"
    return good


def test_no_page_makes_the_parser_reserve_memory() -> None:
    _mutations(10)
    tracemalloc.start()
    try:
        _mutations(2000)
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert most < 1 << 20


@pytest.mark.slow
def test_a_hundred_thousand_mutated_pages() -> None:
    assert 0 < _mutations(100_000) < 100_000


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("atheris") is None, reason="atheris has no wheel for this machine")
def test_atheris_finds_nothing(tmp_path: Path) -> None:
    (tmp_path / "seed").write_bytes(b"\3" + PAGE)
    command = [sys.executable, "-m", "tests.store.fuzz_header", f"-runs={RUNS}", "-max_len=4200", "-timeout=5"]
    command += ["-rss_limit_mb=512", "-max_total_time=120", f"-artifact_prefix={tmp_path}/", str(tmp_path)]
    environment = {"PYTHONPATH": f"{ROOT / 'src'}:{ROOT}", "PATH": "/usr/bin:/bin"}
    # A child's peak memory begins at its parent's, so libFuzzer's parent must be a small one.
    command = ["sh", "-c", '"$@"; exit $?', "-", *command]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
