"""Runs `inside_*.py` tests in the image that the stack uses: real LMCache, no server, no model.

As a program it makes the images, before tests that need them run side by side.
"""

from __future__ import annotations

import subprocess
import sysconfig
from pathlib import Path

from kvstrata.deploy import engine, images, settings
from kvstrata.deploy.steps import Steps

__all__ = ["build", "run"]

ROOT = Path(__file__).parents[1]
# pytest is pure Python: the project's own copy serves the image's interpreter. Appended, so that it hides nothing.
RUN = (
    "import sys; sys.path.append('/site'); import pytest; "
    "sys.exit(pytest.main(['-q', '-p', 'no:cacheprovider', '-o', 'addopts=', '--rootdir', '/tests', *sys.argv[1:]]))"
)


def build() -> str:
    """The image's name."""
    engine.ensure(True, Steps())
    environ = {"KV_DEVICE": "cpu", "KV_IMAGE_SOURCE": "build"}
    return images.ensure(settings.load(ROOT, environ=environ), Steps()).vllm


def run(
    image: str, tests: Path, *args: str, docker: tuple[str, ...] = (), env: tuple[str, ...] = ()
) -> subprocess.CompletedProcess[str]:
    """pytest with `args`, the folder `tests` at /tests; `docker`: more arguments of `docker run`."""
    return subprocess.run(
        [
            "docker", "run", "--rm", "--network", "none", "--read-only", "--tmpfs", "/tmp", "--user", "10001:10001",
            "-v", f"{tests}:/tests:ro", "-v", f"{sysconfig.get_paths()['purelib']}:/site:ro",
            "-e", "LMCACHE_TRACK_USAGE=false", *(f"-e{item}" for item in env), *docker,
            "--entrypoint", "python3", image, "-B", "-c", RUN, *args,
        ],
        capture_output=True, text=True, timeout=900,
    )  # fmt: skip


if __name__ == "__main__":
    build()
