"""Observability in `up`: its images are made while the stack starts and is proven, its services start after that.

Nothing here stops `up`: what goes wrong is said, counts in the exit code, and leaves vLLM and the cache as they are.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from kvstrata.deploy import observability, observability_images, settings
from kvstrata.deploy.compose import Compose
from kvstrata.deploy.errors import KvError
from kvstrata.deploy.observability_images import NONE, Wanted
from kvstrata.deploy.observability_status import Watched, look
from kvstrata.deploy.settings import Settings
from kvstrata.deploy.steps import Steps

__all__ = ["Observability", "begin"]

_TARGETS_S = 90.0


class Observability:
    """What `begin` found. `settings` are those to go on with: without observability where it cannot be had."""

    def __init__(
        self, current: Settings, steps: Steps, wanted: Wanted | None, problem: str = "", *, asked: bool = True
    ) -> None:
        self.settings, self._steps, self._problem, self._asked = current, steps, problem, asked
        self.images = dict(wanted.refs) if wanted else dict(NONE)
        self._fetched: list[str] = []
        self._note = ""
        self._thread: threading.Thread | None = None
        if wanted:
            observability.prepare(current)
            self._thread = threading.Thread(target=self._fetch, args=(wanted,), name="observability", daemon=True)
            self._thread.start()

    def _fetch(self, wanted: Wanted) -> None:
        try:
            self._fetched = observability_images.ensure(self.settings, wanted, self._heard)
        except KvError as error:
            self._problem = str(error)
        except Exception as error:  # of a thread nobody waits for yet: said by `finish`
            self._problem = f"{type(error).__name__}: {error}"

    def _heard(self, note: str) -> None:
        self._note = note

    def core(self, compose: Compose) -> list[str] | None:
        """The services to start first; None = all there are."""
        if self._thread is None:
            return None
        return [name for name in compose.services() if name not in observability.SERVICES]

    def finish(self, root: Path) -> int:
        """Wait for the images, start the services, and look until every expected target is up. Exit code."""
        if self._thread is not None:
            with self._steps.step("Observability, images") as step:
                while self._thread.is_alive():
                    self._thread.join(1)
                    step.note(self._note)
                step.done(" and ".join(self._fetched) + " now" if self._fetched else "all present")
            if not self._problem:
                self._problem = self._start(root)
        if self._problem:
            self._say(f"WARNING: no observability, the rest of the stack runs: {self._problem}")
            return 1 if self._asked else 0
        return 0

    def _start(self, root: Path) -> str:
        """Start the services, wait for the targets; what is wrong, or ""."""
        current = settings.load(root)  # with the managed block that `up` has written meanwhile
        try:
            with self._steps.step("Observability") as step:
                compose = Compose(root, current)
                mine = [name for name in compose.services() if name in observability.SERVICES]
                compose.up(current.wait_timeout, mine, on_note=step.note)
                watched = _wait(current, step.note)
                step.done(watched.line())
        except KvError as error:
            return str(error)
        return "; ".join(watched.problems)

    def _say(self, text: str) -> None:
        self._steps.console.print(f"   {text}", style="bold red", markup=False, highlight=False, soft_wrap=True)


def _wait(current: Settings, note: Callable[[str], None]) -> Watched:
    end = time.monotonic() + _TARGETS_S
    while True:
        watched = look(current)
        if not watched.problems or time.monotonic() > end:
            return watched
        note(watched.line())
        time.sleep(2)


def begin(current: Settings, steps: Steps) -> Observability:
    """Decide, and begin to fetch or build the images in the background. Raises nothing for what is wrong with them."""
    if not current.observes:
        return Observability(current, steps, None)
    try:
        with steps.step("Observability, plan") as step:
            found = observability_images.wanted(current, step)
            why = "KV_OBSERVABILITY=1" if current.observability else "the images are pulled anyway"
            step.done(f"on ({why}); " + ("built here, while the rest starts" if found.builds else "pulled by digest"))
    except KvError as error:
        # Nobody who left the knob blank has asked for it: a release whose images are not all out is no failure of `up`.
        asked = current.observability is not None
        return Observability(replace(current, observability=False), steps, None, str(error), asked=asked)
    try:
        return Observability(current, steps, found)
    except OSError as error:
        return Observability(replace(current, observability=False), steps, None, f"{error.filename}: {error.strerror}")
