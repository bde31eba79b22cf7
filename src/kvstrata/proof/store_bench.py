"""`kvstrata bench store`: the block store against raw reads and LMCache's own adapters, in one run.

Where lmcache can be imported it runs right here; else in the stack's own image, which has it, with this checkout's
source mounted. It starts no server and touches no running one, but it needs the machine for itself to mean anything.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console

from kvstrata.deploy import demo_model, images, model, turn, up
from kvstrata.deploy.errors import CommandFailed, KvError
from kvstrata.deploy.host import existing_parent
from kvstrata.deploy.settings import Settings
from kvstrata.deploy.shell import run as run_command
from kvstrata.deploy.shell import run_lines
from kvstrata.deploy.steps import Steps
from kvstrata.proof import store_bench_scan, store_bench_show
from kvstrata.proof.store_bench_candidates import Options

__all__ = ["figures", "options", "run"]

_GIB = 1 << 30
_MODULE = "kvstrata.proof.store_bench_run"
#: Limit of the container that asks the page-cache question: less than what is written there.
_PAGES_MEMORY = 2 * _GIB

Say = Callable[[str], None]
Runner = Callable[[Options, Path, int], dict[str, Any]]
"""(options, folder, memory limit in bytes or 0) -> figures."""


def run(
    settings: Settings, root: Path, *, quick: bool, folder: Path | None, json_file: Path | None, markdown: Path | None,
    plot: Path | None, seed: int, console: Console,
) -> dict[str, Any]:  # fmt: skip
    """Measure, show, write. Raises KvError where there is no room, or no image to run in."""
    settings, image = _stack(settings, root)
    rivals = None if quick or not image else _rivals(settings, console)
    place = folder or existing_parent(settings.cache_dir)
    if not os.access(place, os.W_OK):
        raise KvError(f"{place} cannot be written", "a folder on the disk of the cache", "--dir FOLDER")
    work = Path(tempfile.mkdtemp(prefix=".kvstrata-bench-", dir=place))
    try:
        wanted = options(settings, root, work, quick=quick, seed=seed)
        found = figures(_runner(image, root, rivals, console), work, wanted, quick, console)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    store_bench_show.render(found, console)
    if json_file is not None:
        json_file.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    if markdown is not None:
        markdown.write_text(store_bench_show.markdown(found), encoding="utf-8")
    if plot is not None and not store_bench_show.plot(found, plot):
        console.print("no plot: matplotlib is not installed", markup=False)
    return found


def options(settings: Settings, root: Path, work: Path, *, quick: bool, seed: int) -> Options:
    """What is measured: everything, or with `quick` a little of everything."""
    stat = os.statvfs(work)
    free = stat.f_bavail * stat.f_frsize
    blocks = {1: 4} if quick else {3: 64, 12: 32, 36: 16}
    needed = 4 * max(size * count for size, count in blocks.items()) << 20
    if free < needed:
        raise KvError(f"{free / _GIB:.1f} GiB free at {work.parent}", f"{needed / _GIB:.1f} GiB", "--dir FOLDER")
    try:
        path = model.resolve(settings, root).path
    except KvError:
        path = None
    return Options(
        folder=str(work), blocks=blocks, threads=(1, 2) if quick else (1, 2, 4, 8, 16), rounds=1 if quick else 5,
        seed=seed, allow_fs=",".join(settings.cache_allow_fs), model=str(path or ""),
        chunk=settings.chunk_size, kv_chunks=1 if quick else 8, pages=0 if quick else 4,
    )  # fmt: skip


def figures(inside: Runner, work: Path, wanted: Options, quick: bool, console: Console) -> dict[str, Any]:
    """The JSON of the whole run. `work` is on the disk that is measured."""
    found = inside(replace(wanted, pages=0), work, 0)
    if wanted.pages:
        asked = inside(replace(wanted, phases=(), blocks={1: 1}), work, _PAGES_MEMORY)
        found["page_cache"] = asked["page_cache"]
    blocks = 2000 if quick else 400_000
    _say(console, f"start with {blocks:,} blocks")
    found["scan"] = store_bench_scan.measure(work / "scan", blocks, wanted.allow_fs, repeats=1 if quick else 3)
    return found


def _say(console: Console, text: str) -> None:
    console.print(text, markup=False, highlight=False)


def _runner(image: str, root: Path, rivals: Path | None, console: Console) -> Runner:
    """In `image`, or right here where it is ""."""

    def say(text: str) -> None:
        _say(console, text)

    if not image:
        return lambda wanted, work, memory: _here(wanted, work, say)
    return lambda wanted, work, memory: _in_image(image, root, rivals, wanted, work, memory, say)


def _rivals(settings: Settings, console: Console) -> Path | None:
    """Folder of the library that LMCache's nixl adapter needs and no image of ours has; fetched once, by hash."""
    pins = settings.root / "requirements" / "bench.txt"
    target = settings.state_dir / f"bench-{hashlib.sha256(pins.read_bytes()).hexdigest()[:12]}"
    if target.exists():
        return target
    _say(console, "fetching nixl (70 MB), to compare with")
    with tempfile.TemporaryDirectory(prefix=".bench-", dir=settings.state_dir) as name:
        argv = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"]
        argv += ["--only-binary", ":all:", "--require-hashes", "--requirement", str(pins), "--target", f"{name}/site"]
        try:
            run_command(argv, timeout=1800)
        except CommandFailed as failed:
            _say(console, f"it did not come, so its rows stay empty: {failed.output.strip()[-200:]}")
            return None
        Path(name, "site").rename(target)
    return target


