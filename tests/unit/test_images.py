"""Images: where they come from, what their tags cover, and what may enter them."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from kvstrata.deploy import image_base, images, lock
from kvstrata.deploy.image_hash import allowed, content_hash, context_files
from kvstrata.deploy.lock import Image

ROOT = Path(__file__).resolve().parents[2]
PAIR = lock.load(ROOT).pair_for("cpu")
DIGEST = "sha256:" + "cd" * 32
KNOWN = [Image("vllm", "kvstrata/vllm:1", DIGEST, "s", "cpu"), Image("proxy", "kvstrata/proxy:1", DIGEST, "s")]
UNKNOWN = [KNOWN[0], Image("proxy", "kvstrata/proxy:1", "unresolved", "s")]


@pytest.mark.parametrize(
    ("asked", "locked", "answers", "source", "why"),
    [
        ("build", KNOWN, True, "build", "KV_IMAGE_SOURCE=build"),
        ("pull", UNKNOWN, False, "pull", "KV_IMAGE_SOURCE=pull"),
        ("", KNOWN, True, "pull", "answers for every image"),
        ("", KNOWN, False, "build", f"no registry answers for r.example/kvstrata/vllm@{DIGEST}"),
        ("", UNKNOWN, True, "build", "no digest for proxy"),
    ],
)
def test_the_source_is_what_was_asked_for_else_what_can_be_had(
    asked: str, locked: list[Image], answers: bool, source: str, why: str
) -> None:
    got, said = images.decide_source(asked, locked, "r.example", lambda ref: answers)
    assert got == source
    assert why in said


def test_no_registry_is_asked_when_a_digest_is_unknown() -> None:
    def answers(ref: str) -> bool:
        raise AssertionError(ref)

    assert images.decide_source("", UNKNOWN, "", answers)[0] == "build"


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A copy of what the image tags read."""
    for name in ("images", "requirements", "configs", "src"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    return tmp_path


def test_a_tag_says_what_went_in(tree: Path) -> None:
    tags = images.tags(tree, "cpu", "base:1", PAIR)
    assert tags == images.tags(tree, "cpu", "base:1", PAIR)
    assert tags["vllm"].startswith("kvstrata/vllm:cpu-")
    assert len(tags["vllm"].rpartition("-")[2]) == 12
    assert tags["proxy"].startswith("kvstrata/proxy:")


@pytest.mark.parametrize(
    ("path", "vllm_changes", "proxy_changes"),
    [
        ("src/kvstrata/connector/__init__.py", True, False),
        ("src/kvstrata/deploy/identity.py", True, False),
        ("requirements/image-cpu.txt", True, False),
        ("images/vllm/Dockerfile", True, False),
        ("images/docker-bake.hcl", True, True),
        ("images/proxy/Dockerfile", False, True),
        ("configs/proxy/nginx.conf", False, True),
        ("src/kvstrata/deploy/errors.py", False, False),
        ("requirements/dev.txt", False, False),
    ],
)
def test_a_tag_changes_with_the_image_and_not_with_the_host_side(
    tree: Path, path: str, vllm_changes: bool, proxy_changes: bool
) -> None:
    before = images.tags(tree, "cpu", "base:1", PAIR)
    with (tree / path).open("a") as file:
        file.write("\n")
    after = images.tags(tree, "cpu", "base:1", PAIR)
    assert (before["vllm"] != after["vllm"], before["proxy"] != after["proxy"]) == (vllm_changes, proxy_changes)


def test_bytecode_and_a_new_base_count_as_they_should(tree: Path) -> None:
    before = images.tags(tree, "cpu", "base:1", PAIR)
    cache = tree / "src/kvstrata/connector/__pycache__"
    cache.mkdir()
    (cache / "x.pyc").write_bytes(b"1")
    assert images.tags(tree, "cpu", "base:1", PAIR) == before
    other = images.tags(tree, "cpu", "base:2", PAIR)
    assert other["vllm"] != before["vllm"]
    assert other["proxy"] != before["proxy"]


def test_a_hash_cannot_be_shifted_from_one_file_into_the_next(tmp_path: Path) -> None:
    def digest(a: str, b: str) -> str:
        (tmp_path / "a").write_text(a)
        (tmp_path / "b").write_text(b)
        return content_hash(tmp_path, [tmp_path / "a", tmp_path / "b"], {})

    assert digest("1", "23") != digest("12", "3")


def test_the_vllm_image_holds_no_host_side_code_and_no_secrets() -> None:
    patterns = allowed((ROOT / "images/vllm/Dockerfile.dockerignore").read_text())
    names = {str(p.relative_to(ROOT)) for p in context_files(ROOT, patterns)}
    assert "src/kvstrata/connector/__init__.py" in names
    assert "src/kvstrata/launch/__init__.py" in names
    for foreign in ("src/kvstrata/cli.py", "src/kvstrata/deploy/engine.py", ".env", "versions.lock"):
        assert foreign not in names


def test_no_dockerfile_needs_a_frontend_from_a_registry() -> None:
    for path in (ROOT / "images").glob("*/Dockerfile"):
        assert "# syntax" not in path.read_text().lower().splitlines()[0], path


@pytest.mark.parametrize(
    ("line", "note"),
    [
        ("#12 3.456 Downloaded torch", "Downloaded torch"),
        ("#7 DONE 0.1s", "DONE 0.1s"),
        ("", ""),
    ],
)
def test_build_progress_is_shown_without_buildkits_numbers(line: str, note: str) -> None:
    assert images.short_note(line) == note


def test_the_base_tag_is_a_content_hash_of_its_recipe(monkeypatch: pytest.MonkeyPatch) -> None:
    before = image_base.tag()
    assert before.startswith("kvstrata/base:bookworm-")
    monkeypatch.setattr(image_base, "_PACKAGES", ("python3",))
    assert image_base.tag() != before
