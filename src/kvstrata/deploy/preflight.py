"""Everything that can be known to fail before anything is started, all of it at once.

Each finding says what was found, what is needed and how to fix it. Errors are raised together as one KvError (exit code
2); warnings are only said. Nothing here changes anything, apart from one temporary file in each folder that must be
writable.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Collection, Iterable

from kvstrata.deploy import lock, model_files
from kvstrata.deploy.checks_disk import disk_findings, folder_findings
from kvstrata.deploy.checks_net import port_findings, proxy_findings
from kvstrata.deploy.errors import KvError
from kvstrata.deploy.finding import Finding
from kvstrata.deploy.host import GIB, Host
from kvstrata.deploy.memory import RESERVE
from kvstrata.deploy.model import ModelInfo
from kvstrata.deploy.plan import Plan
from kvstrata.deploy.settings import Settings
from kvstrata.deploy.shell import run as run_command

__all__ = ["Finding", "check_all", "early", "knobs", "run"]

Say = Callable[[str], None]
#: Minimum for anything at all: vLLM and lmcache on their own, and the smallest KV space and L1.
_LEAST_RAM = 10 * GIB


def early(settings: Settings, model: ModelInfo, ours: Collection[int], say: Say) -> list[Finding]:
    """What can be said before images and a demo model are there: ports, folders, disk, proxies, engine, least memory.

    `ours`: host ports that this project's own running containers hold. Warnings go to `say`, line by line.
    """
    return _report(check_all(settings, model, None, ours, Host.read()), say)


def run(settings: Settings, model: ModelInfo, plan: Plan, ours: Collection[int], say: Say) -> list[Finding]:
    """All checks, with the plan's sizes and the model's files. Warnings were said by `early` already."""
    findings = check_all(settings, model, plan, ours, Host.read())
    _report([finding for finding in findings if finding.level == "error"], say)
    return findings


def knobs(settings: Settings) -> None:
    """The checks that need nothing but .env, for `plan`. Raises KvError; its warnings are `early`'s to say."""
    _report([finding for finding in _sane(settings) if finding.level == "error"], lambda _text: None)


def check_all(
    settings: Settings, model: ModelInfo, plan: Plan | None, ours: Collection[int], host: Host
) -> list[Finding]:
    """The findings themselves; raises nothing for what it finds."""
    return [
        *port_findings(settings, ours),
        *folder_findings(settings, model),
        *disk_findings(settings, model, _docker_root(), started=bool(ours) or _has_image()),
        *_memory(settings, plan, host, started=bool(ours)),
        *_model(model),
        *_matrix(settings, plan),
        *_sane(settings),
        *proxy_findings(),
    ]


def _report(findings: Iterable[Finding], say: Say) -> list[Finding]:
    listed = list(findings)
    errors = [finding for finding in listed if finding.level == "error"]
    for finding in listed:
        if finding.level == "warning":
            say(f"warning: {finding.found}; {finding.fix}")
    if len(errors) == 1:
        raise KvError(errors[0].found, errors[0].needed, errors[0].fix)
    if errors:
        raise KvError(
            *(
                "\n          ".join(f"({number}) {getattr(error, part)}" for number, error in enumerate(errors, 1))
                for part in ("found", "needed", "fix")
            )
        )
    return listed


def _memory(settings: Settings, plan: Plan | None, host: Host, *, started: bool) -> list[Finding]:
    fix = "lower KV_VLLM_KV_GB or KV_L1_GB in .env, serve a smaller model, or add memory"
    total = host.mem_total / GIB
    if plan is None:
        if host.mem_total >= _LEAST_RAM * 9 // 10:
            return []
        return [Finding("memory", "error", f"{total:.1f} GiB of memory", f"{_LEAST_RAM / GIB:g} GiB", "add memory")]
    used = {"vllm": plan.vllm_mem, "lmcache": plan.lmcache_mem if settings.persist else 0, "engine": plan.engine_mem}
    ours = " + ".join(f"{name} {size / GIB:.1f}" for name, size in used.items() if size or name != "engine")
    need = sum(used.values()) + RESERVE
    parts = f"{ours} + {RESERVE / GIB:g} for the system"
    if need > host.mem_total:
        return [Finding("memory", "error", f"{total:.1f} GiB of memory", f"{need / GIB:.1f} GiB: {parts}", fix)]
    # While our own containers run they hold what this check would ask for.
    if not started and need - RESERVE > host.mem_available:
        return [
            Finding(
                "memory free",
                "error",
                f"{host.mem_available / GIB:.1f} GiB of {total:.1f} GiB memory are free",
                f"{(need - RESERVE) / GIB:.1f} GiB: {ours}",
                f"stop other programs, or {fix}",
            )
        ]
    return []


