"""The proof's pieces: metrics text, own blocks, the bench's arithmetic, status from what is mapped."""

from __future__ import annotations

import io
import json
import mmap
import os
import socketserver
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from kvstrata.deploy import status, status_disk, status_probe
from kvstrata.proof import own_blocks, prom
from kvstrata.proof.bench_report import BenchReport, Series, break_even
from kvstrata.proof.client import RequestFailed, VllmClient
from kvstrata.proof.control import OwnBlocks, pack
from kvstrata.store.folders import make_folders
from kvstrata.store.keys import BlockKey

HASH = "ab" * 32


def test_counters_are_summed_over_the_labels_that_are_not_named() -> None:
    text = '# TYPE a counter\na{s="",m="x/y"} 3\na{s="t\\"q",m="z"} 4.5e0\nb 1\nbroken line\na_created 9\n'
    samples = prom.parse(text)
    assert samples.sum("a") == 7.5
    assert samples.sum("a", m="z") == 4.5
    assert samples.sum("absent") == 0.0
    assert samples.labels("a")["m"] == "x/y"


def test_a_label_holds_what_unicode_calls_the_end_of_a_line() -> None:
    assert prom.parse('a{m="x\u2028y\x85z"} 3\nb 1\n').sum("a") == 3.0


class _Streams(BaseHTTPRequestHandler):
    """Answers a completion with the events of `events`, one write each."""

    events: tuple[bytes, ...] = ()

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        self.send_response(200)
        self.send_header("content-type", "text/event-stream; charset=utf-8")
        self.end_headers()
        for event in self.events:
            self.wfile.write(event)

    def log_message(self, format: str, *args: Any) -> None:
        return


@pytest.fixture
def streams() -> Iterator[VllmClient]:
    with socketserver.TCPServer(("127.0.0.1", 0), _Streams) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        client = VllmClient(f"http://127.0.0.1:{server.server_address[1]}", timeout_s=10)
        client._model = "m"
        yield client
        client.close()
        server.shutdown()


def _event(text: str) -> bytes:
    return (
        b"data: " + json.dumps({"choices": [{"text": text, "token_ids": [1]}]}, ensure_ascii=False).encode() + b"\n\n"
    )


@pytest.mark.parametrize("text", ["a\u2028b", "a\u2029b", "a\x85b", "a\x7fb"])
def test_an_answer_may_hold_what_unicode_calls_the_end_of_a_line(streams: VllmClient, text: str) -> None:
    """JSON does not escape these, and a model that goes on from random tokens writes them."""
    _Streams.events = (_event(text), _event("c"), b"data: [DONE]\n\n")
    answer = streams.complete([1, 2], 2)
    assert (answer.text, answer.token_ids) == (text + "c", (1, 1))


def test_an_event_in_pieces_is_one_event(streams: VllmClient) -> None:
    whole = _event("né")
    _Streams.events = (*(whole[at : at + 1] for at in range(len(whole))), b"data: [DONE]\n\n")
    assert streams.complete([1, 2], 1).text == "né"


@pytest.mark.parametrize(
    "events", [(b'data: {"choices": [{"te\n\n',), (_event("a"), b'data: {"cho'), (_event("a"),), ()]
)
def test_a_stream_cut_short_is_a_failed_request(streams: VllmClient, events: tuple[bytes, ...]) -> None:
    _Streams.events = events
    with pytest.raises(RequestFailed, match="needed: an answer"):
        streams.complete([1, 2], 2)


def test_prompts_travel_as_one_argument_each() -> None:
    tokens = [(i * 7919) % 151_936 for i in range(20_000)]
    packed = pack(tokens)
    assert own_blocks.decode(packed) == tokens
    assert len(packed) < 128 * 1024


def test_own_blocks_are_found_by_hash_whatever_the_model_and_salt(tmp_path: Path) -> None:
    chunk, rank = bytes.fromhex(HASH), 0x01000100
    wanted = [BlockKey("a/b", "", chunk, rank), BlockKey("a/b", "salt", chunk, rank, 3), BlockKey("c", "", chunk, rank)]
    for key in (*wanted, BlockKey("a/b", "", b"\xcd" * 32, rank)):
        make_folders(str(tmp_path), key)
        (tmp_path / key.path).touch()
    (tmp_path / "FORMAT.json").touch()
    assert set(own_blocks.store_keys(str(tmp_path), [HASH])) == {
        (key.namespace, rank, key.group, HASH, key.salt) for key in wanted
    }


def test_a_damaged_folder_of_somebody_else_does_not_fail_the_proof(tmp_path: Path) -> None:
    """As a power failure leaves it."""
    ours, other = (BlockKey(model, "", bytes.fromhex(HASH), 1) for model in ("ours", "other"))
    for key in (ours, other):
        make_folders(str(tmp_path), key)
    (tmp_path / ours.path).touch()
    (tmp_path / other.path).parents[2].joinpath("ns.json").write_bytes(b"")
    assert own_blocks.store_keys(str(tmp_path), [HASH]) == [("ours", 1, 0, HASH, "")]


