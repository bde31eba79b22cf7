"""Which candidates the block store's benchmark has, and what it is told to do."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from kvstrata.proof import store_bench_parts as parts
from kvstrata.proof.store_bench_rows import CEILING, LMCACHE_FS, Row
from kvstrata.store.settings import StoreSettings

__all__ = ["OURS", "Options", "candidates", "store_env"]

#: Room that a store is given, so that nothing is evicted while it is measured.
_CAPACITY = 1 << 42
OURS: dict[str, Any] = {
    "type": "plugin", "module_path": "kvstrata.doors.l2_plugin", "class_name": "KvstrataL2Adapter",
    "adapter_params": {},
}  # fmt: skip


@dataclass(frozen=True)
class Options:
    """`blocks`: how many buffers of each size in MiB; `pages`: GB to write for the page-cache question, 0 = none.

    `kv_chunks`: chunks of real KV that codecs work on; 8 are 2048 tokens, 47 MB of the demo model's in bf16.
    """

    folder: str
    blocks: dict[int, int]
    threads: tuple[int, ...]
    rounds: int
    seed: int = 1
    allow_fs: str = ""
    model: str = ""
    chunk: int = 256
    kv_chunks: int = 8
    phases: tuple[str, ...] = ("rows", "codecs", "prefetch")
    only: tuple[str, ...] = ()
    pages: int = 0

    @classmethod
    def read(cls, path: Path) -> Options:
        data: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        data["blocks"] = {int(size): count for size, count in data["blocks"].items()}
        values: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in data.items()}
        return cls(**values)

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self)), encoding="utf-8")


def candidates(options: Options, pool: parts.Pool, folder: Path, rows: list[Row], kv: bool) -> list[parts.Part]:
    """All that can be had here; what cannot leaves a row with the reason."""
    found: list[parts.Part] = []

    def add(name: str, make: Callable[[], parts.Part]) -> None:
        if options.only and not name.startswith(options.only):
            return
        try:
            found.append(make())
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"[:300]
            if not any(row.name == name for row in rows):
                rows.append(Row(name, False, "load", "hot", 0, 0, (), reason))

    for threads in options.threads:
        add(CEILING, partial(parts.Raw, CEILING, folder / f"raw-{threads}", threads))
        add("device", partial(parts.Raw, "device", folder / f"device-{threads}", threads, direct=True))
        make = _ours(options, pool, folder, threads)
        add("kvstrata raw", partial(make, "raw"))
        add("kvstrata raw", partial(make, "raw", checked=False))
        add("kvstrata raw direct", partial(make, "raw", io="direct"))
        for codec in ("lz4", "zstd") if kv else ():
            add(f"kvstrata {codec}", partial(make, codec))
    for name, config, threads in _lmcache_adapters(options, folder):
        if pool.desc is None:
            add(name, partial(_missing, "lmcache is not installed here"))
        else:
            add(name, partial(_adapter, name, config, pool, threads))
    return found


def _missing(reason: str) -> parts.Part:
    raise RuntimeError(reason)


def _ours(options: Options, pool: parts.Pool, folder: Path, threads: int) -> Callable[..., parts.Part]:
    """Our store with `threads` workers: as LMCache's adapter where LMCache is, else asked directly."""

    def make(codec: str, checked: bool = True, io: str = "buffered") -> parts.Part:
        name = "kvstrata " + (codec if io == "buffered" else f"{codec} {io}")
        root = folder / f"{name}-{checked}-{threads}".replace(" ", "-")
        content = "random" if codec == "raw" else "kv"
        if pool.desc is None:
            settings = StoreSettings(
                root, _CAPACITY, codec=codec, io=io, workers=threads, free_floor=0,
                allow_fs=tuple(options.allow_fs.split(",")), load_deadline_s=parts.PATIENCE_S,
                store_deadline_s=parts.PATIENCE_S,
            )  # fmt: skip
            return parts.Store(name, settings, checked=checked, content=content)
        env = store_env(root, codec, io, threads, options.allow_fs)
        from kvstrata.doors.l2_keys import block_key
        from kvstrata.proof.store_bench_lmcache import object_keys

        parts.furnish(StoreSettings.from_env(env), block_key(object_keys(1)[0]))
        ours = OURS | {"folder": str(root)}
        return _adapter(name, ours, pool, threads, checked, content, io != "direct", env)

    return make


def store_env(root: Path, codec: str, io: str, threads: int, allow_fs: str) -> dict[str, str]:
    """The environment that configures our door."""
    return {
        "KV_STORE_ROOT": str(root), "KV_STORE_CAPACITY_BYTES": str(_CAPACITY), "KV_STORE_CODEC": codec,
        "KV_STORE_IO": io, "KV_STORE_WORKERS": str(threads), "KV_STORE_FREE_FLOOR_GB": "0",
        "KV_CACHE_ALLOW_FS": allow_fs, "KV_STORE_LOAD_DEADLINE": str(parts.PATIENCE_S),
        "KV_STORE_STORE_DEADLINE": str(parts.PATIENCE_S),
    }  # fmt: skip


def _lmcache_adapters(options: Options, folder: Path) -> list[tuple[str, dict[str, Any], int]]:
    """(name, configuration, threads). `fs` has asyncio's default pool of threads; nixl's POSIX has its own."""
    fs, nixl = folder / "lmcache-fs", folder / "lmcache-nixl"
    posix = {"file_path": str(nixl), "use_direct_io": "false", "max_capacity_gb": "1000"}
    rows: list[tuple[str, dict[str, Any], int]] = [
        (LMCACHE_FS, {"type": "fs", "base_path": str(fs), "folder": str(fs)}, min(32, (os.cpu_count() or 1) + 4)),
        ("lmcache nixl_store_dynamic",
         {"type": "nixl_store_dynamic", "backend": "POSIX", "backend_params": posix, "folder": str(nixl)}, 0),
    ]  # fmt: skip
    for threads in options.threads:
        place = str(folder / f"lmcache-fs_native-{threads}")
        config = {"type": "fs_native", "base_path": place, "num_workers": threads, "folder": place}
        rows.append(("lmcache fs_native", config, threads))
    return rows


def _adapter(
    name: str, config: dict[str, Any], pool: parts.Pool, threads: int, checked: bool = False, content: str = "random",
    cached: bool = True, env: dict[str, str] | None = None,
) -> parts.Part:  # fmt: skip
    from kvstrata.proof.store_bench_lmcache import Adapter

    own = dict(config)
    folder = Path(own.pop("folder"))
    return Adapter(name, own, folder, pool, checked=checked, threads=threads, content=content, cached=cached, env=env)
