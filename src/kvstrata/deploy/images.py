"""The images of the stack: pulled by digest where a registry answers, else built here by the bake file.

Local tags are content hashes, so an image is built only when what goes into it has changed.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from kvstrata.deploy import envfile, image_base
from kvstrata.deploy.errors import CommandFailed, KvError
from kvstrata.deploy.image_hash import allowed, content_hash, context_files
from kvstrata.deploy.lock import Image, Lock, Pair, load, registry_digest
from kvstrata.deploy.shell import run, run_lines
from kvstrata.deploy.steps import Step, Steps

__all__ = [
    "ImageSet",
    "ImageSettings",
    "bake",
    "build",
    "decide_source",
    "ensure",
    "present",
    "pull",
    "pull_one",
    "run_bake",
    "tags",
]

NAMES = ("vllm", "proxy")
"""Of every stack. The KV engine's image comes with its layer only."""
BAKE_FILE = "images/docker-bake.hcl"
_SYSTEM_CA = "/etc/ssl/certs/ca-certificates.crt"


@dataclass(frozen=True)
class ImageSet:
    """What compose gets: references ("" for the engine's without its layer), KV_PULL_POLICY, "build" or "pull"."""

    vllm: str
    lmcache: str
    proxy: str
    pull_policy: str
    source: str
    engine: str = ""


class ImageSettings(Protocol):
    """The knobs that matter here; settings.Settings has them."""

    @property
    def root(self) -> Path: ...
    @property
    def device(self) -> str: ...
    @property
    def has_engine(self) -> bool: ...
    @property
    def image_source(self) -> str: ...
    @property
    def registry(self) -> str: ...
    @property
    def base_image(self) -> str: ...
    @property
    def ca_bundle(self) -> Path | None: ...


def decide_source(asked: str, images: list[Image], registry: str, answers: Callable[[str], bool]) -> tuple[str, str]:
    """("build" or "pull", why). `asked` is KV_IMAGE_SOURCE; `answers` is asked only where every digest is known."""
    if asked:
        return asked, f"KV_IMAGE_SOURCE={asked}"
    missing = [f"{image.name} ({image.device})" for image in images if not image.resolved]
    if missing:
        return "build", f"versions.lock has no digest for {', '.join(missing)}"
    for image in images:
        if not answers(image.pinned(registry)):
            return "build", f"no registry answers for {image.pinned(registry)}"
    return "pull", "the registry answers for every image"


def ensure(settings: ImageSettings, steps: Steps) -> ImageSet:
    """The images for `settings.device`, present on this engine; the decision is stored in .env when it was blank."""
    locked = _locked(load(settings.root), settings)
    asked = settings.image_source
    source, why = decide_source(asked, locked, settings.registry, lambda ref: registry_digest(ref) is not None)
    if not asked:
        envfile.set_blank(settings.root, {"KV_IMAGE_SOURCE": source})
        steps.console.print(f"   images: {source} ({why})", markup=False, highlight=False, soft_wrap=True)
    return pull(settings, steps) if source == "pull" else build(settings, steps)


def _locked(lock: Lock, settings: ImageSettings) -> list[Image]:
    return [lock.image(name, settings.device) for name in _names(settings)]


def _names(settings: ImageSettings) -> tuple[str, ...]:
    return (*NAMES, "engine") if settings.has_engine else NAMES


def pull(settings: ImageSettings, steps: Steps) -> ImageSet:
    """Pull every image by its digest. KvError for an unresolved digest, or where the registry does not answer."""
    images = {image.name: image.pinned(settings.registry) for image in _locked(load(settings.root), settings)}
    with steps.step("Images, pulled") as step:
        fetched = [name for name, ref in images.items() if pull_one(ref, step.note)]
        step.done(", ".join(fetched) if fetched else "all present")
    return ImageSet(images["vllm"], images["vllm"], images["proxy"], "missing", "pull", images.get("engine", ""))


def pull_one(ref: str, note: Callable[[str], None]) -> bool:
    """Pull `ref` (by digest) unless it is there; True when it was fetched."""
    if present(ref):
        return False
    note(f"pulling {ref}")
    try:
        run_lines(["docker", "pull", ref], note)
    except CommandFailed as failed:
        raise KvError(
            found=f"docker pull {ref}: {' '.join(failed.output.split()[-25:])}",
            needed="a registry that answers and holds exactly this digest",
            fix="check KV_REGISTRY in .env (and `docker login`), or build the images here: make build",
        ) from None
    return True


def present(ref: str) -> bool:
    """The image is on this engine."""
    return run(["docker", "image", "inspect", "--format", "{{.Id}}", ref], check=False).returncode == 0


def build(settings: ImageSettings, steps: Steps) -> ImageSet:
    """Build what is missing. KvError where there is no buildx, no base image, or no Python of the right version."""
    lock = load(settings.root)
    pair = lock.pair_for(settings.device)
    with steps.step("Images, built here") as step:
        base = base_image(settings, lock, pair, step)
        wanted = tags(settings.root, settings.device, base, pair)
        missing = [name for name in _names(settings) if not present(wanted[name])]
        if missing:
            bake(settings, pair, base, wanted, missing, step)
        step.done(f"{wanted['vllm']}" + (f" ({' and '.join(missing)} now)" if missing else " (unchanged)"))
    engine = wanted["engine"] if settings.has_engine else ""
    return ImageSet(wanted["vllm"], wanted["vllm"], wanted["proxy"], "never", "build", engine)


