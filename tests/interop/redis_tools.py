"""Debian's Redis programs for the tests, without its service: from the PATH, else by apt."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import pytest

__all__ = ["program", "redis_server"]

_PACKAGE = "redis-tools"


@cache
def _ensure() -> str:
    """Why there are none, "" if there are."""
    if shutil.which("redis-check-rdb"):
        return ""
    if os.geteuid() != 0 or shutil.which("apt-get") is None:
        return f"no Redis programs here: sudo apt-get install {_PACKAGE}"
    env = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    waiting = ["-o", "DPkg::Lock::Timeout=120"]  # for a test beside this one that installs something
    install = ["apt-get", *waiting, "install", "-y", "-qq", "--no-install-recommends", _PACKAGE]
    for before in ([], ["apt-get", "update", "-qq"]):
        if before:
            subprocess.run(before, capture_output=True, check=False)
        done = subprocess.run(install, capture_output=True, text=True, check=False, env=env)
        if done.returncode == 0:
            return ""
    return f"apt-get could not install {_PACKAGE}: {done.stderr.strip()[-300:]}"


def program(name: str) -> str:
    """The path of redis-cli, redis-benchmark or redis-server; skips the test where it cannot be had."""
    if reason := _ensure():
        pytest.skip(reason)
    found = shutil.which(name)
    if found is None and name == "redis-server":
        # one binary, which acts by the name that it is called by; the package with that name is the service
        found = shutil.which("redis-check-rdb")
    assert found is not None, f"{_PACKAGE} is installed and has no {name}"
    return found


@contextmanager
def redis_server(folder: Path, *args: str) -> Iterator[int]:
    """Its port. No persistence unless `args` say so."""
    link = folder / "redis-server"
    link.symlink_to(program("redis-server"))
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port: int = probe.getsockname()[1]
    process = subprocess.Popen(
        [str(link), "--port", str(port), "--bind", "127.0.0.1", "--dir", str(folder), "--save", "", *args],
        stdout=subprocess.DEVNULL,
    )
    try:
        deadline = time.monotonic() + 20
        while True:
            try:
                socket.create_connection(("127.0.0.1", port), 1).close()
                break
            except OSError:
                assert time.monotonic() < deadline, "redis-server did not start"
                assert process.poll() is None, "redis-server ended"
                time.sleep(0.02)
        yield port
    finally:
        process.terminate()
        process.wait(10)
