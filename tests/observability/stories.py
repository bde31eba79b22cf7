"""Faults on the live stack, and what Alertmanager made of them.

A story causes faults, waits until Alertmanager has their alerts, and repairs them. Waiting for alerts to resolve
overlaps with the stories after it: a recorder looks all the time, and the tests read what it saw.
"""

from __future__ import annotations

import contextlib
import os
import stat
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import httpx

from kvstrata.observe.sources import RULES
from tests.observability import hurried
from tests.observability.watched import Watched
from tests.stack.harness import wait_until

__all__ = ["Recorder", "Seen", "hurry", "load", "read_only"]

_LOOK_S = 2.0
_FIRES_S = 300.0
_RESOLVES_S = 300.0


@dataclass
class Seen:
    """Of one alert; times are seconds on the monotonic clock, None = not yet."""

    caused: float
    fired: float | None = None
    repaired: float | None = None
    resolved: float | None = None
    error: str = ""

    def line(self) -> str:
        """For people."""
        fires = f"fired after {self.fired - self.caused:.0f} s" if self.fired else "NEVER FIRED"
        since = self.repaired or self.caused
        resolved = f"resolved {self.resolved - since:.0f} s after the repair" if self.resolved else "NOT RESOLVED"
        return f"{fires}, {resolved}"


@dataclass
class Recorder:
    """Looks at Alertmanager's API in a thread of its own. Alerts by name, `TargetDown` by name and job."""

    url: str
    seen: dict[str, Seen] = field(default_factory=dict)
    _active: set[str] = field(default_factory=set)
    _stop: threading.Event = field(default_factory=threading.Event)

    def __enter__(self) -> Recorder:
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    @contextlib.contextmanager
    def story(self, *alerts: str) -> Iterator[Callable[[], None]]:
        """The block causes the faults of `alerts`, calls what it is given, which waits until all fire, and repairs."""
        for name in alerts:
            self.seen[name] = Seen(time.monotonic())

        def wait() -> None:
            with contextlib.suppress(AssertionError):  # the tests say so, of each alert
                wait_until(lambda: all(self.seen[name].fired for name in alerts), _FIRES_S, f"{alerts} fire")

        try:
            yield wait
        except Exception as error:  # of one story: the others go on
            for name in alerts:
                self.seen[name].error = f"{type(error).__name__}: {error}"
        finally:
            for name in alerts:
                self.seen[name].repaired = time.monotonic()

    def wait_resolved(self) -> None:
        """Until everything that has fired is gone, or long enough."""
        with contextlib.suppress(AssertionError):
            wait_until(
                lambda: all(one.resolved for one in self.seen.values() if one.fired), _RESOLVES_S, "all are resolved"
            )

    def _look(self) -> None:
        with httpx.Client(base_url=self.url, timeout=5, trust_env=False) as http:
            while not self._stop.wait(_LOOK_S):
                with contextlib.suppress(httpx.HTTPError, ValueError):
                    self._note({_name(one["labels"]) for one in http.get("/api/v2/alerts").raise_for_status().json()})

    def _note(self, active: set[str]) -> None:
        now = time.monotonic()
        for name, one in list(self.seen.items()):
            if name in active:
                one.fired, one.resolved = one.fired or now, None
            elif one.fired and one.repaired and one.resolved is None:
                one.resolved = now


def _name(labels: dict[str, str]) -> str:
    name = labels["alertname"]
    return f"{name}:{labels['job']}" if name == "TargetDown" else name


@contextlib.contextmanager
def hurry(watched: Watched) -> Iterator[None]:
    """The stack's Prometheus goes by the hurried rules."""
    path = watched.root / RULES / "kvstrata.yaml"
    real = path.read_text(encoding="utf-8")
    try:
        path.write_text(hurried.rules(real), encoding="utf-8")
        _reload(watched, hurried.shorter("2m"))
        yield
    finally:
        path.write_text(real, encoding="utf-8")
        _reload(watched, "120s")


def _reload(watched: Watched, l2_stores_fail: str) -> None:
    watched.docker("kill", "-s", "HUP", watched.containers()["prometheus"]["Id"])

    def known() -> bool:
        groups = watched.client.get(f"{watched.prometheus}/api/v1/rules").json()["data"]["groups"]
        waits = {rule["name"]: rule["duration"] for group in groups for rule in group["rules"]}
        return f"{waits['L2StoresFail']:.0f}s" == l2_stores_fail

    wait_until(known, 30, "Prometheus has read the rules")


@contextlib.contextmanager
def load(request: Callable[[int], object]) -> Iterator[None]:
    """Requests one after the other (`request` gets their number) while the block runs."""
    stop = threading.Event()

    def run() -> None:
        number = 0
        while not stop.is_set():
            with contextlib.suppress(httpx.HTTPError):
                request(number)
            number += 1

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


@contextlib.contextmanager
def read_only(folder: Path) -> Iterator[None]:
    """Nobody but root can write into any folder below `folder`: what a disk does that was remounted."""
    changed: list[tuple[Path, int]] = []
    try:
        for name, _, _ in os.walk(folder):
            path = Path(name)
            mode = stat.S_IMODE(path.stat().st_mode)
            path.chmod(mode & ~0o222)
            changed.append((path, mode))
        yield
    finally:
        for path, mode in changed:
            path.chmod(mode)
