"""versions.lock: the tested pairs, what they may serve, and every image by digest."""

from __future__ import annotations

import datetime
import json
import re
import tomllib
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, TypeVar

from kvstrata.deploy.errors import CommandFailed, KvError
from kvstrata.deploy.shell import run

__all__ = [
    "UNRESOLVED",
    "Cell",
    "Image",
    "Lock",
    "Pair",
    "Resolver",
    "fill_in",
    "load",
    "parse",
    "registry_digest",
    "update",
]

SCHEMA = 1
UNRESOLVED = "unresolved"
FAMILIES = ("dense", "sliding-window", "mamba-hybrid", "compressed-kv", "vision-language")
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
_T = TypeVar("_T")
#: Given an image reference, its digest ("sha256:…") or None where no registry answers.
Resolver = Callable[[str], str | None]


@dataclass(frozen=True)
class Pair:
    """A tested (vLLM, LMCache) version pair and the devices that it serves."""

    name: str
    devices: tuple[str, ...]
    vllm_package: str
    vllm: str
    lmcache: str
    torch: str
    python: str
    requirements: tuple[str, ...]

    @property
    def label(self) -> str:
        """As `status` and the guard show it: "vllm 0.28.0 + lmcache 0.5.3"."""
        return f"vllm {self.vllm} + lmcache {self.lmcache}"


@dataclass(frozen=True)
class Cell:
    """One row of the compatibility matrix. `speculative` is "no", "yes" or "any"; `status` supported or refused."""

    pair: str
    family: str
    speculative: str
    status: str
    why: str
    issue: str

    @property
    def supported(self) -> bool:
        return self.status == "supported"


@dataclass(frozen=True)
class Image:
    """An image reference with its digest, or "unresolved", and where the digest was read."""

    name: str
    ref: str
    digest: str
    source: str
    device: str = "any"

    @property
    def resolved(self) -> bool:
        return self.digest != UNRESOLVED

    def pinned(self, registry: str = "") -> str:
        """`[<registry>/]<repository>@<digest>`. Raises KvError when the digest is unresolved."""
        if not self.resolved:
            raise KvError(
                found=f"versions.lock: image {self.name} ({self.device}) has no digest ({self.source})",
                needed="a digest, to pull exactly what was tested",
                fix="make build   # builds it here\n`kvstrata lock update` fills it in where a registry answers",
            )
        prefix = f"{registry.rstrip('/')}/" if registry else ""
        return f"{prefix}{_repository(self.ref)}@{self.digest}"


@dataclass(frozen=True)
class Lock:
    """The parsed file."""

    chunk_size: int
    pairs: tuple[Pair, ...]
    matrix: tuple[Cell, ...]
    images: tuple[Image, ...]
    bases: tuple[Image, ...]
    upstream: tuple[Image, ...]
    packages: dict[str, str]

    def pair_for(self, device: str) -> Pair:
        """The pair that serves `device` (cpu, nvidia, gb10). KvError for another."""
        for pair in self.pairs:
            if device in pair.devices:
                return pair
        known = ", ".join(d for pair in self.pairs for d in pair.devices)
        raise KvError(f"KV_DEVICE={device}", f"one of {known}", "set KV_DEVICE in .env, or leave it blank")

    def cell(self, pair: str, family: str, speculative: bool) -> Cell:
        """The matrix row for this combination; what stands nowhere comes back as refused."""
        wanted = "yes" if speculative else "no"
        for cell in self.matrix:
            if cell.pair == pair and cell.family == family and cell.speculative in (wanted, "any"):
                return cell
        return Cell(pair, family, wanted, "refused", "this combination was never tested", "")

    def image(self, name: str, device: str) -> Image:
        """The published image `name` for `device`. KvError where the file has none."""
        for image in self.images:
            if image.name == name and image.device in (device, "any"):
                return image
        raise KvError(f"versions.lock has no image {name} for {device}", "one [[image]] entry", "restore the file")

    def base(self, name: str) -> Image:
        """The base image `name` (for example python-3.11)."""
        for image in self.bases:
            if image.name == name:
                return image
        raise KvError(f"versions.lock has no base {name}", "one [[base]] entry", "restore the file from git")


def _repository(ref: str) -> str:
    head, _, tail = ref.rpartition("/")
    name = tail.partition("@")[0].partition(":")[0]
    return f"{head}/{name}" if head else name


def load(root: Path) -> Lock:
    """Read `root`/versions.lock. KvError names the file and the entry that is wrong."""
    path = root / "versions.lock"
    if not path.is_file():
        raise KvError(f"no {path}", "versions.lock in the project's root", "restore it: git checkout versions.lock")
    return parse(path.read_text(), str(path))


