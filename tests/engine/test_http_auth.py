"""Who may do what: tokens, scopes, tenants, prefixes, and their change while the engine runs."""

from __future__ import annotations

import hashlib
import json
import os
import ssl
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
import trustme

from kvstrata.deploy.knobs import MANAGED_KEYS, USER_KEYS
from kvstrata.engine.auth import AuthError, Tokens, is_loopback
from kvstrata.engine.check import CheckError, check
from kvstrata.engine.settings import _OTHERS, _OTHERS_BEGIN, EngineSettings
from tests.certificates import certify, trust
from tests.engine.process import READER, ROOT, TOKENS, WRITER, EngineProcess, until
from tests.engine.wire import Wire

ADMIN = "0123456789abcdef-admin"
OTHER = "0123456789abcdef-other"
PART = "0123456789abcdef-part"
SCRAPER = "0123456789abcdef-scraper"
BOTH = "0123456789abcdef-both"
FILE = f"""# who scope tenant [prefix] token
{TOKENS}
admin admin default sha256:{hashlib.sha256(ADMIN.encode()).hexdigest()}
other rw tenant-b sha256:{hashlib.sha256(OTHER.encode()).hexdigest()}
part rw default model-a@ {PART}
scraper metrics default {SCRAPER}
both rw+metrics default {BOTH}
"""


@pytest.fixture
def tokens(tmp_path: Path) -> Path:
    """A file with all kinds of tokens."""
    file = tmp_path / "tokens"
    file.write_text(FILE)
    return file


@pytest.fixture
def guarded(engine_process: Callable[..., EngineProcess], tokens: Path) -> EngineProcess:
    """An engine that wants tokens."""
    return engine_process(TOKENS_FILE=tokens)


def ask(engine: EngineProcess, token: str, method: str, path: str, body: bytes | None = None) -> int:
    """The status of one request."""
    with Wire(engine.http, token) as wire:
        return wire.ask(method, path, body).status


@pytest.mark.parametrize("path", ["/kv/a", "/kv/stats", "/metrics", "/openapi.json", "/nope", "/kv/"])
def test_without_a_token_everything_is_401_before_anything_else(guarded: EngineProcess, path: str) -> None:
    with Wire(guarded.http) as wire:
        answer = wire.ask("GET", path)
        assert (answer.status, answer.headers["www-authenticate"]) == (401, "Bearer")
        assert answer.json["error"] == "Unauthorized"
        assert wire.ask("PUT", path, b"x").status == 401


def test_health_needs_no_token(guarded: EngineProcess) -> None:
    assert [ask(guarded, "", "GET", path) for path in ("/healthz", "/readyz")] == [200, 200]


def test_only_the_exact_token_in_the_right_scheme_is_taken(guarded: EngineProcess) -> None:
    good = hashlib.sha256(ADMIN.encode()).hexdigest()
    with Wire(guarded.http) as wire:
        for header, status in (
            (f"Bearer {WRITER}", 200), (f"bearer {WRITER}", 200), (f"Bearer {WRITER}x", 401),
            (f"Bearer {WRITER[:-1]}", 401), (f"Basic {WRITER}", 401),
            (WRITER, 401), ("Bearer", 401), ("Bearer ", 401), (f"Bearer {good}", 401),
            (f"Bearer {ADMIN}", 200),
        ):  # fmt: skip
            assert wire.ask("GET", "/kv/stats", Authorization=header).status == status, header


def test_a_connection_does_not_keep_what_a_former_request_was_allowed(guarded: EngineProcess) -> None:
    with Wire(guarded.http) as wire:
        assert wire.ask("PUT", "/kv/a", b"x", Authorization=f"Bearer {WRITER}").status == 201
        assert wire.ask("GET", "/kv/a").status == 401
        assert wire.ask("DELETE", "/kv/a", Authorization=f"Bearer {READER}").status == 403


def test_a_reader_may_look_and_change_nothing(guarded: EngineProcess) -> None:
    ask(guarded, WRITER, "PUT", "/kv/a", b"x")
    keys = json.dumps({"keys": ["a"]}).encode()
    for method, path, body, status in (
        ("GET", "/kv/a", None, 200), ("HEAD", "/kv/a", None, 200), ("GET", "/kv/a/exists", None, 200),
        ("GET", "/kv/stats", None, 200), ("POST", "/kv/batch/exists", keys, 200), ("GET", "/kv/fork/stats", None, 200),
        ("PUT", "/kv/b", b"x", 403), ("DELETE", "/kv/a", None, 403), ("PUT", "/kv/version/9", None, 403),
        ("POST", "/kv/snapshot", keys, 403), ("POST", "/kv/snapshot/1/fork", None, 403),
        ("DELETE", "/kv/snapshot/1", None, 403), ("PUT", "/kv/branch/1/a", b"x", 403),
        ("DELETE", "/kv/branch/1", None, 403),
    ):  # fmt: skip
        assert ask(guarded, READER, method, path, body) == status, (method, path)


