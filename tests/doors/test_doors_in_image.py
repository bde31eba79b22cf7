"""The adapter's `inside_*.py` tests, in the image that the stack uses."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from tests import in_image

pytestmark = [pytest.mark.docker, pytest.mark.slow]

HERE = Path(__file__).parent
#: As compose runs the cache server: no capabilities, no root, its shared memory, /cache from the host.
SERVER = (
    "--cap-drop", "ALL", "--security-opt", "no-new-privileges:true", "--init", "--shm-size", "256m",
    "-e", "HOME=/tmp", "-e", "NUMBA_CACHE_DIR=/tmp/numba",
)  # fmt: skip


@pytest.fixture(scope="module")
def image() -> str:
    return in_image.build()


@pytest.fixture
def disk(tmp_path: Path) -> Path:
    """A folder on this machine's disk, as the one that nvme.yaml binds to /cache: of the service's user alone."""
    folder = tmp_path / "cache"
    folder.mkdir(mode=0o777)
    folder.chmod(0o777)
    return folder


def run(image: str, disk: Path, *args: str, env: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    docker = (*SERVER, "-v", f"{disk}:/cache", "-v", f"{in_image.ROOT / 'src'}:/src:ro")
    return in_image.run(image, HERE, "--basetemp", "/cache/t", *args, docker=docker, env=env)


@pytest.mark.parametrize("name", ["inside_conformance.py", "inside_manager.py", "inside_remote.py", "inside_v1.py"])
def test_the_adapter_in_the_image(image: str, disk: Path, name: str) -> None:
    done = run(image, disk, f"/tests/{name}")
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]


def test_without_the_guard_lmcache_stores_what_a_failed_load_left(image: str, disk: Path) -> None:
    """If this fails, the pinned LMCache has mended it and that part of the guard can go. A race: one of 12 will do."""
    damaged = "is_written_again and 1-1"
    done = run(image, disk, "/tests/inside_manager.py", "-x", "-k", damaged, env=("KVSTRATA_UNGUARDED=1",))
    assert done.returncode == 1, done.stdout[-8000:] + done.stderr[-2000:]
