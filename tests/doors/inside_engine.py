"""A KV engine as a process inside the image, whose own client is what is tested: its source comes from /src.

KVSTRATA_SOURCE names another place, for a run without the image where lmcache can be imported.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from remote_parts import TOKEN, Process, Wire, ours

SOURCE = os.environ.get("KVSTRATA_SOURCE", "/src")


@contextmanager
def wired(folder: Path, environ: dict[str, str]) -> Iterator[tuple[Process, Wire]]:
    """An engine behind a wire that can be spoilt; `environ` gets what the client is told of it."""
    made = ours(folder, SOURCE)
    wire = Wire(made.port)
    environ.update(KV_REMOTE_URL=f"http://127.0.0.1:{wire.port}", KV_REMOTE_TOKEN=TOKEN, KV_REMOTE_DEADLINE="1")
    try:
        yield made, wire
    finally:
        wire.close()
        made.kill()
