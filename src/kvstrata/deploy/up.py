"""`up` and `rollback`: the steps from nothing to a running stack, in order, each one line.

First what only looks (settings, preflight), then what changes the machine. Nothing is started before preflight passes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from kvstrata.deploy import (
    demo_model,
    engine,
    envfile,
    identity,
    images,
    kv_engine,
    layers,
    model,
    observability,
    observability_images,
    observability_up,
    plan,
    preflight,
    settings,
)
from kvstrata.deploy.compose import Compose
from kvstrata.deploy.device import detect
from kvstrata.deploy.errors import KvError
from kvstrata.deploy.images import ImageSet
from kvstrata.deploy.model import ModelInfo
from kvstrata.deploy.plan import Plan
from kvstrata.deploy.settings import Settings
from kvstrata.deploy.steps import Steps

__all__ = ["make_plan", "prepare", "rollback", "up"]

_PROVED = "proved.json"


def prepare(root: Path, steps: Steps, *, plain: bool = False) -> Settings:
    """Engine, .env, secrets and device: what every verb that touches docker needs. Returns the settings after it.

    plain: with KV_PERSIST=0, whatever .env says. A cache folder that is broken must not keep anyone from going back.
    """

    def load() -> Settings:
        found = settings.load(root)
        return replace(found, persist=False) if plain else found

    current = load()  # a bad .env is refused before anything is installed
    envfile.check_data(current)
    kv_engine.check_ca(current)
    found = engine.ensure(current.install_engine, steps)
    with steps.step("Settings") as step:
        created = envfile.ensure(root, rootless=engine.rootless())
        filled = []
        if not settings.load(root).device:
            device = detect()
            filled = envfile.set_blank(root, {"KV_DEVICE": device.name})
            step.say(f"device: {device.name} ({device.why})")
        current = load()
        lost = envfile.lost_salt_key(current)
        secrets = envfile.ensure_secrets(current)
        what = [".env created"] if created else []
        what += [f"{key} decided" for key in filled] + [f"secret {path.name} made" for path in secrets]
        step.done(f"{', '.join(what) or 'unchanged'}; device {current.device}")
    if lost:
        steps.console.print(f"   WARNING: {lost}", style="bold red", markup=False, highlight=False, soft_wrap=True)
    for warning in found.warnings:
        steps.console.print(f"   warning: {warning}", markup=False, highlight=False, soft_wrap=True)
    return current


def make_plan(root: Path) -> Plan:
    """The plan for the current settings, without changing anything (`kvstrata plan`).

    Raises KvError for settings that `up` would refuse; ports, disks and memory are for `up` to look at.
    """
    current = settings.load(root)
    current = replace(current, device=current.device or detect().name)
    envfile.check_data(current)
    kv_engine.check_ca(current)
    layers.resolve(current)
    kv_engine.check(current)
    preflight.knobs(current)
    chosen = model.resolve(current, root)
    return plan.make(current, chosen, current.device, plan.Host.read())


def up(root: Path, steps: Steps, *, proof: bool = True) -> int:
    """Bring the stack up and prove it; returns the exit code. See the module and README for the steps."""
    current = prepare(root, steps)
    ready = _ready(root, current, steps)
    moved = _moved(current)
    watch = observability_up.begin(replace(current, image_source=ready[2].source), steps)
    _write_managed(root, watch.settings, *ready, watch.images)
    _compose_up(root, steps, watch)
    if moved:
        steps.console.print(f"   {moved}", markup=False, highlight=False, soft_wrap=True)
    code = _prove(root, steps) if current.persist and proof else 0
    code = max(code, watch.finish(root))
    _closing_lines(steps, watch.settings, ready[0])
    return code


def rollback(root: Path, steps: Steps) -> int:
    """Plain vLLM with its own arguments: the same files less the cache's. Nothing on disk is touched."""
    current = prepare(root, steps, plain=True)
    _write_managed(root, current, *_ready(root, current, steps), observability_images.NONE)
    _compose_up(root, steps)
    steps.console.print("\nplain vLLM runs; the cache on disk is untouched. `make up` uses it again.", highlight=False)
    return 0


