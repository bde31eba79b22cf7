"""Run a child process: captured, streamed, or line by line."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
from collections.abc import Callable, Mapping, Sequence
from subprocess import CompletedProcess

from kvstrata.deploy.errors import CommandFailed, KvError

__all__ = ["INTERRUPTED", "run", "run_lines"]

#: How a child ends after a Ctrl-C: by the signal itself, or with the code that shells give it.
INTERRUPTED = (-signal.SIGINT, 128 + signal.SIGINT)


def _missing(argv: Sequence[str]) -> KvError:
    return KvError(
        found=f"no command `{argv[0]}`",
        needed=f"`{argv[0]}` on PATH",
        fix=f"install the package that brings `{argv[0]}`",
    )


def run(
    argv: Sequence[str],
    *,
    env: Mapping[str, str] | None = None,
    check: bool = True,
    timeout: float | None = None,
    stream: bool = False,
) -> CompletedProcess[str]:
    """Run `argv` to its end and return it with text output (empty when `stream` sent it to the terminal).

    `env` is added to the caller's environment. Raises KvError when the command is missing, CommandFailed on a
    non-zero end with `check`, and CommandFailed (returncode 124) after `timeout` seconds.
    """
    full = {**os.environ, **env} if env is not None else None
    pipe = None if stream else subprocess.PIPE
    args = list(argv)
    try:
        done = subprocess.run(
            args, env=full, stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe, text=True, errors="replace",
            timeout=timeout, check=False,
        )  # fmt: skip
    except FileNotFoundError:
        raise _missing(args) from None
    except subprocess.TimeoutExpired:
        raise CommandFailed(args, 124, f"no end after {timeout} s") from None
    result = CompletedProcess(args, done.returncode, done.stdout or "", done.stderr or "")
    if check and result.returncode != 0:
        raise CommandFailed(args, result.returncode, result.stdout + result.stderr)
    return result


def run_lines(
    argv: Sequence[str],
    on_line: Callable[[str], None],
    *,
    env: Mapping[str, str] | None = None,
    cwd: str | None = None,
    timeout: float | None = None,
) -> str:
    """Run `argv`, hand each line of its merged output to `on_line` as it comes, return the whole output.

    Raises as `run` with check=True does, and KeyboardInterrupt when a Ctrl-C reached the child
    alone; after `timeout` seconds the child is killed.
    """
    full = {**os.environ, **env} if env is not None else None
    args = list(argv)
    try:
        child = subprocess.Popen(
            args, env=full, cwd=cwd, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            text=True, errors="replace",
        )  # fmt: skip
    except FileNotFoundError:
        raise _missing(args) from None
    timer = threading.Timer(timeout, child.kill) if timeout is not None else None
    lines: list[str] = []
    with child:
        if timer:
            timer.start()
        assert child.stdout is not None
        for line in child.stdout:
            lines.append(line)
            on_line(line.rstrip("\n"))
        code = child.wait()
    output = "".join(lines)
    if timer:
        if not timer.is_alive():
            raise CommandFailed(args, 124, f"{output}\nno end after {timeout} s")
        timer.cancel()
    if code in INTERRUPTED:
        raise KeyboardInterrupt
    if code != 0:
        raise CommandFailed(args, code, output)
    return output
