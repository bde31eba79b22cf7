"""Which model is chosen, and that half a model is refused."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest

from kvstrata.deploy import model, model_files, settings
from kvstrata.deploy.errors import KvError

ROOT = Path(__file__).parents[2]


def safetensors(size: int = 8) -> bytes:
    header = json.dumps({"w": {"dtype": "F32", "shape": [size // 4], "data_offsets": [0, size]}}).encode()
    return struct.pack("<Q", len(header)) + header + bytes(size)


def make_model(folder: Path) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text('{"model_type": "llama"}')
    (folder / "tokenizer.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(safetensors())
    return folder


def toml(root: Path, name: str, **more: str) -> Path:
    file = root / "configs" / "models" / f"{name}.toml"
    file.parent.mkdir(parents=True, exist_ok=True)
    values = {"name": name, "source": "dir", "path": f"models/{name}"} | more
    file.write_text("".join(f'{key} = "{value}"\n' for key, value in values.items()))
    return file


def load(root: Path, **env: str) -> settings.Settings:
    return settings.load(root, env)


def test_the_only_config_is_the_choice(tmp_path: Path) -> None:
    toml(tmp_path, "one")
    make_model(tmp_path / "models" / "one")
    info = model.resolve(load(tmp_path), tmp_path)
    assert (info.name, info.path, info.is_demo) == ("one", tmp_path / "models" / "one", False)


def test_two_configs_and_no_choice_are_refused_with_both_names(tmp_path: Path) -> None:
    toml(tmp_path, "one")
    toml(tmp_path, "two")
    with pytest.raises(KvError) as error:
        model.resolve(load(tmp_path), tmp_path)
    assert "one, two" in error.value.found
    assert "KV_MODEL" in error.value.fix


def test_no_config_at_all_is_refused(tmp_path: Path) -> None:
    with pytest.raises(KvError, match="0 files"):
        model.resolve(load(tmp_path), tmp_path)


def test_kv_model_chooses_among_several(tmp_path: Path) -> None:
    toml(tmp_path, "one")
    toml(tmp_path, "two")
    make_model(tmp_path / "models" / "two")
    assert model.resolve(load(tmp_path, KV_MODEL="two"), tmp_path).name == "two"


@pytest.mark.parametrize("name", ["three", "../two", "two.toml", "TWO"])
def test_an_unknown_kv_model_is_refused_with_the_names_that_exist(tmp_path: Path, name: str) -> None:
    toml(tmp_path, "two")
    with pytest.raises(KvError, match="two"):
        model.resolve(load(tmp_path, KV_MODEL=name), tmp_path)


def test_model_dir_wins_over_everything(tmp_path: Path) -> None:
    toml(tmp_path, "one")
    toml(tmp_path, "two")
    folder = make_model(tmp_path / "My Model_7B")
    info = model.resolve(load(tmp_path, MODEL_DIR=str(folder)), tmp_path)
    assert (info.name, info.path, info.config_file) == ("my-model_7b", folder, None)


def test_model_dir_takes_its_flags_from_the_toml_of_the_same_name_or_from_kv_model(tmp_path: Path) -> None:
    toml(tmp_path, "mine")
    toml(tmp_path, "two")
    folder = make_model(tmp_path / "Mine")
    assert model.resolve(load(tmp_path, MODEL_DIR=str(folder)), tmp_path).config.name == "mine"
    info = model.resolve(load(tmp_path, MODEL_DIR=str(folder), KV_MODEL="two"), tmp_path)
    assert (info.name, info.path) == ("two", folder)


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("/m/Qwen3-4B", "qwen3-4b"),
        ("/hub/models--Qwen--Qwen3-4B/snapshots/1cfa9a7208912126459214e8b04321603b3df60c", "qwen3-4b"),
        ("/m/a b@c", "a-b-c"),
        ("/m/...", "model"),
        ("/m/" + "x" * 200, "x" * 64),
    ],
)
def test_a_folder_gives_a_name_that_is_safe_everywhere(path: str, name: str) -> None:
    assert model.short_name(Path(path)) == name


@pytest.mark.parametrize(
    ("line", "key"),
    [
        ('name = "other"', "name"),
        ('source = "hub"', "source"),
        ("path = 3", "path"),
        ("max_model_len = 0", "max_model_len"),
        ("max_model_len = true", "max_model_len"),
        ('family = "moe"', "family"),
        ("colour = 1", "colour"),
        ("[device.tpu]\nx = 1", "device.tpu"),
        ("[device.cpu]\nDtype = 1", "device.cpu.Dtype"),
        ("[device.cpu]\ndtype = [1]", "device.cpu.dtype"),
        ("x = ", "Invalid value"),
    ],
)
def test_a_wrong_toml_is_refused_with_file_and_key(tmp_path: Path, line: str, key: str) -> None:
    file = toml(tmp_path, "one")
    kept = [text for text in file.read_text().splitlines() if not text.startswith(line.split(" ")[0] + " ")]
    file.write_text("\n".join([*kept, line]))
    with pytest.raises(KvError) as error:
        model.load_config(file)
    assert key in error.value.found
    assert str(file) in error.value.found


def test_every_config_of_the_repository_loads() -> None:
    files = sorted((ROOT / "configs" / "models").glob("*.toml"))
    assert files
    for file in files:
        model.load_config(file)


def test_the_demo_model_lives_in_the_data_folder_and_may_be_missing_before_it_is_made() -> None:
    info = model.resolve(load(ROOT, KV_MODEL="smollm2-135m-instruct", KV_DATA_DIR="/d"), ROOT, must_exist=False)
    assert (info.path, info.is_demo) == (Path("/d/models/SmolLM2-135M-Instruct"), True)


# -- completeness ----------------------------------------------------------------------------------------------------


def drop(name: str):  # type: ignore[no-untyped-def]
    return lambda folder: (folder / name).unlink()


def write(name: str, body: bytes):  # type: ignore[no-untyped-def]
    return lambda folder: (folder / name).write_bytes(body)


def index(folder: Path) -> None:
    table = {"a": "model.safetensors", "b": "model-00002-of-00002.safetensors"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": table}))


POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"0" * 64 + b"\nsize 1234\n"
BROKEN = {
    "no config": (drop("config.json"), "config.json is missing"),
    "config is no JSON": (write("config.json", b"<html>"), "not a JSON object"),
    "no tokenizer": (drop("tokenizer.json"), "no tokenizer"),
    "tokenizer is a pointer": (write("tokenizer.json", POINTER), "Git LFS pointer"),
    "no weights": (drop("model.safetensors"), "no weights"),
    "empty weights": (write("model.safetensors", b""), "is empty"),
    "pointer": (write("model.safetensors", POINTER), "Git LFS pointer"),
    "cut off in the data": (write("model.safetensors", safetensors(400)[:-1]), "bytes, as its header says"),
    "bytes too many": (write("model.safetensors", safetensors(400) + b"x"), "bytes, as its header says"),
    "cut off in the header": (write("model.safetensors", safetensors(400)[:20]), "cut off"),
    "not safetensors": (write("model.safetensors", b"<!doctype html><html>" * 5), "cut off or no safetensors"),
    "header is no JSON": (write("model.safetensors", struct.pack("<Q", 4) + b"abcd"), "unreadable header"),
    "shard missing": (index, "1 of 2 shards missing: model-00002-of-00002.safetensors"),
    "index without a map": (write("model.safetensors.index.json", b"{}"), "no weight_map"),
    "link to nothing": (lambda folder: (folder / "x.safetensors").symlink_to("gone"), "link to nothing"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_an_incomplete_folder_is_refused_with_what_is_wrong(tmp_path: Path, case: str) -> None:
    folder = make_model(tmp_path / "m")
    assert model_files.problems(folder) == []
    spoil, said = BROKEN[case]
    spoil(folder)
    with pytest.raises(KvError) as error:
        model_files.check_complete(folder)
    assert said in f"{error.value.found} {error.value.needed}"
    assert str(folder) in error.value.fix


def test_all_problems_are_listed_together(tmp_path: Path) -> None:
    folder = make_model(tmp_path / "m")
    (folder / "config.json").unlink()
    (folder / "tokenizer.json").unlink()
    assert len(model_files.problems(folder)) == 2


def test_a_missing_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(KvError, match="is not a folder"):
        model.resolve(load(tmp_path, MODEL_DIR=str(tmp_path / "gone")), tmp_path)


def test_weights_that_ship_twice_are_counted_once(tmp_path: Path) -> None:
    folder = make_model(tmp_path / "m")
    size = model_files.weight_bytes(folder)
    (folder / "pytorch_model.bin").write_bytes(bytes(1000))
    assert model_files.weight_bytes(folder) == size
