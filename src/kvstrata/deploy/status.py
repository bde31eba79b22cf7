"""What runs, how KV moves, how full the tiers are, and the last proof: `kvstrata status`.

Everything is read from the running processes and files; a configured value is shown only next to what was seen.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from kvstrata.deploy import kv_engine, layers, turn
from kvstrata.deploy.compose import Compose, ServiceState
from kvstrata.deploy.errors import KvError
from kvstrata.deploy.observability_status import Watched, look
from kvstrata.deploy.settings import Settings
from kvstrata.deploy.status_disk import folder_bytes, image_bytes, log_bytes
from kvstrata.deploy.status_probe import Transfer, look_inside, transfer_of
from kvstrata.deploy.status_tiers import Tiers, l2_line, size, tiers_of
from kvstrata.proof import docker_control
from kvstrata.proof.checks import GuardFacts, guard_problems, read_guard
from kvstrata.proof.client import LmcacheClient, VllmClient
from kvstrata.proof.prom import Samples

__all__ = ["Status", "Tiers", "collect", "last_proof", "render", "tiers_of"]

_LOG_LINES = 2000


@dataclass(frozen=True)
class Status:
    """One look at the stack. `problems` are what makes `ok` false, as found / needed sentences."""

    persist: bool
    plain: bool
    """Plain vLLM was started last: KV_PERSIST=0, or a rollback, which changes no knob."""
    busy: str
    """The command that is changing the stack now, or ""."""
    device: str
    layers: tuple[str, ...]
    pair: str
    model: str
    services: tuple[ServiceState, ...]
    guard: GuardFacts
    transfer: Transfer
    watched: Watched
    """Targets and alerts of the observability layers; none without them."""
    tiers: Tiers
    disk: Mapping[str, int | None]
    proof: Mapping[str, Any] | None
    problems: tuple[str, ...]

    @property
    def ok(self) -> bool:
        return not self.problems

    def to_json(self) -> dict[str, Any]:
        return {
            "ok": self.ok,
            "persist": self.persist,
            "plain": self.plain,
            "busy": self.busy,
            "device": self.device,
            "layers": list(self.layers),
            "pair": self.pair,
            "model": self.model,
            "services": [asdict(service) for service in self.services],
            "guard": {
                "loaded": bool(self.guard.roles),
                "class": self.guard.value("class"),
                "roles": dict(self.guard.roles),
            },
            "transfer": self.transfer.to_json(),
            "observability": self.watched.to_json(),
            "tiers": asdict(self.tiers),
            "disk": dict(self.disk),
            "last_proof": self.proof,
            "problems": list(self.problems),
        }


class _Stack:
    """Compose's `exec` as the probes want it: never raises for a container that is not there."""

    lmcache_http = "unix:/run/lmcache-http/http.sock"

    def __init__(self, compose: Compose) -> None:
        self._compose = compose

    def kill(self, services: Sequence[str]) -> None:
        raise NotImplementedError("status kills nothing")

    start = kill

    def exec(self, service: str, argv: Sequence[str]) -> tuple[int, str]:
        try:
            done = self._compose.exec(service, argv, check=False, timeout=20)
        except KvError as error:
            return 1, error.found
        return done.returncode, done.stdout