def test_keys_of_registered_engines_are_one_a_rank() -> None:
    server = {"cache_context_meta": {"1": {"model_name": "m", "world_size": 2}}, "non_cuda_context_meta": {}}
    keys = own_blocks.registered_keys(server, [HASH])
    assert keys == [("m", 0x02000200, 0, HASH, ""), ("m", 0x02010201, 0, HASH, "")]


@pytest.fixture
def lmcache_socket(tmp_path: Path) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """A UNIX socket that answers DELETE /cache/objects; the first answer says that a key is locked."""
    seen: list[dict[str, Any]] = []

    class Handler(BaseHTTPRequestHandler):
        def address_string(self) -> str:
            return "unix"

        def log_message(self, format: str, *args: object) -> None:
            """Quiet."""

        def do_DELETE(self) -> None:
            seen.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            data = json.dumps({"deleted": 1, "skipped": 1 if len(seen) == 1 else 0, "ok": True}).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

    path = tmp_path / "http.sock"
    server = socketserver.ThreadingUnixStreamServer(str(path), Handler)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    yield f"unix:{path}", seen
    server.shutdown()
    server.server_close()


def test_locked_blocks_are_tried_again_and_never_forced(lmcache_socket: tuple[str, list[dict[str, Any]]]) -> None:
    address, seen = lmcache_socket
    answer = own_blocks.delete(address, "l1", [("m", 1, 0, HASH, "s")], time.monotonic() + 5)
    assert answer == {"status": 200, "deleted": 1, "skipped": 0, "ok": True}
    key = {"model_name": "m", "kv_rank": 1, "object_group_id": 0, "chunk_hash_hex": HASH, "cache_salt": "s"}
    assert seen == [{"keys": [key], "tier": "l1"}] * 2


class _Answers:
    """A `Control` whose container prints what it is told to."""

    lmcache_http = "unix:/x"

    def __init__(self, *results: dict[str, Any]) -> None:
        self.results, self.calls = list(results), 0

    def kill(self, services: object) -> None: ...

    def start(self, services: object) -> None: ...

    def exec(self, service: str, argv: object) -> tuple[int, str]:
        self.calls += 1
        return 0, "a warning first\n" + json.dumps(self.results[min(self.calls, len(self.results)) - 1])


def test_what_is_left_behind_is_said() -> None:
    assert OwnBlocks(_Answers({"l1": {"skipped": 0}, "l2_left": 0}), 4).delete([[1] * 8]) is None
    left = OwnBlocks(_Answers({"l1": {"skipped": 2}, "l2_left": 3}), 4).delete([[1] * 8])
    assert left is not None
    assert "2 locked in L1, 3 in L2" in left
    assert OwnBlocks(_Answers({"l2_present": None}), 4).count([[1] * 8]) is None


def test_many_prompts_go_in_several_calls() -> None:
    control = _Answers({"l2_present": 5})
    assert OwnBlocks(control, 1).count([[i] for i in range(40)]) == 15
    assert control.calls == 3


@pytest.mark.parametrize(
    ("points", "expected"),
    [
        ([], None),
        ([(100, 1.0, 0.5)], 0.0),
        ([(100, 1.0, 2.0), (200, 2.0, 1.0)], 150.0),
        ([(100, 1.0, 2.0), (200, 2.0, 2.5)], float("inf")),
        ([(1000, 1.0, 0.9), (2000, 2.0, 1.0)], 1000 - 0.1 * 1000 / 0.9),
        ([(1000, 1.0, 0.1), (2000, 2.0, 0.2)], 0.0),
    ],
)
def test_break_even_length(points: list[tuple[int, float, float]], expected: float | None) -> None:
    assert break_even(points) == (None if expected is None else pytest.approx(expected))


def test_bench_report_is_json_without_infinities_a_table_and_a_plot(tmp_path: Path) -> None:
    ttft = {
        600: {"cold": Series((1.0, 3.0, 2.0)), "l1": Series((4.0,)), "plain_cold": Series((1.5, 1.4, 1.6))},
        1200: {"cold": Series((4.0,)), "l2": Series((1.0,))},
    }
    report = BenchReport("cpu", "pair", "m", 256, 3, ttft, True, ("a note",), "now", 1.0)
    written = report.write(tmp_path)
    assert [path.name for path in written] == ["bench.json", "bench.svg", "bench.png"]
    data = json.loads(written[0].read_text(), parse_constant=lambda name: pytest.fail(name))
    first = data["lengths"][0]
    assert (first["ttft_s"]["cold"]["median"], first["speed_up"]["l1"], first["connector_cost_s"]) == (2.0, 0.5, 0.5)
    assert data["break_even_tokens"] == {"l0": None, "l1": None, "l2": 0.0}
    report.render(Console(quiet=True))


