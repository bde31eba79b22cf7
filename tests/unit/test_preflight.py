"""Preflight with real sockets, folders and disks."""

from __future__ import annotations

import json
import os
import shutil
import socket
import struct
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kvstrata.deploy import checks_disk, checks_net, model, plan, preflight, settings, up
from kvstrata.deploy.errors import KvError
from kvstrata.deploy.finding import Finding
from kvstrata.deploy.host import GIB, Host

CONFIG = {
    "model_type": "llama", "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2,
    "hidden_size": 256, "max_position_embeddings": 4096, "torch_dtype": "bfloat16",
}  # fmt: skip
HOST = Host(24 * GIB, 20 * GIB, 2)


@contextmanager
def listener(address: str = "127.0.0.1") -> Iterator[int]:
    with socket.socket() as sock:
        sock.bind((address, 0))
        sock.listen()
        yield sock.getsockname()[1]


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


@pytest.fixture
def root(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    (folder / "tokenizer.json").write_text("{}")
    header = b'{"w":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}'
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + bytes(8))
    shutil.copy(Path(__file__).parents[2] / "versions.lock", tmp_path)
    (tmp_path / "configs").mkdir()
    shutil.copy(Path(__file__).parents[2] / "configs" / "store-classes.json", tmp_path / "configs")
    return tmp_path


def load(root: Path, **env: str) -> settings.Settings:
    ports = {"KV_PORT": str(free_port()), "KV_METRICS_PORT": str(free_port())}
    ids = {"KV_UID": str(os.geteuid()), "KV_GID": str(os.getegid())}
    return settings.load(root, {"MODEL_DIR": str(root / "model"), "KV_DEVICE": "cpu", **ports, **ids, **env})


def findings(root: Path, host: Host = HOST, ours: tuple[int, ...] = (), **env: str) -> list[Finding]:
    chosen = load(root, **env)
    info = model.resolve(chosen, root, must_exist=False)
    made = plan.make(chosen, info, "cpu", host) if (info.path / "config.json").is_file() else None
    return preflight.check_all(chosen, info, made, ours, host)


def errors(found: list[Finding]) -> list[Finding]:
    # The disk that the tests themselves run on is not their subject.
    return [finding for finding in found if finding.level == "error" and finding.name != "disk"]


def test_a_good_set_up_has_no_errors(root: Path) -> None:
    assert errors(findings(root)) == []


# -- ports -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("knob", ["KV_PORT", "KV_METRICS_PORT"])
@pytest.mark.parametrize("address", ["127.0.0.1", "0.0.0.0"])
def test_a_port_that_somebody_listens_on_is_found(root: Path, knob: str, address: str) -> None:
    with listener(address) as port:
        found = errors(findings(root, **{knob: str(port)}))
    assert [f"{knob}={port}" in f.found for f in found] == [True]
    assert "in use" in found[0].found
    assert knob in found[0].fix


def test_a_port_that_our_own_containers_hold_is_fine(root: Path) -> None:
    with listener() as port:
        assert errors(findings(root, KV_PORT=str(port), ours=(port,))) == []


def test_plain_vllm_needs_no_metrics_port(root: Path) -> None:
    with listener() as port:
        assert errors(findings(root, KV_METRICS_PORT=str(port), KV_PERSIST="0")) == []


def test_connections_that_linger_after_a_stop_are_no_hindrance(root: Path) -> None:
    server = socket.socket()
    server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    server.bind(("127.0.0.1", 0))
    server.listen()
    port = server.getsockname()[1]
    client = socket.create_connection(("127.0.0.1", port))
    accepted, _ = server.accept()
    accepted.close()  # the side that closes first keeps TIME_WAIT
    client.close()
    server.close()
    assert checks_net.port_findings(load(root, KV_PORT=str(port)), ()) == []


# -- memory ----------------------------------------------------------------------------------------------------------


def test_too_little_memory_for_the_plan_is_found_with_both_figures(root: Path) -> None:
    found = errors(findings(root, host=Host(4 * GIB, 4 * GIB)))
    assert [f.name for f in found] == ["memory"]
    assert "4.0 GiB" in found[0].found
    assert "lmcache" in found[0].needed


def test_memory_that_others_use_is_found_before_the_start_only(root: Path) -> None:
    busy = Host(24 * GIB, 2 * GIB)
    assert [f.name for f in errors(findings(root, host=busy))] == ["memory free"]
    assert errors(findings(root, host=busy, ours=(1,))) == []


