"""What each route answers."""

from __future__ import annotations

import itertools
import json
import os
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.engine.process import EngineProcess
from tests.engine.wire import Wire

_numbers = itertools.count()


@pytest.fixture
def key() -> str:
    """A key that no other test has."""
    return f"key-{next(_numbers)}"


def test_a_new_key_is_201_a_repeated_one_200_and_the_first_value_stays(wire: Wire, key: str) -> None:
    first, second = os.urandom(100_000), os.urandom(5000)
    assert wire.ask("PUT", f"/kv/{key}", first).status == 201
    assert wire.ask("PUT", f"/kv/{key}", second).status == 200
    assert wire.ask("GET", f"/kv/{key}").body == first


def test_an_unknown_key_is_404_with_a_reason(wire: Wire, key: str) -> None:
    answer = wire.ask("GET", f"/kv/{key}")
    assert answer.status == 404
    assert answer.json["error"] == "NoSuchBlock"
    assert answer.stays


def test_head_tells_the_length_and_sends_no_body(wire: Wire, key: str) -> None:
    wire.ask("PUT", f"/kv/{key}", b"x" * 12345)
    answer = wire.ask("HEAD", f"/kv/{key}")
    assert (answer.status, answer.headers["content-length"]) == (200, "12345")
    assert wire.ask("HEAD", f"/kv/{key}-not").status == 404
    assert wire.ask("GET", f"/kv/{key}/exists").json == {"exists": True, "hash": key}  # nothing was left in between


def test_delete_forgets_the_key_once(wire: Wire, key: str) -> None:
    wire.ask("PUT", f"/kv/{key}", b"x")
    assert wire.ask("DELETE", f"/kv/{key}").status == 204
    assert wire.ask("DELETE", f"/kv/{key}").status == 404
    assert wire.ask("GET", f"/kv/{key}").status == 404
    assert wire.ask("PUT", f"/kv/{key}", b"new").status == 201
    assert wire.ask("GET", f"/kv/{key}").body == b"new"


@pytest.mark.parametrize(
    ("asked", "status", "wanted", "said"),
    [
        ("bytes=0-9", 206, slice(0, 10), "bytes 0-9/1000"),
        ("bytes=990-", 206, slice(990, 1000), "bytes 990-999/1000"),
        ("bytes=-7", 206, slice(993, 1000), "bytes 993-999/1000"),
        ("bytes=-5000", 206, slice(0, 1000), "bytes 0-999/1000"),
        ("bytes=995-5000", 206, slice(995, 1000), "bytes 995-999/1000"),
        ("bytes=0-1,5-6", 200, slice(0, 1000), None),
        ("lines=0-1", 200, slice(0, 1000), None),
        ("bytes=9-3", 200, slice(0, 1000), None),
    ],
)
def test_a_range_is_answered_with_just_those_bytes(
    wire: Wire, asked: str, status: int, wanted: slice, said: str | None
) -> None:
    value = bytes(i % 251 for i in range(1000))
    wire.ask("PUT", "/kv/ranged", value)
    answer = wire.ask("GET", "/kv/ranged", Range=asked)
    assert (answer.status, answer.body, answer.headers.get("content-range")) == (status, value[wanted], said)


def test_a_range_inside_a_later_sub_block_is_exact(wire: Wire, key: str) -> None:
    value = os.urandom(3 << 20)
    wire.ask("PUT", f"/kv/{key}", value)
    answer = wire.ask("GET", f"/kv/{key}", Range=f"bytes={(1 << 20) - 3}-{(2 << 20) + 4}")
    assert answer.body == value[(1 << 20) - 3 : (2 << 20) + 5]


@pytest.mark.parametrize("asked", ["bytes=1000-", "bytes=1000-2000", "bytes=-0"])
def test_a_range_outside_the_block_is_416(wire: Wire, asked: str) -> None:
    wire.ask("PUT", "/kv/ranged416", b"x" * 1000)
    answer = wire.ask("GET", "/kv/ranged416", Range=asked)
    assert (answer.status, answer.headers["content-range"]) == (416, "bytes */1000")


def test_the_etag_is_of_the_content(wire: Wire, key: str) -> None:
    made = wire.ask("PUT", f"/kv/{key}", b"same").headers["etag"]
    wire.ask("PUT", f"/kv/{key}-2", b"same")
    wire.ask("PUT", f"/kv/{key}-3", b"other")
    tags = [wire.ask("GET", f"/kv/{key}{end}").headers["etag"] for end in ("", "-2", "-3")]
    assert made == tags[0] == tags[1] != tags[2]
    assert wire.ask("HEAD", f"/kv/{key}").headers["etag"] == made
    assert wire.ask("GET", f"/kv/{key}", If_None_Match=made).status == 304
    assert wire.ask("GET", f"/kv/{key}", If_None_Match='"x"').status == 200
    assert wire.ask("GET", f"/kv/{key}", If_Range=made, Range="bytes=0-0").status == 206
    assert wire.ask("GET", f"/kv/{key}", If_Range='"x"', Range="bytes=0-0").status == 200


