"""Start-up of a store with many blocks: seconds of the scan, and memory of the index a block.

`python -m kvstrata.proof.store_bench_scan ROOT ALLOW_FS` opens the store in a process of its own, so that its memory
is the index's and nothing else's, and prints one JSON object.
"""

from __future__ import annotations

import gc
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

from kvstrata.proof.store_bench_parts import MODEL, chunk_hash
from kvstrata.store.folders import make_folders
from kvstrata.store.format import HEADER_BYTES
from kvstrata.store.keys import BlockKey
from kvstrata.store.settings import StoreSettings
from kvstrata.store.store import BlockStore

__all__ = ["measure"]


def measure(root: Path, blocks: int, allow_fs: str, repeats: int = 3) -> dict[str, Any]:
    """Fill `root` with `blocks` files as a scan sees them (no payload on the disk), open it warm and, as root, cold."""
    _open(root, allow_fs)  # makes the root
    for index in range(blocks):
        _sparse(root, BlockKey(MODEL, "", chunk_hash(index)))
    warm = [_open(root, allow_fs) for _ in range(repeats)]
    result = {
        "blocks": blocks,
        "warm_s": round(median(one["seconds"] for one in warm), 3),
        "cold_s": None,
        "index_bytes_per_block": round(median(one["bytes"] for one in warm) / max(1, blocks), 1),
    }
    if warm[0]["blocks"] != blocks:
        raise RuntimeError(f"{warm[0]['blocks']} of {blocks} blocks were found")
    try:
        os.sync()
        Path("/proc/sys/vm/drop_caches").write_text("3", encoding="ascii")
    except OSError as error:
        result["reason"] = f"no cold figure: drop_caches: {error.strerror}"
    else:
        result["cold_s"] = round(_open(root, allow_fs)["seconds"], 3)
    shutil.rmtree(root)
    return result


def _sparse(root: Path, key: BlockKey) -> None:
    path = f"{root}/{key.path}"
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileNotFoundError:
        make_folders(str(root), key)
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    os.ftruncate(fd, 2 * HEADER_BYTES)
    os.close(fd)


def _open(root: Path, allow_fs: str) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-m", __name__, str(root), allow_fs], capture_output=True, text=True, check=False, timeout=900,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )  # fmt: skip
    if done.returncode:
        raise RuntimeError(done.stderr.strip()[-600:])
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer


def _resident() -> int:
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * os.sysconf("SC_PAGE_SIZE")


def main(argv: list[str]) -> None:
    root = Path(argv[0])
    root.mkdir(mode=0o700, parents=True, exist_ok=True)
    settings = StoreSettings(root, capacity=1 << 44, allow_fs=tuple(argv[1].split(",")), free_floor=0)
    gc.collect()
    before, began = _resident(), time.perf_counter()
    store = BlockStore.open(settings)
    seconds = time.perf_counter() - began
    gc.collect()
    after, blocks = _resident(), store.usage().blocks
    store.close()
    print(json.dumps({"seconds": seconds, "bytes": after - before, "blocks": blocks}))


if __name__ == "__main__":
    main(sys.argv[1:])
