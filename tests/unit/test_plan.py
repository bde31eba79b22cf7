"""From config.json, device and memory to flags and sizes."""

from __future__ import annotations

import json
import os
import struct
from pathlib import Path
from typing import Any

import pytest

from kvstrata.deploy import arch, dotenv, model, plan, settings
from kvstrata.deploy.errors import KvError
from kvstrata.deploy.extra_args import ExtraArgs
from kvstrata.deploy.host import GIB, Host

SMOLLM = {
    "model_type": "llama", "num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 64,
    "hidden_size": 576, "max_position_embeddings": 8192, "vocab_size": 49152, "torch_dtype": "bfloat16",
}  # fmt: skip
QWEN3 = {
    "model_type": "qwen3", "num_hidden_layers": 36, "num_attention_heads": 32, "num_key_value_heads": 8,
    "head_dim": 128, "hidden_size": 2560, "max_position_embeddings": 40960, "dtype": "bfloat16",
    "use_sliding_window": False, "sliding_window": 4096, "layer_types": ["full_attention"] * 36,
}  # fmt: skip
QWEN2 = {
    "model_type": "qwen2", "num_hidden_layers": 24, "num_attention_heads": 14, "num_key_value_heads": 2,
    "hidden_size": 896, "max_position_embeddings": 32768, "sliding_window": 32768, "use_sliding_window": False,
    "torch_dtype": "bfloat16",
}  # fmt: skip
GEMMA3 = {  # a vision-language config: the text part is what counts
    "model_type": "gemma3", "vision_config": {"num_hidden_layers": 27, "hidden_size": 1152},
    "torch_dtype": "bfloat16",
    "text_config": {
        "model_type": "gemma3_text", "num_hidden_layers": 6, "num_attention_heads": 8, "num_key_value_heads": 4,
        "head_dim": 256, "hidden_size": 2560, "max_position_embeddings": 131072, "sliding_window": 1024,
        "layer_types": ["sliding_attention"] * 5 + ["full_attention"],
    },
}  # fmt: skip
MISTRAL = {**SMOLLM, "model_type": "mistral", "sliding_window": 4096}
FALCON_H1 = {
    "model_type": "falcon_h1", "num_hidden_layers": 36, "num_attention_heads": 8, "num_key_value_heads": 2,
    "head_dim": 64, "hidden_size": 1024, "max_position_embeddings": 16384, "mamba_d_state": 128, "mamba_d_ssm": 1536,
    "torch_dtype": "bfloat16",
}  # fmt: skip
QWEN3_NEXT = {
    **QWEN3, "model_type": "qwen3_next", "num_hidden_layers": 4, "linear_num_value_heads": 32,
    "layer_types": ["linear_attention"] * 3 + ["full_attention"],
}  # fmt: skip
JAMBA = {**SMOLLM, "model_type": "jamba", "mamba_d_conv": 4, "attn_layer_period": 8}
NEMOTRON_H = {**SMOLLM, "model_type": "nemotron_h", "hybrid_override_pattern": "M-M*-M-"}
LFM2 = {**SMOLLM, "model_type": "lfm2", "layer_types": ["conv", "full_attention"] * 15}
GRANITE_DENSE = {**SMOLLM, "model_type": "granitemoehybrid", "mamba_d_state": 128, "layer_types": ["attention"] * 30}
DEEPSEEK = {
    "model_type": "deepseek_v3", "num_hidden_layers": 61, "num_attention_heads": 128, "num_key_value_heads": 128,
    "hidden_size": 7168, "max_position_embeddings": 163840, "kv_lora_rank": 512, "qk_rope_head_dim": 64,
    "v_head_dim": 128, "torch_dtype": "bfloat16",
}  # fmt: skip
GPT2 = {"model_type": "gpt2", "n_layer": 12, "n_head": 12, "n_embd": 768, "n_positions": 1024}

#         config, family, KV values a token
FAMILIES = [
    (SMOLLM, "dense", 30 * 2 * 3 * 64),
    (QWEN3, "dense", 36 * 2 * 8 * 128),
    (QWEN2, "dense", 24 * 2 * 2 * 64),
    (GPT2, "dense", 12 * 2 * 12 * 64),
    (GRANITE_DENSE, "dense", 30 * 2 * 3 * 64),
    (GEMMA3, "sliding", 6 * 2 * 4 * 256),
    (MISTRAL, "sliding", 30 * 2 * 3 * 64),
    (FALCON_H1, "hybrid", 36 * 2 * 2 * 64),
    (QWEN3_NEXT, "hybrid", 4 * 2 * 8 * 128),
    (JAMBA, "hybrid", 30 * 2 * 3 * 64),
    (NEMOTRON_H, "hybrid", 30 * 2 * 3 * 64),
    (LFM2, "hybrid", 30 * 2 * 3 * 64),
    (DEEPSEEK, "compressed", 61 * (512 + 64)),
]
HOST = Host(mem_total=24 * GIB, mem_available=20 * GIB, cpus=2)