@pytest.mark.parametrize(("samples", "cost"), [((1.0,), None), ((1.0, 1.1), None), ((1.0, 1.1, 1.2), 0.1)])
def test_bench_gives_no_cost_of_the_connector_that_is_noise(samples: tuple[float, ...], cost: float | None) -> None:
    plain = Series(tuple(value - 0.1 for value in samples))
    ttft = {600: {"cold": Series(samples), "plain_cold": plain}}
    report = BenchReport("cpu", "pair", "m", 256, len(samples), ttft, True, (), "now", 1.0)
    assert report.to_json()["lengths"][0]["connector_cost_s"] == cost
    console = Console(record=True, width=200, quiet=False, file=io.StringIO())
    report.render(console)
    line = next(row for row in console.export_text().splitlines() if row.startswith("the connector itself"))
    assert ("ms" in line, "not separable from noise" in line) == (cost is not None, cost is None)


_POOL = "/dev/shm/lmcache_l1_pool_kvstrata"


def _inside(mapped: list[dict[str, Any]], pools: dict[str, list[int]]) -> status_probe.Inside:
    return status_probe.Inside(tuple(mapped), pools, {"ipc": "ipc:[1]", "pid": "pid:[1]"})


@pytest.mark.parametrize(
    ("mapped", "server", "mode"),
    [
        ([{"pid": 7, "file": _POOL, "inode": 42, "deleted": False}], {}, "shm"),
        ([{"pid": 7, "file": _POOL, "inode": 41, "deleted": False}], {}, "pickle"),
        ([{"pid": 7, "file": _POOL, "inode": 42, "deleted": True}], {}, "pickle"),
        ([], {"non_cuda_context_meta": {"1": {}}}, "pickle"),
        ([], {"cache_context_meta": {"1": {}}}, "handle"),
        ([], {}, "none"),
    ],
)
def test_transfer_mode_is_what_is_mapped(mapped: list[dict[str, Any]], server: dict[str, Any], mode: str) -> None:
    log = "x Retrieved 10 tokens in 0.5 seconds\nRetrieved 2816 tokens in 0.015 seconds (y)\n"
    found = status_probe.transfer_of(_inside(mapped, {}), _inside([], {_POOL: [42, 1 << 30]}), server, log)
    assert (found.mode, found.retrieved_tokens, found.retrieve_s) == (mode, 2816, 0.015)
    assert status_probe.transfer_of(None, None, server, "").mode == "unknown"


def test_the_probe_sees_a_mapped_pool_of_this_process(tmp_path: Path) -> None:
    class Here:
        def exec(self, service: str, argv: Any) -> tuple[int, str]:
            done = subprocess.run([sys.executable, *argv[1:]], capture_output=True, text=True, check=True)
            return 0, done.stdout

    pool = Path(f"/dev/shm/lmcache_l1_pool_unittest{os.getpid()}")
    pool.write_bytes(bytes(4096))
    try:
        with pool.open("r+b") as stream, mmap.mmap(stream.fileno(), 4096) as mapped:
            seen = status_probe.look_inside(Here(), "vllm")
            assert seen is not None
            own = [m for m in seen.mapped if m["pid"] == os.getpid()]
            assert [(m["file"], m["inode"], m["deleted"]) for m in own] == [(str(pool), pool.stat().st_ino, False)]
            pool.unlink()
            seen = status_probe.look_inside(Here(), "vllm")
            assert seen is not None
            assert [m["deleted"] for m in seen.mapped if m["pid"] == os.getpid()] == [True]
            assert mapped is not None
    finally:
        pool.unlink(missing_ok=True)


def test_last_proof_is_the_newest_report(tmp_path: Path) -> None:
    assert status.last_proof(tmp_path / "absent") is None
    for name, passed in (("verify-1.json", True), ("verify-2.json", False)):
        (tmp_path / name).write_text(json.dumps({"passed": passed, "worth_it": True, "live": False}))
    os.utime(tmp_path / "verify-1.json", (1, 1))
    found = status.last_proof(tmp_path)
    assert found is not None
    assert (found["passed"], found["file"]) == (False, str(tmp_path / "verify-2.json"))


def test_folder_size_counts_a_hard_link_once(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "x").write_bytes(bytes(range(256)) * 64)
    once = status_disk.folder_bytes(tmp_path)
    (tmp_path / "y").hardlink_to(tmp_path / "a" / "x")
    assert once
    assert status_disk.folder_bytes(tmp_path) == once
    assert status_disk.folder_bytes(tmp_path / "absent") == 0
