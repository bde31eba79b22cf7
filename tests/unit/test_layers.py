"""Which files make a stack, and what is refused."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from kvstrata.deploy import layers, settings
from kvstrata.deploy.errors import KvError

ROOT = Path(__file__).parents[2]


def names(root: Path, **env: str) -> list[str]:
    return [path.stem for path in layers.resolve(settings.load(root, env))]


@pytest.mark.parametrize(
    ("env", "expected"),
    [
        ({"KV_DEVICE": "cpu"}, "vllm lmcache nvme cpu"),
        ({"KV_DEVICE": "cpu", "KV_LAYERS": ""}, "vllm lmcache cpu"),
        ({"KV_DEVICE": "nvidia"}, "vllm lmcache nvme nvidia nvidia-lmcache"),
        ({"KV_DEVICE": "gb10"}, "vllm lmcache nvme gb10 nvidia-lmcache"),
        ({"KV_DEVICE": "cpu", "KV_PERSIST": "0"}, "vllm cpu"),
        ({"KV_DEVICE": "gb10", "KV_PERSIST": "0"}, "vllm gb10"),
    ],
)
def test_settings_choose_the_files_in_order(tmp_path: Path, env: dict[str, str], expected: str) -> None:
    shutil.copytree(ROOT / "compose", tmp_path / "compose")
    assert names(tmp_path, **env) == expected.split()


def test_a_rollback_is_the_plain_files_whatever_the_switch_says() -> None:
    plain = layers.plain(settings.load(ROOT, {"KV_DEVICE": "cpu", "KV_PERSIST": "1", "KV_LAYERS": "nvme"}))
    assert [path.stem for path in plain] == ["vllm", "cpu"]


@pytest.mark.parametrize(
    ("env", "found", "fix"),
    [
        ({"KV_DEVICE": "cpu", "KV_LAYERS": "nvmee"}, "nvmee", "nvme"),
        ({"KV_DEVICE": "cpu", "KV_PERSIST": "0", "KV_LAYERS": "tape"}, "tape", "KV_LAYERS"),
        ({"KV_DEVICE": "cpu", "KV_LAYERS": "nvme,nvme"}, "twice", "KV_LAYERS"),
        ({"KV_DEVICE": "cpu", "KV_LAYERS": "lmcache"}, "lmcache", "KV_LAYERS"),
        ({"KV_DEVICE": ""}, "KV_DEVICE", "make up"),
    ],
)
def test_what_cannot_run_is_refused(env: dict[str, str], found: str, fix: str) -> None:
    with pytest.raises(KvError) as caught:
        names(ROOT, **env)
    assert found in caught.value.found
    assert fix in caught.value.fix
    assert caught.value.exit_code == 2


def test_a_layer_without_what_it_needs_is_refused_and_a_new_file_is_a_new_layer(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "compose", tmp_path / "compose")
    header = "# purpose: x\n# adds: y\n# needs: {}\n# undo: z\n"
    (tmp_path / "compose" / "second.yaml").write_text(header.format("lmcache, nvme"))
    assert set(layers.selectable(tmp_path)) == {"engine", "nvme", "path-a", "path-b", "second"}
    assert names(tmp_path, KV_DEVICE="cpu", KV_LAYERS="nvme,second")[2:4] == ["nvme", "second"]
    for chosen in ("second", "second,nvme"):
        with pytest.raises(KvError, match="without nvme"):
            names(tmp_path, KV_DEVICE="cpu", KV_LAYERS=chosen)
    (tmp_path / "compose" / "second.yaml").write_text("# purpose: x\n")
    with pytest.raises(KvError, match="adds, needs, undo"):
        names(tmp_path, KV_DEVICE="cpu", KV_LAYERS="second")


@pytest.mark.parametrize("chosen", ["nvme,path-a", "path-a,nvme", "engine,path-a,path-b", "nvme,engine"])
def test_two_places_for_the_blocks_are_refused(chosen: str) -> None:
    with pytest.raises(KvError, match="together") as refused:
        names(ROOT, KV_DEVICE="cpu", KV_LAYERS=chosen)
    assert refused.value.needed == "one place for the blocks"
    assert names(ROOT, KV_DEVICE="cpu", KV_LAYERS="engine,path-a")[2:4] == ["engine", "path-a"]


def test_compose_file_is_relative_so_that_the_checkout_may_move() -> None:
    files = layers.plain(settings.load(ROOT, {"KV_DEVICE": "cpu"}))
    assert layers.compose_file(ROOT, files) == "compose/vllm.yaml:compose/cpu.yaml"


def test_all_combinations_hold_each_device_with_and_without_the_cache() -> None:
    found = [" ".join(path.stem for path in files) for files in layers.all_combinations(ROOT)]
    assert len(found) == len(set(found)) >= 9
    for device in layers.DEVICE_LAYERS:
        assert f"vllm {device}" in found
    assert "vllm lmcache nvme cpu" in found