def make_model(folder: Path, config: dict[str, Any], weights: int = 4096) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text("{}")
    header = json.dumps({"w": {"dtype": "BF16", "shape": [weights // 2], "data_offsets": [0, weights]}}).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(header)) + header)
        file.truncate(8 + len(header) + weights)  # sparse: gigabytes cost nothing
    return folder


def make(
    tmp_path: Path, config: dict[str, Any] = SMOLLM, *, device: str = "cpu", host: Host = HOST, weights: int = 4096,
    toml: str | None = None, **env: str,
) -> plan.Plan:  # fmt: skip
    folder = make_model(tmp_path / "m", config, weights)
    if toml is not None:
        file = tmp_path / "configs" / "models" / "m.toml"
        file.parent.mkdir(parents=True)
        file.write_text(f'name = "m"\nsource = "dir"\npath = "m"\n{toml}')
    chosen = settings.load(tmp_path, {"MODEL_DIR": str(folder), **env})
    return plan.make(chosen, model.resolve(chosen, tmp_path), device, host)


@pytest.mark.parametrize(("config", "family", "values"), FAMILIES, ids=[row[0]["model_type"] for row in FAMILIES])
def test_config_json_tells_family_and_kv_size(config: dict[str, Any], family: str, values: int) -> None:
    found = arch.describe(config)
    assert (found.family, found.kv_values_per_token) == (family, values)


def test_a_config_without_the_needed_figures_is_refused() -> None:
    with pytest.raises(KvError, match="num_hidden_layers"):
        arch.describe({"model_type": "bert"})


def test_the_demo_model_on_a_cpu(tmp_path: Path) -> None:
    made = make(tmp_path, weights=269_000_000)
    assert " ".join(made.vllm_args) == (
        "--dtype float32 --max-model-len 8192 --max-num-batched-tokens 2048 --max-num-seqs 16 --enforce-eager "
        "--enable-prefix-caching"
    )
    assert made.kv_bytes_per_token == 46080
    assert (made.l1_gb, made.vllm_kv_gb, made.chunk_size, made.block_size) == (2.0, 1, 256, 128)
    assert made.env()["KV_PLAN_VLLM_MEM"] == str(made.vllm_mem)


def test_the_same_input_gives_the_same_plan_whatever_is_free_just_now(tmp_path: Path) -> None:
    one = make(tmp_path / "1", host=Host(24 * GIB, 23 * GIB), KV_L2_GB="7")
    assert make(tmp_path / "2", host=Host(24 * GIB, 1 * GIB), KV_L2_GB="7").env() == one.env()
    # Another kernel reserves a few MiB more: no container may be recreated for that.
    first, second = (make(tmp_path / f"{mib}", host=Host(23 * GIB + (mib << 20), GIB)) for mib in (700, 705))
    assert first.env() == second.env()


@pytest.mark.parametrize("config", [FALCON_H1, QWEN3_NEXT, JAMBA])
@pytest.mark.parametrize("device", ["cpu", "nvidia"])
def test_a_hybrid_is_refused_with_the_reason_and_the_way_out(
    tmp_path: Path, config: dict[str, Any], device: str
) -> None:
    with pytest.raises(KvError) as error:
        make(tmp_path, config, device=device)
    assert "recurrent" in error.value.found
    assert "KV_PERSIST=0" in error.value.fix


def test_compressed_kv_is_refused_for_the_cache(tmp_path: Path) -> None:
    with pytest.raises(KvError, match="kv_lora_rank = 512"):
        make(tmp_path, DEEPSEEK, device="nvidia")


@pytest.mark.parametrize("config", [FALCON_H1, DEEPSEEK])
def test_plain_vllm_serves_what_the_cache_cannot(tmp_path: Path, config: dict[str, Any]) -> None:
    assert "--enable-prefix-caching" in make(tmp_path, config, device="nvidia", KV_PERSIST="0").vllm_args


def test_a_sliding_window_model_gets_one_group_of_layers_on_a_cpu_only(tmp_path: Path) -> None:
    flag = "--disable-hybrid-kv-cache-manager"
    assert flag in make(tmp_path / "a", MISTRAL).vllm_args
    assert flag not in make(tmp_path / "b", MISTRAL, device="nvidia").vllm_args


@pytest.mark.parametrize(
    ("device", "chunk", "fix"),
    [("cpu", "200", "128 or 256"), ("cpu", "64", "128"), ("nvidia", "100", "96 or 112"), ("cpu", "384", None),
     ("nvidia", "48", None)],
)  # fmt: skip
def test_chunks_are_whole_blocks(tmp_path: Path, device: str, chunk: str, fix: str | None) -> None:
    if fix is None:
        assert make(tmp_path, device=device, KV_CHUNK_SIZE=chunk).chunk_size == int(chunk)
        return
    with pytest.raises(KvError) as error:
        make(tmp_path, device=device, KV_CHUNK_SIZE=chunk)
    assert fix in error.value.fix


def test_the_block_size_of_the_users_own_arguments_counts(tmp_path: Path) -> None:
    with pytest.raises(KvError, match="KV_CHUNK_SIZE=256"):
        make(tmp_path, KV_VLLM_EXTRA_ARGS="--block-size 96")


def test_a_batch_is_never_smaller_than_a_chunk(tmp_path: Path) -> None:
    args = make(tmp_path, KV_CHUNK_SIZE="4096").vllm_args
    assert args[args.index("--max-num-batched-tokens") + 1] == "4096"


def test_shared_memory_counts_against_its_writer(tmp_path: Path) -> None:
    made = make(tmp_path, KV_L1_GB="3")
    assert made.lmcache_mem >= 3 * GIB + GIB
    assert made.shm_bytes >= 3 * GIB + 800 * 10**6
    assert made.l1_gb == 3


REFUSED = [
    ({"KV_L1_GB": "3", "KV_LMCACHE_MEM_GB": "3"}, "KV_LMCACHE_MEM_GB"),
    ({"KV_L1_GB": "0.01"}, "KV_L1_GB"),
    ({"KV_VLLM_KV_GB": "1.5"}, "KV_VLLM_KV_GB"),
    ({"KV_VLLM_MEM_GB": "1"}, "KV_VLLM_MEM_GB"),
    ({"KV_VLLM_KV_GB": "1", "KV_VLLM_EXTRA_ARGS": "--max-model-len 100k"}, "--max-model-len"),
    ({"KV_VLLM_EXTRA_ARGS": "--max-model-len many"}, "--max-model-len"),
    ({"KV_VLLM_EXTRA_ARGS": "--dtype int4"}, "--dtype"),
    ({"KV_VLLM_EXTRA_ARGS": "--kv-transfer-config={}"}, "--kv-transfer-config"),
    ({"KV_VLLM_EXTRA_ARGS": "--kv_transfer_config {}"}, "--kv-transfer-config"),
    ({"KV_VLLM_EXTRA_ARGS": "--port 9"}, "--port"),
]


@pytest.mark.parametrize(("env", "said"), REFUSED, ids=[said for _, said in REFUSED])
def test_a_knob_that_cannot_work_is_refused_by_name(tmp_path: Path, env: dict[str, str], said: str) -> None:
    with pytest.raises(KvError) as error:
        make(tmp_path, **env)
    assert said in error.value.found
    assert error.value.fix


def test_the_limit_has_room_for_the_logits_of_a_whole_step(tmp_path: Path) -> None:
    """prompt_logprobs asks for vocabulary x batch x 4 bytes, twice: a client must not be able to get vLLM killed."""
    small, large = (make(tmp_path / str(n), SMOLLM | {"vocab_size": n}) for n in (1000, 151_936))
    assert large.vllm_mem - small.vllm_mem >= 2 * 4 * 2048 * 150_000


def test_memory_knobs_win_and_are_said(tmp_path: Path) -> None:
    made = make(tmp_path, KV_L1_GB="0.5", KV_VLLM_KV_GB="2", KV_VLLM_MEM_GB="8", KV_LMCACHE_MEM_GB="4", KV_L2_GB="7")
    assert (made.l1_gb, made.vllm_kv_gb, made.l2_gb) == (0.5, 2, 7)
    assert (made.vllm_mem, made.lmcache_mem) == (8 * GIB, 4 * GIB)
    for knob in ("KV_L1_GB", "KV_VLLM_KV_GB", "KV_VLLM_MEM_GB", "KV_L2_GB"):
        assert any(knob in why for why in made.explain)


def test_the_disk_cache_takes_a_share_of_what_is_free_and_keeps_it(tmp_path: Path) -> None:
    first = make(tmp_path)
    stat = os.statvfs(tmp_path)
    free = stat.f_bavail * stat.f_frsize
    assert first.l2_gb * GIB <= 0.81 * free and (first.l2_gb == 1500 or first.l2_gb * GIB >= 0.7 * free)
    assert first.env()["KV_PLAN_L2_BYTES"] == str(int(first.l2_gb * GIB))
    # What others do with the disk must not recreate the cache server; a figure that makes no sense any more is dropped.
    shares = ((0.6, True), (0.95, True), (1.2, True), (0.3, False), (1.4, False))
    for before, kept in ((first.l2_gb * share, kept) for share, kept in shares):
        block = f"{dotenv.BEGIN}\nKV_PLAN_L2_BYTES={int(before * GIB)}\n{dotenv.END}\n"
        (tmp_path / ".env").write_text(block)
        again = make(tmp_path)
        assert (again.env()["KV_PLAN_L2_BYTES"] == str(int(before * GIB))) == (kept or first.l2_gb == 1500 < before)


def test_a_cap_of_less_than_a_few_blocks_is_refused(tmp_path: Path) -> None:
    with pytest.raises(KvError, match=r"KV_L2_GB=0\.06"):
        make(tmp_path, KV_L2_GB="0.06")


def test_a_context_that_does_not_fit_the_kv_space_is_cut_to_whole_chunks(tmp_path: Path) -> None:
    made = make(tmp_path, QWEN3, weights=8 * GIB)
    assert made.dtype == "bfloat16"
    assert made.max_model_len is not None
    assert made.max_model_len % 256 == 0
    assert made.max_model_len * made.kv_bytes_per_token <= made.vllm_kv_gb * GIB
    assert any("instead of 40960" in why for why in made.explain)


def test_float32_on_a_cpu_only_where_the_weights_leave_room(tmp_path: Path) -> None:
    assert make(tmp_path / "a", weights=1 * GIB).dtype == "float32"
    assert make(tmp_path / "b", weights=6 * GIB).dtype == "bfloat16"
    assert make(tmp_path / "c", weights=6 * GIB, KV_VLLM_EXTRA_ARGS="--dtype float32").dtype == "float32"


def test_a_small_machine_gets_a_smaller_l1(tmp_path: Path) -> None:
    big, small = make(tmp_path / "a", weights=10**9), make(tmp_path / "b", weights=10**9, host=Host(11 * GIB, 8 * GIB))
    assert small.l1_gb < big.l1_gb
    assert small.vllm_mem + small.lmcache_mem <= 10 * GIB


def test_unified_memory_is_shared_out_once(tmp_path: Path) -> None:
    host = Host(119 * GIB, 110 * GIB)
    made = make(tmp_path, QWEN3, device="gb10", host=host, weights=8 * GIB)
    share = float(made.vllm_args[made.vllm_args.index("--gpu-memory-utilization") + 1])
    assert share * host.mem_total + made.lmcache_mem < host.mem_total - 4 * GIB


def test_the_toml_adds_and_takes_away_flags(tmp_path: Path) -> None:
    toml = "max_model_len = 2048\n[device.cpu]\nenforce-eager = false\nmax-num-seqs = 2\nseed = 7\n"
    args = make(tmp_path, toml=toml).vllm_args
    text = " ".join(args)
    assert "--max-model-len 2048" in text
    assert "--max-num-seqs 2" in text
    assert "--seed 7" in text
    assert "--enforce-eager" not in args


def test_a_toml_that_states_another_family_is_refused(tmp_path: Path) -> None:
    with pytest.raises(KvError, match="family = 'sliding'"):
        make(tmp_path, toml='family = "sliding"\n')


def test_extra_arguments_are_read_as_vllm_reads_them() -> None:
    args = ExtraArgs.parse(("--max-model-len=8k", "--block_size", "64", "-tp", "2", "--flag", "--x", "-1", "--x", "3"))
    assert args.whole("--max-model-len") == 8000
    assert args.whole("--block-size") == 64
    assert args.value("--tensor-parallel-size") == "2"
    assert args.value("--flag") == ""
    assert args.value("--x") == "3"


def test_host_reads_this_machine() -> None:
    host = Host.read()
    assert 0 < host.mem_available <= host.mem_total
