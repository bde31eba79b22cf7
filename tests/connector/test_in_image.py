"""Runs the `inside_*.py` tests in the image that the stack uses: real LMCache, no server, no model."""

from __future__ import annotations

import subprocess
import sysconfig
from pathlib import Path

import pytest

from kvstrata.deploy import engine, images, settings
from kvstrata.deploy.steps import Steps

pytestmark = [pytest.mark.docker, pytest.mark.slow]

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
# pytest is pure Python: the project's own copy serves the image's interpreter. Appended, so that it hides nothing.
RUN = (
    "import sys; sys.path.append('/site'); import pytest; "
    "sys.exit(pytest.main(['-q', '-p', 'no:cacheprovider', '-o', 'addopts=', '--rootdir', '/tests', sys.argv[1]]))"
)


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> str:
    engine.ensure(True, Steps())
    environ = {"KV_DEVICE": "cpu", "KV_IMAGE_SOURCE": "build"}
    return images.ensure(settings.load(ROOT, environ=environ), Steps()).vllm


def run(image: str, name: str, *env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [
            "docker", "run", "--rm", "--network", "none", "--read-only", "--tmpfs", "/tmp", "--user", "10001:10001",
            "-v", f"{HERE}:/tests:ro", "-v", f"{sysconfig.get_paths()['purelib']}:/site:ro",
            "-e", "LMCACHE_TRACK_USAGE=false", *(f"-e{item}" for item in env),
            "--entrypoint", "python3", image, "-B", "-c", RUN, f"/tests/{name}",
        ],
        capture_output=True, text=True, timeout=600,
    )  # fmt: skip


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
