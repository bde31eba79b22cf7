"""The KV engine in its container: started again when it dies, in the failed state when a restart cannot help."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping

from kvstrata.launch.config import Paths
from kvstrata.launch.supervise import Supervisor

__all__ = ["run"]

_UMASK = 0o077


def run(env: Mapping[str, str] = os.environ, paths: Paths | None = None) -> int:
    """Supervise `python3 -m kvstrata.engine`, which reads KV_ENGINE_* itself and ends with 2 where they cannot work."""
    paths = paths or Paths()
    argv = [sys.executable, "-m", "kvstrata.engine"]
    return Supervisor("engine", argv, paths.failed, env=dict(env), umask=_UMASK).run()
