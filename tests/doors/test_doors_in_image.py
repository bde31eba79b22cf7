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
    "sys.exit(pytest.main(['-q', '-p', 'no:cacheprovider', '-o', 'addopts=', '--basetemp', '/cache/t', "
    "'--rootdir', '/tests', *sys.argv[1:]]))"
)


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> str:
    engine.ensure(True, Steps())
    environ = {"KV_DEVICE": "cpu", "KV_IMAGE_SOURCE": "build"}
    return images.ensure(settings.load(ROOT, environ=environ), Steps()).vllm


@pytest.fixture
def disk(tmp_path: Path) -> Path:
    """A folder on this machine's disk, as the one that nvme.yaml binds to /cache: of the service's user alone."""
    folder = tmp_path / "cache"
    folder.mkdir(mode=0o777)
    folder.chmod(0o777)
    return folder


def run(image: str, disk: Path, *args: str, env: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    """As compose runs the cache server: read-only, no capabilities, no root, /cache from the host."""
    return subprocess.run(
        [
            "docker", "run", "--rm", "--network", "none", "--read-only", "--tmpfs", "/tmp", "--user", "10001:10001",
            "--cap-drop", "ALL", "--security-opt", "no-new-privileges:true", "--init", "--shm-size", "256m",
            "-v", f"{HERE}:/tests:ro", "-v", f"{sysconfig.get_paths()['purelib']}:/site:ro", "-v", f"{disk}:/cache",
            "-e", "LMCACHE_TRACK_USAGE=false", "-e", "HOME=/tmp", "-e", "NUMBA_CACHE_DIR=/tmp/numba",
            *(f"-e{item}" for item in env), "--entrypoint", "python3", image, "-B", "-c", RUN, *args,
        ],
        capture_output=True, text=True, timeout=900,
    )  # fmt: skip


@pytest.mark.parametrize("name", ["inside_conformance.py", "inside_manager.py"])
def test_the_adapter_in_the_image(image: str, disk: Path, name: str) -> None:
    done = run(image, disk, f"/tests/{name}")
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]


def test_without_the_guard_lmcache_stores_what_a_failed_load_left(image: str, disk: Path) -> None:
    """If this fails, the pinned LMCache has mended it and that part of the guard can go. A race: one of 12 will do."""
    damaged = "is_written_again and 1-1"
    done = run(image, disk, "/tests/inside_manager.py", "-x", "-k", damaged, env=("KVSTRATA_UNGUARDED=1",))
    assert done.returncode == 1, done.stdout[-8000:] + done.stderr[-2000:]
