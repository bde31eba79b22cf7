"""The base image where no registry answers: a small Debian 12 with Python, made from the distribution's packages."""

from __future__ import annotations

import hashlib
import os
import subprocess
import tempfile

from kvstrata.deploy import engine_apt
from kvstrata.deploy.errors import CommandFailed, KvError
from kvstrata.deploy.shell import run
from kvstrata.deploy.steps import Step

__all__ = ["ensure", "tag"]

SUITE = "bookworm"
PYTHON = "3.11"  # what that suite's python3 is
_PACKAGES = ("ca-certificates", "python3", "python3-venv")
_OPTIONS = (
    "--variant=apt",
    "--components=main",
    '--aptopt=Acquire::Languages "none"',
    '--aptopt=Apt::Install-Recommends "false"',
    "--dpkgopt=force-unsafe-io",  # a half-made image is thrown away, so nothing has to be synced on the way
    "--dpkgopt=path-exclude=/usr/share/man/*",
    "--dpkgopt=path-exclude=/usr/share/locale/*",
    "--dpkgopt=path-exclude=/usr/share/info/*",
    "--dpkgopt=path-exclude=/usr/share/doc/*",
    "--dpkgopt=path-include=/usr/share/doc/*/copyright",
    '--customize-hook=rm -f "$1/etc/resolv.conf" "$1/etc/hostname"',
)
_FALLBACK_URI = "http://deb.debian.org/debian"
_KEYRING = "/usr/share/keyrings/debian-archive-keyring.gpg"


def tag() -> str:
    """`kvstrata/base:bookworm-<12 hex>`, the hash over the recipe."""
    recipe = "\0".join((SUITE, *_PACKAGES, *_OPTIONS))
    return f"kvstrata/base:{SUITE}-{hashlib.sha256(recipe.encode()).hexdigest()[:12]}"


def ensure(step: Step) -> str:
    """Make the base unless it is there; returns its tag. Needs root (mmdebstrap makes device files and owners).

    Raises KvError with what to do where mmdebstrap cannot be had.
    """
    wanted = tag()
    if run(["docker", "image", "inspect", wanted], check=False).returncode == 0:
        return wanted
    root = os.geteuid() == 0
    engine_apt.ensure_command(
        "mmdebstrap", "mmdebstrap", step, root=root, found="no registry for a base image, and no mmdebstrap to make one"
    )
    release = engine_apt.os_release()
    if release.get("ID") == "ubuntu":
        engine_apt.ensure_file(_KEYRING, "debian-archive-keyring", step, root=root)
    step.note(f"base image {wanted}: bootstrapping Debian {SUITE}")
    _import(wanted, engine_apt.machine_uri(release) or _FALLBACK_URI, root)
    return wanted


def _import(wanted: str, uri: str, root: bool) -> None:
    """mmdebstrap | docker import. Without root it works in a user namespace (needs newuidmap)."""
    command = ["mmdebstrap", "--quiet", f"--mode={'root' if root else 'unshare'}", *_OPTIONS]
    command += [f"--include={','.join(_PACKAGES)}", f"--keyring={_KEYRING}", SUITE, "-", uri]
    load = ["docker", "import", "--change", "ENV LANG=C.UTF-8", "--change", 'CMD ["bash"]', "-", wanted]
    with tempfile.TemporaryFile("w+", errors="replace") as errors:
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors) as maker:
            done = subprocess.run(load, stdin=maker.stdout, capture_output=True, text=True, check=False)
        errors.seek(0)
        said = errors.read()
    if maker.returncode != 0:
        # a truncated archive may still have been imported: it must not be taken for the base next time
        run(["docker", "image", "rm", "-f", wanted], check=False)
        raise KvError(
            found=f"mmdebstrap from {uri} ended with {maker.returncode}:\n" + "\n".join(said.strip().splitlines()[-8:]),
            needed=f"a Debian mirror that serves {SUITE}",
            fix="mend the machine's apt sources, or name a base image with Python 3.11: KV_BASE_IMAGE in .env",
        )
    if done.returncode != 0:
        raise CommandFailed(load, done.returncode, done.stderr)