def _stack(settings: Settings, root: Path) -> tuple[Settings, str]:
    """Settings, and the image to run in, with the model made; "" where lmcache is right here, or there is no docker.

    On a checkout that never saw `up`, its first steps: .env, device, images, demo model.
    """
    if importlib.util.find_spec("lmcache") is not None or shutil.which("docker") is None:
        return settings, ""
    steps = Steps()
    with turn.take(root, "bench store"):
        current = up.prepare(root, steps)
        found = images.ensure(current, steps)
        chosen = model.resolve(current, root, must_exist=False)
        if chosen.is_demo:
            demo_model.ensure(current, chosen, found.vllm, steps)
    return current, found.lmcache


def _here(wanted: Options, work: Path, say: Say) -> dict[str, Any]:
    task, answer = work / "options.json", work / "figures.json"
    wanted.write(task)
    run_lines(
        [sys.executable, "-m", _MODULE, str(task), str(answer)], say,
        env={"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
    )  # fmt: skip
    return _answer(answer)


def _in_image(
    image: str, root: Path, rivals: Path | None, wanted: Options, work: Path, memory: int, say: Say
) -> dict[str, Any]:
    """The same in a container that sees the work folder, the source and the model, and no network."""
    inside = replace(wanted, folder="/bench", model="/model" if wanted.model else "")
    task, answer = work / "options.json", work / "figures.json"
    inside.write(task)
    owner = work.stat()
    pool = 3 * max(size * count for size, count in wanted.blocks.items()) << 20
    mounts = [f"{work}:/bench", f"{root / 'src'}:/src:ro", *([f"{wanted.model}:/model:ro"] if wanted.model else [])]
    mounts += [f"{rivals}:/rivals:ro"] if rivals else []
    argv = [
        "docker", "run", "--rm", "--network", "none", "--user", f"{owner.st_uid}:{owner.st_gid}", "--read-only",
        "--tmpfs", "/tmp",  # noqa: S108 - in the container
        "--shm-size", str(2 * pool + _GIB), *(["--memory", str(memory)] if memory else []),
        *(word for mount in mounts for word in ("-v", mount)),
        "-e", "PYTHONPATH=/src:/rivals", "-e", "PYTHONDONTWRITEBYTECODE=1", "-e", "HOME=/tmp", "-e", "HF_HUB_OFFLINE=1",
        "-e", "LMCACHE_TRACK_USAGE=false", "-e", "LMCACHE_LOG_LEVEL=ERROR",
        "--entrypoint", "python3", image, "-m", _MODULE, "/bench/options.json", "/bench/figures.json",
    ]  # fmt: skip
    run_lines(argv, say)
    return _answer(answer)


def _answer(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return found
