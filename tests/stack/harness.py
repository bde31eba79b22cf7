"""A stack of its own for the tests: a copy of the checkout, another project name, free ports, real everything."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import httpx

from kvstrata.deploy import settings
from kvstrata.proof.prompts import handbook

REPOSITORY = Path(__file__).parents[2]
CHUNK = 256
_RUN = os.urandom(8).hex()


def free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    for s in sockets:
        s.bind(("127.0.0.1", 0))
    ports = [s.getsockname()[1] for s in sockets]
    for s in sockets:
        s.close()
    return ports


def copy_checkout(target: Path) -> None:
    """Tracked and new files, without what git ignores."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=REPOSITORY, check=True, capture_output=True, text=True,
    ).stdout  # fmt: skip
    for name in filter(None, listed.split("\0")):
        source, copy = REPOSITORY / name, target / name
        if source.is_file():
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, copy)


def wait_until(check: Callable[[], Any], seconds: float, what: str) -> Any:
    deadline = time.monotonic() + seconds
    while True:
        try:
            if value := check():
                return value
        except (httpx.HTTPError, OSError, ValueError):
            pass
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {seconds} s: {what}")
        time.sleep(0.2)


@dataclass(frozen=True)
class Answer:
    status: int
    text: str
    seconds: float
    l0: int
    lmcache: int
    prompt_tokens: int
    logprobs: tuple[float, ...] = ()
    """Of the chosen tokens, where `logprobs=1` was asked for: they move long before the text does."""


