"""Facts for `status` that only the running processes know: what is mapped, and in which namespaces they live."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol

__all__ = ["Executor", "Inside", "Transfer", "last_retrieve", "look_inside", "transfer_of"]

# Runs in a container as its own user, who may read the maps of his own processes. A mapping of a file that was
# removed or replaced since ends in " (deleted)": a pool that nobody else has.
_PROBE = r"""
import glob, json, os, re
mapped = []
for path in glob.glob("/proc/[0-9]*/maps"):
    try:
        lines = open(path).read().splitlines()
    except OSError:
        continue
    for line in lines:
        at = line.find("/dev/shm/lmcache_l1_pool_")
        if at >= 0:
            inode = int(line.split()[4])
            entry = {"pid": int(path.split("/")[2]), "file": line[at:].split(" ")[0], "inode": inode}
            entry["deleted"] = line.endswith("(deleted)")
            if entry not in mapped:
                mapped.append(entry)
pools = {p: [os.stat(p).st_ino, os.stat(p).st_size] for p in glob.glob("/dev/shm/lmcache_l1_pool_*")}
spaces = {name: os.readlink("/proc/self/ns/" + name) for name in ("ipc", "pid")}
print(json.dumps({"mapped": mapped, "pools": pools, "namespaces": spaces}))
"""
_RETRIEVED = re.compile(r"Retrieved (\d+) tokens in ([0-9.]+) seconds")


class Executor(Protocol):
    """What runs a command in a service: (exit status, output)."""

    def exec(self, service: str, argv: Sequence[str]) -> tuple[int, str]: ...


@dataclass(frozen=True)
class Inside:
    """Of one container. `mapped`: LMCache L1 pools in the memory of its processes; `pools`: path -> (inode, bytes)."""

    mapped: tuple[Mapping[str, Any], ...]
    pools: Mapping[str, Sequence[int]]
    namespaces: Mapping[str, str]


@dataclass(frozen=True)
class Transfer:
    """How KV moves between vLLM and LMCache; `evidence` says what was seen."""

    mode: str
    """shm | handle | pickle | none | unknown"""
    evidence: str
    retrieved_tokens: int | None = None
    retrieve_s: float | None = None

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def look_inside(stack: Executor, service: str) -> Inside | None:
    """None when the container does not run or has no Python."""
    status, output = stack.exec(service, ["python3", "-c", _PROBE])
    if status != 0:
        return None
    try:
        seen = json.loads(output.strip().splitlines()[-1])
    except (ValueError, IndexError):
        return None
    return Inside(tuple(seen["mapped"]), seen["pools"], seen["namespaces"])


def transfer_of(vllm: Inside | None, lmcache: Inside | None, server: Mapping[str, Any] | None, log: str) -> Transfer:
    """Decide from what is mapped. `server` is LMCache's /status; `log` LMCache's last lines.

    SHM means that a vLLM process maps the very file (inode) that the server's pool is now. An engine that registered
    without a pool mapped sends its blocks pickled over ZMQ, a silent fall-back that is ten times slower
    (store 0.171 s instead of 0.013 s); a CUDA engine registers memory handles instead.
    """
    tokens, seconds = last_retrieve(log)
    if vllm is None or lmcache is None or server is None:
        return Transfer("unknown", "vllm or lmcache does not answer")
    own = {file: int(stat[0]) for file, stat in lmcache.pools.items()}
    live = [m for m in vllm.mapped if not m["deleted"] and own.get(str(m["file"])) == m["inode"]]
    if live:
        seen = f"pid {live[0]['pid']} of vllm maps {live[0]['file']}, inode {live[0]['inode']}, which is the server's"
        return Transfer("shm", seen, tokens, seconds)
    if server.get("cache_context_meta"):
        return Transfer("handle", "LMCache holds memory handles of a GPU engine", tokens, seconds)
    if vllm.mapped:
        seen = f"vllm maps {vllm.mapped[0]['file']}, which is not the server's pool any more"
        return Transfer("pickle", seen, tokens, seconds)
    if server.get("non_cuda_context_meta"):
        return Transfer("pickle", "an engine is registered, no pool is mapped: bytes over ZMQ", tokens, seconds)
    return Transfer("none", "no engine is registered with LMCache", tokens, seconds)


def last_retrieve(log: str) -> tuple[int | None, float | None]:
    """(tokens, seconds) of the last retrieve that LMCache logged (engine_driven_transfer.py:530), or (None, None)."""
    found = _RETRIEVED.findall(log)
    return (int(found[-1][0]), float(found[-1][1])) if found else (None, None)
