"""Runs promtool, Prometheus' own checker of rules: `python -m kvstrata.observe.promtool check rules FILE`.

Taken from PATH if it is new enough; else Debian's package is fetched, checked by apt's signatures, into data/tools of
the checkout and unpacked there: nothing is installed, no root is needed.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

from kvstrata.deploy import engine_apt
from kvstrata.deploy.errors import KvError

__all__ = ["find", "main", "prometheus"]

_ROOT = Path(__file__).resolve().parents[3]
_NEWEST = (3, 0)
"""The rules' tests feed native histograms, which older ones do not read well."""
_SUITE = "sid"
_KEYRING = "/usr/share/keyrings/debian-archive-keyring.gpg"
_LISTS = ("/etc/apt/sources.list", "/etc/apt/sources.list.d")


def find(root: Path = _ROOT) -> Path:
    """The program, fetched if it has to be. Raises KvError where that cannot be."""
    return _program(root, "promtool")


def prometheus(root: Path = _ROOT) -> Path:
    """Prometheus itself, by the same way; for tests."""
    return _program(root, "prometheus")


def _program(root: Path, name: str) -> Path:
    own = root / "data" / "tools" / "usr" / "bin" / name
    for candidate in (shutil.which(name), own):
        if candidate and Path(candidate).is_file() and _version(Path(candidate)) >= _NEWEST:
            return Path(candidate)
    _fetch(root / "data" / "tools", name)
    return own


def _version(program: Path) -> tuple[int, int]:
    done = subprocess.run([program, "--version"], capture_output=True, text=True, check=False)
    match = re.search(r"version (\d+)\.(\d+)", done.stdout + done.stderr)
    return (int(match.group(1)), int(match.group(2))) if match else (0, 0)


def _fetch(folder: Path, package: str) -> None:
    if not shutil.which("apt-get") or not Path(_KEYRING).is_file():
        raise KvError(
            f"no {package} {_NEWEST[0]} or later on PATH", f"{package} of Prometheus 3", "install it, or run on Debian"
        )
    for part in ("lists/partial", "cache/archives/partial"):
        (folder / "apt" / part).mkdir(parents=True, exist_ok=True)
    source = folder / "apt" / "debian.sources"
    source.write_text(f"Types: deb\nURIs: {_mirror()}\nSuites: {_SUITE}\nComponents: main\nSigned-By: {_KEYRING}\n")
    options = {
        "Dir::Etc::sourcelist": source, "Dir::Etc::sourceparts": "/dev/null", "Dir::State::Lists": folder / "apt/lists",
        "Dir::Cache": folder / "apt/cache", "Dir::Etc::preferences": "/dev/null",
        "Dir::Etc::preferencesparts": "/dev/null",
        # Nothing of a rolling suite is older than its release file says; some machines' clocks are.
        "Acquire::Check-Valid-Until": "false", "Acquire::Languages": "none", "APT::Sandbox::User": "",
    }  # fmt: skip
    apt = ["apt-get", "-qq", *(word for key, value in options.items() for word in ("-o", f"{key}={value}"))]
    _run([*apt, "update"], folder)
    _run([*apt, "download", package], folder)
    newest = max(folder.glob(f"{package}_*.deb"), key=lambda path: path.stat().st_mtime)
    _run(["dpkg", "-x", str(newest), str(folder)], folder)
    newest.unlink()
    shutil.rmtree(folder / "apt")  # 90 MB of lists


def _mirror() -> str:
    """The mirror that this machine's apt uses; Debian's own where none is named."""
    texts = []
    for place in map(Path, _LISTS):
        for path in sorted(place.glob("*")) if place.is_dir() else [place]:
            if path.is_file():
                texts.append(path.read_text(encoding="utf-8", errors="replace"))
    codename = engine_apt.os_release().get("VERSION_CODENAME", "")
    return engine_apt.mirror_uri(texts, codename) or "http://deb.debian.org/debian"


def _run(command: list[str], folder: Path) -> None:
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise KvError(
            f"`{command[0]} {command[-1]}` ended with {done.returncode}: {(done.stdout + done.stderr)[-400:]}",
            "promtool 3 on PATH, or an apt mirror that answers", "install Prometheus 3, or check the network",
        )  # fmt: skip


def main() -> int:
    try:
        program = find()
    except KvError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    return subprocess.run([program, *sys.argv[1:]], check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
