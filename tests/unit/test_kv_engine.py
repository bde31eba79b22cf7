"""What the command line decides about the KV engine: addresses, secrets, what is said of it."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from kvstrata.deploy import envfile, kv_engine, memory, settings, up
from kvstrata.deploy.errors import KvError
from kvstrata.deploy.status_tiers import l2_line, tiers_of
from kvstrata.doors.remote_wire import PREFIX
from kvstrata.launch import lmcache
from kvstrata.launch.config import ConfigError, Paths
from kvstrata.proof.docker_control import kv_engine as asked_by_verify
from kvstrata.proof.phases import _engine_problems
from kvstrata.proof.prom import Samples

REPOSITORY = Path(__file__).parents[2]
A, B = {"KV_LAYERS": "engine,path-a"}, {"KV_LAYERS": "engine,path-b"}


def load(root: Path, **env: str) -> settings.Settings:
    return settings.load(root, env)


@pytest.mark.parametrize(
    ("env", "found"),
    [
        ({"KV_LAYERS": "path-a"}, "no engine to reach"),
        ({"KV_LAYERS": "path-b", "KV_ENGINE_URL": "http://x:1"}, "no engine to reach"),
        ({**A, "KV_ENGINE_URL": "http://x:1"}, "KV_ENGINE_URL=http://x:1"),
        ({**B, "KV_RESP_URL": "redis://x:1"}, "KV_RESP_URL=redis://x:1"),
    ],
)
def test_a_path_to_no_engine_or_to_two_is_refused(tmp_path: Path, env: dict[str, str], found: str) -> None:
    with pytest.raises(KvError) as refused:
        kv_engine.check(load(tmp_path, **env))
    assert found in refused.value.found
    kv_engine.check(load(tmp_path, **env, KV_PERSIST="0"))


@pytest.mark.parametrize(
    ("env", "address", "resp", "closed"),
    [
        (A, "http://engine:9130", ("engine", "6379", "lmcache", "token"), "true"),
        ({"KV_LAYERS": "nvme"}, "http://engine:9130", ("engine", "6379", "lmcache", "token"), "true"),
        ({"KV_LAYERS": "path-a", "KV_ENGINE_URL": "https://kv.example:9/x/"}, "https://kv.example:9/x",
         ("engine", "6379", "lmcache", "token"), "false"),
        ({"KV_LAYERS": "path-b", "KV_RESP_URL": "redis://r.example:6380"}, "http://engine:9130",
         ("r.example", "6380", "", "resp_password"), "false"),
        ({"KV_LAYERS": "path-b", "KV_RESP_URL": "redis://me@r.example:6380"}, "http://engine:9130",
         ("r.example", "6380", "me", "resp_password"), "false"),
    ],
)  # fmt: skip
def test_lmcache_is_sent_to_the_engine_that_was_meant(
    tmp_path: Path, env: dict[str, str], address: str, resp: tuple[str, ...], closed: str
) -> None:
    found = kv_engine.managed(load(tmp_path, **env))
    assert found["KV_ENGINE_ADDRESS"] == address and found["KV_STORE_NET_INTERNAL"] == closed
    assert tuple(found[f"KV_RESP_{key}"] for key in ("HOST", "PORT", "USER", "SECRET")) == resp


@pytest.mark.parametrize("url", ["redis://u:secret@x:1", "rediss://x:1", "redis://x", "http://x:1"])
def test_a_resp_address_without_a_way_to_it_is_refused(tmp_path: Path, url: str) -> None:
    with pytest.raises(KvError, match="KV_RESP_URL"):
        load(tmp_path, KV_RESP_URL=url)


def test_the_token_is_made_once_and_the_engine_gets_its_digest_alone(tmp_path: Path) -> None:
    current = load(tmp_path, **A)
    made = envfile.ensure_secrets(current)
    token = kv_engine.token(current)
    assert len(token) >= 32
    tokens = (kv_engine.server_dir(current) / "tokens").read_text()
    assert tokens.splitlines()[-1] == f"stack rw+metrics default sha256:{hashlib.sha256(token.encode()).hexdigest()}"
    assert token not in tokens
    assert all(path.stat().st_mode & 0o777 == 0o600 for path in made)
    assert {path.parent.stat().st_mode & 0o777 for path in made} == {0o700}
    assert envfile.ensure_secrets(current) == [] and kv_engine.token(current) == token


def test_the_engine_takes_the_token_that_was_made(tmp_path: Path) -> None:
    auth = pytest.importorskip("kvstrata.engine.auth")
    current = load(tmp_path, **A)
    envfile.ensure_secrets(current)
    tokens = auth.Tokens(kv_engine.server_dir(current) / "tokens")
    grant = tokens.check(kv_engine.token(current).encode())
    assert grant is not None and grant.write and grant.metrics and not grant.admin and grant.tenant == "default"
    assert tokens.check(b"x" * 43) is None


def test_a_password_of_a_redis_is_the_users_to_write_and_never_the_engines_token(tmp_path: Path) -> None:
    envfile.ensure_secrets(load(tmp_path, **B))
    current = load(tmp_path, KV_LAYERS="path-b", KV_RESP_URL="redis://x:1")
    assert [path.name for path in envfile.ensure_secrets(current)] == ["resp_password"]
    assert (kv_engine.client_dir(current) / "resp_password").read_text() == ""


FOREIGN = {"KV_LAYERS": "path-a", "KV_ENGINE_URL": "http://x:1"}


def sent(current: settings.Settings) -> Path:
    """The file whose token the door of path A sends to where .env sends it."""
    layer = yaml.safe_load((REPOSITORY / "compose" / "path-a.yaml").read_text())["services"]["lmcache"]
    (mount,) = layer["volumes"]
    seen = layer["environment"]["KV_REMOTE_TOKEN_FILE"]
    for key, value in kv_engine.managed(current).items():
        seen = seen.replace(f"${{{key}:?run make up}}", value)
    return kv_engine.client_dir(current) / Path(seen).relative_to(mount["target"])


def test_the_token_of_this_stacks_engine_never_goes_to_another(tmp_path: Path) -> None:
    own = load(tmp_path, **A)
    envfile.ensure_secrets(own)
    token = kv_engine.token(own)
    assert sent(own).read_text().strip() == token
    foreign = load(tmp_path, **FOREIGN)
    envfile.ensure_secrets(foreign)
    assert sent(foreign).read_text() == "" and sent(foreign).stat().st_mode & 0o777 == 0o600
    sent(foreign).write_text("of-the-other-engine\n")
    assert envfile.ensure_secrets(foreign) == [] and envfile.ensure_secrets(own) == []
    assert sent(foreign).read_text() == "of-the-other-engine\n"
    assert sent(own).read_text().strip() == kv_engine.token(own) == token, "a switch back needs nothing"


@pytest.mark.parametrize("content", [None, "", " \n", "two words", "ü\n"])
def test_an_engine_elsewhere_without_a_token_of_its_own_is_refused(tmp_path: Path, content: str | None) -> None:
    envfile.ensure_secrets(load(tmp_path, **A))
    current = load(tmp_path, **FOREIGN)
    if content is not None:
        sent(current).write_text(content)
    with pytest.raises(KvError) as refused:
        kv_engine.check(current)
    assert str(sent(current)) in refused.value.found and "KV_ENGINE_URL=http://x:1" in refused.value.found
    assert "token" in refused.value.needed and str(sent(current)) in refused.value.fix
    kv_engine.check(load(tmp_path, **FOREIGN, KV_PERSIST="0"))
    sent(current).write_text("of-the-other-engine\n")
    kv_engine.check(current)


def test_an_address_elsewhere_that_no_layer_uses_leaves_the_own_engines_token_alone(tmp_path: Path) -> None:
    current = load(tmp_path, **B, KV_ENGINE_URL="http://x:1")
    envfile.ensure_secrets(current)
    assert len(kv_engine.token(current)) >= 32


def test_an_empty_token_of_before_becomes_one_when_this_stack_gets_an_engine(tmp_path: Path) -> None:
    current = load(tmp_path, **A)
    kv_engine.client_dir(current).mkdir(parents=True)
    (kv_engine.client_dir(current) / "token").write_text("")
    envfile.ensure_secrets(current)
    token = kv_engine.token(current)
    assert len(token) >= 32
    assert hashlib.sha256(token.encode()).hexdigest() in (kv_engine.server_dir(current) / "tokens").read_text()


def test_without_these_layers_no_token_is_made(tmp_path: Path) -> None:
    envfile.ensure_secrets(load(tmp_path))
    assert sorted(path.name for path in (tmp_path / "data/secrets").iterdir()) == ["salt_key"]


# -- plan and up -----------------------------------------------------------------------------------------------------


def test_the_engines_limit_holds_its_hot_tier_and_what_is_in_flight(tmp_path: Path) -> None:
    hot, limit = memory._engine(load(tmp_path, **A, KV_ENGINE_HOT_GB="2"), [])
    assert hot == 2 << 30 and limit >= hot + memory.ENGINE_BUFFERS + (256 << 20)
    assert memory._engine(load(tmp_path), []) == (0, 0)
    assert memory._engine(load(tmp_path, **A, KV_PERSIST="0"), []) == (0, 0)


def test_with_the_engine_the_disk_is_its_own_folder(tmp_path: Path) -> None:
    current = load(tmp_path, **A, KV_ENGINE_DIR="fast")
    assert (current.l2_dir, current.l2_knob) == (tmp_path / "fast", "KV_ENGINE_DIR")
    envfile.ensure_data(current)
    assert (tmp_path / "fast").stat().st_mode & 0o777 == 0o700 and not current.cache_dir.exists()
    assert load(tmp_path).l2_dir == tmp_path / "data" / "cache"


@pytest.mark.parametrize(
    ("before", "now", "said"),
    [
        ("nvme", "engine,path-a", "the KV engine by HTTP (path A) now, no longer in the local disk"),
        ("engine path-a", "engine,path-b", "RESP (path B) now, no longer in the KV engine by HTTP"),
        ("engine path-a", "nvme", "the local disk now"),
        ("engine path-a", "engine,path-a", ""),
        ("", "engine,path-a", ""),
    ],
)
def test_up_says_that_hits_begin_at_nothing_where_blocks_are_kept_elsewhere(
    tmp_path: Path, before: str, now: str, said: str
) -> None:
    files = ":".join(f"compose/{name}.yaml" for name in ("vllm", "lmcache", *before.split()))
    current = replace(load(tmp_path, KV_LAYERS=now), managed={"COMPOSE_FILE": files})
    assert said in up._moved(current) and bool(up._moved(current)) is bool(said)


@pytest.mark.parametrize(
    ("stamp", "known"),
    [(None, []), ('{"first_proof": "x"}', ["", "nvme"]), ('{"storage": ["path-a"]}', ["path-a"]), ("rubbish", [])],
)
def test_each_place_of_the_blocks_is_proven_in_full_once(tmp_path: Path, stamp: str | None, known: list[str]) -> None:
    file = tmp_path / "proved.json"
    if stamp is not None:
        file.write_text(stamp)
    assert up._proved(file) == known


# -- the launcher ----------------------------------------------------------------------------------------------------

BASE = {"KV_CHUNK_SIZE": "256", "KV_PLAN_L1_GB": "1"}


def adapter(env: dict[str, str], tmp_path: Path) -> dict[str, object]:
    argv = lmcache.build_argv({**BASE, **env}, Paths(cache=tmp_path))
    return dict(json.loads(argv[argv.index("--l2-adapter") + 1]))


def test_path_a_tells_lmcache_a_class_and_nothing_that_it_could_print(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("secret-token\n")
    env = {"KV_L2": "remote", "KV_REMOTE_URL": "http://engine:9130", "KV_REMOTE_TOKEN_FILE": str(token)}
    assert adapter(env, tmp_path) == {
        "type": "native_plugin", "module_path": "kvstrata.doors.l2_remote", "class_name": "KvstrataRemote",
        "adapter_params": {},
    }  # fmt: skip


def test_path_b_gives_the_password_by_the_environment_of_the_server_alone(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("secret-token\n")
    env = {
        "KV_L2": "resp", "KV_RESP_HOST": "engine", "KV_RESP_PORT": "6379", "KV_RESP_WORKERS": "3",
        "KV_RESP_USER": "lmcache", "KV_RESP_PASSWORD_FILE": str(tmp_path / "token"),
    }  # fmt: skip
    assert adapter(env, tmp_path) == {"type": "resp", "host": "engine", "port": 6379, "num_workers": 3}
    child = lmcache.child_env(env)
    assert (child["LMCACHE_RESP_USERNAME"], child["LMCACHE_RESP_PASSWORD"]) == ("lmcache", "secret-token")
    (tmp_path / "token").write_text("")
    assert "LMCACHE_RESP_USERNAME" not in lmcache.child_env(env), "a Redis without a password takes no AUTH"


@pytest.mark.parametrize(
    ("env", "said"),
    [
        ({"KV_L2": "remote"}, "KV_REMOTE_URL"),
        ({"KV_L2": "remote", "KV_REMOTE_URL": "http://e:1", "KV_REMOTE_TOKEN_FILE": "/nowhere"}, "token file /nowhere"),
        (
            {"KV_L2": "remote", "KV_REMOTE_URL": "https://e:1", "KV_REMOTE_CA_FILE": "/nowhere.pem"},
            "CA file /nowhere.pem: No such file",
        ),
        ({"KV_L2": "resp"}, "KV_RESP_HOST"),
        ({"KV_L2": "other"}, "needed store, remote, resp or nothing"),
    ],
)
def test_what_cannot_work_is_the_failed_state_and_no_restart(tmp_path: Path, env: dict[str, str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        adapter(env, tmp_path)


# -- status and the proof --------------------------------------------------------------------------------------------

SERVER = {"storage_manager": {"l2_adapters": [{"type": "KvstrataRemote"}]}}
STATS = {"resident_bytes": 3 << 30, "capacity_bytes": 8 << 30, "total_refs": 12, "get_hits": 3, "get_misses": 1}


def line(path: str, rows: tuple[tuple[str, dict[str, str], float], ...] = (), stats: object = STATS) -> str:
    return l2_line(tiers_of(SERVER, Samples(rows), Samples(()), None, path, stats))  # type: ignore[arg-type]


def test_status_says_how_full_the_engine_is_and_which_wire_is_checked() -> None:
    assert line("path-a") == (
        "3.00 GiB of 8.00 GiB, 12 blocks, hit rate 75 %; path A: HTTP, each block checked from end to end"
    )
    assert "NOT checked from end to end" in line("path-b")
    assert line("path-a", stats=None) == "path A: HTTP, each block checked from end to end"
    assert "ENGINE DOES NOT ANSWER" in line("path-a", (("kvstrata_remote_down", {}, 1.0),))


@pytest.mark.parametrize(("given", "chunks", "good"), [(11, 11, True), (22, 11, True), (0, 11, False), (10, 11, False)])
def test_the_engine_must_have_given_the_blocks_that_lmcache_says_came_from_l2(
    given: int, chunks: int, good: bool
) -> None:
    assert (_engine_problems(given, chunks) == []) is good


def test_verify_asks_the_engine_by_the_names_that_path_a_uses(tmp_path: Path) -> None:
    for env, prefix in ((A, PREFIX), (B, "")):
        client = asked_by_verify(load(tmp_path, **env))
        assert client is not None and client._prefix == prefix
        client.close()
    assert asked_by_verify(load(tmp_path)) is None
    elsewhere = load(tmp_path, KV_LAYERS="path-a", KV_ENGINE_URL="http://x:1")
    assert asked_by_verify(elsewhere) is None, "another machine's counters are others' as well"
