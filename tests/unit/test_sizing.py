"""From a model's shape to bytes on disk."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import settings as tries
from hypothesis import strategies as st

from kvstrata.deploy import arch, settings
from kvstrata.deploy.errors import KvError
from kvstrata.proof import sizing
from kvstrata.store.format import HEADER_BYTES

LLAMA_8B = sizing.COMMON["Llama-3.1-8B"]
MLA = {
    "model_type": "deepseek_v3", "num_hidden_layers": 61, "num_attention_heads": 128, "num_key_value_heads": 128,
    "hidden_size": 7168, "max_position_embeddings": 163840, "kv_lora_rank": 512, "qk_rope_head_dim": 64,
    "torch_dtype": "bfloat16",
}  # fmt: skip


def sized(config: object = LLAMA_8B, *, dtype: str = "bfloat16", tp: int = 1, chunk: int = 256, tokens: int = 1000) -> sizing.Sizing:  # fmt: skip # noqa: E501
    described = arch.describe(config)  # type: ignore[arg-type]
    return sizing.compute("m", "test", described, dtype=dtype, tp=tp, chunk_size=chunk, tokens=tokens)


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A checkout with the demo model's file and no model folder."""
    models = tmp_path / "configs" / "models"
    models.mkdir(parents=True)
    (models / "demo.toml").write_text('name = "demo"\nsource = "demo"\npath = "Demo"\n')
    return tmp_path


def of(checkout: Path, name: str, **options: object) -> sizing.Sizing:
    return sizing.of_model(settings.load(checkout, environ={}), name, tokens=1000, **options)  # type: ignore[arg-type]


# 2 (K and V) x layers x KV heads x head size x 2 bytes
@pytest.mark.parametrize(
    ("name", "kib"),
    [("Llama-3.1-8B", 128), ("Llama-3.3-70B", 320), ("Qwen2.5-7B", 56), ("Qwen2.5-32B", 256), ("Mistral-7B-v0.3", 128),
     ("Qwen3-8B", 144), ("Qwen3-30B-A3B", 96), ("SmolLM2-135M", 22.5)],
)  # fmt: skip
def test_bytes_a_token_of_well_known_models(name: str, kib: float) -> None:
    assert sized(sizing.COMMON[name]).bytes_per_token == kib * 1024


def test_a_block_is_its_chunk_and_a_header_page() -> None:
    one = sized()
    assert one.block_bytes == 256 * 131072
    assert one.file_bytes == one.block_bytes + HEADER_BYTES
    assert one.gb_per_1k_tokens == pytest.approx(0.131088, abs=1e-6)


def test_a_block_that_ends_inside_a_page_takes_the_whole_page() -> None:
    small = sized({**LLAMA_8B, "num_hidden_layers": 1, "num_key_value_heads": 1, "head_dim": 3}, chunk=16)
    assert small.block_bytes == 16 * 12
    assert small.file_bytes == 2 * 4096


@pytest.mark.parametrize("tp", [2, 4, 8])
def test_ranks_share_the_heads_and_the_bytes_stay(tp: int) -> None:
    assert sized(tp=tp).bytes_per_token == sized().bytes_per_token
    assert sized(tp=tp).block_bytes == sized().block_bytes // tp
    assert sized(tp=tp, tokens=2560).blocks == 10 * tp


def test_more_ranks_than_heads_keep_heads_twice() -> None:
    assert sized(tp=16).bytes_per_token == 2 * sized().bytes_per_token


def test_a_latent_vector_is_kept_by_each_rank() -> None:
    assert sized(MLA).bytes_per_token == 61 * 576 * 2
    assert sized(MLA, tp=4).bytes_per_token == 4 * 61 * 576 * 2


@pytest.mark.parametrize(
    ("options", "needed"), [({"tp": 3}, "divides the other"), ({"dtype": "int4"}, "one of float32")]
)
def test_what_vllm_would_not_take_is_refused(options: dict[str, object], needed: str) -> None:
    with pytest.raises(KvError) as error:
        sized(**options)  # type: ignore[arg-type]
    assert needed in error.value.needed


@tries(deadline=None)
@given(tokens=st.integers(0, 10**9), chunk=st.sampled_from([16, 256, 1024]), tp=st.sampled_from([1, 2, 8]))
def test_only_whole_chunks_are_kept(tokens: int, chunk: int, tp: int) -> None:
    one = sized(chunk=chunk, tp=tp, tokens=tokens)
    kept = one.blocks // tp * chunk
    assert kept <= tokens < kept + chunk
    assert one.disk_bytes == one.blocks * one.file_bytes


@tries(deadline=None)
@given(gb=st.floats(0.1, 10_000), config=st.sampled_from(list(sizing.COMMON.values())))
def test_the_advised_capacity_holds_the_working_set_after_an_eviction(gb: float, config: dict[str, object]) -> None:
    described = arch.describe(config)
    one = sizing.compute("m", "t", described, dtype="bfloat16", tp=1, chunk_size=256, tokens=1, working_set_gb=gb)
    used = one.working_set_chunks * one.file_bytes
    assert used <= gb * 1e9 < used + one.file_bytes
    assert one.capacity_gib * 2**30 * 0.8 >= used
    assert (one.capacity_gib - 1) * 2**30 * 0.8 <= gb * 1e9


def test_json_carries_what_the_text_says() -> None:
    data = json.loads(json.dumps(sized(tokens=100_000).to_json()))
    assert data["gb_per_1k_tokens"] == 0.1311
    assert data["blocks"] == 390
    assert data["working_set"]["capacity_gib"] == 233
    assert data["working_set"]["tokens"] == data["working_set"]["blocks"] * 256


def test_a_folder_is_sized_by_its_config(checkout: Path, tmp_path: Path) -> None:
    folder = tmp_path / "My Model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({**LLAMA_8B, "torch_dtype": "float32"}))
    one = of(checkout, str(folder))
    assert (one.model, one.dtype, one.bytes_per_token) == ("my-model", "float32", 2 * 131072)
    assert of(checkout, str(folder), dtype="fp8").bytes_per_token == 65536


def test_a_well_known_name_needs_no_folder(checkout: Path) -> None:
    assert of(checkout, "qwen3-8b").model == "Qwen3-8B"


def test_the_model_of_env_has_the_type_that_it_is_served_in(checkout: Path) -> None:
    folder = checkout / "data" / "models" / "Demo"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(LLAMA_8B))
    assert of(checkout, "").dtype == "bfloat16"
    (checkout / ".env").write_text(
        "KV_ENV_VERSION=1\n# >>> written by kvstrata, changes here are lost\n# <<< kvstrata\n"
    )
    found = settings.load(checkout, environ={})
    served = type(found)(**{**vars(found), "managed": {"KV_VLLM_ARGS": "--dtype float32"}})
    assert sizing.of_model(served, "", tokens=1).dtype == "float32"
    assert sizing.of_model(served, "demo", tokens=1).dtype == "bfloat16"


@pytest.mark.parametrize("name", ["no-such-model", "../nowhere", ""])
def test_a_model_that_is_not_there_is_refused_with_a_way_out(checkout: Path, name: str) -> None:
    with pytest.raises(KvError) as error:
        of(checkout, name)
    assert error.value.fix
