"""The store's settings, and how the environment spells them (`KV_STORE_*`)."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from kvstrata.store.errors import StoreError

__all__ = ["CLASSES", "ClassRule", "StoreSettings", "class_rules"]

CLASSES = ("bulk", "normal", "keep", "pin")
"""Retention classes in the order in which they are evicted; `pin` never is."""

NATIVE_CHOICES = ("auto", "on", "off")
MIN_CAPACITY = 8 << 20
DEFAULT_FLOOR = 1 << 30


@dataclass(frozen=True, slots=True)
class ClassRule:
    """Blocks of a namespace and salt (shell globs, case matters) belong to a retention class."""

    namespace: str
    salt: str
    cls: str

    def __post_init__(self) -> None:
        if self.cls not in CLASSES:
            raise StoreError(
                f"retention class {self.cls!r}", f"one of {', '.join(CLASSES)}", "correct KV_STORE_CLASSES"
            )

    def matches(self, namespace: str, salt: str) -> bool:
        """True if the rule speaks about this folder."""
        return fnmatchcase(namespace, self.namespace) and fnmatchcase(salt, self.salt)


@dataclass(frozen=True)
class StoreSettings:
    """Everything that BlockStore.open needs. Bytes are bytes on disk (allocated), seconds are seconds.

    `free_floor` None: the smaller of 1 GiB and 5 % of the device. `workers` 0: the smaller of 8 and the CPUs. `native`:
    as for cached_reader.
    """

    root: Path
    capacity: int
    watermark: float = 0.9
    target: float = 0.8
    free_floor: int | None = None
    codec: str = "raw"
    io: str = "buffered"
    native: str = "auto"
    workers: int = 0
    load_deadline_s: float = 10.0
    store_deadline_s: float = 60.0
    allow_fs: tuple[str, ...] = ()
    classes: tuple[ClassRule, ...] = ()
    sub_bytes: int = 1 << 20
    """How much has one checksum: who sends a block on piece by piece wants pieces that fit a CPU's cache."""

    def __post_init__(self) -> None:
        def need(good: bool, knob: str, value: object, needed: str) -> None:
            if not good:
                raise StoreError(f"{knob}={value}", needed, f"correct {knob}")

        # A capacity that got lost on its way here must never look like "evict everything".
        need(
            self.capacity >= MIN_CAPACITY,
            "KV_STORE_CAPACITY_BYTES",
            self.capacity,
            f"at least {MIN_CAPACITY} bytes (a smaller one would empty the store)",
        )
        need(
            0.0 < self.target <= self.watermark <= 1.0,
            "target, watermark",
            (self.target, self.watermark),
            "0 < target <= watermark <= 1",
        )
        need(self.io in ("buffered", "direct"), "KV_STORE_IO", self.io, "buffered or direct")
        need(self.native in NATIVE_CHOICES, "KV_STORE_NATIVE", self.native, ", ".join(NATIVE_CHOICES))
        need(0 <= self.workers <= 64, "KV_STORE_WORKERS", self.workers, "0 (choose) to 64")
        need(self.free_floor is None or self.free_floor >= 0, "KV_STORE_FREE_FLOOR_GB", self.free_floor, "0 or more")
        for knob, value in (
            ("KV_STORE_LOAD_DEADLINE", self.load_deadline_s),
            ("KV_STORE_STORE_DEADLINE", self.store_deadline_s),
        ):
            need(math.isfinite(value) and value > 0, knob, value, "a number of seconds above 0")

    @property
    def worker_count(self) -> int:
        """How many blocks are read, and how many are written, at a time."""
        return self.workers or min(8, len(os.sched_getaffinity(0)))

    def class_of(self, namespace: str, salt: str) -> str | None:
        """The retention class of the first rule that matches, or None."""
        return next((rule.cls for rule in self.classes if rule.matches(namespace, salt)), None)

    def class_number(self, namespace: str, salt: str) -> int | None:
        """Its place in CLASSES."""
        cls = self.class_of(namespace, salt)
        return None if cls is None else CLASSES.index(cls)

    @classmethod
    def from_env(cls, env: Mapping[str, str]) -> StoreSettings:
        """Read the KV_STORE_* variables; StoreError names the one that is wrong or missing."""
        root = env.get("KV_STORE_ROOT", "")
        if not root:
            raise StoreError("no KV_STORE_ROOT", "the folder of the block store", "set KV_STORE_ROOT")
        floor = env.get("KV_STORE_FREE_FLOOR_GB", "")
        return cls(
            root=Path(root),
            capacity=int(_number(env, "KV_STORE_CAPACITY_BYTES", 0)),
            free_floor=int(_number(env, "KV_STORE_FREE_FLOOR_GB", 0) * (1 << 30)) if floor else None,
            codec=env.get("KV_STORE_CODEC") or "raw",
            io=env.get("KV_STORE_IO") or "buffered",
            native=env.get("KV_STORE_NATIVE") or "auto",
            workers=int(_number(env, "KV_STORE_WORKERS", 0)),
            load_deadline_s=_number(env, "KV_STORE_LOAD_DEADLINE", cls.load_deadline_s),
            store_deadline_s=_number(env, "KV_STORE_STORE_DEADLINE", cls.store_deadline_s),
            allow_fs=tuple(env.get("KV_CACHE_ALLOW_FS", "").replace(",", " ").split()),
            classes=class_rules(env.get("KV_STORE_CLASSES", "")),
        )


def _number(env: Mapping[str, str], knob: str, default: float) -> float:
    text = env.get(knob, "")
    try:
        value = float(text) if text else float(default)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise StoreError(f"{knob}={text!r}", "a number", f"correct {knob}")
    return value


def class_rules(file: str) -> tuple[ClassRule, ...]:
    """KV_STORE_CLASSES names a JSON file: [{"namespace": glob, "salt": glob, "class": word}, ...]; first match wins."""
    if not file:
        return ()
    try:
        rows = json.loads(Path(file).read_text(encoding="utf-8"))
        return tuple(
            ClassRule(str(row.get("namespace", "*")), str(row.get("salt", "*")), str(row["class"])) for row in rows
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise StoreError(
            f"KV_STORE_CLASSES={file} ({type(error).__name__}: {error})",
            'a JSON list of {"namespace": glob, "salt": glob, "class": "bulk|normal|keep|pin"}',
            "correct the file or unset KV_STORE_CLASSES",
        ) from error
