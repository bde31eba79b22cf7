"""The engine's settings, and how the environment spells them (`KV_ENGINE_*`)."""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from kvstrata.store.errors import StoreError

__all__ = ["EngineSettings"]

# The least that a block store, and a catalog, can do with.
_LEAST, _CATALOG = 8 << 20, 2 << 20
_MOST_WORKERS = 256
# KV_ENGINE_…: a stack's (its .env), of `engine check`, and what Kubernetes tells of a service kv-engine.
_OTHERS = ("ADDRESS", "CA", "CONNECTIONS", "DEADLINE", "DIR", "HOT_GB", "PATH", "SECRET", "TOKEN", "URL")
_OTHERS_BEGIN = ("PORT", "SERVICE_")


@dataclass(frozen=True)
class EngineSettings:
    """Bytes are bytes, seconds are seconds; `capacity` and `cold_capacity` are bytes on disk. StoreError if wrong.

    Env names are KV_ENGINE_ and the field in capitals, with _BYTES behind those that are bytes.
    """

    root: Path
    capacity: int
    catalog: int = 0
    """Of the capacity, for names: the catalog and its log; 0: a 32nd, 2 MiB at least, 1 GiB at most."""
    hot: int = 0
    """RAM for blocks that are asked often; 0: none."""
    cold_root: Path | None = None
    cold_capacity: int = 0
    durability: str = "process"
    """process: what is acknowledged survives the end of the process; fsync: of the machine too."""
    disk_s: float = 10.0
    """A read that a disk holds longer makes all of them misses until it returns; a write, three times as long."""
    free_floor: int | None = None
    """Bytes of the device that stay free; None: the smaller of 1 GiB and 5 % of it."""
    allow_fs: tuple[str, ...] = ()
    max_keys: int = 4_000_000
    """References a tenant; beyond it the oldest ones go."""

    max_value: int = 64 << 20
    """The largest value over HTTP."""
    resp_max_value: int = 512 << 20
    memory: int = 512 << 20
    """Connection buffers, all together; at least one largest value must fit."""

    lease_s: float = 30.0
    """How long EXISTS over RESP keeps a block from being evicted."""
    lease_share: float = 0.5
    """Of the capacity: beyond it EXISTS says no instead of promising."""
    fork_share: float = 0.25
    """Of the capacity: what snapshots and branches may pin."""
    fork_idle_s: float = 3600.0
    """A branch or snapshot that nobody uses for so long ends."""
    max_snapshots: int = 1024
    max_branches: int = 1024

    http: str = "127.0.0.1:9130"
    resp: str = ""
    tokens_file: Path | None = None
    tls_cert: Path | None = None
    tls_key: Path | None = None
    workers: int = 8
    """Connections that are served at the same moment."""
    max_connections: int = 12_000
    header_s: float = 15.0
    """To send a whole request header."""
    body_s: float = 60.0
    """To send, or to take, a whole body."""
    idle_s: float = 600.0

    def __post_init__(self) -> None:
        def need(good: bool, knob: str, value: object, needed: str) -> None:
            if not good:
                raise StoreError(f"KV_ENGINE_{knob}={value}", needed, f"correct KV_ENGINE_{knob}")

        need(self.capacity >= _LEAST + _CATALOG, "CAPACITY_BYTES", self.capacity, f"at least {_LEAST + _CATALOG} bytes")
        most = self.capacity - _LEAST
        needed = f"0 (choose), or {_CATALOG} to {most} bytes of KV_ENGINE_CAPACITY_BYTES"
        need(self.catalog == 0 or _CATALOG <= self.catalog <= most, "CATALOG_BYTES", self.catalog, needed)
        need(self.hot >= 0, "HOT_BYTES", self.hot, "0 (none) or more bytes")
        cold = self.cold_root is not None
        need(not cold or self.cold_capacity >= 8 << 20, "COLD_CAPACITY_BYTES", self.cold_capacity, "at least 8388608")
        need(not cold or self.cold_root != self.root, "COLD_ROOT", self.cold_root, "another folder than KV_ENGINE_ROOT")
        need(self.durability in ("process", "fsync"), "DURABILITY", self.durability, "process or fsync")
        for knob, number in (
            ("MAX_KEYS", self.max_keys),
            ("MAX_VALUE_BYTES", self.max_value),
            ("RESP_MAX_VALUE_BYTES", self.resp_max_value),
            ("WORKERS", self.workers),
            ("MAX_CONNECTIONS", self.max_connections),
            ("MAX_SNAPSHOTS", self.max_snapshots),
            ("MAX_BRANCHES", self.max_branches),
        ):
            need(number >= 1, knob, number, "1 or more")
        largest = max(self.max_value, self.resp_max_value if self.resp else 0)
        need(self.memory >= largest, "MEMORY_BYTES", self.memory, f"at least the largest value, {largest} bytes")
        for knob, share in (("LEASE_SHARE", self.lease_share), ("FORK_SHARE", self.fork_share)):
            need(0.0 <= share <= 0.5, knob, share, "0 to 0.5 of the capacity")
        for knob, seconds in (
            ("DISK_S", self.disk_s),
            ("LEASE_S", self.lease_s),
            ("FORK_IDLE_S", self.fork_idle_s),
            ("HEADER_S", self.header_s),
            ("BODY_S", self.body_s),
            ("IDLE_S", self.idle_s),
        ):
            need(math.isfinite(seconds) and seconds > 0, knob, seconds, "a number of seconds above 0")

    @property
    def threads(self) -> int:
        """Those of a listener at most, while every worker is stuck in a peer that does not read or send."""
        return max(_MOST_WORKERS, self.workers)

    @property
    def names(self) -> int:
        """Bytes of the capacity that the catalog and its log may take."""
        return self.catalog or min(max(self.capacity // 32, _CATALOG), 1 << 30)

    @property
    def blocks(self) -> int:
        """Bytes of the capacity that are left for blocks."""
        return self.capacity - self.names

    @classmethod
    def from_env(cls, env: Mapping[str, str]) -> EngineSettings:
        """Read the KV_ENGINE_* variables (and KV_CACHE_ALLOW_FS); StoreError names the one that is wrong, missing or
        none that there is.
        """
        read = _Reader(env)
        return cls(
            capacity=read.whole("CAPACITY_BYTES", 0),
            catalog=read.whole("CATALOG_BYTES", cls.catalog),
            hot=read.whole("HOT_BYTES", cls.hot),
            cold_root=read.path("COLD_ROOT"),
            cold_capacity=read.whole("COLD_CAPACITY_BYTES", cls.cold_capacity),
            durability=read.text("DURABILITY", cls.durability),
            disk_s=read.number("DISK_S", cls.disk_s),
            free_floor=read.whole("FREE_FLOOR_BYTES", 0) if read.text("FREE_FLOOR_BYTES", "") else None,
            allow_fs=tuple(env.get("KV_CACHE_ALLOW_FS", "").replace(",", " ").split()),
            max_keys=read.whole("MAX_KEYS", cls.max_keys),
            max_value=read.whole("MAX_VALUE_BYTES", cls.max_value),
            resp_max_value=read.whole("RESP_MAX_VALUE_BYTES", cls.resp_max_value),
            memory=read.whole("MEMORY_BYTES", cls.memory),
            lease_s=read.number("LEASE_S", cls.lease_s),
            lease_share=read.number("LEASE_SHARE", cls.lease_share),
            fork_share=read.number("FORK_SHARE", cls.fork_share),
            fork_idle_s=read.number("FORK_IDLE_S", cls.fork_idle_s),
            max_snapshots=read.whole("MAX_SNAPSHOTS", cls.max_snapshots),
            max_branches=read.whole("MAX_BRANCHES", cls.max_branches),
            http=read.text("HTTP", cls.http),
            resp=read.text("RESP", cls.resp),
            tokens_file=read.path("TOKENS_FILE"),
            tls_cert=read.path("TLS_CERT"),
            tls_key=read.path("TLS_KEY"),
            workers=read.whole("WORKERS", cls.workers),
            max_connections=read.whole("MAX_CONNECTIONS", cls.max_connections),
            header_s=read.number("HEADER_S", cls.header_s),
            body_s=read.number("BODY_S", cls.body_s),
            idle_s=read.number("IDLE_S", cls.idle_s),
            root=read.last("ROOT"),
        )


class _Reader:
    """Looks variables up; an empty one counts as not set, as compose files pass them."""

    def __init__(self, env: Mapping[str, str]) -> None:
        self._env = env
        self._known: set[str] = set()

    def text(self, knob: str, default: str) -> str:
        self._known.add(knob)
        return self._env.get(f"KV_ENGINE_{knob}") or default

    def path(self, knob: str) -> Path | None:
        text = self.text(knob, "")
        return Path(text) if text else None

    def last(self, knob: str) -> Path:
        """A path that is needed, asked for when all other names are known: what is none of them is refused."""
        path = self.path(knob)
        for name in sorted(name for name, value in self._env.items() if value and name.startswith("KV_ENGINE_")):
            word = name.removeprefix("KV_ENGINE_")
            if word not in self._known and word not in _OTHERS and not word.startswith(_OTHERS_BEGIN):
                near = difflib.get_close_matches(word, self._known, 1)
                fix = f"write KV_ENGINE_{near[0]}" if near else "see docs/engine.md"
                raise StoreError(f"{name}, which is no setting", "names that are", f"{fix}, or take it out")
        if path is None:
            raise StoreError(f"no KV_ENGINE_{knob}", "the engine's folder", f"set KV_ENGINE_{knob}")
        return path

    def number(self, knob: str, default: float) -> float:
        text = self.text(knob, "")
        try:
            value = float(text) if text else float(default)
        except ValueError:
            value = math.nan
        if not math.isfinite(value):
            raise StoreError(f"KV_ENGINE_{knob}={text!r}", "a number", f"correct KV_ENGINE_{knob}")
        return value

    def whole(self, knob: str, default: int) -> int:
        return int(self.number(knob, default))
