"""Docker Engine and Compose: found and left alone, or installed and started, or the exact commands printed.

An engine that answers is never touched. The minimum is Engine 25 (health checks' `start_interval`) and Compose 2.24
(the oldest whose merge rules the layers are tested with).
"""

from __future__ import annotations

import os
import shutil
import sys
from dataclasses import dataclass, field
from enum import Enum

from kvstrata.deploy import engine_apt, engine_start
from kvstrata.deploy.errors import CommandFailed, KvError
from kvstrata.deploy.shell import run
from kvstrata.deploy.steps import Step, Steps

__all__ = ["Action", "EngineInfo", "Facts", "decide", "ensure", "look", "parse_version", "rootless", "warnings_for"]

MIN_ENGINE = (25, 0)
MIN_COMPOSE = (2, 24)
# Before 28.3.3 a port published on 127.0.0.1 can be reached by neighbours on the same network segment
# (moby#45610, CVE-2025-54388).
SAFE_ENGINE = (28, 3, 3)


@dataclass(frozen=True)
class EngineInfo:
    """What answers. `buildx` is "" where the plugin is absent: pulling works without it, building does not."""

    engine_version: str
    compose_version: str
    buildx: str
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True)
class Facts:
    """What the machine looks like; everything `decide` may know."""

    server: str = ""  # version of the engine that answers, or ""
    error: str = ""  # why it does not
    compose: str = ""
    buildx: str = ""
    dockerd: str = ""  # path of the daemon's program, or ""
    remote: str = ""  # DOCKER_HOST when it is set
    root: bool = False
    os_release: dict[str, str] = field(default_factory=dict)


class Action(Enum):
    """What `ensure` does next."""

    USE = "use"
    START = "start"
    INSTALL = "install"
    REFUSE = "refuse"


def parse_version(text: str) -> tuple[int, ...]:
    """Leading numbers of a version: "26.1.5+dfsg1" -> (26, 1, 5); "v2.26.1-4" -> (2, 26, 1); "" -> ()."""
    numbers: list[int] = []
    for part in text.strip().lstrip("v").split("."):
        digits = part[: len(part) - len(part.lstrip("0123456789"))]
        if not digits:
            break
        numbers.append(int(digits))
        if digits != part:
            break
    return tuple(numbers)


def warnings_for(engine_version: str) -> tuple[str, ...]:
    """What a user of this engine has to know."""
    if parse_version(engine_version) < SAFE_ENGINE:
        return (
            f"Engine {engine_version} < 28.3.3: ports on 127.0.0.1 can be reached from the same network segment "
            "(CVE-2025-54388); keep neighbours off it or upgrade",
        )
    return ()


def decide(facts: Facts, install: bool) -> tuple[Action, KvError | None]:
    """The next action for these facts; the error to raise comes with REFUSE. Pure."""
    if facts.server:
        return _judge_running(facts)
    if "permission denied" in facts.error.lower():
        return Action.REFUSE, KvError(
            found=f"no right to talk to the Docker Engine: {facts.error}",
            needed="root, or membership of the group docker",
            fix="sudo usermod -aG docker $USER   # then log in again; members of this group are as good as root",
        )
    if facts.remote:
        return Action.REFUSE, KvError(
            found=f"DOCKER_HOST={facts.remote} does not answer: {facts.error}",
            needed="an engine that answers there, or no DOCKER_HOST",
            fix="unset DOCKER_HOST, or start the engine that it names",
        )
    if facts.dockerd:
        if facts.root:
            return Action.START, None
        return Action.REFUSE, KvError(
            found=f"{facts.dockerd} is installed but does not run",
            needed="a running Docker Engine",
            fix="sudo systemctl start docker",
        )
    if install and facts.root and engine_apt.plan(facts.os_release, "") is not None:
        return Action.INSTALL, None
    why = "no Docker Engine"
    if not install:
        why += ", and KV_INSTALL_ENGINE=0 forbids its installation"
    elif not facts.root:
        why += ", and no root rights to install it"
    return Action.REFUSE, KvError(
        found=why,
        needed="Docker Engine >= 25 with Compose >= 2.24 and buildx",
        fix=engine_apt.manual(facts.os_release),
    )


