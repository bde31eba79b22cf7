"""Test hook of the guard: lets a test stop the engine at one exact point."""

import os
import time
from pathlib import Path

__all__ = ["pause_at"]

_FOLDER = "KVSTRATA_TEST_HOOK_DIR"


def pause_at(point: str) -> None:
    """Test hook, dormant unless its folder is set: say `<point>.reached`, wait for `<point>.go` (30 s at most)."""
    folder = os.environ.get(_FOLDER)
    if not folder or not (Path(folder) / f"{point}.armed").exists():
        return
    (Path(folder) / f"{point}.reached").touch()
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline and not (Path(folder) / f"{point}.go").exists():
        time.sleep(0.02)