def _ask(wire: Wire, method: str, path: str, name: str, value: str) -> int:
    body = b"new" if method == "PUT" else None
    return wire.ask(method, path, body, **{name: value}).status


@pytest.mark.parametrize("place", ["/kv/", "/kv/branch/{branch}/"])
def test_a_condition_is_kept_whatever_the_method(wire: Wire, key: str, place: str) -> None:
    made = wire.ask("POST", "/kv/snapshot", b'{"keys": []}').json["snapshot"]
    place = place.format(branch=wire.ask("POST", f"/kv/snapshot/{made}/fork").json["branch"])
    path, nothing = f"{place}{key}", f"{place}{key}-not"
    wire.ask("PUT", path, b"value")
    tag = wire.ask("GET", path).headers["etag"]
    for method in ("GET", "HEAD", "PUT", *(() if "branch" in place else ("DELETE",))):
        there = 304 if method in ("GET", "HEAD") else 412
        assert _ask(wire, method, path, "If_Match", '"x"') == 412
        assert _ask(wire, method, path, "If_Match", f"W/{tag}") == 412
        assert _ask(wire, method, path, "If_None_Match", tag) == there
        assert _ask(wire, method, path, "If_None_Match", f'"x", W/{tag}') == there
        assert _ask(wire, method, path, "If_None_Match", "*") == there
        if method != "PUT":
            assert _ask(wire, method, nothing, "If_Match", "*") == 404  # as without it
    assert wire.ask("GET", path).body == b"value"
    assert _ask(wire, "PUT", nothing, "If_Match", "*") == 412
    assert wire.ask("GET", nothing).status == 404
    assert _ask(wire, "PUT", nothing, "If_None_Match", "*") in (200, 201)
    assert wire.ask("GET", nothing).body == b"new"
    assert _ask(wire, "PUT", path, "If_Match", f'"x", {tag}') == 200
    assert _ask(wire, "PUT", path, "If_None_Match", '"x"') == 200
    if "branch" not in place:
        assert _ask(wire, "DELETE", path, "If_Match", tag) == 204


def test_of_many_who_want_to_be_the_first_one_is(engine: EngineProcess, key: str) -> None:
    def put(number: int) -> int:
        with Wire(engine.http) as wire:
            return wire.ask("PUT", f"/kv/{key}", b"%d" % number * 300_000, If_None_Match="*").status

    with ThreadPoolExecutor(8) as pool:
        assert sorted(pool.map(put, range(8))) == [201, *[412] * 7]


@pytest.mark.parametrize(
    ("sent", "same"),
    [("a%2Fb%40c", "a%2fb@c"), ("%E2%82%AC", "%e2%82%ac"), ("plain", "%70lain"), ("%00%FF", "%00%ff"), ("%25", "%25")],
)
def test_a_key_is_percent_decoded_once(wire: Wire, sent: str, same: str) -> None:
    wire.ask("PUT", f"/kv/{sent}", sent.encode())
    assert wire.ask("GET", f"/kv/{same}").body == sent.encode()


def test_different_keys_never_meet_after_decoding(wire: Wire) -> None:
    for spelled in ("x%2541", "x%41", "x+y", "x%20y", "x%2By%20"):
        wire.ask("PUT", f"/kv/{spelled}", spelled.encode())
    assert wire.ask("GET", "/kv/x%2541").body == b"x%2541"
    assert wire.ask("GET", "/kv/xA").body == b"x%41"
    assert wire.ask("GET", "/kv/x+y").body == wire.ask("GET", "/kv/x%2By").body == b"x+y"
    assert wire.ask("GET", "/kv/x%20y").body == b"x%20y"


@pytest.mark.parametrize("path", ["/kv/", "/kv/a%", "/kv/a%zz", "/kv/a?b=c", "/kv/" + "k" * 4097])
def test_what_is_no_key_is_400(wire: Wire, path: str) -> None:
    assert wire.ask("GET", path).status == 400


def test_a_key_of_4096_bytes_works_however_it_is_spelled(wire: Wire) -> None:
    assert wire.ask("PUT", "/kv/" + "k" * 4096, b"v").status == 201
    assert wire.ask("GET", "/kv/" + "%6B" * 4096).body == b"v"


