"""A KV engine as a process inside the image, whose own client is what is tested: its source comes from /src."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from remote_parts import TOKEN, Process, Wire, free_port


@contextmanager
def engine(folder: Path) -> Iterator[Process]:
    port = free_port()
    folder.mkdir(parents=True, exist_ok=True)
    tokens = folder / "tokens"
    tokens.write_text(f"test rw default {TOKEN}\n")
    env = {
        **os.environ, "PYTHONPATH": "/src", "KV_ENGINE_ROOT": str(folder / "data"),
        "KV_ENGINE_CAPACITY_BYTES": str(256 << 20), "KV_ENGINE_FREE_FLOOR_BYTES": "1",
        "KV_ENGINE_HTTP": f"127.0.0.1:{port}", "KV_ENGINE_TOKENS_FILE": str(tokens),
        "KV_CACHE_ALLOW_FS": "tmpfs overlay fuse",
    }  # fmt: skip
    made = Process([sys.executable, "-m", "kvstrata.engine"], env, port, folder / "log")
    try:
        yield made
    finally:
        made.kill()


@contextmanager
def wired(folder: Path, environ: dict[str, str]) -> Iterator[tuple[Process, Wire]]:
    """An engine behind a wire that can be spoilt; `environ` gets what the client is told of it."""
    with engine(folder) as made:
        wire = Wire(made.port)
        environ.update(
            KV_REMOTE_URL=f"http://127.0.0.1:{wire.port}", KV_REMOTE_TOKEN=TOKEN, KV_REMOTE_DEADLINE="1",
        )  # fmt: skip
        try:
            yield made, wire
        finally:
            wire.close()
