"""Faults of LMCache that show by chance only: too rare for a test run, worth a look before a pin is moved."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.doors.test_doors_in_image import disk, image, run

__all__ = ["disk", "image"]  # fixtures

pytestmark = [pytest.mark.docker, pytest.mark.slow]


def test_without_the_guard_lmcache_stores_what_a_failed_load_left(image: str, disk: Path) -> None:
    """If this fails, the pinned LMCache has mended it and that part of the guard can go. A race: one of 12 will do."""
    damaged = "is_written_again and 1-1"
    done = run(image, disk, "/tests/inside_manager.py", "-x", "-k", damaged, env=("KVSTRATA_UNGUARDED=1",))
    assert done.returncode == 1, done.stdout[-8000:] + done.stderr[-2000:]