def _judge_running(facts: Facts) -> tuple[Action, KvError | None]:
    if parse_version(facts.server) < MIN_ENGINE:
        return Action.REFUSE, KvError(
            found=f"Docker Engine {facts.server}",
            needed="Docker Engine >= 25",
            fix="upgrade it the way it was installed; one that answers is never upgraded from here",
        )
    if parse_version(facts.compose) < MIN_COMPOSE:
        return Action.REFUSE, KvError(
            found=f"Compose {facts.compose}" if facts.compose else "no Compose plugin beside a running Docker Engine",
            needed="Compose >= 2.24 (`docker compose version`)",
            fix="apt-get install docker-compose-plugin      # Docker's own packages\n"
            "apt-get install docker-compose-v2          # Ubuntu's\n"
            "apt-get install docker-compose             # Debian 13's",
        )
    return Action.USE, None


def _first_line(argv: list[str]) -> str:
    try:
        return next(iter(run(argv, timeout=20).stdout.splitlines()), "").strip()
    except KvError:
        return ""


def look() -> Facts:
    """Read the machine's state; changes nothing."""
    server = error = compose = buildx = ""
    if shutil.which("docker"):
        try:
            server = run(["docker", "version", "--format", "{{.Server.Version}}"], timeout=20).stdout.strip()
        except CommandFailed as failed:
            error = " ".join(failed.output.split())
        compose = _first_line(["docker", "compose", "version", "--short"])
        words = _first_line(["docker", "buildx", "version"]).split()
        buildx = next((w for w in words if parse_version(w)), "")
    daemon = shutil.which("dockerd", path=os.environ.get("PATH", "") + ":/usr/sbin:/sbin:/usr/local/sbin")
    return Facts(
        server=server,
        error=error,
        compose=compose,
        buildx=buildx,
        dockerd=daemon or "",
        remote=os.environ.get("DOCKER_HOST", ""),
        root=os.geteuid() == 0,
        os_release=engine_apt.os_release(),
    )


def ensure(install: bool, steps: Steps) -> EngineInfo:
    """Make sure that a good engine answers. `install` is KV_INSTALL_ENGINE.

    Raises KvError (exit code 2) with the commands to run where it may not, or cannot, do it itself.
    """
    with steps.step("Docker Engine") as step:
        facts, how = _reach(install, step)
        info = EngineInfo(facts.server, facts.compose, facts.buildx, warnings_for(facts.server))
        buildx = f", buildx {info.buildx}" if info.buildx else ", no buildx"
        step.done(f"{info.engine_version}, Compose {info.compose_version}{buildx}{how}")
    return info


def _reach(install: bool, step: Step) -> tuple[Facts, str]:
    """At most one installation and one start; each is followed by a fresh look."""
    how: list[str] = []
    for _ in range(3):
        facts = look()
        action, refusal = decide(facts, install)
        if refusal is not None:
            raise refusal
        if action is Action.USE:
            return facts, f" ({' and '.join(how)} now)" if how else ""
        if action is Action.INSTALL and "installed" not in how:
            engine_apt.install(facts.os_release, step)
            how.append("installed")
        elif action is Action.START and "started" not in how:
            engine_start.start(facts.dockerd, step)
            how.append("started")
        else:
            break
    raise KvError(
        found=f"the Docker Engine does not answer after it was {' and '.join(how)}: {facts.error}",
        needed="an engine that answers `docker info`",
        fix=f"look into {engine_start.LOG} (or `journalctl -u docker`)",
    )


def rootless() -> bool:
    """The engine maps container uid 0 to the caller: files are then owned by that id, not by a service's."""
    done = run(["docker", "info", "--format", "{{.SecurityOptions}}"], check=False, timeout=30)
    return done.returncode == 0 and "name=rootless" in done.stdout


def main() -> int:
    """`python -m kvstrata.deploy.engine`: what scripts/test does before the tests."""
    try:
        found = ensure(os.environ.get("KV_INSTALL_ENGINE", "1") != "0", Steps())
    except KvError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    for warning in found.warnings:
        print(f"warning: {warning}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
