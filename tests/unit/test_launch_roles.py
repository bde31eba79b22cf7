"""What the launcher starts: argv of vLLM and of the LMCache server, refusals, and the HTTP socket."""

from __future__ import annotations

import json
import os
import socket
import stat
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from kvstrata.deploy import identity
from kvstrata.launch import health, lmcache, lmcache_server, vllm
from kvstrata.launch.config import ConfigError, Paths
from kvstrata.store.root import open_root
from kvstrata.store.settings import StoreSettings

DIGEST = "ab" * 32
VLLM_ENV = {
    "KV_IDENTITY": DIGEST,
    "KV_MODEL_NAME": "tiny",
    "KV_CHUNK_SIZE": "256",
    "KV_MQ_TIMEOUT": "5",
    "KV_HEARTBEAT": "2.5",
}
CACHE_ENV = {"KV_CHUNK_SIZE": "256", "KV_PLAN_L1_GB": "1.5"}
ARGS = ["serve", "/model", "--served-model-name", "tiny"]


def test_vllm_keeps_its_arguments_and_gets_the_guard() -> None:
    argv = vllm.build_argv(ARGS, VLLM_ENV, Paths())
    assert argv[: len(ARGS) + 1] == [*ARGS, "--kv-transfer-config"]
    config = json.loads(argv[-1])
    extra = config.pop("kv_connector_extra_config")
    assert config == {
        "kv_connector": "KvstrataConnector",
        "kv_connector_module_path": "kvstrata.connector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
    }
    assert extra == {
        "lmcache.mp.host": "tcp://lmcache",
        "lmcache.mp.port": 5555,
        "lmcache.mp.mq_timeout": 5,
        "lmcache.mp.heartbeat_interval": 2.5,
        "kvstrata.identity": DIGEST,
        "kvstrata.model_name": "tiny",
        "kvstrata.chunk_size": 256,
        "kvstrata.salt_key_file": "/run/secrets/kv_salt_key",
    }


@pytest.mark.parametrize(
    ("mode", "asked"), [("auto", None), ("", None), ("lmcache_driven", "lmcache_driven"), ("pickle", "engine_driven")]
)
def test_the_transfer_mode_is_passed_on_only_when_it_was_chosen(mode: str, asked: str | None) -> None:
    config = json.loads(vllm.build_argv(ARGS, {**VLLM_ENV, "KV_TRANSFER_MODE": mode}, Paths())[-1])
    assert config["kv_connector_extra_config"].get("lmcache.mp.mp_transfer_mode") == asked


@pytest.mark.parametrize(
    "extra",
    [
        ["--kv-transfer-config", "{}"],
        ["--kv-transfer-config={}"],
        ["--kv_transfer_config={}"],
        ["--kv-transfer-config.kv_connector", "X"],
        ["--other", '{"kv_connector": "LMCacheConnectorV1"}'],
    ],
)
def test_arguments_that_choose_a_connector_are_refused(extra: list[str]) -> None:
    with pytest.raises(ConfigError, match="KV_VLLM_EXTRA_ARGS"):
        vllm.build_argv([*ARGS, *extra], VLLM_ENV, Paths())


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("KV_CHUNK_SIZE", ""),
        ("KV_CHUNK_SIZE", "1.5"),
        ("KV_MQ_TIMEOUT", "nan"),
        ("KV_HEARTBEAT", "0"),
        ("KV_TRANSFER_MODE", "x"),
    ],
)
def test_a_bad_value_names_its_knob(key: str, value: str) -> None:
    with pytest.raises(ConfigError, match=key):
        vllm.build_argv(ARGS, {**VLLM_ENV, key: value}, Paths())


