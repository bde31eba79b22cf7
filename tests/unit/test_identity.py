"""The identity of a model folder: what changes it, what does not, and what the hash cache may not hide."""

from __future__ import annotations

import json
import os
import shutil
import threading
import time
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvstrata.deploy import identity

SETTLE_S = 1.1  # longer than identity._SETTLED_NS: files younger than that are not cached


def make_model(folder: Path, **files: bytes) -> Path:
    folder.mkdir(parents=True)
    content = {
        "config.json": b'{"model_type": "qwen3"}',
        "tokenizer.json": b'{"model": {}}',
        "tokenizer_config.json": b'{"chat_template": "x"}',
        "model.safetensors": bytes(range(256)) * 40,
    }
    for name, body in (content | files).items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(body)
    return folder


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return make_model(tmp_path / "model")


def digest(folder: Path, cache: Path | None = None) -> str:
    return identity.compute(folder, cache).digest


RELEVANT = ["config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors"]


@pytest.mark.parametrize("name", RELEVANT)
def test_one_bit_of_any_relevant_file_changes_the_digest(model: Path, name: str) -> None:
    before = digest(model)
    body = bytearray((model / name).read_bytes())
    body[len(body) // 2] ^= 1
    (model / name).write_bytes(body)
    assert digest(model) != before


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(body=st.binary(min_size=1, max_size=300), where=st.integers(0, 10**6), bit=st.integers(0, 7))
def test_any_bit_of_any_content_counts(tmp_path: Path, body: bytes, where: int, bit: int) -> None:
    folder = tmp_path / "m"
    folder.mkdir(exist_ok=True)
    (folder / "w.safetensors").write_bytes(body)
    before = digest(folder)
    changed = bytearray(body)
    changed[where % len(body)] ^= 1 << bit
    (folder / "w.safetensors").write_bytes(changed)
    assert digest(folder) != before


@settings(max_examples=60, deadline=None)
@given(
    first=st.dictionaries(st.sampled_from("abcde"), st.binary(max_size=8), min_size=1),
    second=st.dictionaries(st.sampled_from("abcde"), st.binary(max_size=8), min_size=1),
)
def test_two_folders_agree_exactly_when_names_and_contents_do(
    tmp_path_factory: pytest.TempPathFactory, first: dict[str, bytes], second: dict[str, bytes]
) -> None:
    digests = []
    for files in (first, second):
        folder = tmp_path_factory.mktemp("m")
        for name, body in files.items():
            (folder / f"{name}.safetensors").write_bytes(body)
        digests.append(digest(folder))
    assert (digests[0] == digests[1]) == (first == second)


def test_moving_bytes_between_files_changes_the_digest(tmp_path: Path) -> None:
    one = make_model(tmp_path / "one", **{"a.safetensors": b"12", "b.safetensors": b"3"})
    two = make_model(tmp_path / "two", **{"a.safetensors": b"1", "b.safetensors": b"23"})
    assert digest(one) != digest(two)


def test_renamed_copied_and_touched_folder_keeps_the_digest(model: Path, tmp_path: Path) -> None:
    before = digest(model)
    other = tmp_path / "deeper" / "elsewhere"
    shutil.copytree(model, other)
    os.utime(other / "config.json", (1, 1))
    (other / "config.json").chmod(0o600)
    moved = model.rename(tmp_path / "moved")
    assert digest(other) == digest(moved) == before


@pytest.mark.parametrize(
    "name",
    [
        "generation_config.json",
        "README.md",
        ".gitattributes",
        "training_args.bin",
        ".cache/x/model.safetensors",
        "a.png",
    ],
)
def test_files_that_no_kv_depends_on_do_not_count(model: Path, name: str) -> None:
    before = digest(model)
    (model / name).parent.mkdir(parents=True, exist_ok=True)
    (model / name).write_bytes(b"something")
    assert digest(model) == before


@pytest.mark.parametrize(
    "name", ["chat_template.jinja", "additional_chat_templates/tool.jinja", "modeling_x.py", "tokenizer.model",
             "model.safetensors.index.json", "extra.bin", "original/consolidated.00.pth"],
)  # fmt: skip
def test_a_new_file_that_the_server_reads_counts(model: Path, name: str) -> None:
    before = digest(model)
    (model / name).parent.mkdir(parents=True, exist_ok=True)
    (model / name).write_bytes(b"something")
    assert digest(model) != before


def test_a_hugging_face_snapshot_of_links_is_the_same_model(model: Path, tmp_path: Path) -> None:
    blobs, snapshot = tmp_path / "hub" / "blobs", tmp_path / "hub" / "snapshots" / "abc"
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    for number, file in enumerate(sorted(model.iterdir())):
        shutil.copy(file, blobs / str(number))
        (snapshot / file.name).symlink_to(Path("..") / ".." / "blobs" / str(number))
    assert digest(snapshot) == digest(model)


def test_a_broken_link_is_an_error_and_not_left_out(model: Path) -> None:
    (model / "model-2.safetensors").symlink_to("nowhere")
    with pytest.raises(FileNotFoundError):
        digest(model)


def test_an_empty_folder_has_no_identity(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no weights"):
        digest(tmp_path)


def test_the_second_time_reads_nothing(model: Path, tmp_path: Path) -> None:
    cache = tmp_path / "state" / "identity.json"
    time.sleep(SETTLE_S)
    first = identity.compute(model, cache)
    second = identity.compute(model, cache)
    assert first.hashed_bytes > 0
    assert second.hashed_bytes == 0
    assert second.files == first.files
    assert cache.stat().st_mode & 0o777 == 0o644


def test_replacement_with_the_same_size_and_mtime_is_seen(model: Path, tmp_path: Path) -> None:
    cache, weights = tmp_path / "c.json", model / "model.safetensors"
    time.sleep(SETTLE_S)
    before = digest(model, cache)
    stat = weights.stat()
    other = bytearray(weights.read_bytes())
    other[7] ^= 0xFF
    with weights.open("r+b") as file:  # in place: not even the inode changes
        file.write(other)
    os.utime(weights, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert (weights.stat().st_size, weights.stat().st_mtime_ns) == (stat.st_size, stat.st_mtime_ns)
    assert digest(model, cache) != before


def test_a_file_that_was_just_written_is_not_trusted_to_the_cache(model: Path, tmp_path: Path) -> None:
    cache = tmp_path / "c.json"
    identity.compute(model, cache)
    assert identity.compute(model, cache).hashed_bytes > 0


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"[]", b'{"format": 99, "sha256": {}}', b'{"format": 1, "sha256": []}', b"\xff\xfe", b"null"],
)
def test_a_damaged_cache_only_costs_time(model: Path, tmp_path: Path, content: bytes) -> None:
    cache = tmp_path / "c.json"
    cache.write_bytes(content)
    assert digest(model, cache) == digest(model)


def test_a_cache_with_a_value_that_is_no_hash_is_not_believed(model: Path, tmp_path: Path) -> None:
    cache = tmp_path / "c.json"
    time.sleep(SETTLE_S)
    before = digest(model, cache)
    data = json.loads(cache.read_text())
    data["sha256"] = dict.fromkeys(data["sha256"], "short")
    cache.write_text(json.dumps(data))
    assert digest(model, cache) == before


def test_a_cache_that_cannot_be_written_is_no_error(model: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    assert digest(model, tmp_path / "file" / "c.json") == digest(model)


def test_hashes_of_a_replaced_model_leave_the_cache(model: Path, tmp_path: Path) -> None:
    cache = tmp_path / "c.json"
    time.sleep(SETTLE_S)
    digest(model, cache)
    (model / "model.safetensors").unlink()
    (model / "model.safetensors").write_bytes(b"new")
    time.sleep(SETTLE_S)
    digest(model, cache)
    assert len(json.loads(cache.read_text())["sha256"]) == len(RELEVANT)


def test_progress_ends_at_the_total_and_never_overlaps(tmp_path: Path) -> None:
    model = make_model(tmp_path / "m", **{f"s{i}.safetensors": bytes(100_000) for i in range(8)})
    seen: list[tuple[int, int]] = []
    busy = threading.Lock()

    def progress(done: int, total: int) -> None:
        assert busy.acquire(blocking=False)
        seen.append((done, total))
        busy.release()

    found = identity.compute(model, progress=progress)
    assert seen[-1] == (found.hashed_bytes, found.hashed_bytes)
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)


def test_a_file_that_grows_while_it_is_read_is_an_error(tmp_path: Path) -> None:
    model = make_model(tmp_path / "m", **{"big.safetensors": bytes(32 << 20)})
    grown = threading.Event()

    def progress(done: int, total: int) -> None:
        if not grown.is_set():
            grown.set()
            with (model / "big.safetensors").open("ab") as file:
                file.write(b"more")

    with pytest.raises(RuntimeError, match="changed while it was read"):
        identity.compute(model, progress=progress)


def test_the_module_needs_nothing_but_the_standard_library(tmp_path: Path) -> None:
    import subprocess
    import sys

    source = Path(identity.__file__)
    code = f"import runpy; runpy.run_path({str(source)!r})"
    subprocess.run([sys.executable, "-I", "-S", "-c", code], check=True, cwd=tmp_path)
