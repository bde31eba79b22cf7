"""Runs inside the image: cache servers, each a process with the pinned StorageManager, share one engine."""

from __future__ import annotations

import json
import os
import ssl
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from inside_engine import SOURCE
from inside_manager import CHUNKS
from remote_parts import TOKEN, Process, ours
from shared_server import CacheServer

#: Half of it is what lookups may be promised in half a minute, and the tests of one engine are done in less.
ROOMY = str(1 << 30)
#: ca.pem, cert.pem and key.pem for 127.0.0.1: made outside, because the image has nothing that makes certificates.
CERTIFICATES = Path(os.environ["KVSTRATA_CERTIFICATES"])


@dataclass
class Stand:
    """One engine and the servers that share it."""

    engine: Process
    env: dict[str, str]
    shape: tuple[int, int]
    servers: list[CacheServer]

    @property
    def blocks(self) -> int:
        """Of one prompt."""
        return CHUNKS * self.shape[0] * self.shape[1]

    def server(self) -> CacheServer:
        self.servers.append(CacheServer(self.env, *self.shape))
        return self.servers[-1]

    def figures(self) -> dict[str, Any]:
        return dict(json.loads(self.engine.call("GET", "/kv/stats")[1]))

    def has(self, paths: list[str]) -> list[bool]:
        return [self.engine.call("HEAD", path)[0] == 200 for path in paths]


def stand_for(folder: Path, shape: tuple[int, int] = (1, 1), *, tls: bool = False) -> Stand:
    known = {"KV_REMOTE_TOKEN": TOKEN, "KV_REMOTE_DEADLINE": "20"}
    if not tls:
        engine = ours(folder, SOURCE, KV_ENGINE_CAPACITY_BYTES=ROOMY)
        return Stand(engine, known | {"KV_REMOTE_URL": f"http://127.0.0.1:{engine.port}"}, shape, [])
    ca = CERTIFICATES / "ca.pem"
    files = {f"KV_ENGINE_TLS_{name.upper()}": str(CERTIFICATES / f"{name}.pem") for name in ("cert", "key")}
    engine = ours(folder, SOURCE, ssl.create_default_context(cafile=ca), **files)
    known |= {"KV_REMOTE_URL": f"https://127.0.0.1:{engine.port}", "KV_REMOTE_CA_FILE": str(ca)}
    return Stand(engine, known, shape, [])


def close(stand: Stand) -> None:
    for server in stand.servers:
        server.kill()
    stand.engine.kill()


@pytest.fixture(scope="module")
def stand(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stand]:
    """With two servers that have come up side by side."""
    made = stand_for(tmp_path_factory.mktemp("shared"))
    for server in [made.server() for _ in range(2)]:
        server.do("ready")
    yield made
    close(made)


@pytest.mark.parametrize("prompts", [1, 8])
def test_the_second_server_has_in_full_what_the_first_one_stored(stand: Stand, prompts: int) -> None:
    first, second = stand.servers[:2]
    names = [f"first-{prompts}-{number}" for number in range(prompts)]
    before = stand.figures()
    first.do("write", names, "tenant")
    stored = stand.figures()
    assert stored["put_new"] - before["put_new"] == prompts * stand.blocks
    assert second.do("read", names, "tenant") == [CHUNKS] * prompts
    after = stand.figures()
    assert after["get_hits"] - stored["get_hits"] == prompts * stand.blocks, "from the engine, and each block once"
    assert after["put_new"] == stored["put_new"], "what was loaded is not stored again"
    assert second.do("read", names) == [0] * prompts, "another tenant"


def test_so_it_is_with_several_ranks_and_groups_and_over_tls(tmp_path: Path) -> None:
    made = stand_for(tmp_path, (2, 2), tls=True)
    try:
        first, second = made.server(), made.server()
        first.do("write", ["p"])
        assert made.figures()["put_new"] == made.blocks
        assert second.do("read", ["p"]) == [CHUNKS]
    finally:
        close(made)


def test_both_store_the_same_prompts_at_once_and_each_block_lies_there_once(stand: Stand) -> None:
    first, second = stand.servers[:2]
    names = [f"both-{number}" for number in range(20)]
    before = stand.figures()["put_new"]
    first.begin("write", names)
    second.begin("write", names)
    first.end(), second.end()
    assert stand.figures()["put_new"] - before == len(names) * stand.blocks
    first.begin("read", names)
    second.begin("read", names[::-1])
    assert [first.end(), second.end()] == [[CHUNKS] * len(names)] * 2


def test_those_that_are_killed_while_they_store_leave_nothing_wrong_and_the_other_goes_on(stand: Stand) -> None:
    other, victims = stand.servers[0], [stand.server() for _ in range(2)]
    known: list[str] = []
    for at, victim in zip((0, 5), victims, strict=True):
        mine = [f"mine-{at}-{number}" for number in range(10)]
        theirs = [f"theirs-{at}-{number}" for number in range(100)]
        paths = [other.do("paths", name) for name in theirs[:20]]
        victim.do("ready")
        other.begin("write", mine)
        victim.begin("write", theirs)
        end = time.monotonic() + 60
        while not any(stand.has(paths[at])):
            assert time.monotonic() < end, "it stores"
        victim.kill()
        other.end()
        assert other.do("read", mine) == [CHUNKS] * 10
        found = other.do("read", theirs[:20])  # compares each byte
        assert found == [[*stand.has(few), False].index(False) for few in paths], "what lies there is whole, and a hit"
        other.do("write", theirs[:20])
        assert other.do("read", theirs[:20]) == [CHUNKS] * 20, "what did not come to its end is stored anew"
        known += mine + theirs[:20]
    assert stand.server().do("read", known) == [CHUNKS] * 60, "so has the one that is started in their place"


def test_one_that_stands_still_does_not_hold_the_other(stand: Stand) -> None:
    first, second = stand.servers[:2]
    mine, theirs = [f"going-{n}" for n in range(10)], [f"still-{n}" for n in range(30)]
    second.begin("write", theirs)
    second.stop()
    try:
        first.do("write", mine)
        assert first.do("read", mine) == [CHUNKS] * len(mine)
        first.do("write", theirs)
    finally:
        second.go_on()
    second.end()
    assert second.do("read", [*mine, *theirs]) == [CHUNKS] * (len(mine) + len(theirs))


def test_what_is_deleted_is_gone_for_both(stand: Stand) -> None:
    first, second = stand.servers[:2]
    first.do("write", ["deleted"])
    assert stand.engine.call("DELETE", first.do("paths", "deleted")[2])[0] in (200, 204)
    assert [first.do("read", ["deleted"]), second.do("read", ["deleted"])] == [[2], [2]]