def _ready(root: Path, current: Settings, steps: Steps) -> tuple[ModelInfo, Plan, ImageSet, str]:
    """Everything that has to be there before a container starts: images, model, plan, the model's identity."""
    layers.resolve(current)  # an unknown layer is refused before anything is built
    kv_engine.check(current)
    chosen = model.resolve(current, root, must_exist=False)
    if not chosen.is_demo:
        chosen = model.resolve(current, root)
    compose = Compose(root, current)
    if other := compose.other_checkout():
        raise KvError(
            f"project {current.project!r} already runs from {other}",
            "one project name a checkout",
            f"COMPOSE_PROJECT_NAME=<another name> in {root / '.env'}, with other ports; or make down in {other}",
        )
    ours = compose.running_ports()
    with steps.step("Preflight") as step:
        preflight.early(current, chosen, ours, step.say)
        step.done("ports, disk, memory and settings are as needed")
    image_set = images.ensure(current, steps)
    if chosen.is_demo:
        demo_model.ensure(current, chosen, image_set.vllm, steps)
        chosen = model.resolve(current, root)
    with steps.step("Model") as step:
        cache = current.state_dir / "identity.json"
        found = identity.compute(chosen.path, cache, lambda done, total: step.note(f"{done * 100 // max(total, 1)} %"))
        made = plan.make(current, chosen, current.device, plan.Host.read())
        preflight.run(current, chosen, made, ours, step.say)
        step.done(f"{chosen.name}, identity {found.digest[:12]}, {made.summary()}")
    return chosen, made, image_set, found.digest


def _write_managed(
    root: Path,
    current: Settings,
    chosen: ModelInfo,
    made: Plan,
    image_set: ImageSet,
    digest: str,
    watching: Mapping[str, str],
) -> bool:
    files = layers.resolve(current)
    values: Mapping[str, str] = {
        "COMPOSE_FILE": layers.compose_file(root, files),
        "KV_PULL_POLICY": image_set.pull_policy,
        "KV_IMAGE_VLLM": image_set.vllm,
        "KV_IMAGE_LMCACHE": image_set.lmcache,
        "KV_IMAGE_PROXY": image_set.proxy,
        "KV_IMAGE_ENGINE": image_set.engine,
        "KV_MODEL_NAME": chosen.name,
        "KV_MODEL_PATH": str(chosen.path),
        "KV_IDENTITY": digest,
        **made.env(),
        **kv_engine.managed(current),
        "KV_CACHE_PATH": str(current.cache_dir),
        "KV_CLASSES_PATH": str(current.store_classes),
        "KV_SECRETS_PATH": str(current.secrets_dir),
        "KV_STATE_PATH": str(current.state_dir),
        **observability.managed(current),
        **watching,
    }
    return envfile.write_managed(root, values)


def _compose_up(root: Path, steps: Steps, watch: observability_up.Observability | None = None) -> None:
    current = settings.load(root)
    compose = Compose(root, current)
    with steps.step("Start") as step:
        step.say(f"$ {compose.command_line(current.wait_timeout)}")
        compose.up(current.wait_timeout, watch.core(compose) if watch else None, on_note=step.note)
        step.done(", ".join(f"{s.service} {s.health or s.state}" for s in compose.ps()))


def _prove(root: Path, steps: Steps) -> int:
    """The whole proof once for a data folder and place of blocks, `--live` from then on: an `up` kills no server."""
    from kvstrata.proof import verify

    current = settings.load(root)
    stamp = current.state_dir / _PROVED
    storage = kv_engine.storage(current.layers)
    proved = _proved(stamp)
    live = storage in proved
    with steps.step("Proof, live" if live else "Proof") as step:
        report = verify.run(current, root, live=live, before=verify.progress(step.note, live=live))
        step.done("passed" if report.passed else "FAILED")
    report.render(steps.console)
    if report.passed and not live:
        stamp.write_text(json.dumps({"first_proof": report.started_at, "storage": [*proved, storage]}) + "\n")
    return 0 if report.passed else 1


def _proved(stamp: Path) -> list[str]:
    """Storage layers of which the whole proof has passed. A file of before there were several: all that there was."""
    try:
        return list(json.loads(stamp.read_text(encoding="utf-8")).get("storage", ["", "nvme"]))
    except (OSError, ValueError, AttributeError):
        return []


def _moved(current: Settings) -> str:
    """What to say when blocks are kept elsewhere than by the `up` before: hits begin at nothing there."""
    names = tuple(Path(name).stem for name in current.managed.get("COMPOSE_FILE", "").split(":"))
    before, now = kv_engine.storage(names), kv_engine.storage(current.layers)
    if not before or before == now or not current.persist:
        return ""
    return (
        f"blocks are kept in {kv_engine.STORAGE.get(now, 'RAM only')} now, no longer in {kv_engine.STORAGE[before]}: "
        "zero hits from L2 at first. What is there stays there, and is used again after a switch back"
    )


def _closing_lines(steps: Steps, current: Settings, chosen: ModelInfo) -> None:
    url = f"http://127.0.0.1:{current.port}/v1"
    body = json.dumps(
        {"model": chosen.name, "messages": [{"role": "user", "content": "What is the capital of France?"}]}
    )
    lines = (
        f"\nask:   curl -s {url}/chat/completions -H 'Content-Type: application/json' -d '{body}'",
        "look:  make status, make logs" + (f"; Prometheus: {current.prometheus_url}" if current.observes else ""),
        "undo:  make rollback (plain vLLM), make down (stop; data stays)",
    )
    for line in lines:
        steps.console.print(line, markup=False, highlight=False, soft_wrap=True)