# -- folders and disks -----------------------------------------------------------------------------------------------


def test_a_data_folder_that_is_a_file_is_found(root: Path) -> None:
    (root / "file").write_text("")
    found = errors(findings(root, KV_DATA_DIR=str(root / "file")))
    assert any("KV_DATA_DIR" in f.found and "is a file" in f.found for f in found)


def test_a_folder_that_cannot_be_written_is_found(root: Path) -> None:
    # /proc refuses root as well.
    found = errors(findings(root, KV_CACHE_DIR="/proc/kvstrata"))
    assert any("KV_CACHE_DIR" in f.found and "cannot be written" in f.found for f in found)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder away")
def test_a_cache_of_another_user_is_found(root: Path) -> None:
    (root / "cache").mkdir(mode=0o700)
    os.chown(root / "cache", 4321, 4321)
    found = errors(findings(root, KV_CACHE_DIR=str(root / "cache"), KV_UID="10001", KV_GID="10001"))
    assert any("belongs to uid 4321" in f.found for f in found)


def test_model_files_that_the_service_user_cannot_read_are_found(root: Path) -> None:
    (root / "model" / "model.safetensors").chmod(0o600)
    other = str(os.geteuid() + 12345)
    found = errors(findings(root, KV_UID=other, KV_GID=other))
    assert any("model.safetensors cannot be read by uid" in f.found for f in found)


