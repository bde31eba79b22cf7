"""Thin wrapper around `docker compose`: the same commands that a person would type in the checkout's root.

.env names the files (COMPOSE_FILE), so plain `docker compose ps` in that folder shows the same stack.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence, Set
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

from kvstrata.deploy import causes
from kvstrata.deploy.compose_ps import ServiceState, parse_ps
from kvstrata.deploy.errors import CommandFailed, KvError
from kvstrata.deploy.knobs import MANAGED_KEYS
from kvstrata.deploy.settings import Settings
from kvstrata.deploy.shell import INTERRUPTED

__all__ = ["Compose", "ServiceState", "StackFailed", "parse_ps"]

FAILED_MARK = "kvstrata failed:"
LOG_LINES = 30
_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
_POLL_S = 2.0  # each look costs two processes, on a machine that is busy loading a model


class StackFailed(KvError):
    """The stack did not become healthy. Holds the service, its last log lines and the likely cause."""

    exit_code = 1

    def __init__(self, service: str, reason: str, log: str, cause: str) -> None:
        shown = f"\n--- last {LOG_LINES} lines of {service} ---\n{log.strip()}\n---" if log.strip() else ""
        super().__init__(f"{service}: {reason}{shown}", "every service healthy", cause)
        self.service, self.reason, self.log = service, reason, log


class Compose:
    """Commands on the stack of one checkout. Raises CommandFailed when docker does, KvError when docker is missing."""

    def __init__(self, root: Path, settings: Settings, command: Sequence[str] = ("docker", "compose")) -> None:
        self._root, self._settings, self._command = root, settings, list(command)

    def command_line(self, wait_timeout: int | None = None) -> str:
        """What `up` runs, to be typed in the root of the checkout."""
        return " ".join(["docker", "compose", *self._up_args(wait_timeout)])

    def up(
        self,
        wait_timeout: int | None = None,
        services: Sequence[str] | None = None,
        on_note: Callable[[str], None] = lambda _text: None,
    ) -> None:
        """Start or update the stack, or `services` of it, and wait until that is healthy (seconds; KV_WAIT_TIMEOUT).

        Unchanged services are not touched; services of layers that were taken out are removed. A service in the
        launcher's failed state ends the wait at once. Raises StackFailed. `on_note` gets progress at each look.
        """
        only = frozenset(services or ())
        for state, _ in self._failed(self._states(only)):  # an earlier failure: a new container is a new try
            self._docker("rm", "-f", state.container_id)
        args = [*self._command, *self._up_args(wait_timeout), *(services or ())]
        with tempfile.TemporaryFile(mode="w+") as output:
            process = subprocess.Popen(
                args, cwd=self._root, env=self._env(), stdin=subprocess.DEVNULL, stdout=output, stderr=output
            )
            try:
                self._watch(process, on_note, only)
            except BaseException:
                process.send_signal(signal.SIGINT)
                process.wait()
                raise
            output.seek(0)
            text = output.read()
        if process.returncode in INTERRUPTED:  # a Ctrl-C that reached compose alone
            raise KeyboardInterrupt
        # Compose 2.26 ends with 0 when the wait timed out, so its word alone does not count.
        if process.returncode != 0 or not all(state.ok for state in self._states(only)):
            raise self._why(text, only)
        self._drop_old_pools()
        self._drop_old_networks()

    def down(self) -> None:
        """Stop and remove the containers and networks. Volumes and data folders stay."""
        self._compose("down", "--remove-orphans")
        self._drop_old_networks()

    def services(self) -> list[str]:
        """Names of all services of the compose files, running or not."""
        return self._compose("config", "--services").stdout.split()

    def ps(self) -> list[ServiceState]:
        """All containers of the project, stopped ones too, by service name."""
        return parse_ps(self._compose("ps", "--all", "--format", "json").stdout)

    def running_ports(self) -> frozenset[int]:
        """Host ports that running containers of this project publish; works before there is any compose file."""
        mine = f"label=com.docker.compose.project={self._settings.project}"
        done = self._docker("ps", "--filter", mine, "--format", "{{.Ports}}", check=False)
        return frozenset(int(port) for port in re.findall(r":(\d+)->", done.stdout))

    def other_checkout(self) -> str:
        """Folder of another checkout whose containers run under this project's name, or ""."""
        mine = f"label=com.docker.compose.project={self._settings.project}"
        label = '{{.Label "com.docker.compose.project.working_dir"}}'
        done = self._docker("ps", "--filter", mine, "--format", label, check=False)
        folders = {Path(line).resolve() for line in done.stdout.split("\n") if line.strip()}
        here = self._root.resolve()
        return next((str(folder) for folder in sorted(folders) if folder not in (here, here / "compose")), "")

    def logs(self, service: str | None = None, tail: int | None = None) -> str:
        """Log text, oldest first; of one service without its name before each line."""
        prefix = ["--no-log-prefix", service] if service else []
        text = self._compose("logs", "--no-color", *_tail(tail), *prefix).stdout
        return _ESCAPES.sub("", text)  # Compose before 5 clears the line even where there is no terminal

    def show_logs(self, service: str = "", tail: int | None = None, follow: bool = False) -> None:
        """Logs straight to the terminal, or as plain text to a file or pipe; with `follow` until Ctrl-C.

        Raises KvError for a service that the stack does not have.
        """
        if service and service not in (names := self.services()):
            raise KvError(f"no service {service!r}", f"one of {', '.join(sorted(names))}", "make logs ARGS=SERVICE")
        args = ["logs", *_tail(tail), *(["--follow"] if follow else []), *([service] if service else [])]
        with contextlib.suppress(KeyboardInterrupt):
            if sys.stdout.isatty():
                subprocess.run([*self._command, *args], cwd=self._root, env=self._env(), check=False)
            else:
                self._plain_logs([*self._command, *args, "--no-color"])

    def _plain_logs(self, argv: list[str]) -> None:
        """Without the services' own colours, and without the line clearing that Compose before 5 does everywhere."""
        with subprocess.Popen(
            argv, cwd=self._root, env=self._env(), stdout=subprocess.PIPE, text=True, errors="replace"
        ) as child:
            assert child.stdout is not None
            try:
                for line in child.stdout:
                    sys.stdout.write(_ESCAPES.sub("", line))
                    sys.stdout.flush()
            except BrokenPipeError:  # `make logs | head`
                child.terminate()
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())

    def kill(self, service: str, restart: bool = True) -> None:
        """SIGKILL the service's container and start it again (docker's restart policy does not undo a kill).

        With `restart` false it stays dead until `start`.
        """
        for state in self.ps():
            if state.service == service and state.state == "running":
                self._docker("kill", "-s", "KILL", state.container_id)
        if restart:
            self.start([service])

    def start(self, services: Sequence[str]) -> None:
        """Start these services alone; does not wait for their health."""
        self._compose("up", "-d", "--no-deps", *services)

    def exec(
        self, service: str, argv: Sequence[str], check: bool = True, timeout: float | None = 60
    ) -> CompletedProcess[str]:
        """Run argv in the running container of the service, with text output."""
        return self._compose("exec", "-T", service, *argv, check=check, timeout=timeout)

    def wait_healthy(self, services: Sequence[str], timeout: float) -> None:
        """Return when all `services` are healthy. StackFailed after `timeout` s, or at once for a failed state."""
        end = time.monotonic() + timeout
        while True:
            found = self.ps()
            states = {state.service: state for state in found}
            if all(name in states and states[name].ok for name in services):
                return
            for state, reason in self._failed(found):
                raise self._stack_failed(state, reason)
            if time.monotonic() > end:
                bad = next(name for name in services if name not in states or not states[name].ok)
                if bad not in states:
                    raise StackFailed(bad, "has no container", "", "run `make up`")
                raise self._stack_failed(states[bad], f"{_shown(states[bad])} after {timeout:.0f} s")
            time.sleep(_POLL_S)

    # -- inner workings --

    def _up_args(self, wait_timeout: int | None) -> list[str]:
        timeout = self._settings.wait_timeout if wait_timeout is None else wait_timeout
        return ["up", "-d", "--wait", "--wait-timeout", str(timeout), "--remove-orphans"]

    def _env(self) -> dict[str, str]:
        """The caller's environment less what only .env may say: an exported COMPOSE_FILE would mean another stack."""
        env = {k: v for k, v in os.environ.items() if k not in MANAGED_KEYS and not k.startswith("COMPOSE_")}
        return {**env, "COMPOSE_PROJECT_NAME": self._settings.project}

    def _compose(self, *args: str, check: bool = True, timeout: float | None = None) -> CompletedProcess[str]:
        return self._run([*self._command, *args], check, timeout)

    def _docker(self, *args: str, check: bool = True) -> CompletedProcess[str]:
        return self._run(["docker", *args], check, 60)

    def _run(self, argv: list[str], check: bool, timeout: float | None) -> CompletedProcess[str]:
        try:
            done = subprocess.run(argv, cwd=self._root, env=self._env(), stdin=subprocess.DEVNULL, capture_output=True,
                                  text=True, errors="replace", check=False, timeout=timeout)  # fmt: skip
        except FileNotFoundError:
            needed = "Docker Engine with Compose"
            raise KvError(f"no command `{argv[0]}`", needed, "run `make up`, which says how to get it") from None
        except subprocess.TimeoutExpired:
            raise CommandFailed(argv, 124, f"no end after {timeout} s") from None
        if check and done.returncode != 0:
            raise CommandFailed(argv, done.returncode, done.stdout + done.stderr)
        return done

    def _watch(self, process: subprocess.Popen[bytes], note: Callable[[str], None], only: Set[str]) -> None:
        """Until compose ends. A container that says why it cannot run ends it early."""
        started = time.monotonic()
        while process.poll() is None:
            try:
                process.wait(_POLL_S)
            except subprocess.TimeoutExpired:
                states = self._states(only)
                for state, reason in self._failed(states):
                    raise self._stack_failed(state, reason) from None
                waiting = [state.service for state in states if not state.ok]
                note(f"{time.monotonic() - started:.0f} s, waiting for {', '.join(waiting) or 'compose'}")

    def _why(self, output: str, only: Set[str]) -> StackFailed:
        """Turn a failed `up` into the service that is to blame, its log and the likely cause."""
        states = self._states(only)
        for state, reason in self._failed(states):
            return self._stack_failed(state, reason)
        bad = [state for state in states if not state.ok]
        bad.sort(key=lambda state: (state.health == "starting", state.service))
        said = causes.likely(output, default="")
        if said or not bad:  # compose itself could not create or start something
            lines = "\n".join(output.strip().splitlines()[-LOG_LINES:])
            return StackFailed("docker compose up", "ended with an error", lines, said or causes.UNKNOWN)
        return self._stack_failed(bad[0], f"{_shown(bad[0])}, not healthy")

    def _stack_failed(self, state: ServiceState, reason: str) -> StackFailed:
        text = self._merged("docker", "logs", "--tail", str(LOG_LINES), state.container_id)
        details = self._inspect([state.container_id])
        if details and details[0]["State"].get("OOMKilled"):
            reason += " (out of memory)"
        default = causes.SLOW if state.health == "starting" else causes.UNKNOWN
        return StackFailed(state.service, reason, text, causes.likely(f"{reason}\n{text}", default))

    def _merged(self, *argv: str) -> str:
        """Both streams of a command in the order in which they were written."""
        done = subprocess.run(argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                              text=True, errors="replace", check=False)  # fmt: skip
        return done.stdout

    def _states(self, only: Set[str] = frozenset()) -> list[ServiceState]:
        """Of these services; of all where none is named."""
        done = self._compose("ps", "--all", "--format", "json", check=False)
        found = parse_ps(done.stdout) if done.returncode == 0 else []
        return [state for state in found if not only or state.service in only]

    def _failed(self, states: Sequence[ServiceState]) -> list[tuple[ServiceState, str]]:
        """Those of `states` whose last health check carried the launcher's reason, with it."""
        found = []
        running = {state.container_id: state for state in states if state.state == "running"}
        for detail in self._inspect(list(running)):
            checks = (detail["State"].get("Health") or {}).get("Log") or []
            said = str(checks[-1].get("Output", "")) if checks else ""
            if said.startswith(FAILED_MARK):
                state = next(s for key, s in running.items() if detail["Id"].startswith(key))
                found.append((state, said.splitlines()[0].removeprefix(FAILED_MARK).strip()))
        return found

    def _inspect(self, ids: Sequence[str]) -> list[dict[str, Any]]:
        if not ids:
            return []
        done = self._docker("inspect", *ids, check=False)  # a container may go between ps and here
        found: list[dict[str, Any]] = json.loads(done.stdout or "[]")
        return found

    def _drop_old_networks(self) -> None:
        """Remove networks of layers that were taken out: compose leaves them behind. Docker refuses those in use."""
        mine = f"label=com.docker.compose.project={self._settings.project}"
        names = self._docker("network", "ls", "-q", "--filter", "dangling=true", "--filter", mine, check=False).stdout
        if ids := names.split():
            self._docker("network", "rm", *ids, check=False)

    def _drop_old_pools(self) -> None:
        """Remove shared-memory volumes of earlier sizes (their name carries it); they are tmpfs, unused and empty."""
        mine = f"label=com.docker.compose.project={self._settings.project}"
        names = self._docker(
            "volume", "ls", "-q", "--filter", "dangling=true", "--filter", mine, check=False
        ).stdout.split()
        old = [name for name in names if name.startswith(f"{self._settings.project}_shm_")]
        if old and self._settings.persist:
            self._docker("volume", "rm", *old, check=False)


def _tail(lines: int | None) -> list[str]:
    return [] if lines is None else ["--tail", str(lines)]


def _shown(state: ServiceState) -> str:
    if state.state != "running":
        return f"is {state.state} (exit code {state.exit_code})"
    return f"is {state.health or 'running'}"
