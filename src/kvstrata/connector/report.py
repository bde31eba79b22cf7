"""The guard's own report: one small JSON file a role, which `status` and `verify` read from outside.

A report can only be written by a loaded guard, so a missing or stale file means that the guard is not there.
"""

import json
import os
import threading
import time
from pathlib import Path
from typing import Any

__all__ = ["GuardReport"]

_FOLDER = "KVSTRATA_RUN_DIR"


class GuardReport:
    """Writes `guard-<role>.json` whole or not at all; failing to write never disturbs the engine."""

    def __init__(self, role: str, fields: dict[str, Any]) -> None:
        self._path = Path(os.environ.get(_FOLDER, "/run/kvstrata")) / f"guard-{role}.json"
        self._fields = {"role": role, "pid": os.getpid(), **fields}
        self._lock = threading.Lock()

    def lost(self, what: str) -> None:
        """Count a store, retrieve or lookup that the server did not answer."""
        with self._lock:
            counts = dict(self._fields.get("lost", {}))
        self.update(lost={**counts, what: counts.get(what, 0) + 1})

    def update(self, **fields: Any) -> None:
        if fields.get("healthy"):
            fields["beat"] = round(time.time(), 1)  # when the server was last known to answer
        with self._lock:
            changed = {k: v for k, v in fields.items() if self._fields.get(k, self) != v}
            if not changed and self._path.exists():
                return
            self._fields.update(changed)
            temporary = self._path.with_suffix(".tmp")
            try:
                temporary.write_text(json.dumps(self._fields, sort_keys=True) + "\n")
                temporary.replace(self._path)
            except OSError:
                return
