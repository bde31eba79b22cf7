"""The knobs of .env, typed and checked.

`load` is the only door. It reads the file, lets the process environment win for known knobs (as docker compose does)
and refuses what it does not know, so that a misspelt knob can never be silently without effect.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from kvstrata.deploy import dotenv
from kvstrata.deploy.knob_values import Reader, absolute
from kvstrata.deploy.knobs import ENV_VERSION, USER_KEYS, places

__all__ = ["Settings", "load"]

DEVICES = ("cpu", "nvidia", "gb10")
DURABILITIES = ("process", "fsync")
CODECS = ("raw", "lz4", "zstd")
IO_MODES = ("buffered", "direct")
NATIVE_CHOICES = ("auto", "on", "off")
IMAGE_SOURCES = ("build", "pull")
TRANSFER_MODES = ("auto", "engine_driven", "lmcache_driven", "pickle")


@dataclass(frozen=True)
class Settings:
    """All knobs. `None` or "" = blank: the plan, or the step that the comment in .env.example names, decides.

    Sizes are GiB, times are seconds, paths are absolute. `managed` is the block that the CLI wrote last (may be empty).
    """

    root: Path
    project: str
    persist: bool
    layers: tuple[str, ...]
    device: str
    image_source: str
    registry: str
    install_engine: bool
    model: str
    model_dir: Path | None
    vllm_extra_args: tuple[str, ...]
    port: int
    metrics_port: int
    chunk_size: int
    l1_gb: float | None
    l2_gb: float | None
    vllm_kv_gb: int | None  # vLLM reads it as an int (vllm 0.28.0 envs.py:870)
    vllm_mem_gb: float | None
    lmcache_mem_gb: float | None
    store_codec: str
    store_io: str
    store_native: str
    store_load_deadline: float
    store_free_floor_gb: float | None
    store_classes: Path
    cache_allow_fs: tuple[str, ...]
    engine_url: str
    resp_url: str
    engine_deadline: float
    engine_connections: int
    engine_ca: Path | None
    engine_port: int
    engine_dir: Path
    engine_hot_gb: float
    engine_durability: str
    observability: bool | None
    watch_ports: Mapping[str, int]
    """Knob -> port of each page of the observability layers."""
    data_dir: Path
    cache_dir: Path
    uid: int | None
    gid: int | None
    wait_timeout: int
    transfer_mode: str
    mq_timeout: float
    heartbeat: float
    base_image: str
    ca_bundle: Path | None
    managed: Mapping[str, str]

    @property
    def env_file(self) -> Path:
        return self.root / ".env"

    @property
    def store_root(self) -> Path:
        """The block store's folder on this host; /cache/store in the container (compose/nvme.yaml)."""
        return self.cache_dir / "store"

    @property
    def observes(self) -> bool:
        """The observability layers run: asked for, or the images are pulled anyway. Never beside plain vLLM."""
        wanted = self.image_source == "pull" if self.observability is None else self.observability
        return self.persist and wanted

    @property
    def prometheus_url(self) -> str:
        return f"http://127.0.0.1:{self.watch_ports['KV_PROMETHEUS_PORT']}"

    @property
    def has_engine(self) -> bool:
        """The KV engine (not Docker's) is part of this stack; then it has the disk, and not the store in lmcache."""
        return self.persist and "engine" in self.layers

    @property
    def l2_dir(self) -> Path:
        """The folder whose disk holds the blocks, where that is a disk of this machine."""
        return self.engine_dir if self.has_engine else self.cache_dir

    @property
    def l2_knob(self) -> str:
        return "KV_ENGINE_DIR" if self.has_engine else "KV_CACHE_DIR"

    @property
    def secrets_dir(self) -> Path:
        return self.data_dir / "secrets"

    @property
    def state_dir(self) -> Path:
        return self.data_dir / "state"

    @property
    def models_dir(self) -> Path:
        return self.data_dir / "models"

    @property
    def reports_dir(self) -> Path:
        return self.data_dir / "reports"