def base_image(settings: ImageSettings, lock: Lock, pair: Pair, step: Step) -> str:
    """What the images stand on: KV_BASE_IMAGE, else the locked Python image, else a base made here."""
    if settings.base_image:
        return settings.base_image
    locked = lock.base(f"python-{pair.python}")
    if locked.resolved and (present(locked.pinned()) or registry_digest(locked.pinned()) is not None):
        return locked.pinned()
    if pair.python != image_base.PYTHON:
        raise KvError(
            found=f"no digest for {locked.ref} in versions.lock, and Debian 12 has Python {image_base.PYTHON}",
            needed=f"a base image with Python {pair.python}, which the pair {pair.name} is locked for",
            fix=f"KV_BASE_IMAGE={locked.ref} in .env, or `kvstrata lock update` where a registry answers",
        )
    return image_base.ensure(step)


def tags(root: Path, device: str, base: str, pair: Pair) -> dict[str, str]:
    """Local tag of each image: name, device and a hash over what its .dockerignore lets in and the build arguments."""
    found: dict[str, str] = {}
    for name, variant in (("vllm", f"{device}-"), ("proxy", ""), ("engine", "")):
        patterns = allowed((root / f"images/{name}/Dockerfile.dockerignore").read_text())
        files = context_files(root, [*patterns, BAKE_FILE])
        extra = {"base": base}
        if name == "vllm":
            extra |= {"device": device, "torch": pair.torch, "index": os.environ.get("TORCH_INDEX_URL", "")}
        found[name] = f"kvstrata/{name}:{variant}{content_hash(root, files, extra)}"
    return found


def bake(
    settings: ImageSettings, pair: Pair, base: str, wanted: dict[str, str], missing: list[str], step: Step
) -> None:
    env = {
        "BASE_IMAGE": base,
        "DEVICE": "cpu" if settings.device == "cpu" else "nvidia",
        "TORCH_VERSION": pair.torch,
        "VLLM_TAG": wanted["vllm"],
        "PROXY_TAG": wanted["proxy"],
        "ENGINE_TAG": wanted["engine"],
    }
    run_bake(settings, BAKE_FILE, env, missing, step.note)


def run_bake(
    settings: ImageSettings, file: str, variables: Mapping[str, str], wanted: list[str], note: Callable[[str], None]
) -> None:
    """`docker buildx bake` of these targets. KvError with the failing step's lines."""
    if run(["docker", "buildx", "version"], check=False).returncode != 0:
        raise KvError(
            found="no buildx plugin beside the Docker Engine",
            needed="`docker buildx bake`, to build the images",
            fix="apt-get install docker-buildx   # docker-buildx-plugin with Docker's own packages",
        )
    env = {
        **variables,
        "CA_BUNDLE": str(ca_bundle(settings) or ""),
        "PIP_CONF": str(pip_conf() or ""),
        "BUILDX_NO_DEFAULT_ATTESTATIONS": "1",
    }
    command = ["docker", "buildx", "bake", "--progress=plain", "-f", file, *wanted]
    try:
        run_lines(command, lambda line: note(short_note(line)), env=env, cwd=str(settings.root))
    except CommandFailed as failed:
        raise KvError(
            found=f"`{' '.join(command)}` failed:\n{failed_lines(failed.output)}",
            needed="images that build and whose imports work",
            fix="no network or a company proxy: HTTPS_PROXY in the environment, KV_CA_BUNDLE in .env\n"
            "no space: docker system df\nelse run the command above in the project's folder",
        ) from None


def ca_bundle(settings: ImageSettings) -> Path | None:
    """The CA file for downloads inside a build: KV_CA_BUNDLE, else what this machine's own tools are told to use.

    The system bundle is handed over as well: where TLS is intercepted the interceptor's CA is in it, elsewhere it is
    the public set that pip would use anyway.
    """
    if settings.ca_bundle is not None:
        return settings.ca_bundle
    for candidate in (os.environ.get("PIP_CERT"), os.environ.get("SSL_CERT_FILE"), _SYSTEM_CA):
        if candidate and Path(candidate).is_file():
            return Path(candidate)
    return None


def pip_conf() -> Path | None:
    """The caller's pip configuration file, for machines that have their own package index."""
    places = [os.environ.get("PIP_CONFIG_FILE", ""), "~/.config/pip/pip.conf", "~/.pip/pip.conf", "/etc/pip.conf"]
    for place in places:
        path = Path(place).expanduser()
        if place and path.is_file() and os.access(path, os.R_OK):
            return path
    return None


def short_note(line: str) -> str:
    """A line of buildkit's plain progress as a short note: without its number, at most one terminal line."""
    text = re.sub(r"^#\d+ (?:\d+\.\d+ )?", "", line).strip()
    width = max(40, shutil.get_terminal_size().columns - 30)
    return text if len(text) <= width else text[: width - 1] + "…"


def failed_lines(output: str) -> str:
    """The end of a failed build, from the failing step's own lines."""
    lines = [short_note(line) for line in output.splitlines() if line.strip() and "CACHED" not in line]
    return "\n".join(lines[-15:])
