"""The engine from the distribution's own signed packages.

Debian 12 ships Engine 20.10 and no Compose v2, so engine, buildx and Compose come from Debian 13, by a pin that lets
nothing else in. Their needs (glibc 2.34) are met by Debian 12, whose own runc serves them.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from kvstrata.deploy.errors import CommandFailed, KvError
from kvstrata.deploy.shell import run_lines
from kvstrata.deploy.steps import Step

__all__ = ["Plan", "install", "manual", "mirror_uri", "os_release", "plan"]

SOURCE_FILE = "/etc/apt/sources.list.d/kvstrata-engine.sources"
PIN_FILE = "/etc/apt/preferences.d/kvstrata-engine"
_KEYRING = "/usr/share/keyrings/debian-archive-keyring.gpg"
_PINNED = ("docker.io", "docker-cli", "docker-buildx", "docker-compose", "containerd", "tini-static")
_DEBIAN = ("docker.io", "docker-cli", "docker-buildx", "docker-compose", "iptables", "ca-certificates")
_UBUNTU = ("docker.io", "docker-buildx", "docker-compose-v2", "iptables", "ca-certificates")


@dataclass(frozen=True)
class Plan:
    """Files to write (path -> text) and packages to install."""

    packages: tuple[str, ...]
    files: dict[str, str] = field(default_factory=dict)


def os_release(path: Path = Path("/etc/os-release")) -> dict[str, str]:
    """os-release(5) as a dict, {} where there is none."""
    if not path.exists():
        return {}
    pairs = (line.partition("=") for line in path.read_text().splitlines() if "=" in line)
    return {key.strip(): value.strip().strip("\"'") for key, _, value in pairs}


def mirror_uri(texts: Iterable[str], suite: str) -> str:
    """The URI that this machine's apt uses for `suite` ("" if none), from .sources and .list texts."""
    for text in texts:
        for paragraph in text.split("\n\n"):
            fields = {
                line.split(":", 1)[0].strip().lower(): line.split(":", 1)[1].split()
                for line in paragraph.splitlines()
                if ":" in line and not line.startswith(("#", "deb", " ", "\t"))
            }
            if fields.get("enabled") == ["no"] or "deb" not in fields.get("types", []):
                continue
            if suite in fields.get("suites", []) and fields.get("uris"):
                return fields["uris"][0]
        for line in text.splitlines():
            words = line.split("#")[0].split()
            if not words or words[0] != "deb":
                continue
            if len(words) > 1 and words[1].startswith("["):
                closing = next((i for i, word in enumerate(words) if word.endswith("]")), len(words) - 1)
                words = ["deb", *words[closing + 1 :]]
            if len(words) >= 3 and words[2] == suite:
                return words[1]
    return ""


def plan(release: dict[str, str], uri: str) -> Plan | None:
    """What brings the engine to this distribution, None where we do not know. `uri`: apt mirror (Debian 12 only)."""
    if release.get("ID") == "ubuntu":
        return Plan(_UBUNTU)
    if release.get("ID") != "debian":
        return None
    if release.get("VERSION_CODENAME") != "bookworm":
        return Plan(_DEBIAN) if int(release.get("VERSION_ID") or "0") >= 13 else None
    source = f"Types: deb\nURIs: {uri}\nSuites: trixie\nComponents: main\nSigned-By: {_KEYRING}\n"
    pin = (
        "Package: *\nPin: release n=trixie\nPin-Priority: -1\n\n"
        f"Package: {' '.join(_PINNED)}\nPin: release n=trixie\nPin-Priority: 990\n"
    )
    return Plan(_DEBIAN, {SOURCE_FILE: source, PIN_FILE: pin})


def manual(release: dict[str, str]) -> str:
    """The commands for a person."""
    chosen = plan(release, machine_uri(release))
    if chosen is None:
        return (
            "install Docker Engine, its compose plugin and its buildx plugin: https://docs.docker.com/engine/install/"
        )
    lines = [f"sudo tee {path} <<'EOF'\n{text}EOF" for path, text in chosen.files.items()]
    lines.append(f"sudo apt-get update && sudo apt-get install --no-install-recommends {' '.join(chosen.packages)}")
    lines.append("sudo systemctl start docker")
    return "\n".join(lines)


def machine_uri(release: dict[str, str]) -> str:
    """The mirror that this Debian's apt sources name for its suite ("" elsewhere); it has the other suites too."""
    if release.get("ID") != "debian":
        return ""
    parts = Path("/etc/apt/sources.list.d")
    paths = sorted(parts.glob("*.sources")) + sorted(parts.glob("*.list")) + [Path("/etc/apt/sources.list")]
    texts = [path.read_text() for path in paths if path.is_file()]
    return mirror_uri(texts, release.get("VERSION_CODENAME", ""))


def install(release: dict[str, str], step: Step) -> None:
    """Install the engine by apt. Root only. Raises KvError with apt's last lines."""
    uri = machine_uri(release)
    chosen = plan(release, uri)
    if chosen is None:
        raise KvError(f"{release.get('PRETTY_NAME', 'this system')}", "Debian 12+ or Ubuntu", manual(release))
    if chosen.files and not uri:
        raise KvError(
            found="no apt source for bookworm in /etc/apt",
            needed="this machine's own Debian mirror, to take Debian 13's engine from the same place",
            fix="add the line `deb <mirror> bookworm main` to /etc/apt/sources.list",
        )
    origin = " of Debian 13 (apt pin)" if chosen.files else ""
    step.say(f"no Docker Engine here: installing {', '.join(chosen.packages)}{origin}; KV_INSTALL_ENGINE=0 forbids it")
    for path, text in chosen.files.items():
        Path(path).write_text(text)
    apt_update(step)
    apt_install(chosen.packages, step)


def apt_update(step: Step) -> None:
    """Refresh the package lists. A broken foreign source is reported and does not stop us: the installation will
    say itself whether what it needs is there."""
    try:
        run_lines(["apt-get", "update"], step.note)
    except CommandFailed as failed:
        last = next((line for line in failed.output.splitlines() if line.startswith("E:")), "see `apt-get update`")
        step.say(f"apt-get update: {last}")


def apt_install(packages: Iterable[str], step: Step) -> None:
    """Install packages without questions; the output goes to the step's progress."""
    env = {"DEBIAN_FRONTEND": "noninteractive"}
    run_lines(["apt-get", "install", "-y", "--no-install-recommends", *packages], step.note, env=env)


def ensure_command(command: str, package: str, step: Step, *, root: bool, found: str) -> None:
    """Make sure that `command` exists: apt as root on Debian or Ubuntu, else a KvError that says what to install."""
    if shutil.which(command):
        return
    _ensure_package(package, step, root=root, refusal=KvError(found, f"the command {command}", _fix(package)))


def ensure_file(path: str, package: str, step: Step, *, root: bool) -> None:
    """The same for a file that `package` brings."""
    if not Path(path).exists():
        refusal = KvError(f"no {path}", f"the package {package}", _fix(package))
        _ensure_package(package, step, root=root, refusal=refusal)


def _fix(package: str) -> str:
    return f"sudo apt-get install {package}"


def _ensure_package(package: str, step: Step, *, root: bool, refusal: KvError) -> None:
    if not root or shutil.which("apt-get") is None:
        raise refusal
    step.say(f"installing the package {package} with apt")
    try:
        apt_install([package], step)
    except CommandFailed:
        apt_update(step)
        apt_install([package], step)
