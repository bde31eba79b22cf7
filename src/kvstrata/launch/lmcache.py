"""The stock LMCache server as this deployment runs it: argv from the environment, files for its owner only."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Mapping

from kvstrata.launch.config import ConfigError, Paths, number, whole
from kvstrata.launch.supervise import Supervisor, failed_state

__all__ = ["build_argv", "check_store", "drop_old_pool", "run"]

#: Fixed, so that a restarted server takes over its pool in /dev/shm instead of leaving one behind for each crash.
SHM_NAME = "kvstrata"
#: L2 files and the pool are for the service's user only; LMCache itself would leave them readable for all.
UMASK = 0o077
_OWNER_WAIT_S = 30.0


def run(env: Mapping[str, str] = os.environ, paths: Paths | None = None) -> int:
    """Supervise the server; the failed state for anything a restart cannot mend."""
    paths = paths or Paths()
    try:
        argv = build_argv(env, paths)
    except ConfigError as error:
        return failed_state(str(error), paths.failed)
    runner = [sys.executable, "-m", "kvstrata.launch.lmcache_server", str(paths.http_socket), *argv]

    def prepare() -> None:
        drop_old_pool(paths)
        check_store(env)

    return Supervisor("lmcache", runner, paths.failed, umask=UMASK, prepare=prepare).run()


def drop_old_pool(paths: Paths) -> None:
    """Unlink the pool of the server before this one.

    LMCache 0.5.3 compares the free space of /dev/shm with L1 before it replaces the old pool
    (v1/multiprocess/server.py:366); a full old one would make it fall back to pickle, in silence and for good.
    vLLM's mapping of it goes when the guard registers again, so /dev/shm has room for two (deploy/memory.py).
    """
    (paths.shm / f"lmcache_l1_pool_{SHM_NAME}").unlink(missing_ok=True)


def build_argv(env: Mapping[str, str], paths: Paths) -> list[str]:
    """Arguments of `lmcache` (0.5.3: `lmcache server --help`). Raises ConfigError for a value it would choke on."""
    pickle = env.get("KV_TRANSFER_MODE", "") == "pickle"
    argv = [
        "server",
        "--host", env.get("KV_LMCACHE_BIND", "0.0.0.0"),
        "--port", str(whole(env, "KV_LMCACHE_PORT", 5555)),
        "--chunk-size", str(whole(env, "KV_CHUNK_SIZE")),
        "--l1-size-gb", f"{number(env, 'KV_PLAN_L1_GB'):g}",
        "--no-l1-use-lazy",  # a pool that grows cannot be shared memory (engine_context.py:319)
        "--eviction-policy", "LRU",
        "--shm-name", "" if pickle else SHM_NAME,
    ]  # fmt: skip
    return argv + _l2(env, paths)


def _l2(env: Mapping[str, str], paths: Paths) -> list[str]:
    kind = env.get("KV_L2", "").strip()
    if not kind:
        return []
    if kind != "store":
        raise ConfigError(f"KV_L2={kind}, needed store or nothing; a layer of compose/ sets it")
    if not os.access(paths.cache, os.W_OK | os.X_OK):
        raise ConfigError(f"permission denied on cache folder {paths.cache} for uid {os.getuid()}: "
                          "the folder of KV_CACHE_DIR must belong to KV_UID:KV_GID; chown it")  # fmt: skip
    # No parameters: LMCache prints them. The adapter reads KV_STORE_* itself.
    adapter = {"type": "plugin", "module_path": "kvstrata.doors.l2_plugin", "class_name": "KvstrataL2Adapter",
               "adapter_params": {}}  # fmt: skip
    # retain: a block that L2 gave is kept in L1; by default each hit would read the disk again.
    return ["--l2-prefetch-policy", "retain", "--l2-adapter", json.dumps(adapter)]


def check_store(env: Mapping[str, str], wait_s: float = _OWNER_WAIT_S) -> None:
    """Open the store's root and its codec as the server will, and let go of them. ConfigError where that fails.

    The server would end with a traceback and be started again five times; its failed state says what to do at once.
    An owner that is going away (a killed server, a `kvstrata store` command) is waited for.
    """
    if env.get("KV_L2", "").strip() != "store":
        return
    from kvstrata.store.codecs import CodecError, codec
    from kvstrata.store.errors import StoreError
    from kvstrata.store.root import open_root
    from kvstrata.store.settings import StoreSettings

    end = time.monotonic() + wait_s
    while True:
        try:
            settings = StoreSettings.from_env(env)
            codec(settings.codec)
            open_root(settings).close()
        except (StoreError, CodecError) as error:
            if getattr(error, "owned", False) and time.monotonic() < end:
                time.sleep(0.2)
                continue
            raise ConfigError(str(error)) from None
        return
