"""The guard's `inside_*.py` tests, in the image that the stack uses."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from tests import in_image

pytestmark = [pytest.mark.docker, pytest.mark.slow]

HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def image() -> str:
    return in_image.build()


def run(image: str, name: str, *env: str) -> subprocess.CompletedProcess[str]:
    return in_image.run(image, HERE, f"/tests/{name}", env=env)


def test_half_written_blocks_are_never_served(image: str) -> None:
    done = run(image, "inside_l1_guard.py")
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_request_that_ended_holds_no_lock(image: str) -> None:
    done = run(image, "inside_lock_ledger.py")
    assert done.returncode == 0, done.stdout + done.stderr


def test_without_the_guard_locks_stay(image: str) -> None:
    done = run(image, "inside_lock_ledger.py", "KVSTRATA_UNGUARDED=1")
    assert done.returncode == 1, done.stdout + done.stderr
    for name in ("go_with_the_request", "leaves_nothing"):
        assert any(name in line for line in done.stdout.splitlines() if line.startswith("FAILED")), done.stdout


def test_the_guards_parts_on_the_real_classes(image: str) -> None:
    done = run(image, "inside_guard.py")
    assert done.returncode == 0, done.stdout + done.stderr


def test_without_the_guard_lmcache_serves_them(image: str) -> None:
    """If this fails, the pinned LMCache has mended it and the guard can go."""
    done = run(image, "inside_l1_guard.py", "KVSTRATA_UNGUARDED=1")
    assert done.returncode == 1, done.stdout + done.stderr
    for name in ("is_never_readable", "can_be_written_again", "of_an_expired_write_commits_nothing"):
        assert any(name in line for line in done.stdout.splitlines() if line.startswith("FAILED")), done.stdout


def test_pushed_figures_come_soon_after_a_collector_that_was_away(image: str) -> None:
    done = run(image, "inside_telemetry.py")
    assert done.returncode == 0, done.stdout[-4000:]
