"""The stock LMCache server as this deployment runs it: argv from the environment, files for its owner only."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from kvstrata.launch.config import ConfigError, Paths, number, required, whole
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
        child_env(env)
    except ConfigError as error:
        return failed_state(str(error), paths.failed)
    runner = [sys.executable, "-m", "kvstrata.launch.lmcache_server", str(paths.http_socket), *argv]

    def prepare() -> None:
        drop_old_pool(paths)
        check_store(env)

    return Supervisor("lmcache", runner, paths.failed, env=child_env(env), umask=UMASK, prepare=prepare).run()


def child_env(env: Mapping[str, str]) -> dict[str, str]:
    """The server's environment. LMCache's RESP client takes its password from there, and prints what is in its JSON."""
    made = dict(env)
    if env.get("KV_L2", "").strip() == "resp" and (file := env.get("KV_RESP_PASSWORD_FILE", "").strip()):
        made["LMCACHE_RESP_PASSWORD"] = _secret(Path(file))
        if made["LMCACHE_RESP_PASSWORD"]:
            # The KV engine answers this user in the few forms that LMCache's client reads without losing step.
            made["LMCACHE_RESP_USERNAME"] = env.get("KV_RESP_USER", "").strip()
    return made


def _secret(file: Path) -> str:
    try:
        return file.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the password file {file} cannot be read ({error}); run `make up`, which makes it") from None


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
    return argv + _telemetry(env) + _l2(env, paths)


def _telemetry(env: Mapping[str, str]) -> list[str]:
    """Metrics and traces to the collector, where the observability layer says which.

    A fixed instance: a restarted server goes on with the same series. Rate 1: by default the life of one block in a
    hundred is told, of a small cache's none.
    """
    endpoint = env.get("KV_OTLP_ENDPOINT", "").strip()
    if not endpoint:
        return []
    instance = env.get("KV_HOST_NAME", "").strip() or "lmcache"
    return ["--otlp-endpoint", endpoint, "--enable-tracing", "--metrics-sample-rate", "1", "--instance-id", instance]


def _l2(env: Mapping[str, str], paths: Paths) -> list[str]:
    kind = env.get("KV_L2", "").strip()
    if not kind:
        return []
    # retain: a block that L2 gave is kept in L1; by default each hit would read it from L2 again.
    return ["--l2-prefetch-policy", "retain", "--l2-adapter", json.dumps(_adapter(kind, env, paths))]


def _adapter(kind: str, env: Mapping[str, str], paths: Paths) -> dict[str, object]:
    """The JSON of --l2-adapter. Without parameters and secrets: LMCache prints it. Ours read the environment."""
    if kind == "remote":
        from kvstrata.doors.remote_settings import RemoteError, RemoteSettings

        try:
            found = RemoteSettings.from_env(env)
            found.bearer()
            found.tls()
        except RemoteError as error:
            raise ConfigError(str(error)) from None
        return {"type": "native_plugin", "module_path": "kvstrata.doors.l2_remote", "class_name": "KvstrataRemote",
                "adapter_params": {}}  # fmt: skip
    if kind == "resp":
        return {"type": "resp", "host": required(env, "KV_RESP_HOST"), "port": whole(env, "KV_RESP_PORT"),
                "num_workers": whole(env, "KV_RESP_WORKERS", 4)}  # fmt: skip
    if kind != "store":
        raise ConfigError(f"KV_L2={kind}, needed store, remote, resp or nothing; a layer of compose/ sets it")
    if not os.access(paths.cache, os.W_OK | os.X_OK):
        raise ConfigError(f"permission denied on cache folder {paths.cache} for uid {os.getuid()}: "
                          "the folder of KV_CACHE_DIR must belong to KV_UID:KV_GID; chown it")  # fmt: skip
    return {"type": "plugin", "module_path": "kvstrata.doors.l2_plugin", "class_name": "KvstrataL2Adapter",
            "adapter_params": {}}  # fmt: skip


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