def test_tenants_do_not_see_each_other(guarded: EngineProcess) -> None:
    ask(guarded, WRITER, "PUT", "/kv/mine", b"secret")
    assert ask(guarded, OTHER, "GET", "/kv/mine") == 404
    assert ask(guarded, OTHER, "DELETE", "/kv/mine") == 404
    assert ask(guarded, OTHER, "PUT", "/kv/mine", b"secret") == 201  # not: 200, which would tell that it is there
    with Wire(guarded.http, OTHER) as wire:
        assert wire.ask("GET", "/kv/mine").body == b"secret"
        assert wire.ask("GET", "/kv/stats").json["total_refs"] == 1
        assert wire.ask("GET", "/kv/stats").json["dedup_hits"] == 0
        keys = json.dumps({"keys": ["mine"]}).encode()
        snapshot = wire.ask("POST", "/kv/snapshot", keys).json["snapshot"]
    assert ask(guarded, WRITER, "POST", f"/kv/snapshot/{snapshot}/fork") == 404
    with Wire(guarded.http, ADMIN) as wire:
        assert wire.ask("GET", "/kv/stats").json["total_refs"] == 2


@pytest.mark.parametrize(
    ("token", "status"),
    [(SCRAPER, 200), (BOTH, 200), (ADMIN, 200), (WRITER, 403), (READER, 403), (OTHER, 403), (PART, 403)],
)
def test_figures_of_all_tenants_are_for_those_who_are_entitled(guarded: EngineProcess, token: str, status: int) -> None:
    assert ask(guarded, token, "GET", "/metrics") == status


def test_the_figures_are_everybodys_where_there_is_one_tenant(
    engine_process: Callable[..., EngineProcess], tmp_path: Path
) -> None:
    (tmp_path / "tokens").write_text(f"{TOKENS}scraper metrics elsewhere {SCRAPER}\n")
    engine = engine_process(TOKENS_FILE=tmp_path / "tokens")
    assert [ask(engine, token, "GET", "/metrics") for token in (WRITER, READER, SCRAPER)] == [200] * 3


def test_a_token_for_figures_reads_and_writes_nothing_else(guarded: EngineProcess) -> None:
    ask(guarded, WRITER, "PUT", "/kv/a", b"x")
    for method, path, body in (
        ("GET", "/kv/a", None), ("HEAD", "/kv/a", None), ("GET", "/kv/a/exists", None), ("GET", "/kv/stats", None),
        ("PUT", "/kv/b", b"x"), ("DELETE", "/kv/a", None), ("GET", "/kv/fork/stats", None),
        ("GET", "/kv/version", None), ("POST", "/kv/batch/exists", json.dumps({"keys": ["a"]}).encode()),
    ):  # fmt: skip
        assert ask(guarded, SCRAPER, method, path, body) == 403, (method, path)
    assert ask(guarded, BOTH, "GET", "/kv/a") == 200


