"""faults.c, compiled: a disk that fails or hangs on command."""

from __future__ import annotations

import subprocess
from pathlib import Path, PurePosixPath

__all__ = ["environment"]


def environment(folder: Path, root: PurePosixPath, seen: PurePosixPath | None = None) -> dict[str, str]:
    """Make the shim in `folder`, which the program sees as `seen`. Returns what that program needs in its environment;
    files below `root`, as it sees them, are concerned.
    """
    library, faults = folder / "faults.so", folder / "faults"
    source = Path(__file__).with_name("faults.c")
    subprocess.run(["gcc", "-shared", "-fPIC", "-O1", "-o", library, source, "-ldl"], check=True)
    faults.write_text("..")
    faults.chmod(0o666)
    seen = seen or folder
    return {"LD_PRELOAD": str(seen / "faults.so"), "KV_FAULTS": str(seen / "faults"), "KV_FAULT_ROOT": str(root)}
