"""Arguments that are not the user's: what the launcher would stop at is refused before anything starts."""

from __future__ import annotations

import pytest

from kvstrata.deploy.errors import KvError
from kvstrata.deploy.extra_args import ExtraArgs
from kvstrata.launch import vllm
from kvstrata.launch.config import ConfigError, Paths

ENV = {"KV_IDENTITY": "ab" * 32, "KV_MODEL_NAME": "m", "KV_CHUNK_SIZE": "256"}

CONNECTORS = [
    ["--kv-transfer-config", "{}"],
    ["--kv_transfer_config={}"],
    ["--kv-transfer-config.kv_connector", "Foo"],
    ["--kv_transfer_config.kv_connector=Foo"],
    ["--kv-transfer", "{}"],
    ["--kv-offloading-size", "4"],
    ["--kv_offloading_size=4"],
    ["--kv-offloading-backend", "lmcache"],
    ["--kv-offloading-s", "4"],
    ["--speculative-config", '{"kv_connector": "LMCacheConnectorV1"}'],
]
OTHERS = [["--port=9"], ["--hos", "::"], ["--served_model_name", "x"], ["--model", "x"], ["--config", "f"]]
FREE = [
    ["--max-num-seqs", "8"],
    ["--kv-cache-dtype", "auto"],
    ["--model-impl", "auto"],
    ["--config-format", "hf"],
    ["-tp", "2"],
    ["--seed", "-1"],
]


@pytest.mark.parametrize("args", CONNECTORS, ids=" ".join)
def test_a_connector_of_the_users_is_refused_by_both(args: list[str]) -> None:
    with pytest.raises(KvError, match="KV_VLLM_EXTRA_ARGS has"):
        ExtraArgs.parse(tuple(args))
    with pytest.raises(ConfigError, match="KV_VLLM_EXTRA_ARGS"):
        vllm.build_argv(["serve", "/model", *args], ENV, Paths())


@pytest.mark.parametrize("args", OTHERS, ids=" ".join)
def test_what_another_knob_owns_is_refused_before_the_start(args: list[str]) -> None:
    with pytest.raises(KvError, match="KV_VLLM_EXTRA_ARGS has"):
        ExtraArgs.parse(tuple(args))


@pytest.mark.parametrize("args", FREE, ids=" ".join)
def test_everything_else_is_the_users(args: list[str]) -> None:
    ExtraArgs.parse(tuple(args))
    assert vllm.build_argv(args, ENV, Paths())[: len(args)] == args
