"""The smallest L1, full. lmcache restarts with no room to spare in /dev/shm: shared memory stays, never pickle."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from tests.stack.harness import Stack, chunks, prompt

pytestmark = pytest.mark.stack

GIB = 1 << 30
L1 = GIB // 4  # the least that the plan allows
QUEUES = 2 * GIB  # room that the plan leaves to vLLM's queues (deploy/memory.py)
SLACK = 16 << 20

_LOOK = """
import glob, json, os, shutil
pages = sum(os.stat(p).st_blocks * 512 for p in glob.glob('/dev/shm/lmcache_l1_pool_*'))
print(json.dumps([shutil.disk_usage('/dev/shm').used, pages]))
"""


def look(stack: Stack) -> tuple[int, int]:
    """(bytes in use in the shared volume, those of the present pool)."""
    used, pool = json.loads(stack.compose("exec", "-T", "lmcache", "python3", "-c", _LOOK))
    return used, pool


def run_on_volume(stack: Stack, code: str) -> None:
    """In a container of its own: pages of tmpfs count against the container that writes them."""
    lmcache = stack.containers()["lmcache"]
    volume = next(m["Name"] for m in lmcache["Mounts"] if m["Destination"] == "/dev/shm")
    stack.docker(
        "run", "--rm", "--network", "none", "--user", lmcache["Config"]["User"], "-v", f"{volume}:/shm",
        "--entrypoint", "python3", lmcache["Image"], "-c", code,
    )  # fmt: skip


@pytest.fixture
def tight(stack: Stack) -> Iterator[None]:
    """The smallest L1, and a file that stands for queues as large as the plan expects them at most."""
    stack.set(KV_L1_GB="0.25")
    try:
        stack.settle()
        used, pool = look(stack)
        size = QUEUES - (used - pool) - SLACK
        run_on_volume(
            stack, f"import os; os.posix_fallocate(os.open('/shm/ballast', os.O_CREAT | os.O_RDWR), 0, {size})"
        )
        yield
    finally:
        run_on_volume(stack, "import pathlib; pathlib.Path('/shm/ballast').unlink(missing_ok=True)")
        stack.set(KV_L1_GB="1")


def fill(stack: Stack) -> None:
    """Store, or load from disk what an earlier turn stored, until nearly every page of the pool was written."""
    stack.drop_l0()
    for number in range(8):
        stack.store(prompt(f"fill-{number}", 2200), tokens=1)
        if look(stack)[1] >= 0.75 * L1:
            return
    raise AssertionError(f"L1 does not fill: {look(stack)[1]} of {L1} bytes")


def test_shared_memory_stays_when_lmcache_restarts_with_a_full_l1(stack: Stack, tight: None) -> None:
    """Three times: a pool that vLLM kept mapped would be in the way of the third."""
    cold = stack.store(prompt("full-l1"))
    for turn, how in enumerate(("restart", "KILL", "KILL")):
        fill(stack)
        if how == "KILL":
            stack.kill("lmcache")
            stack.start("lmcache")
        else:
            stack.restart("lmcache")
        stack.wait_ready()
        seen = stack.transfer()
        assert seen["mode"] == "shm", f"turn {turn}, after {how}: {seen}"
        stack.drop_l0()
        warm = stack.ask(prompt("full-l1"))
        assert warm.text == cold.text and warm.lmcache == chunks(cold.prompt_tokens)
        used, pool = look(stack)
        assert used - pool < QUEUES, "an old pool is still mapped"
