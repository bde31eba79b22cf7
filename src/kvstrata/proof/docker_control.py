"""The proof's hands on the compose stack."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from kvstrata.deploy import kv_engine as where
from kvstrata.deploy import layers, lock
from kvstrata.deploy.compose import Compose
from kvstrata.deploy.errors import KvError
from kvstrata.deploy.settings import Settings
from kvstrata.proof.control import Target
from kvstrata.proof.kv_engine import KvEngine

__all__ = ["DockerControl", "PlainVllm", "kv_engine", "running_stack"]


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
        # Compose takes COMPOSE_FILE of the environment before .env's; `env` sets it for this one command. It then looks
        # for .env beside the first file, so it has to be told.
        command = ("env", f"COMPOSE_FILE={files}", "docker", "compose", "--env-file", str(settings.env_file))
        self._plain = Compose(root, settings, command)
        self._full = Compose(root, settings)
        self._timeout_s = settings.wait_timeout

    def __enter__(self) -> None:
        self._plain.start(["vllm"])
        self._plain.wait_healthy(["vllm"], self._timeout_s)

    def __exit__(self, *_error: object) -> None:
        self._full.start(["vllm"])
        self._full.wait_healthy(["vllm"], self._timeout_s)


def running_stack(settings: Settings, root: Path) -> Target:
    """The stack of `settings` as the proof and the benchmark reach it. KvError where there is no cache to measure."""
    if not settings.persist:
        raise KvError("KV_PERSIST=0: no cache", "KV_PERSIST=1", "set KV_PERSIST=1 in .env, then `make up`")
    if layers.runs_plain(settings):
        raise KvError("plain vLLM (after a rollback): no cache", "vLLM with the cache", "`make up` brings it back")
    return Target(
        vllm_url=f"http://127.0.0.1:{settings.port}",
        lmcache_url=f"http://127.0.0.1:{settings.metrics_port}",
        device=settings.device or "cpu",
        chunk_size=settings.chunk_size,
        control=DockerControl(settings, root),
        wait_timeout_s=settings.wait_timeout,
        locked_chunk=lock.load(root).chunk_size,
        files_digest=settings.managed.get("KV_IDENTITY", ""),
        engine=kv_engine(settings),
    )


def kv_engine(settings: Settings) -> KvEngine | None:
    """The stack's own KV engine as this machine reaches it, where a storage layer keeps the blocks there."""
    path = where.storage(settings.layers)
    if not settings.has_engine or not path.startswith("path"):
        return None
    prefix = "framed@" if path == "path-a" else ""
    return KvEngine(f"http://127.0.0.1:{settings.engine_port}", where.token(settings), prefix)
