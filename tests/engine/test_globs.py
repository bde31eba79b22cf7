"""Patterns of SCAN, against a matcher that tries everything."""

from __future__ import annotations

import subprocess
import sys
from fnmatch import fnmatchcase

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstrata.engine.globs import glob
from tests.engine.process import ROOT


@given(pattern=st.text("ab*?", max_size=12), key=st.text("ab", max_size=14))
def test_a_pattern_means_what_it_does_in_a_shell(pattern: str, key: str) -> None:
    assert bool(glob(pattern.encode()).fullmatch(key.encode())) == fnmatchcase(key, pattern)


@pytest.mark.parametrize(
    ("pattern", "fits", "does_not"),
    [
        (b"h[ae]llo", [b"hello", b"hallo"], [b"hillo", b"hllo"]),
        (b"h[^e]*o", [b"hallo", b"hbo"], [b"hello", b"ho"]),
        (b"[b-a]?", [b"ax", b"b\n"], [b"c", b"cx"]),
        (rb"\*\[a*", [b"*[a", b"*[a\xff"], [b"x[a", b"[a"]),
        (b"*[]*", [], [b"", b"[]"]),
        (b"***", [b"", b"x"], []),
    ],
)
def test_classes_and_escapes(pattern: bytes, fits: list[bytes], does_not: list[bytes]) -> None:
    assert all(glob(pattern).fullmatch(key) for key in fits)
    assert not any(glob(pattern).fullmatch(key) for key in does_not)


@pytest.mark.parametrize("pattern", [b"*a" * 12 + b"*b", b"*" * 4000 + b"b", b"a*" * 2000 + b"b", b"*?" * 400 + b"*b"])
def test_no_pattern_takes_for_ever(pattern: bytes) -> None:
    """In a process of its own: it would hold this one's interpreter."""
    code = (
        f"import sys; from kvstrata.engine.globs import glob; sys.exit(bool(glob({pattern!r}).fullmatch(b'a' * 4096)))"
    )
    command = [sys.executable, "-c", code]
    assert subprocess.run(command, env={"PYTHONPATH": str(ROOT / "src")}, timeout=30, check=False).returncode == 0
