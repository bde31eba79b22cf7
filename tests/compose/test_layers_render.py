"""Every stack that settings can ask for, rendered by the oldest and the newest Compose and read back."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

from kvstrata.deploy import layers, settings
from kvstrata.deploy.knobs import USER_KEYS
from kvstrata.doors.remote_settings import RemoteSettings
from kvstrata.store.settings import StoreSettings
from tests.compose.rendering import MANAGED, ROOT, Checkout, Version

STACKS = layers.all_combinations(ROOT)
Model = dict[str, Any]

#: Hardening that is not given, and why. tests/stack reads the same rules from the running containers.
EXCEPTIONS = {
    (row["service"], row["rule"]): row["reason"]
    for row in tomllib.loads((ROOT / "compose" / "exceptions.toml").read_text())["exception"]
}


def ids(files: list[Path]) -> str:
    return "+".join(path.stem for path in files)


def problems(model: Model) -> list[str]:
    """What a rendered stack must not have. A list, so that a planted violation can be shown to be caught."""
    found: list[str] = []
    services = model["services"]
    for name, service in services.items():
        for port in service.get("ports", []):
            if port.get("host_ip") != "127.0.0.1":
                found.append(f"{name}: port {port.get('published')} on {port.get('host_ip') or 'every address'}")
        found += [f"{name}: {what}" for what in _soft(name, service)]
        found += [f"{name}: {what}" for what in _dangling(service, model)]
    return found


def _soft(name: str, service: Model) -> list[str]:
    env = service.get("environment", {})
    rules = {
        "user": service.get("user") == "4321:1234",
        "read_only": service.get("read_only") is True,
        "cap_drop": service.get("cap_drop") == ["ALL"],
        "no cap_add": not service.get("cap_add"),
        "not privileged": not service.get("privileged"),
        "no-new-privileges": "no-new-privileges:true" in service.get("security_opt", []),
        "init": service.get("init") is True,
        "restart": service.get("restart") == "unless-stopped",
        "mem_limit": _bytes(service.get("mem_limit", 0)) > 0,
        "pids_limit": int(service.get("pids_limit", 0)) > 0,
        "log caps": service.get("logging", {}).get("options") == {"max-size": "10m", "max-file": "3"},
        "tmpfs /tmp": any(str(entry).startswith("/tmp:size=") for entry in service.get("tmpfs", [])),
        "healthcheck": bool(service.get("healthcheck", {}).get("test")),
        "pull_policy": service.get("pull_policy") == MANAGED["KV_PULL_POLICY"],
        "no docker socket": "docker.sock" not in str(service.get("volumes", [])),
        "no build": "build" not in service,
        "no host namespace": "host" not in [service.get(key) for key in ("network_mode", "pid", "ipc", "userns_mode")],
    }
    if "vllm" in service.get("image", ""):
        rules["no telemetry"] = env.get("DO_NOT_TRACK") == "1" and env.get("HF_HUB_OFFLINE") == "1"
        rules["HOME and USER"] = bool(env.get("HOME")) and bool(env.get("USER"))
    return [f"breaks {rule}" for rule, kept in rules.items() if not kept and (name, rule) not in EXCEPTIONS]


def _dangling(service: Model, model: Model) -> list[str]:
    found: list[str] = []
    for key in ("network_mode", "pid", "ipc"):
        kind, _, target = str(service.get(key, "")).partition(":")
        if kind == "service" and target not in model["services"]:
            found.append(f"{key} of service {target}, which is not there")
    found += [
        f"waits for {name}, which is not there"
        for name in service.get("depends_on", {})
        if name not in model["services"]
    ]
    found += [
        f"network {name}, which is not there" for name in service.get("networks", {}) if name not in model["networks"]
    ]
    for mount in service.get("volumes", []):
        if mount["type"] == "volume" and mount["source"] not in model.get("volumes", {}):
            found.append(f"volume {mount['source']}, which is not there")
        if mount["type"] == "bind" and not mount["source"].startswith("/"):
            found.append(f"bind of {mount['source']}")
    for secret in service.get("secrets", []):
        if secret["source"] not in model.get("secrets", {}):
            found.append(f"secret {secret['source']}, which is not there")
    return found


def _bytes(value: Any) -> int:
    match = re.fullmatch(r"(\d+)([kmg]?)", str(value))
    return int(match[1]) * {"": 1, "k": 2**10, "m": 2**20, "g": 2**30}[match[2]] if match else 0


@pytest.fixture
def model(compose: Version, checkout: Checkout, request: pytest.FixtureRequest) -> Model:
    return compose.config(checkout(request.param, KV_UID="4321", KV_GID="1234"))


@pytest.mark.parametrize("model", STACKS, ids=ids, indirect=True)
def test_every_stack_is_loopback_only_hardened_and_whole(model: Model) -> None:
    assert problems(model) == []


@pytest.mark.parametrize("files", STACKS, ids=ids)
def test_services_and_networks_are_those_of_the_layers(compose: Version, checkout: Checkout, files: list[Path]) -> None:
    services = compose.config(checkout(files))["services"]
    names = {path.stem for path in files}
    watched = "observability" in names
    expected = (
        {"vllm"}
        | ({"lmcache", "proxy"} if "lmcache" in names else set())
        | ({"ns"} if "nvidia-lmcache" in names else set())
        | ({"otlp", "otelcol", "prometheus", "alertmanager", "traces", "node-exporter"} if watched else set())
        | ({"grafana"} if "grafana" in names else set())
        | ({"gpu-exporter"} if "gpu-metrics" in names else set())
        | ({"engine"} if "engine" in names else set())
    )
    assert set(services) == expected
    networks = {name: sorted(service.get("networks") or {}) for name, service in services.items()}
    if "lmcache" not in names:
        assert networks == {"vllm": ["front"]}
        return
    assert networks["vllm"] == ["front", "kv"]
    remote = {"path-a", "path-b"} & names
    assert networks["lmcache"] == (["kv", "store"] if remote else ["kv"])
    if "engine" in names:
        assert networks["engine"] == ["engine", "mgmt", "store"]
    if watched:
        # Nobody but these two is on the network of ZMQ, and of LMCache's L2: what they push goes over a socket.
        assert networks["otlp"] == networks["otelcol"] == networks["node-exporter"] == ["obs"]
        assert networks["prometheus"] == ["front", "mgmt", "obs"]
    assert networks["proxy"] == ["mgmt"]
    assert not services["lmcache"].get("ports"), "neither ZMQ nor LMCache's HTTP is ever published"
    holders = {n for n, s in services.items() if any(m.get("source") == "lmcache-http" for m in s.get("volumes", []))}
    assert holders == {"lmcache", "proxy"}


def test_zmq_lives_on_an_internal_network(compose: Version, checkout: Checkout) -> None:
    model = compose.config(checkout(_stack("cpu")))
    assert model["networks"]["kv"]["internal"] is True
    shm = model["volumes"]["shm"]
    assert shm["driver_opts"]["o"] == "size=1500000000,mode=1777"
    assert "1500000000" in shm["name"], "another size must be another volume"
    mounts = {n: [m["target"] for m in s["volumes"] if m["source"] == "shm"] for n, s in model["services"].items()}
    assert mounts == {"vllm": ["/dev/shm"], "lmcache": ["/dev/shm"], "proxy": []}


def test_the_disk_layer_hands_the_stores_settings_to_lmcache_alone(compose: Version, checkout: Checkout) -> None:
    knobs = {
        "KV_STORE_CODEC": "zstd", "KV_STORE_IO": "direct", "KV_STORE_NATIVE": "off", "KV_STORE_LOAD_DEADLINE": "3.5",
        "KV_STORE_FREE_FLOOR_GB": "0.5", "KV_CACHE_ALLOW_FS": "tmpfs",
    }  # fmt: skip
    services = compose.config(checkout(_stack("cpu"), **knobs))["services"]
    env = services["lmcache"]["environment"]
    assert env["KV_L2"] == "store" and env.items() >= knobs.items()
    found = StoreSettings.from_env({**env, "KV_STORE_CLASSES": ""})
    assert (str(found.root), found.capacity) == ("/cache/store", int(MANAGED["KV_PLAN_L2_BYTES"]))
    assert (found.codec, found.io, found.load_deadline_s, found.free_floor) == ("zstd", "direct", 3.5, 1 << 29)
    mounts = {mount["target"]: mount for mount in services["lmcache"]["volumes"]}
    assert mounts["/cache"]["source"] == MANAGED["KV_CACHE_PATH"] and not mounts["/cache"].get("read_only")
    table = mounts[env["KV_STORE_CLASSES"]]
    assert table["source"] == MANAGED["KV_CLASSES_PATH"] and table["read_only"] is True
    for name in ("vllm", "proxy"):
        assert not [key for key in services[name]["environment"] if key.startswith("KV_STORE")]


def test_the_disk_layers_defaults_are_those_of_the_settings(compose: Version, checkout: Checkout) -> None:
    env = compose.config(checkout(_stack("cpu")))["services"]["lmcache"]["environment"]
    knobs = [key for key in USER_KEYS if key.startswith("KV_STORE_") and key != "KV_STORE_CLASSES"]
    assert {key: env[key] for key in knobs} == {key: USER_KEYS[key] for key in knobs}
    bare = [path for path in _stack("cpu") if path.stem != "nvme"]
    ram_only = compose.config(checkout(bare))["services"]["lmcache"]["environment"]
    assert ram_only["KV_L2"] == "" and not [key for key in ram_only if key.startswith("KV_STORE")]


def test_a_path_hands_lmcache_an_address_and_a_folder_of_secrets_and_no_secret(
    compose: Version, checkout: Checkout
) -> None:
    knobs = {"KV_ENGINE_DEADLINE": "3.5", "KV_ENGINE_CONNECTIONS": "7"}
    model = compose.config(checkout(_stack("cpu", storage=("engine", "path-a")), **knobs))
    lmcache, engine = model["services"]["lmcache"], model["services"]["engine"]
    env = lmcache["environment"]
    assert env["KV_L2"] == "remote" and not [key for key in env if key.startswith("KV_STORE")]
    found = RemoteSettings.from_env(env)
    assert (found.url.geturl(), found.deadline_s, found.connections) == ("http://engine:9130", 3.5, 7)
    assert str(found.token_file) == "/run/kvstrata-l2/token" and not found.token
    assert _mounts(lmcache)["/run/kvstrata-l2"] == ("/data/secrets/engine-client", True)
    assert _mounts(engine)["/run/kvstrata-engine"] == ("/data/secrets/engine", True)
    assert _mounts(engine)["/data"] == ("/data/engine", False)
    assert "/run/kvstrata-l2" not in {**_mounts(engine), **_mounts(model["services"]["vllm"])}
    assert [port["published"] for port in engine["ports"]] == ["9130"], "RESP is not published"


def test_the_engines_environment_is_what_the_engine_reads(compose: Version, checkout: Checkout) -> None:
    settings_ = pytest.importorskip("kvstrata.engine.settings")
    model = compose.config(checkout(_stack("cpu", storage=("engine", "path-a")), KV_ENGINE_DURABILITY="fsync"))
    env = model["services"]["engine"]["environment"]
    found = settings_.EngineSettings.from_env(env)
    assert (str(found.root), found.capacity, found.hot) == ("/data/engine", int(MANAGED["KV_PLAN_L2_BYTES"]), 0)
    assert (found.http, found.resp, found.durability) == ("0.0.0.0:9130", "0.0.0.0:6379", "fsync")
    assert str(found.tokens_file) == "/run/kvstrata-engine/tokens" and found.memory == 1 << 29
    source = (ROOT / "src/kvstrata/engine/settings.py").read_text()
    for key in env:
        assert not key.startswith("KV_ENGINE_") or f'"{key.removeprefix("KV_ENGINE_")}"' in source, (
            f"nobody reads {key}"
        )


def test_path_b_hands_lmcache_a_host_and_the_name_of_a_password_file(compose: Version, checkout: Checkout) -> None:
    env = compose.config(checkout(_stack("cpu", storage=("engine", "path-b"))))["services"]["lmcache"]["environment"]
    found = {key: value for key, value in env.items() if key.startswith(("KV_RESP", "KV_L2", "KV_REMOTE"))}
    assert found == {
        "KV_L2": "resp", "KV_RESP_HOST": "engine", "KV_RESP_PORT": "6379", "KV_RESP_WORKERS": "4",
        "KV_RESP_USER": "lmcache",
        "KV_RESP_PASSWORD_FILE": "/run/kvstrata-l2/token",
    }  # fmt: skip


def test_a_switch_of_the_path_changes_lmcache_and_nothing_else(compose: Version, checkout: Checkout) -> None:
    def services(*storage: str) -> dict[str, Any]:
        return dict(compose.config(checkout(_stack("cpu", storage=storage)))["services"])

    a, b, nvme = services("engine", "path-a"), services("engine", "path-b"), services("nvme")
    assert {name for name in a if a[name] != b[name]} == {"lmcache"}
    assert {name for name in nvme if nvme[name] != a[name]} == {"lmcache"} and set(a) - set(nvme) == {"engine"}


@pytest.mark.parametrize(("internal", "storage"), [("true", ("engine", "path-a")), ("false", ("path-b",))])
def test_the_way_to_an_engine_elsewhere_is_another_network_than_the_closed_one(
    compose: Version, checkout: Checkout, internal: str, storage: tuple[str, ...]
) -> None:
    root = checkout(_stack("cpu", storage=storage))
    env = (root / ".env").read_text().replace("KV_STORE_NET_INTERNAL=true", f"KV_STORE_NET_INTERNAL={internal}")
    (root / ".env").write_text(env)
    model = compose.config(root)
    assert model["networks"]["store"].get("internal", False) is (internal == "true")
    assert model["networks"]["store"]["name"] == f"kvstrata_store_internal-{internal}"
    assert model["networks"]["kv"]["internal"] is True


def test_the_users_argv_is_the_same_with_and_without_the_cache(compose: Version, checkout: Checkout) -> None:
    extra = "--max-num-seqs 4 --note 'two words'"
    plain = compose.config(checkout(_stack("cpu", persist=False), KV_VLLM_EXTRA_ARGS=extra))["services"]["vllm"]
    cached = compose.config(checkout(_stack("cpu"), KV_VLLM_EXTRA_ARGS=extra))["services"]["vllm"]
    assert plain["entrypoint"] == ["vllm"]
    assert cached["entrypoint"] == ["kvstrata-launch", "vllm"]
    assert plain["command"] == cached["command"]
    argv = [part.replace("$$", "$") for part in plain["command"]]
    assert argv == [
        "serve", "/model", "--served-model-name", "tiny", "--host", "0.0.0.0", "--port", "8000",
        "--dtype", "float32", "--hf-overrides", '{"a": "it\'s $HOME"}', "--max-num-seqs", "4", "--note", "two words",
    ]  # fmt: skip
    assert not [key for key in plain["environment"] if key.startswith("KV_")], "plain vLLM knows nothing of kvstrata"


def test_device_layers_reserve_gpus_and_nothing_else_does(compose: Version, checkout: Checkout) -> None:
    for device in layers.DEVICE_LAYERS:
        for name, service in compose.config(checkout(_stack(device)))["services"].items():
            reserved = service.get("deploy", {}).get("resources", {}).get("reservations", {}).get("devices")
            assert bool(reserved) == (device != "cpu" and name in ("vllm", "lmcache"))
            assert ("memlock" in service.get("ulimits", {})) == bool(reserved)
            assert (service.get("pid") == service.get("ipc") == "service:ns") == bool(reserved)


def test_the_environment_wins_over_the_file_as_in_settings(compose: Version, checkout: Checkout) -> None:
    root = checkout(_stack("cpu"), KV_PORT="8001")
    ports = compose.config(root, KV_PORT="8002")["services"]["vllm"]["ports"]
    assert [port["published"] for port in ports] == ["8002"]
    assert settings.load(root, {"KV_PORT": "8002"}).port == 8002
    assert compose.config(root, COMPOSE_PROJECT_NAME="other")["name"] == "other"


def test_a_stack_that_nobody_planned_is_refused_with_the_way_out(compose: Version, checkout: Checkout) -> None:
    root = checkout(_stack("cpu"))
    text = (root / ".env").read_text().replace(f"KV_IMAGE_VLLM={MANAGED['KV_IMAGE_VLLM']}", "KV_IMAGE_VLLM=")
    (root / ".env").write_text(text)
    done = compose.run(root, "config")
    assert done.returncode != 0
    assert "run make up" in done.stderr


@pytest.mark.parametrize(
    "line",
    [
        "    ports: ['9:9']",
        "    ports: ['0.0.0.0:9:9']",
        "    user: root",
        "    read_only: false",
        "    privileged: true",
        "    cap_add: [NET_ADMIN]",
        "    pid: host",
        "    network_mode: host\n    networks: !reset null",
        "    mem_limit: 0",
        "    logging: !reset null",
        "    healthcheck: !reset null",
        "    init: false",
        "    volumes: ['/var/run/docker.sock:/var/run/docker.sock']",
        "    security_opt: !reset null",
    ],
)
def test_a_planted_violation_is_caught(compose: Version, checkout: Checkout, line: str) -> None:
    files = _stack("cpu")
    root = checkout(files, KV_UID="4321", KV_GID="1234")
    (root / "compose" / "planted.yaml").write_text(f"services:\n  vllm:\n{line}\n")
    env = (root / ".env").read_text()
    (root / ".env").write_text(re.sub(r"(COMPOSE_FILE=.*)", r"\1:compose/planted.yaml", env))
    assert problems(compose.config(root)) != []


def _mounts(service: Model) -> dict[str, tuple[str, bool]]:
    return {m["target"]: (m["source"], bool(m.get("read_only"))) for m in service["volumes"]}


def _stack(device: str, persist: bool = True, storage: tuple[str, ...] = ("nvme",)) -> list[Path]:
    own, extra = layers.DEVICE_LAYERS[device]
    names = ["vllm", "lmcache", *storage, own, *extra] if persist else ["vllm", own]
    return [ROOT / "compose" / f"{name}.yaml" for name in names]
