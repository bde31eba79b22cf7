"""What the proof may do to the stack: kill, start, wait, run a command inside. Injected, so that it is testable."""

from __future__ import annotations

import base64
import json
import struct
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import Any, Protocol

from kvstrata.deploy.errors import KvError
from kvstrata.proof.kv_engine import KvEngine

__all__ = ["Control", "OwnBlocks", "ServiceName", "Target", "pack", "wait_until"]

ServiceName = str
_PROMPTS_PER_CALL = 16


class Control(Protocol):
    """The stack under proof. Service names are compose's: vllm, lmcache."""

    lmcache_http: str
    """LMCache's own HTTP as seen inside its container: "unix:PATH" or "tcp:HOST:PORT" (own_blocks.py)."""

    def kill(self, services: Sequence[ServiceName]) -> None:
        """SIGKILL, all at once, and return when they are dead."""

    def start(self, services: Sequence[ServiceName]) -> None:
        """Start exactly these again, as they were; the others are not touched. Does not wait."""

    def exec(self, service: ServiceName, argv: Sequence[str]) -> tuple[int, str]:
        """Run argv inside; return (exit status, standard output)."""


def wait_until(ready: Callable[[], bool], what: str, deadline_s: float, every_s: float = 0.5) -> None:
    """Poll `ready` until it is true. Raises KvError naming `what` after `deadline_s` seconds."""
    deadline = time.monotonic() + deadline_s
    while not ready():
        if time.monotonic() > deadline:
            raise KvError(
                found=f"{what}: not so after {deadline_s:.0f} s",
                needed=f"{what} within {deadline_s:.0f} s",
                fix="make logs shows why; KV_WAIT_TIMEOUT in .env gives slow machines more time",
            )
        time.sleep(every_s)


@dataclass(frozen=True)
class Target:
    """A running stack and what its settings say it should be."""

    vllm_url: str
    lmcache_url: str
    device: str
    chunk_size: int
    control: Control
    wait_timeout_s: float = 300.0
    locked_chunk: int | None = None
    """chunk_size of versions.lock; None is not compared."""
    files_digest: str = ""
    """KV_IDENTITY of .env; "" is not compared."""
    engine: KvEngine | None = None
    """The KV engine that holds the blocks, where it can be asked; it then has to have served what came from L2."""


class OwnBlocks:
    """The blocks of the prompts that the proof has sent: counted and removed where they lie (own_blocks.py)."""

    def __init__(self, control: Control, chunk: int, engine: KvEngine | None = None) -> None:
        self._control, self._chunk, self._engine = control, chunk, engine

    def count(self, prompts: Sequence[Sequence[int]]) -> int | None:
        """How many of their blocks lie in L2; None when there is no L2 that can be looked into."""
        results = self._run("count", prompts)
        present = [self._in_engine(result) if self._engine else result["l2_present"] for result in results]
        return None if None in present else sum(present)

    def _in_engine(self, result: Mapping[str, Any]) -> int:
        """Chunks whose blocks of every rank are there."""
        assert self._engine is not None
        keys = result.get("keys", [])
        missing = {key.split("@")[3] for key, there in zip(keys, self._engine.present(keys), strict=True) if not there}
        return len({key.split("@")[3] for key in keys} - missing)

    def drop_l1(self, prompts: Sequence[Sequence[int]]) -> int:
        """Remove their unlocked blocks from L1 only; how many went."""
        return sum(int(result.get("l1", {}).get("deleted", 0)) for result in self._run("drop-l1", prompts))

    def delete(self, prompts: Sequence[Sequence[int]]) -> str | None:
        """Remove them from L1 and L2. None when all went, else a sentence that says what is left."""
        left = []
        for result in self._run("delete", prompts):
            locked = result.get("l1", {}).get("skipped", 0)
            error = result.get("l2", {}).get("error") or result.get("l1", {}).get("error")
            if locked or result.get("l2_left") or error:
                left.append(f"{locked} locked in L1, {result.get('l2_left') or 0} in L2, {error or 'no error'}")
        return f"blocks of the proof were left behind: {'; '.join(left)}" if left else None

    def _run(self, action: str, prompts: Sequence[Sequence[int]]) -> list[dict[str, Any]]:
        script = files("kvstrata.proof").joinpath("own_blocks.py").read_text(encoding="utf-8")
        unique = sorted({tuple(prompt) for prompt in prompts if len(prompt) >= self._chunk})
        results = []
        for at in range(0, len(unique), _PROMPTS_PER_CALL):
            packed = [pack(prompt) for prompt in unique[at : at + _PROMPTS_PER_CALL]]
            argv = ["python3", "-c", script, action, self._control.lmcache_http, str(self._chunk), *packed]
            status, output = self._control.exec("lmcache", argv)
            if status != 0:
                raise KvError(
                    found=f"looking for the proof's own blocks inside lmcache ended with {status}: {output[-300:]}",
                    needed="exit status 0",
                    fix="make status; make logs",
                )
            results.append(json.loads(output.strip().splitlines()[-1]))
        return results


def pack(tokens: Sequence[int]) -> str:
    """A prompt as one argument: an argument may have 128 KiB (MAX_ARG_STRLEN), which is room for ~45 000 tokens."""
    return base64.b64encode(zlib.compress(struct.pack(f">{len(tokens)}I", *tokens), 9)).decode()
