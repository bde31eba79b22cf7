"""Path A over https, against the real engine with a CA of its own: whatever is in doubt is a miss that says why."""

from __future__ import annotations

import datetime
import json
import logging
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest
import trustme
from tests.certificates import certify, trust
from tests.doors.remote_parts import Driver, Process, Wire, block, driver, name, ours

from kvstrata.doors.remote_settings import RemoteSettings
from kvstrata.doors.remote_wire import Wire as Client

SOURCE = str(Path(__file__).parents[2] / "src")
KEYS = [name(number) for number in range(6)]
BLOCKS = [block(key) for key in KEYS]
NAMES = ("localhost", "127.0.0.1")


def settings(folder: Path, authority: trustme.CA, *names: str, **more: datetime.datetime) -> dict[str, str]:
    """Of an engine that serves as `names`."""
    cert, key = certify(folder, authority, *names, **more)
    return {"KV_ENGINE_TLS_CERT": str(cert), "KV_ENGINE_TLS_KEY": str(key)}


@pytest.fixture(scope="module")
def authority() -> trustme.CA:
    return trustme.CA()


@pytest.fixture(scope="module")
def server(authority: trustme.CA, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Process]:
    folder = tmp_path_factory.mktemp("tls")
    context = trust(folder / "ca.pem", authority)
    made = ours(folder, SOURCE, context, **settings(folder, authority, *NAMES))
    yield made
    made.kill()


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Callable[[trustme.CA, dict[str, str]], Process]]:
    """Engines of one test alone."""
    running: list[Process] = []

    def start(authority: trustme.CA, more: dict[str, str]) -> Process:
        running.append(ours(tmp_path, SOURCE, trust(tmp_path / "own-ca.pem", authority), **more))
        return running[-1]

    yield start
    for made in running:
        made.kill()


@pytest.fixture
def ca(authority: trustme.CA, tmp_path: Path) -> Path:
    file = tmp_path / "ca.pem"
    trust(file, authority)
    return file


@pytest.fixture
def wire(server: Process) -> Iterator[Wire]:
    with closing(Wire(server.port)) as made:
        yield made


