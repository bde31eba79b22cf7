"""LMCache's own RESP client, in the image that the stack uses."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import in_image

pytestmark = [pytest.mark.docker, pytest.mark.slow]

HERE = Path(__file__).parent


def test_lmcache_s_client_in_the_image() -> None:
    root = HERE.parents[1]
    docker = ("-v", f"{root / 'src'}:/repo/src:ro", "-v", f"{root / 'tests'}:/repo/tests:ro")
    done = in_image.run(
        in_image.build(),
        HERE,
        "/repo/tests/interop/inside_lmcache_resp.py",
        docker=docker,
        env=("PYTHONPATH=/repo/src:/repo",),
    )
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