def test_a_model_folder_other_than_the_planned_one_is_refused(tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    (model / "model.safetensors").write_bytes(b"weights")
    paths = Paths(model=model, state=tmp_path)
    digest = identity.compute(model, tmp_path / "identity.json").digest
    vllm.check_identity(digest, paths)
    (model / "model.safetensors").write_bytes(b"Weights")
    with pytest.raises(ConfigError, match="identity mismatch"):
        vllm.check_identity(digest, paths)
    with pytest.raises(ConfigError, match="cannot be read"):
        vllm.check_identity(digest, Paths(model=tmp_path / "none", state=tmp_path))
    with pytest.raises(ConfigError, match="no digest"):
        vllm.check_identity("x", paths)


def test_what_an_earlier_vllm_left_is_removed_and_the_cache_servers_pool_is_not(tmp_path: Path) -> None:
    run, shm = tmp_path / "run", tmp_path / "shm"
    for folder, names in (
        (run, ["guard-worker.json", "failed"]),
        (shm, ["psm_1a", "lmcache_kv_7_0", "lmcache_l1_pool_kvstrata"]),
    ):
        folder.mkdir()
        for name in names:
            (folder / name).touch()
    vllm.clean_up(Paths(run=run, shm=shm))
    assert [path.name for path in run.iterdir()] == ["failed"]
    assert [path.name for path in shm.iterdir()] == ["lmcache_l1_pool_kvstrata"]


def test_the_cache_server_has_a_shared_pool_of_a_fixed_name_and_the_planned_size(tmp_path: Path) -> None:
    argv = lmcache.build_argv(CACHE_ENV, Paths())
    options = dict(zip(argv[1::2], argv[2::2], strict=False))
    assert argv[0] == "server"
    assert "--no-l1-use-lazy" in argv, "a lazy pool silently turns shared memory off"
    assert options["--l1-size-gb"] == "1.5"
    assert argv[argv.index("--shm-name") + 1] == "kvstrata"
    assert "--l2-adapter" not in argv


def test_pickle_mode_takes_the_pool_away() -> None:
    argv = lmcache.build_argv({**CACHE_ENV, "KV_TRANSFER_MODE": "pickle"}, Paths())
    assert argv[argv.index("--shm-name") + 1] == ""


def test_the_disk_tier_is_named_by_its_layer(tmp_path: Path) -> None:
    argv = lmcache.build_argv({**CACHE_ENV, "KV_L2": "store", "KV_STORE_ROOT": "/x"}, Paths(cache=tmp_path))
    assert json.loads(argv[argv.index("--l2-adapter") + 1]) == {
        "type": "plugin", "module_path": "kvstrata.doors.l2_plugin", "class_name": "KvstrataL2Adapter",
        "adapter_params": {},
    }  # fmt: skip
    assert argv[argv.index("--l2-prefetch-policy") + 1] == "retain"
    with pytest.raises(ConfigError, match="KV_L2=tape"):
        lmcache.build_argv({**CACHE_ENV, "KV_L2": "tape"}, Paths(cache=tmp_path))
    with pytest.raises(ConfigError, match="permission denied on cache"):
        lmcache.build_argv({**CACHE_ENV, "KV_L2": "store"}, Paths(cache=tmp_path / "none"))


def store_env(root: Path, **more: str) -> dict[str, str]:
    allowed = {"KV_STORE_CAPACITY_BYTES": str(1 << 30), "KV_CACHE_ALLOW_FS": "tmpfs overlay"}
    return {**CACHE_ENV, "KV_L2": "store", "KV_STORE_ROOT": str(root), **allowed, **more}


def test_a_store_that_can_be_opened_is_let_go_of_again(tmp_path: Path) -> None:
    for _ in range(2):
        lmcache.check_store(store_env(tmp_path / "store"))
    lmcache.check_store({**CACHE_ENV, "KV_L2": ""})


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"KV_STORE_CAPACITY_BYTES": ""}, "KV_STORE_CAPACITY_BYTES"),
        ({"KV_STORE_CODEC": "fp8"}, "fp8"),
        ({"KV_STORE_ROOT": "/proc/kvstrata"}, "/proc/kvstrata"),
        ({"KV_STORE_CLASSES": "/none.json"}, "/none.json"),
    ],
)
def test_a_store_that_cannot_be_opened_is_a_failed_state_and_no_crash_loop(
    tmp_path: Path, more: dict[str, str], said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        lmcache.check_store(store_env(tmp_path / "store", **more), wait_s=0)


def test_an_owner_that_goes_away_is_waited_for(tmp_path: Path) -> None:
    env = store_env(tmp_path / "store")
    held = open_root(StoreSettings.from_env(env))
    with pytest.raises(ConfigError, match="owned by another process"):
        lmcache.check_store(env, wait_s=0)
    timer = threading.Timer(0.5, held.close)
    timer.start()
    lmcache.check_store(env, wait_s=30)
    timer.join()


def test_the_reserved_socket_is_for_owner_and_group_and_replaces_a_stale_one(tmp_path: Path) -> None:
    path = tmp_path / "http.sock"
    for _ in range(2):
        lmcache_server.reserve_socket(path)
        mode = path.stat().st_mode
        assert stat.S_ISSOCK(mode)
        assert stat.S_IMODE(mode) == 0o660


class Answer(BaseHTTPRequestHandler):
    code = 200

    def do_GET(self) -> None:
        self.send_response(self.code if self.path in ("/health", "/healthcheck") else 404)
        self.end_headers()

    def log_message(self, *_args: object) -> None:
        pass

    def address_string(self) -> str:
        return "socket"


class UnixServer(HTTPServer):
    address_family = socket.AF_UNIX

    def server_bind(self) -> None:
        self.socket.bind(self.server_address)


@pytest.mark.parametrize(("code", "expected"), [(200, 0), (503, 1)])
def test_health_asks_the_service_itself(
    tmp_path: Path, code: int, expected: int, capsys: pytest.CaptureFixture[str]
) -> None:
    handler = type("Handler", (Answer,), {"code": code})
    over_tcp = HTTPServer(("127.0.0.1", 0), handler)
    over_unix = UnixServer(str(tmp_path / "http.sock"), handler)  # type: ignore[arg-type]
    paths = Paths(run=tmp_path, http_socket=tmp_path / "http.sock")
    for server in (over_tcp, over_unix):
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    assert health.check("vllm", paths, port=over_tcp.server_port) == expected
    assert health.check("lmcache", paths) == expected
    for server in (over_tcp, over_unix):
        server.shutdown()
        server.server_close()
    capsys.readouterr()
    assert health.check("vllm", paths, port=over_tcp.server_port) == 1
    assert health.check("lmcache", paths) == 1
    out = capsys.readouterr().out
    assert "vllm does not answer" in out
    assert "lmcache does not answer" in out


def test_the_health_check_ignores_proxies_and_loads_nothing_heavy() -> None:
    code = "import sys; from kvstrata.launch import main; main(['health', 'vllm']); print(sorted(sys.modules))"
    env = {**os.environ, "http_proxy": "http://127.0.0.1:9", "HTTP_PROXY": "http://127.0.0.1:9"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, check=True)
    assert not {"vllm", "lmcache", "torch", "rich", "yaml", "httpx", "urllib.request"} & set(done.stdout.split("'"))