def test_a_token_of_64_hex_digits_is_a_token(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    token = hashlib.sha256(b"openssl rand -hex 32").hexdigest()
    (tmp_path / "tokens").write_text(f"a rw t {token}\nb rw t sha256:{hashlib.sha256(b'x' * 20).hexdigest()}\n")
    tokens = Tokens(tmp_path / "tokens")
    assert tokens.check(token.encode()) is not None
    assert tokens.check(b"x" * 20) is not None
    assert tokens.check(hashlib.sha256(b"x" * 20).hexdigest().encode()) is None
    assert not caplog.records


def test_a_token_with_a_prefix_reaches_no_other_keys(guarded: EngineProcess) -> None:
    ask(guarded, WRITER, "PUT", "/kv/model-b%40x", b"x")
    assert ask(guarded, PART, "PUT", "/kv/model-a%40x", b"x") == 201
    for method, path, body in (
        ("GET", "/kv/model-b%40x", None), ("HEAD", "/kv/model-b%40x", None), ("PUT", "/kv/model-b%40y", b"x"),
        ("DELETE", "/kv/model-b%40x", None), ("GET", "/kv/model-b%40x/exists", None), ("GET", "/kv/model-a", None),
        ("POST", "/kv/batch/exists", json.dumps({"keys": ["model-a@x", "model-b@x"]}).encode()),
        ("POST", "/kv/snapshot", json.dumps({"keys": ["model-b@x"]}).encode()),
        ("GET", "/kv/branch/1/model-b%40x", None),
    ):  # fmt: skip
        assert ask(guarded, PART, method, path, body) == 403, (method, path)


def test_tokens_rotate_while_a_connection_is_open(guarded: EngineProcess, tokens: Path) -> None:
    fresh = "fedcba9876543210-fresh"
    with Wire(guarded.http, WRITER) as old, Wire(guarded.http, fresh) as new:
        assert (old.ask("GET", "/kv/stats").status, new.ask("GET", "/kv/stats").status) == (200, 401)
        tokens.write_text(FILE + f"fresh rw default {fresh}\n")
        until(lambda: new.ask("GET", "/kv/stats").status == 200)
        assert old.ask("GET", "/kv/stats").status == 200
        tokens.write_text(f"fresh rw default {fresh}\n")
        until(lambda: old.ask("GET", "/kv/stats").status == 401)
        assert new.ask("GET", "/kv/stats").status == 200


def test_a_broken_file_leaves_the_tokens_of_before(guarded: EngineProcess, tokens: Path) -> None:
    tokens.write_text("half a li")
    until(lambda: ask(guarded, WRITER, "GET", "/kv/stats") == 200 and "stay in force" in guarded.log)
    tokens.unlink()
    assert ask(guarded, WRITER, "GET", "/kv/stats") == 200


def test_no_token_ever_stands_in_the_log(guarded: EngineProcess) -> None:
    ask(guarded, WRITER, "GET", "/kv/stats")
    ask(guarded, "a-wrong-token-that-is-secret", "GET", "/kv/stats")
    guarded.stop()
    assert WRITER not in guarded.log
    assert "a-wrong-token" not in guarded.log


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("a rw", "2 words"), ("a rw t p x y", "6 words"), ("a all t 0123456789abcdef", "scope 'all'"),
        ("a metrics+rw t 0123456789abcdef", "scope 'metrics"),
        ("a rw t short", "5 characters"), ("a rw t/u 0123456789abcdef", "tenant"), ("a rw t sha256:12", "characters"),
        ("", "no token"), ("# nothing", "no token"),
    ],
)  # fmt: skip
def test_a_wrong_file_is_refused_with_the_line(tmp_path: Path, line: str, says: str) -> None:
    file = tmp_path / "tokens"
    file.write_text(line)
    with pytest.raises(AuthError, match=says):
        Tokens(file)