def collect(settings: Settings, root: Path) -> Status:
    """Look at the stack of `settings`. A part that does not answer is a problem in the result, not an exception.

    Raises KvError when docker itself does not answer.
    """
    compose = Compose(root, settings)
    services = tuple(compose.ps()) if settings.managed.get("COMPOSE_FILE") else ()
    running = {service.service for service in services if service.state == "running"}
    problems = [
        f"{s.service}: found: {s.state}{f', {s.health}' if s.health else ''}; needed: running and healthy{_hint(s)}"
        for s in services
        if not s.ok
    ]
    if not services:
        problems.append("found: no container of this stack; needed: a running stack (make up)")
    stack = _Stack(compose)
    server, lm_samples = _lmcache(settings) if "lmcache" in running else (None, Samples(()))
    version, v_samples = _vllm(settings) if "vllm" in running else ("", Samples(()))
    guard, transfer = GuardFacts({}), Transfer("none", "no lmcache runs")
    starting = [s.service for s in services if s.health == "starting"]
    if not layers.runs_plain(settings) and "vllm" in running:
        guard = read_guard(stack)
        seen = [look_inside(stack, name) if name in running else None for name in ("vllm", "lmcache")]
        log = compose.logs("lmcache", tail=_LOG_LINES) if "lmcache" in running else ""
        transfer = transfer_of(seen[0], seen[1], server, log)
        # Who is starting has not registered yet: that is no fault, and `starting` is among the problems already.
        if not {"vllm", "lmcache"} & set(starting):
            identity = settings.managed.get("KV_IDENTITY", "")
            problems += guard_problems(guard, server or {}, settings.chunk_size, identity)
            problems += _transfer_problems(settings, transfer)
        if "nvidia-lmcache" in settings.managed.get("COMPOSE_FILE", "") and seen[0] and seen[1]:
            problems += _namespace_problems(seen[0].namespaces, seen[1].namespaces)
    cache = folder_bytes(settings.l2_dir)
    path = kv_engine.storage(_layers(settings)).replace("nvme", "")
    served = "lmcache" in running and "lmcache" not in starting
    engine, engine_problems = _engine(settings, "engine" in running, path == "path-b" and served)
    problems += engine_problems
    tiers = tiers_of(server, lm_samples, v_samples, cache, path, engine)
    if tiers.l2_down:
        problems.append(f"L2: found: {_address(settings)} does not answer lmcache; needed: an engine that serves")
    if tiers.l2_suspect:
        problems.append(f"L2: found: the disk of {settings.cache_dir} does not answer; needed: reads that end (dmesg)")
    if tiers.l2_failing and not tiers.l2_suspect:
        problems.append(
            f"L2: found: the last store to {settings.cache_dir} failed ({tiers.l2_failing}); needed: a disk that takes "
            "blocks (docs/runbooks/l2-stores-fail.md)"
        )
    watched = look(settings)
    problems += watched.problems
    return Status(
        persist=settings.persist,
        plain=layers.runs_plain(settings),
        busy=turn.holder(root),
        device=settings.device,
        layers=_layers(settings),
        pair=guard.pair or (f"vllm {version}" if version else ""),
        model=settings.managed.get("KV_MODEL_NAME", ""),
        services=services,
        guard=guard,
        transfer=transfer,
        watched=watched,
        tiers=tiers,
        disk={
            "logs": log_bytes(service.container_id for service in services),
            "images": image_bytes(service.image for service in services),
            "cache": cache,
        },
        proof=last_proof(settings.reports_dir),
        problems=tuple(problems),
    )


def last_proof(reports: Path) -> dict[str, Any] | None:
    """Verdict of the newest report that `verify` wrote (data/reports/verify-*.json); its age is that of its end."""
    try:
        newest = max(reports.glob("verify-*.json"), key=lambda path: path.stat().st_mtime)
        report = json.loads(newest.read_text(encoding="utf-8"))
        age = time.time() - newest.stat().st_mtime
    except (OSError, ValueError):
        return None
    keys = ("passed", "worth_it", "live", "started_at", "failures")
    ended = datetime.fromtimestamp(time.time() - age, UTC).isoformat(timespec="seconds")
    return {"file": str(newest), "age_s": round(age), "ended_at": ended, **{key: report.get(key) for key in keys}}


def render(state: Status, console: Console) -> None:
    """The same for people: services, then one line a topic, then what is wrong."""
    table = Table()
    for heading in ("service", "state", "ports", "image"):
        table.add_column(heading)
    for service in state.services:
        ports = ", ".join(f"{host}:{published}" for host, published, _ in service.ports)
        shown = service.health or service.state
        table.add_row(service.service, shown, ports, service.image, style=None if service.ok else "red")
    console.print(table)
    for topic, text in _lines(state):
        console.print(f"{topic:<9} {text}", markup=False, soft_wrap=True)
    for problem in state.problems:
        console.print(f"PROBLEM   {problem}", style="red", markup=False, soft_wrap=True)