class Stack:
    """One project made from a copy of the checkout."""

    def __init__(self, root: Path, project: str, **knobs: str) -> None:
        self.root, self.project = root, project
        self._runs: settings.Settings | None = None
        self._back = 0.0
        copy_checkout(root)
        shutil.copy(Path(__file__).with_name("hook.yaml"), root / "compose" / "hook.yaml")
        port, metrics_port = self._ports() or free_ports(2)
        self.url, self.metrics_url = f"http://127.0.0.1:{port}", f"http://127.0.0.1:{metrics_port}"
        self.set(
            COMPOSE_PROJECT_NAME=project, KV_PORT=str(port), KV_METRICS_PORT=str(metrics_port), **knobs
        )  # fmt: skip
        self.client = httpx.Client(timeout=240, trust_env=False)

    # -- settings and verbs --

    def _ports(self) -> list[int]:
        """Ports of a stack that was kept from an earlier session, else none."""
        path = self.root / ".env"
        lines = path.read_text().splitlines() if path.exists() else []
        found = dict(line.split("=", 1) for line in lines if line.startswith(("KV_PORT=", "KV_METRICS_PORT=")))
        return [int(found["KV_PORT"]), int(found["KV_METRICS_PORT"])] if found else []

    def set(self, **knobs: str) -> None:
        """Edit .env as a user would."""
        path = self.root / ".env"
        lines = (path if path.exists() else self.root / ".env.example").read_text().splitlines()
        for key, value in knobs.items():
            index = next(i for i, line in enumerate(lines) if line.startswith(f"{key}="))
            lines[index] = f"{key}={value}"
        path.write_text("\n".join(lines) + "\n")

    def cli(self, *args: str, timeout: float = 900, **env: str) -> CompletedProcess[str]:
        full = {k: v for k, v in os.environ.items() if not k.startswith(("COMPOSE_", "KV_"))}
        full |= {"KVSTRATA_ROOT": str(self.root), "COLUMNS": "160", **env}
        if args[0] == "up":
            self._back = time.time()
        done = subprocess.run(
            [sys.executable, "-m", "kvstrata.cli", *args], env=full, capture_output=True, text=True, timeout=timeout
        )
        if args[0] in ("up", "down", "rollback"):
            self._runs = self._set_now() if args[0] == "up" and done.returncode == 0 else None
        return done

    def ok(self, *args: str, **env: str) -> str:
        done = self.cli(*args, **env)
        assert done.returncode == 0, f"kvstrata {' '.join(args)}: {done.returncode}\n{done.stdout}\n{done.stderr}"
        return done.stdout

    def _set_now(self) -> settings.Settings:
        """What the user's part of .env says."""
        return replace(settings.load(self.root, environ={}), managed={})

    def settle(self) -> None:
        """Bring up what .env says, unless that is what the last `up` brought up."""
        if self._runs != self._set_now():
            self.ok("up", "--no-proof")
            self.wait_ready()

    def docker(self, *args: str, check: bool = True) -> str:
        return subprocess.run(["docker", *args], capture_output=True, text=True, check=check).stdout

    def compose(self, *args: str) -> str:
        return subprocess.run(
            ["docker", "compose", *args], cwd=self.root, capture_output=True, text=True, check=True
        ).stdout

    def containers(self) -> dict[str, dict[str, Any]]:
        """`docker inspect` of every running container of the project, by service."""
        ids = self.docker("ps", "-q", "--filter", f"label=com.docker.compose.project={self.project}").split()
        found = json.loads(self.docker("inspect", *ids)) if ids else []
        return {c["Config"]["Labels"]["com.docker.compose.service"]: c for c in found}

    def kill(self, *services: str) -> None:
        for service in services:
            self.docker("kill", "-s", "KILL", self.containers()[service]["Id"])

    def start(self, *services: str) -> None:
        self._back = time.time()
        self.compose("up", "-d", "--no-deps", *services)

    def restart(self, service: str) -> None:
        """As a user would, with a short grace."""
        self._back = time.time()
        self.compose("restart", "-t", "5", service)

    def strike(self, service: str, name: str) -> None:
        """KILL, STOP or CONT. The signal of `docker kill` goes to the container's init alone; its children stop too."""
        container = self.containers()[service]["Id"]
        if name == "KILL":
            self.docker("kill", "-s", "KILL", container)
            return
        for pid in self.docker("top", container, "-eo", "pid").split()[1:]:
            os.kill(int(pid), signal.SIGSTOP if name == "STOP" else signal.SIGCONT)

    def revive(self, name: str) -> None:
        """Undo `strike("lmcache", name)`, and wait until the cache is used again."""
        if name == "KILL":
            self.start("lmcache")
        else:
            self._back = time.time()
            self.strike("lmcache", "CONT")
        self.wait_used()

    def transfer(self) -> dict[str, Any]:
        """How KV moves now, as `status` sees it in the engine's memory map and in lmcache's log."""
        return dict(json.loads(self.cli("status", "--json").stdout)["transfer"])

    def running(self) -> int:
        """Requests in vLLM's batch."""
        text = self.client.get(self.url + "/metrics").text
        return int(
            sum(float(r.rsplit(" ", 1)[1]) for r in text.splitlines() if r.startswith("vllm:num_requests_running"))
        )

    # -- requests --

    def model(self) -> str:
        return str(self.client.get(self.url + "/v1/models").json()["data"][0]["id"])

    def healthy(self) -> bool:
        return self.client.get(self.url + "/health").status_code == 200

    def guards(self) -> list[dict[str, Any]]:
        """The guard's reports, the worker's first. Docker and not compose, which reads the whole project each time."""
        files = (f"/run/kvstrata/guard-{role}.json" for role in ("worker", "scheduler"))
        return [json.loads(line) for line in self.docker("exec", f"{self.project}-vllm-1", "cat", *files).splitlines()]

    def cache_healthy(self) -> bool:
        return all(report["healthy"] for report in self.guards())

    def used(self) -> bool:
        """The cache server knows a vLLM, and both guards have heard from it since it was started or let go on: until a
        heartbeat misses it, a guard calls a dead one healthy."""
        status = self.client.get(self.metrics_url + "/status")
        if status.status_code != 200 or not status.json()["worker_liveness"]["tracked_instances"]:
            return False
        return all(report["healthy"] and report["beat"] > self._back for report in self.guards())

    def wait_used(self) -> None:
        wait_until(self.used, 120, "the cache server is used")

    def wait_ready(self, seconds: float = 240) -> None:
        wait_until(self.healthy, seconds, "vLLM healthy")
        self.wait_used()

    def drop_l0(self) -> None:
        """vLLM's own prefix cache forgets everything (dev route, on by hook.yaml)."""
        wait_until(lambda: self.client.post(self.url + "/reset_prefix_cache").status_code == 200, 20, "L0 dropped")

    def tokens(self, text: str) -> list[int]:
        reply = self.client.post(self.url + "/tokenize", json={"model": self.model(), "prompt": text})
        return [int(token) for token in reply.json()["tokens"]]

    def ask(self, prompt: str | list[int], tokens: int = 16, **fields: Any) -> Answer:
        body = {
            "model": fields.pop("model", None) or self.model(), "prompt": prompt, "max_tokens": tokens,
            "temperature": 0, "seed": 1, "kv_transfer_params": {"cached_token_stats": 1}, **fields,
        }  # fmt: skip
        started = time.monotonic()
        response = self.client.post(self.url + "/v1/completions", json=body)
        seconds = time.monotonic() - started
        if response.status_code != 200:
            return Answer(response.status_code, response.text, seconds, 0, 0, 0)
        data = response.json()
        stats = (data.get("kv_transfer_params") or {}).get("cached_token_stats") or {}
        return Answer(
            200, data["choices"][0]["text"], seconds, stats.get("num_vllm_cached_tokens", 0),
            stats.get("num_lmcache_cached_tokens", 0), data["usage"]["prompt_tokens"],
            tuple((data["choices"][0].get("logprobs") or {}).get("token_logprobs", ())),
        )  # fmt: skip

    def ask_all(self, prompts: list[str], tokens: int = 16, workers: int = 16) -> list[Answer]:
        with ThreadPoolExecutor(workers) as pool:
            return list(pool.map(lambda p: self.ask(p, tokens), prompts))

    def store(self, prompt: str | list[int], **fields: Any) -> Answer:
        """Ask once and wait until the blocks are in LMCache."""
        before = set(self.l2_files())
        answer = self.ask(prompt, **fields)
        assert answer.status == 200, answer.text
        if not answer.l0 and answer.lmcache < chunks(answer.prompt_tokens):
            # A store begins after the answer; how long after, the machine says. Where none comes, the test says.
            with contextlib.suppress(AssertionError):
                wait_until(lambda: set(self.l2_files()) - before, 10, "the store has begun")
        self.wait_stored()
        return answer

    def metric(self, name: str) -> float:
        text = self.client.get(self.metrics_url + "/metrics").text
        rows = [line for line in text.splitlines() if line.startswith((name + "{", name + " "))]
        return sum(float(row.rsplit(" ", 1)[1]) for row in rows)

    def blocks(self) -> list[Path]:
        """The store's blocks on disk, the oldest use first."""
        found = settings.load(self.root, environ={}).store_root.glob("*/*/*/*.*.*")
        return sorted(found, key=lambda path: path.stat().st_mtime_ns)

    def l2_files(self) -> list[Path]:
        return sorted(p for p in settings.load(self.root, environ={}).cache_dir.rglob("*") if p.is_file())

    def wait_stored(self) -> None:
        """L2's file list stays the same for a while (stores are asynchronous)."""
        seen: list[Any] = [None, time.monotonic()]

        def still() -> bool:
            now = [(p.name, p.stat().st_size) for p in self.l2_files()]
            if now != seen[0]:
                seen[:] = [now, time.monotonic()]
            return time.monotonic() - seen[1] > 1.0

        wait_until(still, 60, "stores done")

    def close(self) -> None:
        self.client.close()
        self.cli("down")
        names = self.docker("volume", "ls", "-q", "--filter", f"label=com.docker.compose.project={self.project}")
        if names.split():
            self.docker("volume", "rm", "-f", *names.split(), check=False)


def prompt(name: str, words: int = 500) -> str:
    """A prompt of about 1.2 tokens a word that no other name, and no other test run, shares a first block with.

    Of two chunks where no number of words is given: what most tests show needs no more, and a CPU computes 450 tokens
    a second.
    """
    seed = hashlib.sha256(f"{_RUN}{name}".encode()).hexdigest()
    text = handbook().split()
    start = random.Random(seed).randrange(0, max(1, len(text) - 50))
    body = (text[start:] + text * 3)[:words]
    return f"Note {seed[:24]}. " + " ".join(body) + "\nIn short:"


def chunks(tokens: int) -> int:
    """Tokens of a prompt that LMCache can hold."""
    return tokens // CHUNK * CHUNK