def load(root: Path, environ: Mapping[str, str] | None = None) -> Settings:
    """Settings of the checkout at `root`; without a .env, the defaults. Writes nothing.

    Raises KvError (exit code 2) for an unknown, renamed, doubled or ill-valued knob, with file, line, value and fix.
    """
    env = os.environ if environ is None else environ
    path = root / ".env"
    entries = dotenv.parse(path, env) if path.exists() else []
    where = places(path, entries)
    values = dict(USER_KEYS)
    values.update({e.key: e.value for e in entries if not e.managed})
    for key in USER_KEYS:
        if key in env:
            values[key] = env[key]
            where[key] = f"{key} of the environment"
    managed = {e.key: e.value for e in entries if e.managed}
    return _build(root.absolute(), Reader(values, where), managed)


def _build(root: Path, r: Reader, managed: Mapping[str, str]) -> Settings:
    if r.text("KV_ENV_VERSION") != str(ENV_VERSION):
        raise r.bad("KV_ENV_VERSION", str(ENV_VERSION),
                    f"compare .env with .env.example, mend it, then set KV_ENV_VERSION={ENV_VERSION}")  # fmt: skip
    project = r.text("COMPOSE_PROJECT_NAME")
    if not re.fullmatch(r"[a-z0-9][a-z0-9_-]*", project):
        raise r.bad("COMPOSE_PROJECT_NAME", "lower-case letters, digits, - and _, a letter or digit first")
    port, metrics_port = (r.whole(k, 1, 65535, "a port from 1 to 65535") for k in ("KV_PORT", "KV_METRICS_PORT"))
    engine_port = r.whole("KV_ENGINE_PORT", 1, 65535, "a port from 1 to 65535")
    if port == metrics_port:
        raise r.bad("KV_METRICS_PORT", f"another port than KV_PORT={port}", "change one of the two in .env")
    if engine_port in (port, metrics_port):
        raise r.bad("KV_ENGINE_PORT", "another port than KV_PORT and KV_METRICS_PORT", "change it in .env")
    watch_ports = _watch_ports(r, {port, metrics_port, engine_port})
    data_dir = absolute(root, r.text("KV_DATA_DIR") or USER_KEYS["KV_DATA_DIR"])
    image = r"([A-Za-z0-9][A-Za-z0-9._/:@-]*)?"
    ids = "a user or group id from 0 to 2147483647, or blank"
    return Settings(
        root=root,
        project=project,
        persist=r.flag("KV_PERSIST"),
        layers=tuple(name for name in re.split(r"[,\s]+", r.text("KV_LAYERS")) if name),
        device=r.choice("KV_DEVICE", DEVICES, blank=True),
        image_source=r.choice("KV_IMAGE_SOURCE", IMAGE_SOURCES, blank=True),
        registry=r.matching("KV_REGISTRY", image, "a registry and path without spaces, or blank").rstrip("/"),
        install_engine=r.flag("KV_INSTALL_ENGINE"),
        model=r.text("KV_MODEL"),
        model_dir=absolute(root, r.text("MODEL_DIR")) if r.text("MODEL_DIR") else None,
        vllm_extra_args=tuple(r.parsed("KV_VLLM_EXTRA_ARGS", shlex.split, "arguments with balanced quotes")),
        port=port,
        metrics_port=metrics_port,
        chunk_size=r.whole("KV_CHUNK_SIZE", 16, 1 << 20, "a number of tokens from 16 to 1048576"),
        l1_gb=r.size("KV_L1_GB"),
        l2_gb=r.size("KV_L2_GB"),
        vllm_kv_gb=r.whole("KV_VLLM_KV_GB", 1, 4096, "a whole number of GiB, or blank")
        if r.text("KV_VLLM_KV_GB")
        else None,
        vllm_mem_gb=r.size("KV_VLLM_MEM_GB"),
        lmcache_mem_gb=r.size("KV_LMCACHE_MEM_GB"),
        store_codec=r.choice("KV_STORE_CODEC", CODECS, blank=False),
        store_io=r.choice("KV_STORE_IO", IO_MODES, blank=False),
        store_native=r.choice("KV_STORE_NATIVE", NATIVE_CHOICES, blank=False),
        store_load_deadline=r.number("KV_STORE_LOAD_DEADLINE", 0.1, 120, "a number of seconds from 0.1 to 120"),
        store_free_floor_gb=r.number("KV_STORE_FREE_FLOOR_GB", 0, 1 << 20, "a number of GiB, 0 or more, or blank")
        if r.text("KV_STORE_FREE_FLOOR_GB")
        else None,
        store_classes=absolute(root, r.text("KV_STORE_CLASSES") or "configs/store-classes.json"),
        cache_allow_fs=tuple(r.text("KV_CACHE_ALLOW_FS").replace(",", " ").split()),
        engine_url=r.matching(
            "KV_ENGINE_URL",
            r"(https?://[A-Za-z0-9._\[\]:-]+(/[A-Za-z0-9._/-]*)?)?",
            "http://host:port or https://host:port, or blank",
        ).rstrip("/"),
        resp_url=r.matching(
            "KV_RESP_URL",
            r"(redis://([A-Za-z0-9._-]+@)?[A-Za-z0-9._-]+:[0-9]{1,5})?",
            "redis://[user@]host:port, without password (it is a file) or TLS (LMCache has none), or blank",
        ),
        engine_deadline=r.number("KV_ENGINE_DEADLINE", 0.1, 120, "a number of seconds from 0.1 to 120"),
        engine_connections=r.whole("KV_ENGINE_CONNECTIONS", 1, 64, "a number from 1 to 64"),
        engine_ca=absolute(root, r.text("KV_ENGINE_CA")) if r.text("KV_ENGINE_CA") else None,
        engine_port=engine_port,
        engine_dir=absolute(root, r.text("KV_ENGINE_DIR")) if r.text("KV_ENGINE_DIR") else data_dir / "engine",
        engine_hot_gb=r.number("KV_ENGINE_HOT_GB", 0, 1 << 20, "a number of GiB, 0 or more"),
        engine_durability=r.choice("KV_ENGINE_DURABILITY", DURABILITIES, blank=False),
        observability=r.flag("KV_OBSERVABILITY") if r.text("KV_OBSERVABILITY") else None,
        watch_ports=watch_ports,
        data_dir=data_dir,
        cache_dir=absolute(root, r.text("KV_CACHE_DIR")) if r.text("KV_CACHE_DIR") else data_dir / "cache",
        uid=r.whole("KV_UID", 0, 2**31 - 1, ids) if r.text("KV_UID") else None,
        gid=r.whole("KV_GID", 0, 2**31 - 1, ids) if r.text("KV_GID") else None,
        wait_timeout=r.whole("KV_WAIT_TIMEOUT", 1, 86400, "a number of seconds from 1 to 86400"),
        transfer_mode=r.choice("KV_TRANSFER_MODE", TRANSFER_MODES, blank=False),
        mq_timeout=r.number("KV_MQ_TIMEOUT", 0.1, 300, "a number of seconds from 0.1 to 300"),
        heartbeat=r.number("KV_HEARTBEAT", 0.5, 30, "a number of seconds from 0.5 to 30"),
        base_image=r.matching("KV_BASE_IMAGE", image, "the name of an image, or blank"),
        ca_bundle=absolute(root, r.text("KV_CA_BUNDLE")) if r.text("KV_CA_BUNDLE") else None,
        managed=managed,
    )


def _watch_ports(r: Reader, taken: set[int]) -> Mapping[str, int]:
    """The pages' ports; the other knobs of those services, which only compose reads, are checked here as well."""
    r.whole("KV_PROMETHEUS_GB", 1, 1 << 20, "a whole number of GiB")
    r.number("KV_TRACE_SHARE", 0, 1, "a share from 0 to 1")
    r.flag("KV_GRAFANA_ANONYMOUS")
    found: dict[str, int] = {}
    for key in ("KV_PROMETHEUS_PORT", "KV_ALERTMANAGER_PORT", "KV_TRACES_PORT", "KV_GRAFANA_PORT"):
        found[key] = r.whole(key, 1, 65535, "a port from 1 to 65535")
        if found[key] in taken:
            raise r.bad(key, "a port that no other knob has", "change it in .env")
        taken.add(found[key])
    return found
