"""Progress for people: one line a step, with its time."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.markup import escape
from rich.status import Status

__all__ = ["Step", "Steps"]

_NOTE_EVERY_S = 5.0  # a log file gets a progress line this often at most; a terminal shows each of them in place


class Step:
    """One running step. `note` shows progress, `done` sets the text of the step's final line."""

    def __init__(self, title: str, console: Console, status: Status | None) -> None:
        self.title = title
        self.result = ""
        self.started = time.monotonic()
        self._console = console
        self._status = status
        self._noted = self.started

    def note(self, text: str) -> None:
        """Say how far the step is; the last note wins."""
        if self._status is not None:
            self._status.update(f"{escape(self.title)}  [dim]{escape(text)}[/dim]")
            return
        now = time.monotonic()
        if now - self._noted >= _NOTE_EVERY_S:
            self._noted = now
            self._console.print(f"  .. {self.title}: {text}", markup=False, highlight=False, soft_wrap=True)

    def say(self, text: str) -> None:
        """Print a line that must be seen (a notice before something is installed, a warning)."""
        self._console.print(f"   {text}", markup=False, highlight=False, soft_wrap=True)

    def done(self, text: str) -> None:
        """Set what the final line says about the outcome."""
        self.result = text


class Steps:
    """Prints each step as one line: mark, title, outcome, seconds. Plain text when the output is no terminal."""

    def __init__(self, console: Console | None = None) -> None:
        self.console = console if console is not None else Console(highlight=False)

    @contextmanager
    def step(self, title: str) -> Iterator[Step]:
        """Time the block. An exception prints a failed line and goes on to the caller."""
        if self.console.is_terminal:
            with self.console.status(escape(title)) as status:
                step = Step(title, self.console, status)
                yield from self._timed(step)
        else:
            yield from self._timed(Step(title, self.console, None))

    def _timed(self, step: Step) -> Iterator[Step]:
        try:
            yield step
        except BaseException as error:
            said = "interrupted" if isinstance(error, KeyboardInterrupt) else step.result or "failed"
            self._line(step, "[red]✗[/red]", said)
            raise
        self._line(step, "[green]✓[/green]", step.result)

    def _line(self, step: Step, mark: str, text: str) -> None:
        seconds = time.monotonic() - step.started
        self.console.print(
            f" {mark} {escape(step.title):<22} {escape(text)}  [dim]{seconds:.1f} s[/dim]",
            highlight=False,
            soft_wrap=True,
        )
