"""vLLM with the connector guard: check that the model is the one the cache was opened for, then add one argument."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Mapping, Sequence

from kvstrata.launch import guard_metrics
from kvstrata.launch.config import ConfigError, Paths, number, required, whole
from kvstrata.launch.owned_args import OWNED, owned
from kvstrata.launch.supervise import Supervisor, failed_state

__all__ = ["build_argv", "clean_up", "run"]

CONNECTOR = {"kv_connector": "KvstrataConnector", "kv_connector_module_path": "kvstrata.connector"}
_CONNECTOR_FLAGS = [flag for flag in OWNED if flag.startswith("--kv-")]
#: KV_TRANSFER_MODE -> what vLLM's side asks for. Pickle is the server's doing: engine_driven without a pool is pickle.
_MODES = {"auto": None, "engine_driven": "engine_driven", "lmcache_driven": "lmcache_driven", "pickle": "engine_driven"}


def run(args: Sequence[str], env: Mapping[str, str] = os.environ, paths: Paths | None = None) -> int:
    """Supervise `vllm <args>` with the connector added; the failed state for anything a restart cannot mend."""
    paths = paths or Paths()
    try:
        identity = required(env, "KV_IDENTITY")
        check_identity(identity, paths)
        argv = ["vllm", *build_argv(args, env, paths)]
        guard_metrics.start(env, paths)
    except ConfigError as error:
        return failed_state(str(error), paths.failed)

    def prepare() -> None:
        # Before each start, not only the first: the files may have been replaced while vLLM ran.
        check_identity(identity, paths)
        clean_up(paths)

    return Supervisor("vllm", argv, paths.failed, prepare=prepare).run()


def build_argv(args: Sequence[str], env: Mapping[str, str], paths: Paths) -> list[str]:
    """`args` plus --kv-transfer-config and what traces need. ConfigError if they choose a connector themselves."""
    if found := owned(args, _CONNECTOR_FLAGS):
        raise ConfigError(f"vLLM's arguments hold {found[0]}, needed none: the launcher adds its own connector; "
                          "take it out of KV_VLLM_EXTRA_ARGS, or set KV_PERSIST=0")  # fmt: skip
    return [*args, *_traces(args, env), "--kv-transfer-config", json.dumps(connector_config(env, paths))]


def _traces(args: Sequence[str], env: Mapping[str, str]) -> list[str]:
    """Spans to the collector, where the observability layer says which; a user's own endpoint stays his."""
    endpoint = env.get("KV_OTLP_ENDPOINT", "").strip()
    if not endpoint or any(arg.replace("_", "-").startswith("--otlp-traces") for arg in args):
        return []
    return ["--otlp-traces-endpoint", endpoint, "--middleware", "kvstrata.launch.trace_ids.TraceIds"]


def connector_config(env: Mapping[str, str], paths: Paths) -> dict[str, object]:
    """The connector's configuration; its extra part is read by kvstrata.connector and by LMCache's adapters.

    kv_load_failure_policy: with vLLM's default `fail` a lost cache server kills the engine (SCH:2828 of vllm 0.28.0).
    """
    extra: dict[str, object] = {
        "lmcache.mp.host": env.get("KV_LMCACHE_HOST", "tcp://lmcache"),
        "lmcache.mp.port": whole(env, "KV_LMCACHE_PORT", 5555),
        "lmcache.mp.mq_timeout": _short(number(env, "KV_MQ_TIMEOUT", 5)),
        "lmcache.mp.heartbeat_interval": _short(number(env, "KV_HEARTBEAT", 5)),
        "kvstrata.identity": required(env, "KV_IDENTITY"),
        "kvstrata.model_name": required(env, "KV_MODEL_NAME"),
        "kvstrata.chunk_size": whole(env, "KV_CHUNK_SIZE"),
        "kvstrata.salt_key_file": str(paths.salt_key),
    }
    mode = env.get("KV_TRANSFER_MODE", "").strip() or "auto"
    if mode not in _MODES:
        raise ConfigError(
            f"KV_TRANSFER_MODE={mode}, needed one of {', '.join(_MODES)}; mend it in .env and run `make up`"
        )
    if _MODES[mode]:
        extra["lmcache.mp.mp_transfer_mode"] = _MODES[mode]
    return {
        **CONNECTOR,
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": extra,
    }


def check_identity(expected: str, paths: Paths) -> None:
    """Refuse a model folder other than the one KV_IDENTITY stands for: its blocks would be taken for that one's."""
    if not re.fullmatch(r"[0-9a-f]{16,128}", expected):
        raise ConfigError(f"KV_IDENTITY={expected!r} is no digest; run `make up`, which writes it to .env")
    from kvstrata.deploy import identity  # late: a health check never needs it

    try:
        found = identity.compute(paths.model, paths.state / "identity.json").digest
    except Exception as error:  # whatever it is, an unchecked model must not meet the cache
        raise ConfigError(f"the model folder cannot be read: {' '.join(str(error).split())}") from error
    if found != expected:
        raise ConfigError(f"identity mismatch: the model folder is {found[:16]}…, .env says {expected[:16]}…; "
                          "its files changed since the last `make up`: run it again")  # fmt: skip


def _short(value: float) -> float | int:
    return int(value) if value == int(value) else value


def clean_up(paths: Paths) -> None:
    """Remove what an earlier vLLM left: reports that would be taken for this one's, segments that fill /dev/shm.

    A killed vLLM leaves psm_* (message queues, hundreds of MB), and lmcache_kv_* in lmcache_driven mode, in the volume
    that outlives it. Both are made by vLLM's processes only (LMCache 0.5.3's server makes lmcache_l1_pool_*), and none
    of those runs now: one vLLM a volume.
    """
    left = [*paths.run.glob("guard-*.json"), *paths.shm.glob("psm_*"), *paths.shm.glob("lmcache_kv_*")]
    for path in left:
        try:
            path.unlink()
        except OSError as error:
            print(f"kvstrata-launch: cannot remove {path}: {error}", file=sys.stderr, flush=True)
