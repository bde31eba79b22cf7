"""Each alert on the live stack: its fault is caused, Alertmanager has it, the fault is repaired, it is gone.

Windows are a tenth as long (hurried.py); those of the KV engine are in test_with_engine.py.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from kvstrata.deploy import settings
from kvstrata.proof.control import OwnBlocks
from kvstrata.proof.docker_control import DockerControl
from tests.observability.stories import Recorder, hurry, load, read_only
from tests.observability.watched import Watched
from tests.stack.harness import CHUNK, prompt, wait_until

pytestmark = [pytest.mark.docker, pytest.mark.slow, pytest.mark.stack]

CUT_OFF = ("TargetDown:traces", "SchedulerHeartbeatLost", "DiskFilledBySomethingElse", "ProofStaleOrFailed")
NEW_PROMPTS = ("HitRateFellToZero", "NearCapAndEvictingFasterThanHitting")
OLD_PROMPTS = ("L1Thrash", "EvictToReuseGapTooShort")
BAD_DISK = ("CorruptBlocks", "L2StoresFail")
ALERTS = (*CUT_OFF, *NEW_PROMPTS, *OLD_PROMPTS, *BAD_DISK)

_OTHERS_BYTES = 2 << 30
_WIDE = 15
"""Prompts of four chunks each that L2 holds and L1 does not."""


def cut_off(watched: Watched, recorder: Recorder) -> None:
    """A part that is stopped, one that hangs, a disk that fills, a proof that fails."""
    other = watched.root / "data" / "somebody-elses"
    with recorder.story(*CUT_OFF) as until_they_fire:
        traces = watched.containers()["traces"]["Id"]
        try:
            assert watched.cli("verify", "--live", KV_CHUNK_SIZE="128").returncode == 1, "not what runs"
            with other.open("wb") as file:
                os.posix_fallocate(file.fileno(), 0, _OTHERS_BYTES)
            watched.docker("stop", "-t", "2", traces)
            watched.strike("lmcache", "STOP")
            until_they_fire()
        finally:
            watched.revive("CONT")
            watched.docker("start", traces)
            other.unlink(missing_ok=True)
            watched.ok("verify", "--live")


def new_prompts(watched: Watched, recorder: Recorder) -> list[str]:
    """Nothing but new prompts, and a store too small for them; then old ones. Returns the newest."""
    asked = [prompt("hit before", 900)]
    watched.store(asked[0])
    watched.drop_l0()
    watched.ask(asked[0])

    def one_more(number: int) -> None:
        asked.append(prompt(f"new {number}", 900))
        watched.ask(asked[-1], tokens=1)

    with recorder.story(*NEW_PROMPTS) as until_they_fire, load(one_more):
        until_they_fire()
    return asked[-_WIDE:]


def old_prompts(watched: Watched, recorder: Recorder, asked: list[str]) -> None:
    """More of them than L1 holds, again and again."""
    before = [recorder.seen[name] for name in NEW_PROMPTS]
    with (
        recorder.story(*OLD_PROMPTS) as until_they_fire,
        load(lambda number: watched.ask(asked[number % len(asked)], tokens=1)),
    ):
        until_they_fire()
        wait_until(lambda: all(one.resolved for one in before), 200, "hits end the alerts of the story before")


def bad_disk(watched: Watched, recorder: Recorder) -> None:
    """A block that rots, and folders that take nothing."""
    current = settings.load(watched.root, environ={})
    with recorder.story(*BAD_DISK) as until_they_fire:
        text = prompt("rots")
        before = set(watched.blocks())
        watched.store(text)
        for path in set(watched.blocks()) - before:
            with path.open("r+b") as file:
                file.seek(4096 + 100)  # behind the header page (docs/format.md)
                byte = file.read(1)[0]
                file.seek(4096 + 100)
                file.write(bytes([byte ^ 0xFF]))
        OwnBlocks(DockerControl(current, watched.root), CHUNK).drop_l1([watched.tokens(text)])
        watched.drop_l0()
        assert watched.ask(text).status == 200
        with read_only(current.store_root), load(lambda number: watched.ask(prompt(f"unstored {number}", 400))):
            until_they_fire()


@pytest.fixture(scope="module")
def recorder(watched: Watched) -> Iterator[Recorder]:
    with hurry(watched), Recorder(watched.alertmanager) as made:
        cut_off(watched, made)
        asked = new_prompts(watched, made)
        old_prompts(watched, made, asked)
        bad_disk(watched, made)
        watched.ask(prompt("stored again"))
        made.wait_resolved()
        for name, one in made.seen.items():
            print(f"{name}: {one.line()}{'; ' if one.error else ''}{one.error}")
        yield made


def test_a_healthy_stack_is_silent(watched: Watched) -> None:
    """By the real rules, and before anything is broken. For longer: `kvstrata observe silence`, ten minutes."""
    print(watched.ok("observe", "silence", "--minutes", "2"))


@pytest.mark.parametrize("alert", ALERTS)
def test_it_fires_in_alertmanager_and_resolves_after_the_repair(recorder: Recorder, alert: str) -> None:
    seen = recorder.seen[alert]
    assert seen.fired and seen.resolved and not seen.error, f"{seen.line()} {seen.error}"


def test_afterwards_everything_is_as_it_was(watched: Watched, recorder: Recorder) -> None:
    wait_until(watched.all_up, 90, "every target is up again")
    assert watched.ok("verify", "--live")
