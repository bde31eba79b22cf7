"""Pulling for real: from Debian's docker-registry on this machine's loopback, by digest."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from kvstrata.deploy import engine_apt, image_base, images, lock
from kvstrata.deploy.errors import KvError
from kvstrata.deploy.shell import run
from kvstrata.deploy.steps import Steps

pytestmark = [pytest.mark.slow, pytest.mark.docker, pytest.mark.root]
ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Knobs:
    """The settings that images.* read."""

    root: Path
    registry: str
    image_source: str = ""
    device: str = "cpu"
    has_engine: bool = False
    base_image: str = ""
    ca_bundle: Path | None = None


@pytest.fixture(scope="module")
def registry(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """`127.0.0.1:<port>` of a registry that ends with the tests."""
    with Steps().step("docker-registry") as step:
        engine_apt.ensure_command(
            "docker-registry", "docker-registry", step, root=os.geteuid() == 0, found="no docker-registry"
        )
    folder = tmp_path_factory.mktemp("registry")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    config = folder / "config.yml"
    config.write_text(
        f"version: 0.1\nstorage: {{filesystem: {{rootdirectory: {folder}/data}}}}\nhttp: {{addr: '{address}'}}\n"
    )
    with (folder / "log").open("wb") as log:
        server = subprocess.Popen(["docker-registry", "serve", str(config)], stdout=log, stderr=log)
    try:
        for _ in range(100):
            try:
                with urllib.request.urlopen(f"http://{address}/v2/", timeout=1):
                    break
            except (urllib.error.URLError, ConnectionError):
                time.sleep(0.1)
        else:
            raise AssertionError((folder / "log").read_text())
        yield address
    finally:
        server.terminate()
        server.wait(10)


@pytest.fixture(scope="module")
def proxy(registry: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The built proxy image, pushed; gives its digest. The local copies under the registry's name are removed."""
    root = checkout(tmp_path_factory.mktemp("push"))
    with Steps().step("proxy") as step:
        base = image_base.ensure(step)
        knobs = Knobs(root, registry)
        pair = lock.load(root).pair_for("cpu")
        tag = images.tags(root, "cpu", base, pair)["proxy"]
        if run(["docker", "image", "inspect", tag], check=False).returncode:
            images.bake(knobs, pair, base, images.tags(root, "cpu", base, pair), ["proxy"], step)
    pushed = f"{registry}/kvstrata/proxy:0.1.0"
    run(["docker", "tag", tag, pushed])
    run(["docker", "push", pushed])
    run(["docker", "image", "rm", pushed])
    digest = lock.registry_digest(pushed)
    assert digest is not None, "the registry answers"
    yield digest
    run(["docker", "image", "rm", f"{registry}/kvstrata/proxy@{digest}"], check=False)


def checkout(folder: Path) -> Path:
    """A folder with what images.* and lock.* read, and a .env whose image source is undecided."""
    for name in ("images", "requirements", "configs", "src"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("versions.lock", ".env.example"):
        shutil.copy(ROOT / name, folder / name)
    shutil.copy(ROOT / ".env.example", folder / ".env")
    return folder


def locked_to(root: Path, registry: str, digest: str) -> None:
    """Let both images of versions.lock be the one that was pushed: the vLLM image is too large to push in a test."""
    path = root / "versions.lock"
    text = path.read_text().replace('ref = "kvstrata/vllm:0.1.0-cpu"', 'ref = "kvstrata/proxy:0.1.0"')
    path.write_text(text)
    changed = lock.update(root, registry)
    assert changed, "lock update found the pushed digest"
    assert digest in path.read_text()


def test_undecided_pulls_by_digest_once_every_digest_is_known_and_stores_the_decision(
    registry: str, proxy: str, tmp_path: Path
) -> None:
    root = checkout(tmp_path)
    locked_to(root, registry, proxy)
    ref = f"{registry}/kvstrata/proxy@{proxy}"

    got = images.ensure(Knobs(root, registry), Steps())

    assert (got.source, got.pull_policy, got.proxy, got.vllm) == ("pull", "missing", ref, ref)
    assert run(["docker", "image", "inspect", "--format", "{{.RepoDigests}}", ref]).stdout.count(proxy)
    env = (root / ".env").read_text()
    assert "KV_IMAGE_SOURCE=pull" in env.replace("'", "").replace('"', "")


def test_a_digest_that_the_registry_does_not_hold_is_refused_with_the_way_out(
    registry: str, proxy: str, tmp_path: Path
) -> None:
    root = checkout(tmp_path)
    locked_to(root, registry, proxy)
    path = root / "versions.lock"
    path.write_text(path.read_text().replace(proxy, "sha256:" + "0" * 64))
    with pytest.raises(KvError, match="docker pull") as refusal:
        images.pull(Knobs(root, registry, "pull"), Steps())
    assert "make build" in refusal.value.fix


def test_pull_refuses_an_unresolved_digest(registry: str, tmp_path: Path) -> None:
    with pytest.raises(KvError, match="has no digest"):
        images.pull(Knobs(checkout(tmp_path), registry, "pull"), Steps())
