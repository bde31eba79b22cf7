"""docs/engine.md: its session runs as written, and its tables name what the code has."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.engine.process import ROOT, TOKENS, WRITER, EngineProcess
from tests.engine.wire import Wire

TEXT = (ROOT / "docs/engine.md").read_text()


def test_the_session_of_the_document_runs_as_written(
    engine_process: Callable[..., EngineProcess], tmp_path: Path
) -> None:
    if shutil.which("curl") is None:
        pytest.skip("needs curl")
    (tmp_path / "tokens").write_text(TOKENS)
    engine = engine_process(TOKENS_FILE=tmp_path / "tokens")
    value = os.urandom(100_000)
    (tmp_path / "block.bin").write_bytes(value)
    (tmp_path / "auth").write_text(f"Authorization: Bearer {WRITER}\n")
    commands = re.findall(r"^\$ (curl .*)$", TEXT, re.M)
    assert len(commands) == 7
    said = []
    for command in commands:
        env = {**os.environ, "URL": engine.url}
        done = subprocess.run(["sh", "-c", f"{command} -f"], cwd=tmp_path, env=env, capture_output=True, text=True)
        assert done.returncode == 0, (command, done.stderr)
        said.append(done.stdout)
    assert (tmp_path / "copy.bin").read_bytes() == value
    assert (tmp_path / "part.bin").read_bytes() == value[:1024]
    assert "Content-Length: 100000" in said[3]
    assert said[4] == '{"exists":[true,false]}'
    assert '"get_hits":2' in said[6]


def test_the_document_has_every_route_and_no_other(engine: EngineProcess) -> None:
    with Wire(engine.http) as wire:
        paths = wire.ask("GET", "/openapi.json").json["paths"]
    routes = {re.sub(r"\{number\}", "<n>", path).replace("{key}", "<key>") for path in paths}
    table = TEXT.partition("| route |")[2].partition("\n\n")[0]
    named = set(re.findall(r"(/(?:kv/|healthz|readyz|metrics)[^\s`]*)", "\n".join(re.findall(r"`([^`]*)`", table))))
    assert named | {"/openapi.json"} == routes


def test_the_document_knows_every_status_of_the_description(engine: EngineProcess) -> None:
    with Wire(engine.http) as wire:
        paths = wire.ask("GET", "/openapi.json").json["paths"]
    described = {
        status
        for operations in paths.values()
        for name, operation in operations.items()
        if name != "parameters"
        for status in operation["responses"]
    }
    assert {status for status in described if int(status) >= 400} <= set(re.findall(r"\b[45]\d\d\b", TEXT))


def _described(engine: EngineProcess) -> dict[str, dict[str, dict[str, Any]]]:
    """Path to method to operation."""
    with Wire(engine.http) as wire:
        paths = wire.ask("GET", "/openapi.json").json["paths"]
    return {
        path: {name: one for name, one in operations.items() if name != "parameters"}
        for path, operations in paths.items()
    }


def test_the_description_has_every_figure_of_the_stats(engine: EngineProcess) -> None:
    with Wire(engine.http) as wire:
        answer = wire.ask("GET", "/kv/stats").json
    answers = _described(engine)["/kv/stats"]["get"]["responses"]
    schema = answers["200"]["content"]["application/json"]["schema"]
    assert set(answer) == set(schema["properties"])
    assert set(answer) - set(schema["required"]) == {"catalog_bytes"}  # of an admin
    tiers = schema["properties"]["tiers"]
    assert set(answer["tiers"]) == set(tiers["properties"])
    assert set(answer["tiers"]["warm"]) == set(tiers["properties"]["warm"]["properties"])


def test_the_description_says_what_every_request_may_be_answered(engine: EngineProcess) -> None:
    for path, operations in _described(engine).items():
        for name, one in operations.items():
            assert {"405", "500", "501", "505"} <= set(one["responses"]), (name, path)


def test_a_branchs_block_is_described_like_any_other(engine: EngineProcess) -> None:
    paths = _described(engine)
    block, branch = paths["/kv/{key}"]["get"], paths["/kv/branch/{number}/{key}"]["get"]
    assert set(branch["responses"]) == set(block["responses"])
    assert branch["parameters"] == block["parameters"]
    for operation in (block, branch, paths["/kv/{key}"]["put"], paths["/kv/branch/{number}/{key}"]["put"]):
        assert {"If-Match", "If-None-Match"} <= {one["name"] for one in operation["parameters"]}
        assert "412" in operation["responses"]