def _refused(**knobs: object) -> str:
    env = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "KV_CACHE_ALLOW_FS": "tmpfs overlay fuse"}
    env |= {f"KV_ENGINE_{name}": str(value) for name, value in knobs.items()}
    done = subprocess.run(
        [sys.executable, "-m", "kvstrata.engine"], env=env, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 2, done.stderr
    return done.stderr


@pytest.mark.parametrize("address", ["0.0.0.0:0", "[::]:0", ":0"])
def test_an_address_that_others_reach_needs_tokens(tmp_path: Path, address: str) -> None:
    assert "KV_ENGINE_TOKENS_FILE" in _refused(ROOT=tmp_path, CAPACITY_BYTES=64 << 20, HTTP=address)


def test_a_wrong_setting_is_refused_with_its_name(tmp_path: Path) -> None:
    common = {"ROOT": tmp_path, "CAPACITY_BYTES": 64 << 20, "HTTP": "127.0.0.1:0"}
    assert "KV_ENGINE_HTTP=nowhere" in _refused(**{**common, "HTTP": "nowhere"})
    assert "KV_ENGINE_TOKENS_FILE" in _refused(**common, TOKENS_FILE=tmp_path / "none")
    assert "KV_ENGINE_TLS_CERT" in _refused(**common, TLS_CERT=tmp_path / "none", TLS_KEY=tmp_path / "none")
    assert "KV_ENGINE_TLS_CERT" in _refused(**common, TLS_KEY=tmp_path / "none")


@pytest.mark.parametrize(
    ("name", "says"),
    [("HOTBYTES", "KV_ENGINE_HOT_BYTES"), ("CAPACITY_BYTE", "KV_ENGINE_CAPACITY_BYTES"), ("QQQ", "docs/engine.md")],
)
def test_a_name_that_is_no_setting_is_refused_and_its_value_not_shown(tmp_path: Path, name: str, says: str) -> None:
    said = _refused(ROOT=tmp_path, CAPACITY_BYTES=64 << 20, HTTP="127.0.0.1:0", **{name: "secret"})
    assert f"KV_ENGINE_{name}" in said
    assert says in said
    assert "secret" not in said


def test_a_misspelt_folder_is_named_before_the_missing_one(tmp_path: Path) -> None:
    assert "KV_ENGINE_ROOTS" in _refused(ROOTS=tmp_path, CAPACITY_BYTES=64 << 20)


def test_names_of_the_stack_and_of_kubernetes_are_not_the_engines_and_no_fault(tmp_path: Path) -> None:
    env = {name: "x" for name in (*USER_KEYS, *MANAGED_KEYS) if name.startswith("KV_ENGINE_")}
    env |= dict.fromkeys(("KV_ENGINE_TOKEN", "KV_ENGINE_PORT_9130_TCP_ADDR", "KV_ENGINE_SERVICE_HOST"), "x")
    env |= {"KV_ENGINE_ROOT": str(tmp_path), "KV_ENGINE_CAPACITY_BYTES": str(64 << 20), "KV_ENGINE_HOTBYTES": ""}
    env["KV_ENGINE_DURABILITY"] = "fsync"
    assert EngineSettings.from_env(env).root == tmp_path


def test_what_the_engine_lets_pass_is_a_knob_of_the_stack_or_known_to_be_another_s() -> None:
    """That each knob is the engine's own or let pass is the test above."""
    knobs = {name.removeprefix("KV_ENGINE_") for name in (*USER_KEYS, *MANAGED_KEYS)}
    assert set(_OTHERS) - knobs == {"TOKEN"}, "of `engine check`"
    assert set(_OTHERS_BEGIN) - knobs == {"SERVICE_"}, "of Kubernetes"


def test_loopback_is_just_this_machine() -> None:
    assert all(map(is_loopback, ("127.0.0.1", "127.1.2.3", "localhost", "::1")))
    assert not any(map(is_loopback, ("0.0.0.0", "::", "10.0.0.1", "1270.0.0.1.example")))


@pytest.fixture
def certified(engine_process: Callable[..., EngineProcess], tmp_path: Path) -> tuple[EngineProcess, ssl.SSLContext]:
    """An engine with a certificate, and a client's context that trusts who signed it."""
    authority = trustme.CA()
    cert, key = certify(tmp_path, authority, "localhost", "127.0.0.1")
    engine = engine_process(TLS_CERT=cert, TLS_KEY=key, HEADER_S=2, BODY_S=2)
    return engine, trust(tmp_path / "ca.pem", authority)


def test_everything_works_over_tls(certified: tuple[EngineProcess, ssl.SSLContext]) -> None:
    engine, context = certified
    value = os.urandom(5 << 20)
    with Wire(engine.http) as wire:
        wire.sock = context.wrap_socket(wire.sock, server_hostname="127.0.0.1")
        assert wire.ask("PUT", "/kv/a", value).status == 201
        assert wire.ask("GET", "/kv/a").body == value
        assert wire.ask("PUT", "/kv/a", value).status == 200
        wire.send(b"".join(wire.head("GET", "/healthz") for _ in range(200)))  # more than one record's worth
        assert [wire.answer().status for _ in range(200)] == [200] * 200
        wire.send(wire.head("PUT", "/kv/c", Transfer_Encoding="chunked") + b"3\r\nabc\r\n0\r\n\r\n")
        assert wire.answer().status == 201


def test_a_handshake_that_never_ends_is_cut_and_holds_no_thread(
    certified: tuple[EngineProcess, ssl.SSLContext],
) -> None:
    engine, context = certified
    stuck = [Wire(engine.http) for _ in range(100)]
    for one in stuck:
        one.send(b"\x16\x03\x01")
    with Wire(engine.http) as wire:
        wire.sock = context.wrap_socket(wire.sock, server_hostname="127.0.0.1")
        assert wire.ask("GET", "/healthz").status == 200
    assert engine.threads() < 60
    for one in stuck:
        assert one.closed()
        one.sock.close()


def test_plain_http_on_a_tls_port_is_cut(certified: tuple[EngineProcess, ssl.SSLContext]) -> None:
    engine, _ = certified
    with Wire(engine.http) as wire:
        wire.send(wire.head("GET", "/healthz"))
        data = b""
        with suppress(ConnectionResetError):
            while more := wire.sock.recv(100):
                data += more
        assert b"HTTP" not in data  # an alert at most


def test_a_token_for_some_keys_does_not_retire_those_of_others(guarded: EngineProcess) -> None:
    with Wire(guarded.http, WRITER) as wire:
        assert wire.ask("PUT", "/kv/others", b"x", X_EG_Data_Version=1).status == 201
        assert ask(guarded, PART, "PUT", "/kv/version/5") == 403
        assert wire.ask("GET", "/kv/others").status == 200
        assert wire.ask("PUT", "/kv/version/5").status == 200


def test_the_check_says_that_it_lacks_the_authority(certified: tuple[EngineProcess, ssl.SSLContext]) -> None:
    host, port = certified[0].http
    with pytest.raises(CheckError) as caught:
        check(f"https://{host}:{port}", "", None)
    assert "--ca" in caught.value.fix
