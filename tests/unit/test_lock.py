"""versions.lock: what is in it, what is refused, and how digests get in."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from kvstrata.deploy import lock
from kvstrata.deploy.errors import KvError

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "versions.lock").read_text()
DIGEST = "sha256:" + "ab" * 32


@pytest.fixture(scope="module")
def locked() -> lock.Lock:
    return lock.load(ROOT)


def test_each_device_has_its_pair(locked: lock.Lock) -> None:
    assert locked.pair_for("cpu").label == "vllm 0.28.0 + lmcache 0.5.3"
    assert locked.pair_for("nvidia").label == "vllm 0.25.1 + lmcache 0.5.3"
    assert locked.pair_for("gb10").name == "nvidia"
    with pytest.raises(KvError, match="KV_DEVICE=tpu"):
        locked.pair_for("tpu")


def test_every_pair_family_and_speculation_has_a_verdict(locked: lock.Lock) -> None:
    assert locked.cell("cpu", "dense", False).supported
    assert not locked.cell("cpu", "mamba-hybrid", False).supported
    assert locked.cell("nvidia", "sliding-window", False).supported
    corrupt = locked.cell("nvidia", "mamba-hybrid", True)
    assert not corrupt.supported
    assert corrupt.issue.startswith("https://github.com/")
    for pair in locked.pairs:
        for family in lock.FAMILIES:
            for speculative in (False, True):
                cell = locked.cell(pair.name, family, speculative)
                assert cell.supported or cell.why


def test_what_stands_nowhere_is_refused(locked: lock.Lock) -> None:
    cell = locked.cell("cpu", "vision-language", True)
    assert not cell.supported
    assert "never tested" in cell.why


def test_the_requirement_files_hold_the_pairs_own_versions_with_hashes(locked: lock.Lock) -> None:
    for pair in locked.pairs:
        text = "".join((ROOT / name).read_text() for name in pair.requirements)
        for package, version in ((pair.vllm_package, pair.vllm), ("lmcache", pair.lmcache), ("torch", pair.torch)):
            assert re.search(rf"^{package}=={re.escape(version)} .*\\\n    --hash=sha256:", text, re.M), package
    tools = (ROOT / "requirements/tools.txt").read_text()
    assert f"uv=={locked.packages['uv']} " in tools


def test_no_requirement_file_names_an_index() -> None:
    for path in (ROOT / "requirements").iterdir():
        assert "://" not in path.read_text(), path


def test_an_unresolved_image_is_never_pulled(locked: lock.Lock) -> None:
    with pytest.raises(KvError, match="has no digest") as refusal:
        locked.image("vllm", "cpu").pinned("registry.example")
    assert "make build" in refusal.value.fix


@pytest.mark.parametrize(
    ("ref", "registry", "pinned"),
    [
        ("kvstrata/proxy:0.1.0", "reg.example:5000/", f"reg.example:5000/kvstrata/proxy@{DIGEST}"),
        ("docker.io/library/python:3.11", "", f"docker.io/library/python@{DIGEST}"),
        ("host:5000/a/b:1", "", f"host:5000/a/b@{DIGEST}"),
        ("redis", "", f"redis@{DIGEST}"),
    ],
)
def test_a_pinned_reference_has_the_digest_and_no_tag(ref: str, registry: str, pinned: str) -> None:
    assert lock.Image("x", ref, DIGEST, "here").pinned(registry) == pinned


def mutate(old: str, new: str) -> str:
    assert old in TEXT
    return TEXT.replace(old, new, 1)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("schema = ", "not TOML"),
        (mutate("schema = 1", "schema = 2"), "schema = 2"),
        (mutate("chunk_size = 256", "chunk_size = 0"), "chunk_size"),
        (mutate('status = "supported"', 'status = "maybe"'), "status = maybe"),
        (mutate('family = "dense"', 'family = "dnese"'), "unknown family"),
        (mutate('pair = "cpu"', 'pair = "tpu"'), "unknown pair"),
        (mutate('digest = "sha256:', 'digest = "sha256:zz'), "digest = sha256:zz"),
        (mutate('source = "not published yet"', 'source = ""'), "without a source"),
        (mutate('devices = ["nvidia", "gb10"]', 'devices = ["nvidia", "cpu"]'), "two pairs"),
        (mutate('vllm = "0.28.0"', 'vlm = "0.28.0"'), "vlm"),
        (TEXT + TEXT[TEXT.index("[[matrix]]") : TEXT.index("# --- the project")], "Cannot|stands twice|not TOML"),
    ],
)
def test_a_wrong_entry_is_named(text: str, words: str) -> None:
    with pytest.raises(KvError, match=words) as refusal:
        lock.parse(text, "some/versions.lock")
    assert "some/versions.lock" in refusal.value.found


def test_update_fills_in_what_a_registry_answers_for_and_invents_nothing() -> None:
    asked: list[str] = []

    def resolve(ref: str) -> str | None:
        asked.append(ref)
        return DIGEST if "proxy" in ref else None

    text, changed = lock.fill_in(TEXT, "reg.example", "2026-01-02", resolve)
    after = lock.parse(text)
    assert changed == [f"reg.example/kvstrata/proxy:0.1.0 -> {DIGEST}"]
    assert after.image("proxy", "cpu").digest == DIGEST
    assert "resolved 2026-01-02" in after.image("proxy", "cpu").source
    assert not after.image("vllm", "cpu").resolved
    before = lock.parse(TEXT)
    assert after.upstream == before.upstream
    assert not any("lmcache" in ref for ref in asked), "a resolved digest is never asked for again"
    assert len(text.splitlines()) == len(TEXT.splitlines())


def test_update_without_a_registry_leaves_our_own_images_alone() -> None:
    text, changed = lock.fill_in(TEXT, "", "2026-01-02", lambda ref: DIGEST if "kvstrata" in ref else None)
    assert (text, changed) == (TEXT, [])
