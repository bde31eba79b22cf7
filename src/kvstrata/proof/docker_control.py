"""The proof's hands on the compose stack."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from kvstrata.deploy.compose import Compose
from kvstrata.deploy.settings import Settings

__all__ = ["DockerControl"]


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