def parse(text: str, where: str = "versions.lock") -> Lock:
    """Parse and validate the file's text."""
    try:
        data = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise _bad(where, f"not TOML: {error}", "valid TOML") from None
    if data.get("schema") != SCHEMA:
        raise _bad(where, f"schema = {data.get('schema')}", f"schema = {SCHEMA}")
    chunk = data.get("defaults", {}).get("chunk_size")
    if not isinstance(chunk, int) or chunk <= 0:
        raise _bad(where, f"defaults.chunk_size = {chunk}", "a positive number of tokens")
    lock = Lock(
        chunk_size=chunk,
        pairs=_rows(Pair, data, "pair", where),
        matrix=_rows(Cell, data, "matrix", where),
        images=_rows(Image, data, "image", where),
        bases=_rows(Image, data, "base", where),
        upstream=_rows(Image, data, "upstream", where),
        packages={str(k): str(v) for k, v in data.get("packages", {}).items()},
    )
    _validate(lock, where)
    return lock


def _bad(where: str, found: str, needed: str) -> KvError:
    return KvError(f"{where}: {found}", needed, "restore the file from git, or mend the entry")


def _rows(cls: Callable[..., _T], data: dict[str, Any], key: str, where: str) -> tuple[_T, ...]:
    rows: list[_T] = []
    for number, raw in enumerate(data.get(key, []), 1):
        values = {name: tuple(value) if isinstance(value, list) else value for name, value in raw.items()}
        try:
            rows.append(cls(**values))
        except TypeError:
            names = ", ".join(f.name for f in fields(cls))  # type: ignore[arg-type]
            raise _bad(where, f"[[{key}]] number {number} has the keys {', '.join(raw)}", f"the keys {names}") from None
    return tuple(rows)


def _validate(lock: Lock, where: str) -> None:
    names = {pair.name for pair in lock.pairs}
    devices = [device for pair in lock.pairs for device in pair.devices]
    if len(devices) != len(set(devices)):
        raise _bad(where, f"a device that two pairs serve: {devices}", "one pair a device")
    seen: set[tuple[str, str, str]] = set()
    for cell in lock.matrix:
        at = f"[[matrix]] {cell.pair}/{cell.family}/{cell.speculative}"
        if cell.pair not in names:
            raise _bad(where, f"{at}: unknown pair", f"one of {', '.join(sorted(names))}")
        if cell.family not in FAMILIES:
            raise _bad(where, f"{at}: unknown family", f"one of {', '.join(FAMILIES)}")
        if cell.speculative not in ("no", "yes", "any"):
            raise _bad(where, f"{at}: speculative", "no, yes or any")
        if cell.status not in ("supported", "refused"):
            raise _bad(where, f"{at}: status = {cell.status}", "supported or refused")
        if not cell.supported and not cell.why:
            raise _bad(where, f"{at}: refused without a reason", "why")
        spans = ("no", "yes") if cell.speculative == "any" else (cell.speculative,)
        for span in spans:
            if (cell.pair, cell.family, span) in seen:
                raise _bad(where, f"{at}: stands twice", "one row a combination")
            seen.add((cell.pair, cell.family, span))
    for image in (*lock.images, *lock.bases, *lock.upstream):
        if image.resolved and not _DIGEST.fullmatch(image.digest):
            raise _bad(where, f"image {image.name}: digest = {image.digest}", 'sha256:<64 hex> or "unresolved"')
        if not image.source:
            raise _bad(where, f"image {image.name}: a digest without a source", "source")


def registry_digest(ref: str) -> str | None:
    """The digest that the registry holds for `ref`, None where none answers. Needs buildx."""
    try:
        done = run(
            ["docker", "buildx", "imagetools", "inspect", ref, "--format", "{{json .Manifest}}"],
            timeout=30,
        )
    except CommandFailed:
        return None
    # `{{.Manifest.Digest}}` prints the whole default report for a single-platform image (buildx 0.13.1)
    try:
        digest = json.loads(done.stdout)["digest"]
    except (ValueError, KeyError, TypeError):
        return None
    return digest if isinstance(digest, str) and _DIGEST.fullmatch(digest) else None


def fill_in(text: str, registry: str, today: str, resolve: Resolver = registry_digest) -> tuple[str, list[str]]:
    """Fill in unresolved digests where a registry answers; (new text, one line a changed entry).

    Works on the text, so that comments and order stay. What no registry answers for stays unresolved. A resolved
    digest is never changed: a new version is a new `ref`.
    """
    lock = parse(text)
    changed: list[str] = []
    for image in (*lock.images, *lock.bases, *lock.upstream):
        if image.resolved:
            continue
        ours = image in lock.images
        if ours and not registry:
            continue
        ref = f"{registry.rstrip('/')}/{image.ref}" if ours else image.ref
        digest = resolve(ref)
        if digest is None:
            continue
        entry = re.compile(
            rf'(ref = "{re.escape(image.ref)}"\ndigest = )"{UNRESOLVED}"(\nsource = )"[^"\n]*"',
        )
        text, count = entry.subn(rf'\g<1>"{digest}"\g<2>"{ref}, resolved {today}"', text)
        if count:
            changed.append(f"{ref} -> {digest}")
    parse(text)
    return text, changed


def update(root: Path, registry: str = "") -> list[str]:
    """`kvstrata lock update`: fill in `root`/versions.lock; one line a changed entry. `registry` is KV_REGISTRY."""
    path = root / "versions.lock"
    load(root)
    text, changed = fill_in(path.read_text(), registry, datetime.date.today().isoformat())
    if changed:
        path.write_text(text)
    return changed
