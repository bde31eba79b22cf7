"""Every linter of the project, each as one step; all run, the exit code is 1 if any of them complained."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def tracked(*patterns: str) -> list[str]:
    """Files of the work tree that git knows or would add."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "--", *patterns]
    names = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    return [name for name in names if (ROOT / name).is_file()]


def shell_scripts() -> list[str]:
    """Files with a sh or bash first line."""
    found = []
    for name in tracked("scripts", ".ci", "images"):
        with (ROOT / name).open("rb") as file:
            first = file.readline()
        if first.startswith(b"#!") and (b"bash" in first or first.rstrip().endswith(b"/sh")):
            found.append(name)
    return found


def steps() -> list[tuple[str, list[str]]]:
    """(title, command) of each linter that has something to look at."""
    dockerfiles = [name for name in tracked("images") if Path(name).name == "Dockerfile"]
    checks = [
        ("ruff", ["ruff", "check", "."]),
        ("ruff format", ["ruff", "format", "--check", "."]),
        ("mypy", ["mypy", "--strict", "src", "scripts/lint.py"]),
        ("shellcheck", ["shellcheck", *shell_scripts()]),
        ("hadolint", ["hadolint", *dockerfiles]),
        ("yamllint", ["yamllint", "--strict", *tracked("*.yaml", "*.yml")]),
    ]
    if (ROOT / "tests/compose").is_dir():
        checks.append(("compose", ["pytest", "-q", "--no-header", "tests/compose"]))
    rules = tracked("observability/prometheus/rules/*.yaml")
    if rules:
        checks.append(("promtool", [sys.executable, "-m", "kvstrata.observe.promtool", "check", "rules", *rules]))
    return checks


def main() -> int:
    """Run them all."""
    failed = []
    env = {**os.environ, "MYPYPATH": "src"}
    for title, command in steps():
        if len(command) == 1 or (title == "yamllint" and len(command) == 2):
            continue
        started = time.monotonic()
        done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
        good = done.returncode == 0
        print(f" {'✓' if good else '✗'} {title:<14} {time.monotonic() - started:.1f} s", flush=True)
        if not good:
            failed.append(title)
            print(done.stdout + done.stderr, flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
