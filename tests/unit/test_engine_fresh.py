"""From nothing to an engine that answers, in a privileged Debian 12 container with its own /var/lib/docker."""

from __future__ import annotations

import os
import subprocess
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstrata.deploy import image_base, images
from kvstrata.deploy.steps import Steps

pytestmark = [pytest.mark.slow, pytest.mark.docker, pytest.mark.root]
ROOT = Path(__file__).resolve().parents[2]

# A machine as the README asks for (git, make, python3), without the venv module and without any engine.
DOCKERFILE = """\
ARG BASE_IMAGE
FROM ${BASE_IMAGE}
RUN apt-get purge -y python3-venv python3.11-venv && apt-get update \\
    && apt-get install -y --no-install-recommends make \\
    && rm -rf /var/lib/apt/lists/*
"""


def docker(*args: str, check: bool = True, timeout: float = 300, text: str | None = None) -> str:
    done = subprocess.run(
        ["docker", *args], capture_output=True, text=True, check=False, timeout=timeout, input=text
    )  # fmt: skip
    if check and done.returncode:
        raise AssertionError(f"docker {' '.join(args)}: {done.stdout}{done.stderr}")
    return done.stdout + done.stderr


@pytest.fixture
def machine() -> Iterator[str]:
    """The name of a running container; it and its volumes go at the end."""
    name = f"kvstrata-test-fresh-{uuid.uuid4().hex[:8]}"
    with Steps().step("base") as step:
        base = image_base.ensure(step)
    docker("build", "-q", "--build-arg", f"BASE_IMAGE={base}", "-t", name, "-", text=DOCKERFILE)
    extra: list[str] = []
    ca = images.ca_bundle(_NoKnobs())
    if ca is not None:
        extra = ["-v", f"{ca}:/ca.crt:ro", "-e", "PIP_CERT=/ca.crt"]
    # Volumes, as a machine has a disk: a container's own layers are a stacked file system, which no cache may lie on.
    disks = ["-v", "/var/lib/docker", "-v", "/src"]
    docker("run", "-d", "--privileged", "--init", "--name", name, *disks, *extra, name, "sleep", "3600")
    try:
        tracked = subprocess.run(
            ["git", "-C", str(ROOT), "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
            capture_output=True, check=True,
        ).stdout  # fmt: skip
        tar = subprocess.Popen(
            ["tar", "-C", str(ROOT), "--null", "--ignore-failed-read", "-T", "-", "-cf", "-"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        assert tar.stdin and tar.stdout
        unpack = subprocess.Popen(["docker", "exec", "-i", name, "tar", "-C", "/src", "-xf", "-"], stdin=tar.stdout)
        tar.stdin.write(tracked)
        tar.stdin.close()
        assert unpack.wait(60) == 0
        yield name
    finally:
        docker("rm", "-f", "-v", name, check=False)
        docker("image", "rm", "-f", name, check=False)


class _NoKnobs:
    root = ROOT
    device = "cpu"
    image_source = registry = base_image = ""
    ca_bundle = None


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root: a privileged container")
def test_a_bare_debian_gets_environment_and_engine_and_a_second_run_changes_nothing(machine: str) -> None:
    ensure = ["exec", machine, "/src/scripts/bootstrap", "python", "-m", "kvstrata.deploy.engine"]

    forbidden = docker("exec", "-e", "KV_INSTALL_ENGINE=0", *ensure[1:], check=False)
    assert "KV_INSTALL_ENGINE=0 forbids" in forbidden
    assert "apt-get install" in forbidden
    assert "not found" in docker("exec", machine, "sh", "-c", "command -v dockerd || echo not found")

    first = docker(*ensure)
    print(first)
    assert "installing docker.io" in first
    assert "installed and started now" in first
    pid = docker("exec", machine, "cat", "/run/kvstrata-dockerd.pid")
    assert "dockerd" in docker("exec", machine, "cat", f"/proc/{pid.strip()}/comm")
    # nothing but the engine may come from Debian 13
    assert "trixie" not in docker("exec", machine, "apt-cache", "policy", "bash").split("***")[1].split("\n\n")[0]

    second = docker(*ensure)
    assert "installed" not in second
    assert docker("exec", machine, "cat", "/run/kvstrata-dockerd.pid") == pid
