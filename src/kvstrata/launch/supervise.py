"""Keep one child process running: forward signals, restart it with back-off, stop trying after too many crashes.

A container's restart policy has no limit that survives a reboot (moby#47846), so the limit is here. After it the
container stays up in a failed state that its health check explains, instead of burning the machine in a loop.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from kvstrata.launch.config import ConfigError

__all__ = ["Limits", "Supervisor", "failed_state", "hold"]

#: argparse and both servers end with 2 on arguments they do not take: trying again cannot help.
USAGE_ERROR = 2
_STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)


@dataclass(frozen=True)
class Limits:
    """At most `restarts` within `window` seconds; the pause before them doubles from `first` to `longest` seconds."""

    restarts: int = 5
    window: float = 600.0
    first: float = 1.0
    longest: float = 16.0


class Supervisor:
    """Runs `argv` until it is told to stop (SIGTERM, SIGINT) or the limit is reached.

    `run` returns the exit code for the container: 0 after a stop that was asked for.
    """

    def __init__(
        self,
        name: str,
        argv: Sequence[str],
        failed_file: Path,
        *,
        env: Mapping[str, str] | None = None,
        limits: Limits | None = None,
        umask: int = -1,
        prepare: Callable[[], None] | None = None,
    ) -> None:
        self._name, self._argv, self._failed_file = name, list(argv), failed_file
        self._env, self._limits, self._umask, self._prepare = env, limits or Limits(), umask, prepare
        self._child: subprocess.Popen[bytes] | None = None
        self._stopping = False

    def run(self) -> int:
        """Blocks for the life of the container."""
        self._failed_file.unlink(missing_ok=True)
        for number in _STOP_SIGNALS:
            signal.signal(number, self._on_signal)
        crashes: deque[float] = deque()
        while True:
            try:
                code = self._run_child()
            except ConfigError as error:  # `prepare` found what a restart cannot mend
                return self._give_up(str(error))
            if self._stopping:
                return 0
            why = f"{self._name} {_ending(code)}"
            if code == USAGE_ERROR:
                return self._give_up(f"{why}: it does not take its arguments; the lines above say which")
            now = time.monotonic()
            crashes.append(now)
            while crashes and now - crashes[0] > self._limits.window:
                crashes.popleft()
            if len(crashes) > self._limits.restarts:
                tried = f"{self._limits.restarts} restarts within {self._limits.window:.0f} s"
                return self._give_up(f"{why}, and {tried} did not help; the lines above say why")
            pause = min(self._limits.first * 2 ** (len(crashes) - 1), self._limits.longest)
            _say(f"{why}; restart {len(crashes)} of {self._limits.restarts} in {pause:g} s")
            self._sleep(pause)
            if self._stopping:
                return 0

    def _run_child(self) -> int:
        if self._stopping:
            return 0
        if self._prepare:
            self._prepare()
        # A group of its own, so that nothing of a crashed server (engine processes hold ports and memory) outlives it.
        try:
            child = subprocess.Popen(self._argv, env=self._env, start_new_session=True, umask=self._umask)
        except OSError as error:
            _say(f"cannot start {self._argv[0]}: {error}")
            return USAGE_ERROR
        self._child = child
        if self._stopping:  # a signal that came while the child was being made
            child.terminate()
        code = child.wait()
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(child.pid, signal.SIGKILL)
        self._child = None
        _reap()
        return code

    def _give_up(self, why: str) -> int:
        for number in _STOP_SIGNALS:
            signal.signal(number, signal.SIG_DFL)
        return 0 if self._stopping else failed_state(why, self._failed_file)

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        self._stopping = True
        child = self._child
        if child is not None and child.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(child.pid, number)

    def _sleep(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        while not self._stopping and (left := end - time.monotonic()) > 0:
            time.sleep(min(left, 0.2))


def failed_state(why: str, failed_file: Path) -> int:
    """Say why once, leave it for the health check, and wait to be stopped. Returns 0 then: the stop was asked for."""
    line = f"kvstrata failed: {' '.join(why.split())}"
    _say_raw(line)
    with contextlib.suppress(OSError):
        failed_file.parent.mkdir(parents=True, exist_ok=True)
        failed_file.write_text(line + "\n", encoding="utf-8")
    return hold()


def hold() -> int:
    """Sleep until SIGTERM or SIGINT."""
    signal.pthread_sigmask(signal.SIG_BLOCK, _STOP_SIGNALS)
    signal.sigwait(_STOP_SIGNALS)
    return 0


def _ending(code: int) -> str:
    if code >= 0:
        return f"ended with exit code {code}"
    with contextlib.suppress(ValueError):
        text = f"was killed by {signal.Signals(-code).name}"
        return text + (" (out of memory, if nobody sent it)" if -code == signal.SIGKILL else "")
    return f"was killed by signal {-code}"


def _reap() -> None:
    """Collect orphans where this process is the one that inherits them (no init, or a shared PID namespace)."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def _say(text: str) -> None:
    _say_raw(f"kvstrata-launch: {text}")


def _say_raw(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