def test_the_names_of_routes_are_keys_when_escaped(wire: Wire) -> None:
    for word, status in (("stats", 405), ("batch", 404), ("fork", 404)):
        answer = wire.ask("PUT", f"/kv/{word}", b"v")
        assert answer.status == status
        assert f"/kv/%{ord(word[0]):02x}{word[1:]}" in answer.json["message"]
    assert wire.ask("PUT", "/kv/%73tats", b"v").status == 201
    assert wire.ask("GET", "/kv/%73tats").body == b"v"


@pytest.mark.parametrize("path", ["/", "/kv", "/kv/a/b", "/kv/a/b/c/d/e", "/other", "//kv/a", "/kv/snapshot/1/fork/x"])
def test_an_unknown_path_is_404(wire: Wire, path: str) -> None:
    assert (wire.ask("GET", path).status, wire.ask("GET", path).json["error"]) == (404, "NoSuchRoute")


@pytest.mark.parametrize(
    ("method", "path", "allow"),
    [
        ("POST", "/kv/a", "DELETE, GET, HEAD, PUT"),
        ("TRACE", "/kv/a", "DELETE, GET, HEAD, PUT"),
        ("DELETE", "/kv/stats", "GET, HEAD"),
        ("GET", "/kv/batch/exists", "POST"),
        ("POST", "/healthz", "GET, HEAD"),
    ],
)
def test_another_method_is_405_and_says_which_are_allowed(wire: Wire, method: str, path: str, allow: str) -> None:
    answer = wire.ask(method, path)
    assert (answer.status, answer.headers["allow"]) == (405, allow)


def test_batch_exists_answers_in_order_with_keys_as_they_are(wire: Wire, key: str) -> None:
    wire.ask("PUT", f"/kv/{key}%2Fa%25", b"v")
    body = json.dumps({"keys": ["nope", f"{key}/a%", f"{key}%2Fa%25"], "lease_s": 5}).encode()
    assert wire.ask("POST", "/kv/batch/exists", body).json == {"exists": [False, True, False]}


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b"", 400),
        (b"[1]", 400),
        (b"{", 400),
        (b"{}", 400),
        (b'{"keys": "a"}', 400),
        (b'{"keys": [1]}', 400),
        (b'{"keys": [""]}', 400),
        (b'{"keys": ["\\ud800"]}', 400),
        (b'{"keys": [], "lease_s": "1"}', 400),
        (b'{"keys": [], "lease_s": 0}', 400),
        (b'{"keys": [], "lease_s": 1e999}', 400),
        (b'{"keys": [], "lease_s": true}', 400),
        (b"[" * 100_000, 400),
        (json.dumps({"keys": ["k" * 4097]}).encode(), 400),
        (json.dumps({"keys": ["k"] * 10_001}).encode(), 413),
        (json.dumps({"keys": ["k"] * 10_000}).encode(), 200),
        (b'{"keys": []}', 200),
    ],
)
def test_a_bad_batch_is_refused_and_the_connection_stays(wire: Wire, body: bytes, status: int) -> None:
    answer = wire.ask("POST", "/kv/batch/exists", body)
    assert (answer.status, answer.stays) == (status, True)
    assert wire.ask("GET", "/healthz").status == 200


def test_a_batch_that_is_not_json_by_its_type_is_415(wire: Wire) -> None:
    assert wire.ask("POST", "/kv/batch/exists", b"{}", Content_Type="text/plain").status == 415


def test_equal_bytes_under_two_keys_take_the_room_once(wire: Wire, key: str) -> None:
    before = wire.ask("GET", "/kv/stats").json
    value = os.urandom(50_000)
    for end in "ab":
        wire.ask("PUT", f"/kv/{key}{end}", value)
    after = wire.ask("GET", "/kv/stats").json
    moved = {name: after[name] - before[name] for name in ("unique_blocks", "total_refs", "logical_bytes", "put_new")}
    assert moved == {"unique_blocks": 1, "total_refs": 2, "logical_bytes": 100_000, "put_new": 2}
    assert after["dedup_savings_bytes"] - before["dedup_savings_bytes"] == 50_000


def test_stats_count_hits_and_misses_of_get_alone(wire: Wire, key: str) -> None:
    wire.ask("PUT", f"/kv/{key}", b"v")
    before = wire.ask("GET", "/kv/stats").json
    wire.ask("GET", f"/kv/{key}")
    wire.ask("GET", f"/kv/{key}-not")
    wire.ask("HEAD", f"/kv/{key}")
    wire.ask("GET", f"/kv/{key}/exists")
    after = wire.ask("GET", "/kv/stats").json
    assert (after["get_hits"] - before["get_hits"], after["get_misses"] - before["get_misses"]) == (1, 1)


