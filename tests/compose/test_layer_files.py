"""Rules that each layer file keeps by itself, read from the YAML and not from what compose makes of it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from kvstrata.deploy import layers
from kvstrata.deploy.knobs import MANAGED_KEYS, USER_KEYS
from tests.compose.rendering import ROOT

FILES = sorted((ROOT / "compose").glob("*.yaml"))
VARIABLE = re.compile(r"(?<!\$)\$\{?([A-Za-z_][A-Za-z0-9_]*)")


def services(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load(path.read_text()).get("services", {})
    return found


def owners() -> dict[str, str]:
    """Service -> the one layer that gives it an image."""
    found: dict[str, str] = {}
    for path in FILES:
        for name, service in services(path).items():
            if "image" in service:
                assert name not in found, f"{name} has an image in {found[name]} and {path.stem}"
                found[name] = path.stem
    return found


def needed(name: str) -> set[str]:
    """The layers that must be there with this one, to the end of the chain."""
    found: set[str] = set()
    todo = [name]
    while todo:
        for need in layers.load(ROOT / "compose" / f"{todo.pop()}.yaml").needs:
            if need not in found:
                found.add(need)
                todo.append(need)
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_the_header_says_what_the_layer_is_for_and_how_to_undo_it(path: Path) -> None:
    layer = layers.load(path)
    assert path.read_text().startswith("# purpose: ")
    assert layer.purpose and layer.adds and layer.undo
    assert set(layer.needs) <= {other.stem for other in FILES}
    assert len(path.read_text().splitlines()) <= 150


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_layer_names_its_own_services_and_those_of_the_layers_it_needs(path: Path) -> None:
    owner = owners()
    for name in services(path):
        assert owner.get(name) in {path.stem, "vllm"} | needed(path.stem), f"{path.stem} makes {name} a broken service"


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_only_the_owner_gives_a_command_and_nothing_is_taken_back(path: Path) -> None:
    text = path.read_text()
    assert "!reset" not in text and "!override" not in text
    assert not re.search(r"^\s*(gpus|build|container_name|extends|links|privileged|profiles):", text, re.M)
    for name, service in services(path).items():
        if owners()[name] != path.stem:
            assert "command" not in service
        for word in str(service.get("command", "")) + str(service.get("entrypoint", "")):
            assert word not in "|;&`<>", "no shell logic"
        assert "sh" not in service.get("entrypoint", [])


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_namespaces_point_at_services_that_exist(path: Path) -> None:
    reachable = {name for name, owner in owners().items() if owner in {path.stem} | needed(path.stem)}
    for service in services(path).values():
        for key in ("pid", "ipc", "network_mode"):
            kind, _, target = str(service.get(key, "")).partition(":")
            assert kind != "service" or target in reachable
            assert kind not in ("host", "container")
        assert "depends_on" not in service, "vLLM comes up without the cache, and `up --no-deps` must not recreate it"


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_bind_paths_do_not_depend_on_where_compose_is_called(path: Path) -> None:
    for service in services(path).values():
        for mount in service.get("volumes", []):
            source = mount.get("source", "") if isinstance(mount, dict) else str(mount).split(":")[0]
            assert not source.startswith("./")
            if isinstance(mount, dict) and mount["type"] == "bind":
                assert mount["bind"] == {"create_host_path": False}, "a misspelt folder must not be made as root"


def used() -> set[str]:
    text = "\n".join(re.sub(r"^\s*#.*$", "", path.read_text(), flags=re.M) for path in FILES)
    return set(VARIABLE.findall(text))


def test_compose_files_use_nothing_that_is_no_setting() -> None:
    assert used() <= {*USER_KEYS, *MANAGED_KEYS}


def test_every_managed_value_is_used() -> None:
    assert set(MANAGED_KEYS) - used() == {"COMPOSE_FILE"}, "which compose itself reads"


def test_every_knob_is_read_by_settings_and_by_somebody_after_it() -> None:
    """A knob counts as used when a compose file has it, or code outside settings.py reads its field."""
    source = (ROOT / "src/kvstrata/deploy/settings.py").read_text()
    code = "\n".join(p.read_text() for p in (ROOT / "src").rglob("*.py") if p.name != "settings.py")
    for key in USER_KEYS:
        assert f'"{key}"' in source, f"{key} is listed but never read"
        field = key.removeprefix("KV_").lower().replace("compose_project_name", "project")
        if key not in used() and key != "KV_ENV_VERSION":
            assert re.search(rf"\.{field}\b", code), f"nobody uses {key}"
