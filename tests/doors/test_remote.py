"""Path A's client against real servers of /kv, over a wire that is spoilt in every way. (LMCache: inside_remote.py.)"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from tests.doors.remote_parts import TOKEN, Driver, Process, Wire, block, driver, epistemic, free_port, name, ours

from kvstrata.doors import remote_frame
from kvstrata.doors.l2_remote import KvstrataRemote
from kvstrata.doors.remote_wire import key_path

DEADLINE_S = 1.0
SOURCE = Path(__file__).parents[2] / "src"
KEYS = [name(number) for number in range(6)]


@pytest.fixture(scope="module", params=["ours", "epistemic memory", "epistemic durable"])
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Process]:
    folder = tmp_path_factory.mktemp("kv")
    kind, _, backend = request.param.partition(" ")
    made = ours(folder, str(SOURCE)) if kind == "ours" else epistemic(folder, backend)
    yield made
    made.kill()


@pytest.fixture
def wire(server: Process) -> Iterator[Wire]:
    with closing(Wire(server.port)) as made:
        yield made


@pytest.fixture
def asked(wire: Wire) -> Iterator[Driver]:
    """With a deadline that no right answer needs, on a busy machine either."""
    with driver(wire.port, KV_REMOTE_DEADLINE="15") as made:
        yield made


@pytest.fixture
def hurried(wire: Wire) -> Iterator[Driver]:
    """For waits that end by the deadline. What needs a right answer asks until it comes."""
    with driver(wire.port, KV_REMOTE_DEADLINE=str(DEADLINE_S)) as made:
        yield made


@pytest.fixture
def keys(request: pytest.FixtureRequest) -> list[str]:
    """Of this test alone: no key of the real server can be written twice."""
    return [name(f"{request.node.name}-{number}") for number in range(6)]


def test_what_was_stored_comes_back_and_nothing_else_does(asked: Driver, keys: list[str]) -> None:
    blocks = [block(key) for key in keys]
    assert asked.has(keys) == [False] * 6
    assert asked.get(keys)[0] == [False] * 6
    assert asked.put(keys[:4], blocks[:4])
    assert asked.has(keys) == [True] * 4 + [False] * 2
    found, buffers = asked.get(keys)
    assert found == [True] * 4 + [False] * 2 and buffers[:4] == blocks[:4]
    assert asked.put(keys[:4], blocks[:4]), "a second time is no failure"


@pytest.mark.parametrize("size", [1, 63, 64, 65, 8191, 8192, 1 << 20, (1 << 20) + 1, 5_000_003])
def test_blocks_of_every_size_come_back(asked: Driver, size: int, keys: list[str]) -> None:
    assert asked.put(keys[:1], [block(size, size)])
    found, buffers = asked.get(keys[:1], size)
    assert found == [True] and buffers[0] == block(size, size)


@pytest.mark.parametrize("other", [299_999, 300_001, 64, 0])
def test_a_block_of_another_size_is_no_hit(asked: Driver, keys: list[str], other: int) -> None:
    assert asked.put(keys[:1], [block("x")])
    assert asked.get(keys[:1], other)[0] == [False]


def test_keys_that_differ_in_any_part_are_different_keys(asked: Driver, keys: list[str]) -> None:
    base = keys[0]
    others = [base + "@salt", base + "@sal%74", base.replace("/", "%2F"), base.upper(), base.replace("@0@", "@00@")]
    assert asked.put([base], [block("x")])
    assert asked.has([base, *others]) == [True] + [False] * 5
    assert len({key_path(key) for key in (base, *others)}) == 6


def test_a_block_under_anothers_key_is_refused(server: Process, asked: Driver, keys: list[str]) -> None:
    stored = remote_frame.make(keys[0], memoryview(block("x"))) + block("x")
    server.call("PUT", f"/kv/{key_path(keys[1])}", stored)
    assert asked.get(keys[1:2])[0] == [False]
    assert asked.has(keys[1:2]) == [False], "not promised again: each request would read it once more"


@pytest.mark.parametrize("bare", [b"", b"x", bytes(300_064), bytes(300_000)])
def test_bytes_that_this_door_did_not_write_are_refused(
    server: Process, asked: Driver, keys: list[str], bare: bytes
) -> None:
    server.call("PUT", f"/kv/{key_path(keys[0])}", bare)
    assert asked.get(keys[:1])[0] == [False]


SPOILT = ["hang", "drip", "rubbish", "html", "flip", "cut"]


@pytest.mark.parametrize("mode", SPOILT)
def test_a_spoilt_wire_is_a_miss_by_the_deadline_and_mends_by_itself(
    wire: Wire, hurried: Driver, keys: list[str], mode: str
) -> None:
    blocks = [block(key) for key in keys]
    hurried.until(lambda: hurried.put(keys, blocks), "stored")
    wire.mode = mode
    # Without the deadline none of these would be answered while the driver waits.
    assert hurried.get(keys)[0] == [False] * 6
    hurried.has(keys)
    hurried.put([f"{key}x" for key in keys], blocks)
    wire.mode = "pass"
    fresh = [f"{key}-later" for key in keys]  # refused blocks of the real server stay refused: it cannot delete them
    hurried.until(lambda: hurried.put(fresh, blocks) and all(hurried.has(fresh)), "it is asked again")
    hurried.until(lambda: hurried.get(fresh) == ([True] * 6, blocks), "and gives what it got")


@pytest.mark.parametrize("mode", ["hang", "drip"])
def test_no_buffer_is_touched_after_its_task_was_reported(
    wire: Wire, hurried: Driver, keys: list[str], mode: str
) -> None:
    hurried.until(lambda: hurried.put(keys, [block(key) for key in keys]), "stored")
    wire.mode = mode
    found, buffers = hurried.get(keys)
    assert found == [False] * 6
    for buffer in buffers:
        buffer[:] = b"\x5a" * len(buffer)
    wire.mode = "pass"  # what was held back arrives now
    time.sleep(0.5)
    assert all(buffer == b"\x5a" * len(buffer) for buffer in buffers)


def test_nobody_waits_once_the_engine_is_known_to_hang(wire: Wire, hurried: Driver, keys: list[str]) -> None:
    wire.mode = "hang"
    assert hurried.has(keys) == [False] * 6
    hurried.until(lambda: hurried.client._breaker.open, "the breaker opens")
    began = time.monotonic()
    for _ in range(50):
        assert hurried.has(keys) == [False] * 6 and hurried.get(keys)[0] == [False] * 6
    assert time.monotonic() - began < DEADLINE_S * 10, "a hundred tasks, none of which waited for its deadline"


def test_a_lookup_does_not_wait_for_loads_that_hang(wire: Wire, hurried: Driver, keys: list[str]) -> None:
    hurried.until(lambda: hurried.put(keys, [block(key) for key in keys]), "stored")
    wire.mode = "hang"
    loads = [hurried.client.submit_batch_get(keys, [memoryview(bytearray(300_000)) for _ in keys]) for _ in range(8)]
    began = time.monotonic()
    assert hurried.has(keys) == [False] * 6
    assert [hurried.wait(load)[2] for load in loads] == [[False] * 6] * 8
    assert time.monotonic() - began < DEADLINE_S + 5


@pytest.mark.parametrize("kind", ["ours", "epistemic"])
def test_an_engine_that_is_not_there_is_a_miss_at_once_and_is_found_when_it_comes(tmp_path: Path, kind: str) -> None:
    made = ours(tmp_path, str(SOURCE)) if kind == "ours" else epistemic(tmp_path, "durable")
    with driver(made.port) as asked:
        assert asked.put(KEYS, [block(key) for key in KEYS])
        made.kill()
        began = time.monotonic()
        for _ in range(10):
            assert asked.has(KEYS) == [False] * 6 and asked.get(KEYS)[0] == [False] * 6
            assert not asked.put([KEYS[0]], [block("x")])
        assert time.monotonic() - began < 10, "refused connections are not waited for"
        made.start()
        asked.until(lambda: all(asked.has(KEYS)), "the restarted engine is asked again")
        found, buffers = asked.get(KEYS)
        assert found == [True] * 6 and buffers == [block(key) for key in KEYS]
    made.kill()


@pytest.mark.parametrize("host", ["no-such-host.invalid", "127.0.0.1"])
def test_a_wrong_address_is_a_miss(host: str) -> None:
    url = f"http://{host}:{free_port()}"
    with driver(0, KV_REMOTE_URL=url, KV_REMOTE_DEADLINE="2") as asked:
        assert asked.has(KEYS) == [False] * 6
        assert not asked.put(KEYS[:1], [block("x")])


def test_a_changed_token_is_read_again_without_a_restart(server: Process, tmp_path: Path, keys: list[str]) -> None:
    file = tmp_path / "token"
    file.write_text("wrong\n")
    with driver(server.port, KV_REMOTE_TOKEN="", KV_REMOTE_TOKEN_FILE=str(file)) as asked:
        assert not asked.put(keys, [block(key) for key in keys])
        assert asked.has(keys) == [False] * 6
        file.write_text(TOKEN + "\n")
        asked.until(lambda: asked.put(keys, [block(key) for key in keys]), "the new token is used")
        assert asked.get(keys)[0] == [True] * 6


def test_a_refused_block_is_deleted_where_that_can_be_and_written_again(
    server: Process, asked: Driver, keys: list[str]
) -> None:
    server.call("PUT", f"/kv/{key_path(keys[0])}", b"not a block of ours")
    assert asked.get(keys[:1])[0] == [False]
    gone = server.call("HEAD", f"/kv/{key_path(keys[0])}")[0] == 404
    asked.put(keys[:1], [block("x")])
    found, buffers = asked.get(keys[:1])
    assert found == [gone], "epistemic-graph keeps the first value for ever"
    assert not gone or buffers[0] == block("x")


def test_many_tasks_at_once_are_each_answered_rightly(server: Process, keys: list[str]) -> None:
    blocks = [block(key) for key in keys]
    with driver(server.port, KV_REMOTE_CONNECTIONS="8") as asked:
        assert asked.put(keys, blocks)
        wanted = [random.Random(n).sample(range(6), 4) for n in range(60)]
        buffers = [[bytearray(300_000) for _ in few] for few in wanted]
        futures = [
            asked.client.submit_batch_get([keys[i] for i in few], [memoryview(b) for b in into])
            for few, into in zip(wanted, buffers, strict=True)
        ]
        for future, few, into in zip(futures, wanted, buffers, strict=True):
            assert asked.wait(future)[2] == [True] * 4
            assert into == [blocks[i] for i in few]


def test_closing_while_calls_hang_comes_back_and_touches_nothing(wire: Wire, keys: list[str]) -> None:
    asked = Driver(wire.port, KV_REMOTE_DEADLINE="60")
    assert asked.put(keys, [block(key) for key in keys])
    wire.mode = "hang"
    buffers = [bytearray(300_000) for _ in keys]
    asked.client.submit_batch_get(keys, [memoryview(b) for b in buffers])
    time.sleep(0.2)
    before = threading.active_count()
    asked.client.close()
    assert threading.active_count() < before
    for buffer in buffers:
        buffer[:] = b"\x5a" * len(buffer)
    wire.mode = "pass"
    time.sleep(0.3)
    assert all(buffer == b"\x5a" * len(buffer) for buffer in buffers)
    asked.client.close()


def test_lists_that_differ_in_length_are_answered(asked: Driver, keys: list[str]) -> None:
    future = asked.client.submit_batch_get(keys, [memoryview(bytearray(10))])
    assert asked.wait(future)[2] == [False] * 6
    assert asked.has([]) == [] and asked.get([])[0] == []


@pytest.mark.parametrize(
    ("env", "said"),
    [
        ({"KV_REMOTE_URL": ""}, "KV_REMOTE_URL"),
        ({"KV_REMOTE_URL": "redis://x:1"}, "http://host:port"),
        ({"KV_REMOTE_URL": "http://user:secret@x"}, "without user or token"),
        ({"KV_REMOTE_URL": "http://x", "KV_REMOTE_DEADLINE": "0"}, "KV_REMOTE_DEADLINE"),
        ({"KV_REMOTE_URL": "http://x", "KV_REMOTE_CONNECTIONS": "x"}, "KV_REMOTE_CONNECTIONS"),
    ],
)
def test_a_setting_that_cannot_work_says_how_to_mend_it(env: dict[str, str], said: str) -> None:
    with pytest.raises(ValueError, match=r"found: .*needed: .*to fix it: ") as failed:
        KvstrataRemote(env=env)
    assert said in str(failed.value)


def test_parameters_are_refused_for_lmcache_prints_them() -> None:
    with pytest.raises(ValueError, match="needed: none"):
        KvstrataRemote(env={"KV_REMOTE_URL": "http://x"}, token=TOKEN)