@pytest.fixture
def said(caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    """The log lines of the client that somebody would see."""
    caplog.set_level(logging.WARNING, "lmcache.kvstrata.remote")
    return lambda: [record.getMessage() for record in caplog.records if record.name == "lmcache.kvstrata.remote"]


def https(port: int, ca_file: Path | None, host: str = "127.0.0.1", **more: str) -> dict[str, str]:
    trusted = {"KV_REMOTE_CA_FILE": str(ca_file)} if ca_file else {}
    return {"KV_REMOTE_URL": f"https://{host}:{port}", **trusted, **more}


def stats(engine: Process) -> dict[str, int]:
    status, body = engine.call("GET", "/kv/stats")
    assert status == 200
    return dict(json.loads(body))


def refused(asked: Driver) -> None:
    """A dozen requests: nothing is stored, promised or loaded, and no buffer is touched."""
    for _ in range(4):
        assert not asked.put(KEYS, BLOCKS)
        assert asked.has(KEYS) == [False] * 6
        found, buffers = asked.get(KEYS)
        assert found == [False] * 6 and not any(any(buffer) for buffer in buffers)


# -- what works ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("host", NAMES)
@pytest.mark.parametrize("size", [1, 8192, 300_000, 5_000_003])
def test_what_was_stored_comes_back_over_tls(server: Process, ca: Path, host: str, size: int) -> None:
    keys = [name(f"{host}-{size}-{number}") for number in range(4)]
    blocks = [block(key, size) for key in keys]
    with driver(0, **https(server.port, ca, host)) as asked:
        assert asked.has(keys) == [False] * 4
        assert asked.put(keys, blocks) and asked.has(keys) == [True] * 4
        found, buffers = asked.get(keys, size)
        assert found == [True] * 4 and buffers == blocks
        assert asked.delete(keys) == [True] * 4 and asked.get(keys, size)[0] == [False] * 4


def test_an_empty_ca_file_is_the_cas_of_the_system(
    server: Process, ca: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So `make up` leaves it where KV_ENGINE_CA is blank."""
    (tmp_path / "empty.pem").write_text("")
    monkeypatch.setenv("SSL_CERT_FILE", str(ca))
    with driver(0, **https(server.port, tmp_path / "empty.pem")) as asked:
        key = name("system")
        assert asked.put([key], [block(key)]) and asked.get([key]) == ([True], [block(key)])


# -- what is not to be trusted ---------------------------------------------------------------------------------------


def past() -> datetime.datetime:
    return datetime.datetime.now(datetime.UTC) - datetime.timedelta(days=1)


@pytest.mark.parametrize(
    ("trusted", "names", "found"),
    [
        ("none", NAMES, "unable to get local issuer certificate"),
        ("empty", NAMES, "unable to get local issuer certificate"),
        ("another", NAMES, "unable to get local issuer certificate"),
        ("right", ("kv.example",), "IP address mismatch"),
        ("right", ("localhost",), "IP address mismatch"),
        ("expired", NAMES, "certificate has expired"),
    ],
)
def test_an_engine_that_cannot_prove_who_it_is_gets_nothing_and_gives_nothing(
    engine: Callable[..., Process], authority: trustme.CA, ca: Path, tmp_path: Path, said: Callable[[], list[str]],
    trusted: str, names: tuple[str, ...], found: str,
) -> None:  # fmt: skip
    more = {"not_after": past()} if trusted == "expired" else {}
    # It has the blocks: what is asked of it could be answered.
    made = engine(authority, settings(tmp_path, authority, *NAMES))
    with driver(0, **https(made.port, ca)) as known:
        assert known.put(KEYS[:3], BLOCKS[:3])
    made.kill()
    certify(tmp_path, authority, *names, **more)
    made.start()
    made.context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    made.context.check_hostname, made.context.verify_mode = False, ssl.CERT_NONE
    before = stats(made)
    files = {"none": None, "empty": tmp_path / "empty.pem", "another": tmp_path / "another.pem"}
    (tmp_path / "empty.pem").write_text("")
    trust(tmp_path / "another.pem", trustme.CA())
    with driver(0, **https(made.port, files.get(trusted, ca), KV_REMOTE_DEADLINE="60")) as asked:
        refused(asked)
    lines = said()
    assert len(lines) == 1, lines
    assert f"https://127.0.0.1:{made.port}" in lines[0] and found in lines[0]
    assert "needed: one for 127.0.0.1, signed by" in lines[0] and "to fix it: " in lines[0] and "KV_ENGINE" in lines[0]
    assert (str(files.get(trusted, ca)) in lines[0]) is (trusted not in ("none", "empty"))
    assert before["total_refs"] == 3 and stats(made) == before, "no request came through"


@pytest.mark.parametrize(
    "content", [None, "this is no PEM", "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----"]
)
def test_a_ca_file_that_is_no_good_is_a_miss_that_names_it_and_is_read_again(
    server: Process, ca: Path, said: Callable[[], list[str]], content: str | None
) -> None:
    right = ca.read_bytes()
    ca.unlink() if content is None else ca.write_text(content)
    with driver(0, **https(server.port, ca, KV_REMOTE_DEADLINE="60")) as asked:
        refused(asked)
        assert len(said()) == 1
        assert f"found: CA file {ca}" in said()[0] and "needed: " in said()[0] and "KV_ENGINE_CA" in said()[0]
        ca.write_bytes(right)
        key = name(f"again-{content}")
        asked.until(lambda: asked.put([key], [block(key)]), "the file is read again")


# -- a wire that is not the one that was meant -----------------------------------------------------------------------


def test_http_to_a_port_that_speaks_tls_is_a_miss_that_says_so(server: Process, said: Callable[[], list[str]]) -> None:
    before = stats(server)
    with driver(server.port, KV_REMOTE_DEADLINE="60") as asked:
        refused(asked)
    assert len(said()) == 1
    assert "found: " in said()[0] and "needed: " in said()[0] and "https:// in KV_ENGINE_URL" in said()[0]
    assert stats(server) == before


def test_https_to_a_port_that_does_not_is_a_miss_that_says_so(
    engine: Callable[..., Process], authority: trustme.CA, ca: Path, said: Callable[[], list[str]]
) -> None:
    plain = engine(authority, {})
    plain.context = None
    with driver(0, **https(plain.port, ca, KV_REMOTE_DEADLINE="1")) as asked:
        refused(asked)
    assert len(said()) == 1
    assert "found: no TLS" in said()[0] and "needed: " in said()[0] and "http:// in KV_ENGINE_URL" in said()[0]
    assert stats(plain)["put_new"] == 0


@pytest.mark.parametrize("mode", ["hang", "drip", "rubbish", "html", "flip", "cut"])
def test_a_spoilt_wire_is_a_miss_and_mends_by_itself(wire: Wire, ca: Path, mode: str) -> None:
    keys = [f"{key}-{mode}" for key in KEYS]
    with driver(0, **https(wire.port, ca, KV_REMOTE_DEADLINE="2")) as asked:
        asked.until(lambda: asked.put(keys, BLOCKS), "stored, also on a machine where that takes a second")
        wire.mode = mode
        assert asked.get(keys)[0] == [False] * 6
        asked.has(keys)
        wire.mode = "pass"
        asked.until(lambda: asked.get(keys) == ([True] * 6, BLOCKS), "it is asked again")


@pytest.mark.parametrize("mode", ["hang", "drip", "rubbish", "html"])
def test_a_greeting_that_is_spoilt_is_a_miss_and_mends_by_itself(wire: Wire, ca: Path, mode: str) -> None:
    wire.mode = mode
    keys = [f"{key}-greeting-{mode}" for key in KEYS]
    with driver(0, **https(wire.port, ca, KV_REMOTE_DEADLINE="2")) as asked:
        refused(asked)
        wire.mode = "pass"
        asked.until(lambda: asked.put(keys, BLOCKS), "it is asked again")
        asked.until(lambda: asked.get(keys) == ([True] * 6, BLOCKS), "and gives what it got")


# -- what changes while the client runs ------------------------------------------------------------------------------


def test_a_renewed_certificate_is_taken_and_one_of_a_new_ca_when_the_file_has_it(
    engine: Callable[..., Process], authority: trustme.CA, ca: Path, tmp_path: Path, said: Callable[[], list[str]]
) -> None:
    made = engine(authority, settings(tmp_path, authority, *NAMES))
    with driver(0, **https(made.port, ca)) as asked:
        assert asked.put(KEYS, BLOCKS)

        def restart(issuer: trustme.CA) -> None:
            made.kill()
            certify(tmp_path, issuer, *NAMES)
            made.start()

        restart(authority)
        asked.until(lambda: asked.get(KEYS) == ([True] * 6, BLOCKS), "same CA: nothing to do")
        other = trustme.CA()
        restart(other)
        refused(asked)
        asked.until(lambda: "unable to get local issuer" in said()[-1], "the log says what it waits for now")
        trust(ca, other)
        asked.until(lambda: asked.get(KEYS) == ([True] * 6, BLOCKS), "the new CA is read without a restart")


@pytest.mark.parametrize("greeted", [True, False])
def test_closing_while_tls_hangs_comes_back_and_touches_nothing(wire: Wire, ca: Path, greeted: bool) -> None:
    keys = [f"{key}-closing-{greeted}" for key in KEYS]
    asked = Driver(0, **https(wire.port, ca, KV_REMOTE_DEADLINE="120"))
    assert asked.put(keys, BLOCKS)
    if greeted:
        asked.until(lambda: asked.get(keys)[0] == [True] * 6 and wire.connections >= 6, "each connection has been used")
    wire.mode = "hang"
    buffers = [bytearray(300_000) for _ in keys]
    asked.client.submit_batch_get(keys, [memoryview(buffer) for buffer in buffers])
    time.sleep(0.2)
    before = threading.active_count()
    closing = threading.Thread(target=asked.client.close, daemon=True)
    closing.start()
    closing.join(60)
    assert not closing.is_alive() and threading.active_count() < before
    for buffer in buffers:
        buffer[:] = b"\x5a" * len(buffer)
    wire.mode = "pass"
    time.sleep(0.3)
    assert all(buffer == b"\x5a" * len(buffer) for buffer in buffers)


def test_an_aborted_connection_stays_encrypted_to_its_end(server: Process, ca: Path) -> None:
    """SSLSocket.shutdown drops its TLS first: a send at that moment, with the token in it, would go in the clear."""
    client = Client(RemoteSettings.from_env(https(server.port, ca, KV_REMOTE_TOKEN="a-token-of-the-tests")))
    assert client.exists(KEYS[0], time.monotonic() + 20) is not None
    sock = client._socket
    client.abort()
    assert isinstance(sock, ssl.SSLSocket) and sock.version() is not None
    client.close()