def test_a_branch_sees_its_own_writes_only(wire: Wire, key: str) -> None:
    wire.ask("PUT", f"/kv/{key}", b"base")
    made = wire.ask("POST", "/kv/snapshot", json.dumps({"keys": [key, "not-there"]}).encode()).json
    assert made["pages"] == 1
    one, two = (wire.ask("POST", f"/kv/snapshot/{made['snapshot']}/fork").json["branch"] for _ in range(2))
    assert wire.ask("PUT", f"/kv/branch/{one}/{key}", b"mine").status == 200
    assert wire.ask("GET", f"/kv/branch/{one}/{key}").body == b"mine"
    assert wire.ask("GET", f"/kv/branch/{two}/{key}").body == b"base"
    assert wire.ask("HEAD", f"/kv/branch/{two}/{key}").headers["content-length"] == "4"  # and no body follows
    assert wire.ask("GET", f"/kv/{key}").body == b"base"
    assert wire.ask("GET", f"/kv/branch/{one}/else").json["error"] == "NoSuchBranchKey"
    assert wire.ask("DELETE", f"/kv/snapshot/{made['snapshot']}").json["error"] == "StillReferenced"
    for branch in (one, two):
        assert wire.ask("DELETE", f"/kv/branch/{branch}").status == 204
    assert wire.ask("GET", f"/kv/branch/{one}/{key}").json["error"] == "NoSuchBranch"
    assert wire.ask("DELETE", f"/kv/snapshot/{made['snapshot']}").status == 204
    assert wire.ask("DELETE", f"/kv/snapshot/{made['snapshot']}").json["error"] == "NoSuchSnapshot"
    assert wire.ask("POST", f"/kv/snapshot/{made['snapshot']}/fork").status == 404
    assert {"snapshots", "branches", "resident_fork_bytes"} <= set(wire.ask("GET", "/kv/fork/stats").json)


@pytest.mark.parametrize("number", ["x", "-1", "99999999999999999999", "1.5", "%31"])
def test_a_number_that_is_none_is_400(wire: Wire, number: str) -> None:
    assert wire.ask("DELETE", f"/kv/branch/{number}").status == 400


def test_a_bumped_version_retires_older_entries_only(wire: Wire, key: str) -> None:
    now = wire.ask("GET", "/kv/version").json["version"]
    wire.ask("PUT", f"/kv/{key}-old", b"v", X_EG_Data_Version=now)
    wire.ask("PUT", f"/kv/{key}-untagged", b"v")
    assert wire.ask("PUT", f"/kv/version/{now + 1}").json == {"tracking": True, "version": now + 1}
    assert wire.ask("GET", f"/kv/{key}-old").status == 404
    assert wire.ask("GET", f"/kv/{key}-untagged").status == 200
    assert wire.ask("PUT", f"/kv/{key}", b"v", X_EG_Data_Version=now).json["error"] == "StaleVersion"
    assert wire.ask("PUT", f"/kv/{key}", b"v", X_EG_Data_Version=now + 1).status == 201
    assert wire.ask("PUT", f"/kv/{key}", b"v", X_EG_Data_Version="one").status == 400


def test_every_answer_names_the_version_of_the_interface(wire: Wire) -> None:
    for path in ("/healthz", "/kv/nope", "/nope"):
        assert wire.ask("GET", path).headers["kv-api-version"] == "1"


def test_metrics_have_the_requests_and_the_stats(wire: Wire, key: str) -> None:
    wire.ask("PUT", f"/kv/{key}", b"v")
    page = wire.ask("GET", "/metrics")
    assert page.headers["content-type"].startswith("text/plain")
    text = page.body.decode()
    for name in (
        'kvstrata_engine_requests_total{code="201",op="put"}', "kvstrata_engine_unique_blocks",
        "kvstrata_engine_get_hits_total", "kvstrata_engine_memory_limit_bytes",
        'kvstrata_engine_connections{protocol="http"}', "kvstrata_engine_process_resident_memory_bytes",
        'kvstrata_engine_tier_bytes{tier="warm"}',
    ):  # fmt: skip
        assert name in text, name


def test_the_description_has_exactly_the_routes_of_the_server(engine: EngineProcess, wire: Wire) -> None:
    paths = wire.ask("GET", "/openapi.json").json["paths"]
    for path, operations in paths.items():
        real = path.replace("{key}", "some-key").replace("{number}", "999999")
        allow = wire.ask("OPTIONS", real).headers["allow"].lower().split(", ")
        described = {name for name in operations if name in ("get", "put", "post", "delete", "head")}
        assert described | ({"head"} if "get" in described else set()) == set(allow), path
