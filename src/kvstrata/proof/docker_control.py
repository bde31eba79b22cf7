"""The proof's hands on the compose stack."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from kvstrata.deploy import layers
from kvstrata.deploy.compose import Compose
from kvstrata.deploy.settings import Settings

__all__ = ["DockerControl", "PlainVllm"]


class DockerControl:
    """`Control` over docker compose: `kill -s KILL`, then `up -d --no-deps` of the same services.

    A killed container is not restarted by its restart policy (docker treats a kill as the user's will), so that the
    time of the restart is ours.
    """

    lmcache_http = "unix:/run/lmcache-http/http.sock"

    def __init__(self, settings: Settings, root: Path) -> None:
        self._compose = Compose(root, settings)

    def kill(self, services: Sequence[str]) -> None:
        for service in services:
            self._compose.kill(service, restart=False)

    def start(self, services: Sequence[str]) -> None:
        self._compose.start(services)

    def exec(self, service: str, argv: Sequence[str]) -> tuple[int, str]:
        done = self._compose.exec(service, argv, check=False)
        return done.returncode, done.stdout if done.returncode == 0 else done.stdout + done.stderr


class PlainVllm:
    """A context in which the service `vllm` runs from vllm.yaml and its device layer alone, as after a rollback.

    lmcache and its proxy are left running, so that leaving the context brings the same stack back.
    """

    def __init__(self, settings: Settings, root: Path) -> None:
        files = layers.compose_file(root, layers.plain(settings))
        # Compose takes COMPOSE_FILE of the environment before .env's; `env` sets it for this one command.
        self._plain = Compose(root, settings, ("env", f"COMPOSE_FILE={files}", "docker", "compose"))
        self._full = Compose(root, settings)
        self._timeout_s = settings.wait_timeout

    def __enter__(self) -> None:
        self._plain.start(["vllm"])
        self._plain.wait_healthy(["vllm"], self._timeout_s)

    def __exit__(self, *_error: object) -> None:
        self._full.start(["vllm"])
        self._full.wait_healthy(["vllm"], self._timeout_s)
