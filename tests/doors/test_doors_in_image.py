"""The adapter's `inside_*.py` tests, in the image that the stack uses."""

from __future__ import annotations

import subprocess
from pathlib import Path, PurePosixPath

import pytest
import trustme
from tests import in_image
from tests.certificates import certify, trust
from tests.store.shim import environment

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


def certificates(folder: Path) -> None:
    """A CA and a certificate of its own, as inside_shared.py wants them."""
    folder.mkdir(mode=0o755)
    authority = trustme.CA()
    trust(folder / "ca.pem", authority)
    certify(folder, authority, "127.0.0.1")
    for file in folder.iterdir():
        file.chmod(0o644)


@pytest.mark.parametrize(
    "name", ["inside_conformance.py", "inside_manager.py", "inside_remote.py", "inside_shared.py", "inside_v1.py"]
)
def test_the_adapter_in_the_image(image: str, disk: Path, name: str) -> None:
    certificates(disk / "certificates")
    env = {"KVSTRATA_CERTIFICATES": "/cache/certificates"}
    if name == "inside_manager.py":
        env |= environment(disk, PurePosixPath("/cache/t"), PurePosixPath("/cache"))
    done = run(image, disk, f"/tests/{name}", env=tuple(f"{key}={value}" for key, value in env.items()))
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
