"""The engine's benchmark: the shape of its figures, its ratios, and that it measures what it says. No speeds."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from kvstrata import cli
from kvstrata.proof import engine_bench, engine_bench_show
from kvstrata.proof.engine_bench_client import Failed, Sample, Target, cell
from kvstrata.proof.engine_bench_servers import EPISTEMIC_DURABLE, HTTP, REDIS, RESP, SERVERS, Running, Server

KEYS = {"server", "op", "block_kib", "connections", "mibps", "p50_ms", "p99_ms", "vs_redis", "vs_epistemic_durable"}
SMALL = engine_bench.Options((64, 256), (1, 2), rounds=1, volume=1 << 19)


def nobody(folder: Path) -> Running:
    raise Failed("there is none")


@pytest.fixture(scope="module")
def figures(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Every server that is here, and one that never is."""
    folder = tmp_path_factory.mktemp("bench")
    found = engine_bench.measure(SMALL, folder, lambda text: None, [*SERVERS, Server("nobody", nobody)])
    assert list(folder.iterdir()) == []
    return json.loads(json.dumps(found))  # type: ignore[no-any-return]


def test_the_figures_have_the_shape_that_is_documented(figures: dict[str, Any]) -> None:
    assert {"machine", "rows", "rss_mib", "check_gbps", "options"} <= figures.keys()
    for row in figures["rows"]:
        assert row.keys() >= KEYS
        assert (row["mibps"] is None) == ("reason" in row) == (row["samples"] == [])
    text = (Path(__file__).parents[2] / "docs" / "performance.md").read_text()
    assert all(f"`{key}`" in text for key in KEYS)


def test_every_server_is_there_or_says_why_not(figures: dict[str, Any]) -> None:
    measured = {
        (row["server"], row["op"], row["block_kib"], row["connections"]) for row in figures["rows"] if row["op"]
    }
    reasons = {row["server"]: row["reason"] for row in figures["rows"] if "reason" in row}
    assert {name for name, *_ in measured} | reasons.keys() == {server.name for server in SERVERS} | {"nobody"}
    assert reasons["nobody"] == "Failed: there is none"
    for name in (HTTP, RESP):
        assert {(name, op, kib, n) for op in ("put", "get") for kib in (64, 256) for n in (1, 2)} <= measured
        assert figures["rss_mib"][name] > 0


def test_every_ratio_is_that_of_two_rows(figures: dict[str, Any]) -> None:
    for row in figures["rows"]:
        for field, name in (("vs_redis", REDIS), ("vs_epistemic_durable", EPISTEMIC_DURABLE)):
            same = [other["mibps"] for other in figures["rows"] if other["server"] == name and other["op"]
                    and all(other[key] == row[key] for key in ("op", "block_kib", "connections"))]  # fmt: skip
            assert row[field] == (round(row["mibps"] / same[0], 3) if same and row["op"] else None)


def test_the_tables_name_every_server_and_every_target(figures: dict[str, Any]) -> None:
    text = engine_bench_show.markdown(figures)
    assert all(f"| {server} |" in text for server in figures["rss_mib"])
    assert all(target.text in text for target in engine_bench_show.TARGETS)
    assert "not measured: nobody: Failed: there is none" in text


speeds = st.floats(1, 10_000)


@settings(deadline=None)
@given(ours=st.lists(speeds, min_size=3, max_size=3), theirs=st.lists(speeds, min_size=3, max_size=3))
def test_a_target_is_judged_by_the_worst_of_its_rows(ours: list[float], theirs: list[float]) -> None:
    samples = {
        (name, "get", 1024, number): [Sample(speed, (1.0,))]
        for name, some in ((HTTP, ours), (REDIS, theirs))
        for number, speed in zip((1, 4, 16), some, strict=True)
    }
    rows = engine_bench_show.table(samples, {})
    speed = {(row["server"], row["connections"]): row["mibps"] for row in rows}
    target, found, met = engine_bench_show.check({"rows": rows})[0]
    worst = min(speed[HTTP, number] / speed[REDIS, number] for number in (1, 4, 16))
    assert found == worst
    assert met is (worst >= target.least)
    others = engine_bench_show.check({"rows": [row for row in rows if row["connections"] != 4]})
    assert others[0][1:] == (None, None)


@contextmanager
def answering(reply: bytes) -> Iterator[Target]:
    """A server that gives the same answer to whatever comes."""
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def serve() -> None:
            peer, _ = listening.accept()
            with peer, suppress(ConnectionResetError):
                while peer.recv(65536):
                    peer.sendall(reply)

        threading.Thread(target=serve, daemon=True).start()
        yield Target("resp" if reply.startswith(b"$") else "http", listening.getsockname()[1])


@pytest.mark.parametrize(
    ("reply", "text"),
    [
        (b"$64\r\n" + bytes(64) + b"\r\n", "not what was stored"),
        (b"$-1\r\n", "answered with"),
        (b"$99999\r\n", "more than the value"),
        (b"HTTP/1.1 404 no\r\ncontent-length: 0\r\n\r\n", "answered with 404"),
        (b"HTTP/1.1 200 ok\r\ncontent-length: 64\r\n\r\n" + bytes(64), "not what was stored"),
        (b"HTTP/1.1 200 ok\r\nx: " + b"x" * 5000, "no end of the reply's head"),
    ],
)
def test_an_answer_that_is_wrong_is_no_figure(reply: bytes, text: str) -> None:
    with answering(reply) as target, pytest.raises(Failed, match=text):
        cell(target, "get", 64, 1, 1, "tag")


def test_the_full_run_measures_what_the_targets_speak_of() -> None:
    full = engine_bench.options(quick=False)
    assert {256, 1024, 4096, 16384} == set(full.blocks_kib)
    assert {1, 4, 16} == set(full.connections)
    assert all(full.count(kib, number) >= 2 for kib in full.blocks_kib for number in full.connections)


def test_the_command_refuses_a_place_without_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda place: type("Usage", (), {"free": 1 << 20})())
    done = CliRunner().invoke(cli.app, ["bench", "engine", "--quick", "--dir", str(tmp_path)])
    assert "0.0 GiB free" in str(done.exception)


def test_the_command_refuses_a_folder_that_is_not_there(tmp_path: Path) -> None:
    done = CliRunner().invoke(cli.app, ["bench", "engine", "--quick", "--dir", str(tmp_path / "absent")])
    assert "absent, which is no folder" in str(done.exception)