def test_needs_on_one_device_are_added_and_asked_once(tmp_path: Path) -> None:
    stat = os.statvfs(tmp_path)
    free = stat.f_bavail * stat.f_frsize
    half = checks_disk.Need("one", tmp_path / "not" / "there" / "yet", free * 6 // 10, "make room")
    other = checks_disk.Need("two", tmp_path, free * 6 // 10, "make room")
    assert checks_disk.space_findings([half]) == []
    found = checks_disk.space_findings([half, other])
    assert len(found) == 1
    assert "for one" in found[0].needed
    assert "for two" in found[0].needed
    assert found[0].fix == "make room"


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A real file system of 16 MiB."""
    folder = tmp_path / "small"
    folder.mkdir()
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=16m", "tmpfs", str(folder)], capture_output=True, check=False
    )
    if done.returncode != 0:
        pytest.skip("no right to mount here")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_a_disk_that_is_too_small_is_found_apart_from_the_others(root: Path, small_disk: Path) -> None:
    found = [f for f in findings(root, KV_CACHE_DIR=str(small_disk / "cache")) if f.name == "disk"]
    assert any(str(small_disk) in f.found and "the KV cache" in f.needed and "KV_CACHE_DIR" in f.fix for f in found)


def test_a_cache_in_memory_is_refused_unless_it_is_allowed(root: Path, small_disk: Path) -> None:
    for allowed, level in (("", "error"), ("nfs, tmpfs", "warning")):
        found = findings(root, KV_CACHE_DIR=str(small_disk / "cache"), KV_CACHE_ALLOW_FS=allowed)
        assert [f.level for f in found if f.name == "file system" and "tmpfs" in f.found] == [level]
    plain = findings(root, KV_CACHE_DIR=str(small_disk / "cache"), KV_LAYERS="")
    assert not [f for f in plain if f.name == "file system"], "no disk tier, nothing to refuse"


@pytest.mark.parametrize(("room", "level"), [(2.0, "error"), (0.999, "warning"), (0.001, None)])
def test_a_cap_larger_than_the_disk_is_refused_and_one_larger_than_its_free_space_is_said(
    root: Path, room: float, level: str | None
) -> None:
    """`room`: the cap as a share of the whole disk, of which some is always taken."""
    stat = os.statvfs(root)
    gib = max(0.1, stat.f_blocks * stat.f_frsize / GIB * room)
    found = [f for f in findings(root, KV_L2_GB=f"{gib:.3f}") if "KV_L2_GB" in f.found]
    assert [f.level for f in found] == ([level] if level else [])


def test_a_table_of_classes_that_the_store_would_refuse_is_found(root: Path) -> None:
    table = root / "classes.json"
    table.write_text('[{"namespace": "tiny*", "class": "forever"}]')
    found = errors(findings(root, KV_STORE_CLASSES=str(table)))
    assert any("forever" in f.found for f in found)
    table.write_text('[{"namespace": "tiny*", "class": "keep"}]')
    assert errors(findings(root, KV_STORE_CLASSES=str(table))) == []
    assert any("none.json" in f.found for f in errors(findings(root, KV_STORE_CLASSES="none.json")))


# -- model, settings, proxies ----------------------------------------------------------------------------------------


def test_an_incomplete_model_is_found(root: Path) -> None:
    (root / "model" / "model.safetensors").write_bytes(b"")
    assert any(f.name == "model" and "is empty" in f.found for f in errors(findings(root)))


def test_pull_without_a_registry_is_found(root: Path) -> None:
    assert any("KV_REGISTRY" in f.found for f in errors(findings(root, KV_IMAGE_SOURCE="pull")))


def test_a_ca_bundle_that_is_not_there_is_found(root: Path) -> None:
    assert any("ca.pem does not exist" in f.found for f in errors(findings(root, KV_CA_BUNDLE="ca.pem")))
    (root / "ca.pem").touch()
    assert errors(findings(root, KV_CA_BUNDLE="ca.pem")) == []


@pytest.mark.parametrize(
    ("env", "said"),
    [
        ({"KV_LAYERS": "nvmee"}, "no layer 'nvmee'"),
        ({"KV_CACHE_DIR": "/etc/passwd"}, "/etc/passwd is a file"),
        ({"KV_CA_BUNDLE": "/none.pem"}, "/none.pem does not exist"),
    ],
)
def test_the_plan_refuses_what_up_would_refuse(
    root: Path, monkeypatch: pytest.MonkeyPatch, env: dict[str, str], said: str
) -> None:
    shutil.copytree(Path(__file__).parents[2] / "compose", root / "compose")
    for key, value in {"MODEL_DIR": str(root / "model"), "KV_DEVICE": "cpu"}.items():
        monkeypatch.setenv(key, value)
    before = sorted(root.rglob("*"))
    up.make_plan(root)
    for key, value in env.items():
        monkeypatch.setenv(key, value)
    with pytest.raises(KvError, match=said):
        up.make_plan(root)
    assert sorted(root.rglob("*")) == before


@pytest.mark.parametrize(
    ("env", "warned"),
    [
        ({}, False),
        ({"http_proxy": "http://p:3128"}, True),
        ({"HTTP_PROXY": "http://p:3128", "NO_PROXY": "localhost"}, True),
        ({"HTTP_PROXY": "http://p:3128", "NO_PROXY": "localhost, 127.0.0.1"}, False),
        ({"ALL_PROXY": "socks5://p:1", "no_proxy": "*"}, False),
        ({"https_proxy": "http://p:3128"}, False),
    ],
)
def test_a_proxy_that_would_catch_local_requests_is_a_warning(env: dict[str, str], warned: bool) -> None:
    found = checks_net.proxy_findings(env)
    assert [f.level for f in found] == ["warning"] * warned


# -- what is raised --------------------------------------------------------------------------------------------------


def test_all_errors_are_raised_together_and_end_with_exit_code_2(root: Path) -> None:
    (root / "model" / "tokenizer.json").unlink()
    with listener() as port:
        chosen = load(root, KV_PORT=str(port), KV_CACHE_DIR="/proc/kvstrata")
        info = model.resolve(chosen, root, must_exist=False)
        with pytest.raises(KvError) as error:
            preflight.early(chosen, info, (), lambda line: None)
    assert error.value.exit_code == 2
    for part in (f"KV_PORT={port}", "has no tokenizer", "KV_CACHE_DIR"):
        assert part in error.value.found
    assert error.value.found.count("(") >= 3


def test_warnings_are_said_and_do_not_stop(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://p:3128")
    monkeypatch.setenv("NO_PROXY", "")
    monkeypatch.setenv("no_proxy", "")
    said: list[str] = []
    chosen = load(root)
    preflight.early(chosen, model.resolve(chosen, root), (), said.append)
    assert any("http_proxy" in line for line in said)


def test_a_combination_that_the_matrix_refuses_is_found(root: Path) -> None:
    found = errors(findings(root, KV_VLLM_EXTRA_ARGS="--speculative-config x"))
    assert found == []  # a dense model may speculate
    lock_file = root / "versions.lock"
    lock_file.write_text(
        lock_file.read_text().replace('status = "supported"\nwhy = ""', 'status = "refused"\nwhy = "y"')
    )
    assert [f.name for f in errors(findings(root))] == ["matrix"]
    assert errors(findings(root, KV_PERSIST="0")) == []