def _lines(state: Status) -> list[tuple[str, str]]:
    tiers, transfer, proof = state.tiers, state.transfer, state.proof
    moved = transfer.evidence
    if transfer.retrieve_s is not None:
        moved += f"; last retrieve: {transfer.retrieved_tokens} tokens in {transfer.retrieve_s * 1000:.0f} ms"
    blocks = "?" if tiers.l1_objects is None else str(tiers.l1_objects)
    layers = " ".join(state.layers) or "-"
    lines = [
        ("stack", f"{state.pair or 'pair unknown'}, device {state.device or 'undecided'}, layers {layers}"),
        ("model", state.model or "-"),
        ("guard", _guard_words(state)),
        ("transfer", f"{transfer.mode} ({moved})"),
        ("L0", f"hit rate {_percent(tiers.l0_hit_rate)} since vLLM started"),
        ("L1", f"{size(tiers.l1_used)} of {size(tiers.l1_total)}, {blocks} blocks"),
        ("L2", l2_line(tiers)),
        ("lookups", f"hit rate {_percent(tiers.lookup_hit_rate)} since lmcache started (tokens, L1 and L2 together)"),
        ("disk", ", ".join(f"{name} {size(used)}" for name, used in state.disk.items())),
    ]
    if state.plain:
        lines = [line for line in lines if line[0] not in ("transfer", "L1", "L2", "lookups")]
    if state.watched.targets:
        lines.append(("watched", state.watched.line()))
    if state.busy:
        lines.append(("busy", f"{state.busy} is at work: what is seen here may change"))
    if proof is None:
        return [*lines, ("proof", "none yet (make verify)")]
    verdict = "passed" if proof["passed"] else "FAILED"
    worth = ", worth it" if proof["worth_it"] else ", not faster everywhere" if proof["passed"] else ""
    kind = " (live)" if proof["live"] else ""
    began = _when(str(proof["started_at"]))
    return [*lines, ("proof", f"{verdict}{worth}{kind}, {began} to {_when(proof['ended_at'])}: {proof['file']}")]


def _lmcache(settings: Settings) -> tuple[dict[str, Any] | None, Samples]:
    client = LmcacheClient(f"http://127.0.0.1:{settings.metrics_port}")
    try:
        return client.status(), client.samples()
    except (KvError, ValueError):
        return None, Samples(())
    finally:
        client.close()


def _engine(settings: Settings, running: bool, resp: bool) -> tuple[Mapping[str, Any] | None, list[str]]:
    """Statistics of the stack's own KV engine, and what is wrong with it. `resp`: lmcache must be connected by RESP."""
    client = docker_control.kv_engine(settings) if running else None
    if client is None:
        return None, []
    try:
        problems = []
        if resp and (have := client.connections("resp")) < settings.engine_connections:
            problems.append(
                f"L2: found: {have} of {settings.engine_connections} connections of LMCache's RESP client, which never "
                "connects again; needed: all of them (docker compose restart lmcache)"
            )
        return client.stats(), problems
    except KvError as error:
        return None, [f"engine: found: {error.found}; needed: {error.needed}"]
    finally:
        client.close()


def _address(settings: Settings) -> str:
    return settings.managed.get("KV_ENGINE_ADDRESS", "the engine")


def _vllm(settings: Settings) -> tuple[str, Samples]:
    client = VllmClient(f"http://127.0.0.1:{settings.port}", timeout_s=10)
    try:
        return client.facts().version, client.samples()
    except (KvError, ValueError, LookupError):
        return "", Samples(())
    finally:
        client.close()


def _transfer_problems(settings: Settings, transfer: Transfer) -> list[str]:
    """A slow path that nobody chose. On a GPU, handles are the fast path; on a CPU shared memory is."""
    if transfer.mode == "pickle" and settings.transfer_mode != "pickle":
        return [f"transfer: found: pickle over ZMQ ({transfer.evidence}); needed: shared memory (make down; make up)"]
    return []


def _namespace_problems(vllm: Mapping[str, str], lmcache: Mapping[str, str]) -> list[str]:
    """CUDA IPC needs one IPC and one PID namespace; a restarted holder splits them silently."""
    return [
        f"{name} namespace: found: vllm in {vllm[name]}, lmcache in {lmcache[name]}; needed: one (make down; make up)"
        for name in ("ipc", "pid")
        if vllm[name] != lmcache[name]
    ]


def _hint(service: ServiceState) -> str:
    return " (it is starting: wait; make logs shows how far it is)" if service.health == "starting" else ""


def _guard_words(state: Status) -> str:
    """What stands between vLLM and LMCache, and what `make up` would make of it."""
    if state.plain and state.persist:
        return "none: plain vLLM (rollback); `make up` brings the cache back"
    if state.plain:
        return "none: plain vLLM (KV_PERSIST=0); KV_PERSIST=1 in .env and `make up` bring the cache back"
    found = str(state.guard.value("class") or "not loaded")
    return found if state.persist else f"{found} (KV_PERSIST=0 is set: `make up` takes it out)"


def _layers(settings: Settings) -> tuple[str, ...]:
    files = settings.managed.get("COMPOSE_FILE", "").split(":")
    return tuple(Path(name).stem for name in files if name)


def _percent(ratio: float | None) -> str:
    return "unknown" if ratio is None else f"{ratio * 100:.0f} %"


def _when(started: str) -> str:
    try:
        return datetime.fromisoformat(started).astimezone().strftime("%Y-%m-%d %H:%M")
    except ValueError:
        return "at an unknown time"