def _model(model: ModelInfo) -> list[Finding]:
    if model.is_demo and not model.path.exists():
        return []  # made by the next step
    fix = "copy the model again, or set MODEL_DIR"
    if model.is_demo:
        fix = f"rm -r {model.path}; the next `make up` makes it again"
    return [Finding("model", "error", found, needed, fix) for found, needed in model_files.problems(model.path)]


#: plan.family -> family of versions.lock's matrix.
_FAMILY = {
    "dense": "dense",
    "sliding": "sliding-window",
    "hybrid": "mamba-hybrid",
    "compressed": "compressed-kv",
}


def _matrix(settings: Settings, plan: Plan | None) -> list[Finding]:
    """The compatibility matrix of versions.lock, for what is about to run with the cache."""
    if plan is None or not settings.persist:
        return []
    locked = lock.load(settings.root)
    pair = locked.pair_for(settings.device).name
    speculative = any(arg.startswith(("--spec", "-sc")) for arg in settings.vllm_extra_args)
    cell = locked.cell(pair, _FAMILY[plan.family], speculative)
    if cell.status == "supported":
        return []
    what = f"{cell.family} model on {pair}" + (" with speculative decoding" if speculative else "")
    needed = f"a combination that versions.lock supports: {cell.why}" + (f" ({cell.issue})" if cell.issue else "")
    return [Finding("matrix", "error", what, needed, "another model, or KV_PERSIST=0 in .env for plain vLLM")]


def _sane(settings: Settings) -> list[Finding]:
    result = []
    if settings.heartbeat > settings.mq_timeout:
        # A ping waits as long as its interval (lmcache 0.5.3 vllm_multi_process_adapter.py:443).
        result.append(
            Finding(
                "settings", "warning",
                f"KV_HEARTBEAT={settings.heartbeat:g} is longer than KV_MQ_TIMEOUT={settings.mq_timeout:g}",
                "KV_HEARTBEAT <= KV_MQ_TIMEOUT",
                "a dead lmcache is seen by a request before the heartbeat sees it: lower KV_HEARTBEAT in .env",
            )
        )  # fmt: skip
    if settings.ca_bundle is not None and not os.access(settings.ca_bundle, os.R_OK):
        what = "cannot be read" if settings.ca_bundle.exists() else "does not exist"
        result.append(
            Finding(
                "settings", "error", f"KV_CA_BUNDLE={settings.ca_bundle} {what}", "a PEM file that you can read",
                "mend KV_CA_BUNDLE in .env, or leave it blank",
            )
        )  # fmt: skip
    if settings.image_source == "pull" and not settings.registry:
        result.append(
            Finding(
                "settings", "error", "KV_IMAGE_SOURCE=pull and no KV_REGISTRY", "the registry to pull from",
                "set KV_REGISTRY=<host>/<path> in .env, or KV_IMAGE_SOURCE=build",
            )
        )  # fmt: skip
    return result


def _docker_root() -> str | None:
    """Folder where the engine keeps images and containers; None when it is not on this machine or gives no answer."""
    try:
        done = run_command(["docker", "info", "--format", "{{json .DockerRootDir}}"], check=False, timeout=30)
        answer = json.loads(done.stdout) if done.returncode == 0 else None
    except (KvError, ValueError):
        return None
    return answer if isinstance(answer, str) and answer else None


def _has_image() -> bool:
    """An image of ours is there, pulled or built: the space that it takes is taken already."""
    try:
        done = run_command(["docker", "image", "ls", "--quiet", "--filter", "reference=*kvstrata/vllm"], check=False)
    except KvError:
        return False
    return done.returncode == 0 and bool(done.stdout.strip())
