"""The servers that the engine's benchmark compares: how each is started, and what it costs in memory."""

from __future__ import annotations

import os
import secrets
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from kvstrata.proof.engine_bench_client import Failed, Target, ready

__all__ = ["EPISTEMIC_DURABLE", "HTTP", "REDIS", "REDIS_AOF", "RESP", "SERVERS", "Running", "Server"]

HTTP, RESP = "engine http", "engine resp"
REDIS, REDIS_AOF = "redis", "redis aof-always"
EPISTEMIC_DURABLE = "epistemic durable"

_START_S = 30.0
_GIB = 1 << 30


@dataclass
class Running:
    """A server that answers."""

    process: subprocess.Popen[bytes]
    target: Target

    def peak_rss_mib(self) -> float:
        """The most memory that it had resident so far (shared pages of files among it)."""
        status = Path(f"/proc/{self.process.pid}/status").read_text(encoding="ascii")
        return next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM")) / 1024

    def stop(self) -> None:
        self.process.terminate()
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


@dataclass(frozen=True)
class Server:
    """`start(folder)`: on the loopback, keeping its data in that empty folder. Raises Failed with the reason."""

    name: str
    start: Callable[[Path], Running]


def _run(argv: list[str], folder: Path, target: Target, env: Mapping[str, str] | None = None) -> Running:
    log = folder / "server.log"
    with log.open("wb") as out:
        process = subprocess.Popen(
            argv, cwd=folder, env=None if env is None else {**os.environ, **env},
            stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT,
        )  # fmt: skip
    running = Running(process, target)
    deadline = time.monotonic() + _START_S
    while time.monotonic() < deadline and process.poll() is None:
        if ready(target):
            return running
        time.sleep(0.02)
    running.stop()
    last = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-3:]
    raise Failed(f"it did not start: {' / '.join(last) or 'no output'}"[:300])


def _port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        number: int = probe.getsockname()[1]
        return number


def _engine(wire: str, *, durability: str = "process", tls: bool = False) -> Callable[[Path], Running]:
    def start(folder: Path) -> Running:
        token, http, resp = secrets.token_hex(24), _port(), _port()
        tokens = folder / "tokens"
        tokens.write_text(f"bench rw bench {token}\n", encoding="utf-8")
        tokens.chmod(0o600)
        env = {
            "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
            "KV_ENGINE_ROOT": str(folder / "root"),
            "KV_ENGINE_CAPACITY_BYTES": str(64 * _GIB),
            "KV_ENGINE_FREE_FLOOR_BYTES": str(64 << 20),
            "KV_ENGINE_DURABILITY": durability,
            "KV_ENGINE_HTTP": f"127.0.0.1:{http}",
            "KV_ENGINE_RESP": f"127.0.0.1:{resp}",
            "KV_ENGINE_TOKENS_FILE": str(tokens),
            **(_certificate(folder) if tls else {}),
        }
        target = Target(wire, http if wire == "http" else resp, token, tls)
        return _run([sys.executable, "-m", "kvstrata.engine"], folder, target, env)

    return start


def _certificate(folder: Path) -> dict[str, str]:
    if shutil.which("openssl") is None:
        raise Failed("no command openssl, which makes the certificate")
    key, cert = folder / "key.pem", folder / "cert.pem"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-subj", "/CN=bench", "-days", "1",
         "-keyout", str(key), "-out", str(cert)],
        check=True, capture_output=True,
    )  # fmt: skip
    return {"KV_ENGINE_TLS_CERT": str(cert), "KV_ENGINE_TLS_KEY": str(key)}


def _redis(*extra: str) -> Callable[[Path], Running]:
    def start(folder: Path) -> Running:
        program = shutil.which("redis-server")
        # Debian's redis-tools brings the program without the service; it acts by the name that it is called by.
        same = shutil.which("redis-check-rdb")
        if program is None and same is None:
            raise Failed("no redis-server here: apt-get install redis-tools")
        port = _port()
        argv = [
            "redis-server", "--port", str(port), "--bind", "127.0.0.1", "--dir", str(folder), "--save", "", *extra,
        ]  # fmt: skip
        link = folder / "redis-server"
        link.symlink_to(program or str(same))
        return _run([str(link), *argv[1:]], folder, Target("resp", port))

    return start


def _epistemic(backend: str) -> Callable[[Path], Running]:
    def start(folder: Path) -> Running:
        beside = Path(sys.executable).parent / "epistemic-graph-server"
        program = str(beside) if beside.exists() else shutil.which("epistemic-graph-server")
        if program is None:
            raise Failed("no epistemic-graph-server here: scripts/bootstrap --dev true")
        token, port = secrets.token_hex(24), _port()
        env = {
            "GRAPH_SERVICE_SOCKET": str(folder / "eg.sock"),
            "GRAPH_SERVICE_PERSIST_DIR": str(folder / "data"),
            "GRAPH_SERVICE_AUTH_SECRET": secrets.token_hex(24),
            "EPISTEMIC_GRAPH_AUDIENCE": "bench",
            "EPISTEMIC_GRAPH_TENANT": "bench",
            "EPISTEMIC_GRAPH_POLICY_VERSION": "1",
            "EPISTEMIC_GRAPH_SIGNER_KEYS_JSON": f'{{"bench":"{secrets.token_hex(24)}"}}',
            "EPISTEMIC_GRAPH_REQUIRE_OIDC": "false",
            "EPISTEMIC_GRAPH_KVCACHE_ADDR": f"127.0.0.1:{port}",
            "EPISTEMIC_GRAPH_KVCACHE_TOKEN": token,
            "EPISTEMIC_GRAPH_KVCACHE_BACKEND": backend,
            "NO_COLOR": "1",
        }
        (folder / "data").mkdir()
        return _run([program], folder, Target("http", port, token), env)

    return start


SERVERS: tuple[Server, ...] = (
    Server(HTTP, _engine("http")),
    Server(RESP, _engine("resp")),
    Server("engine http tls", _engine("http", tls=True)),
    Server("engine http fsync", _engine("http", durability="fsync")),
    Server(REDIS, _redis("--appendonly", "no")),
    Server(REDIS_AOF, _redis("--appendonly", "yes", "--appendfsync", "always", "--auto-aof-rewrite-percentage", "0")),
    Server(EPISTEMIC_DURABLE, _epistemic("durable")),
    Server("epistemic memory", _epistemic("memory")),
)
