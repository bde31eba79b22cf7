"""What the command line decides and writes for observability: layers, targets, secrets, images, and what it says."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from kvstrata.deploy import layers, observability, observability_images, observability_status, settings
from kvstrata.deploy.errors import KvError
from kvstrata.deploy.settings import Settings
from kvstrata.deploy.steps import Steps

ROOT = Path(__file__).parents[2]
Env = Mapping[str, str]
ON = {"KV_DEVICE": "cpu", "KV_OBSERVABILITY": "1", "KV_IMAGE_SOURCE": "build"}


def made(root: Path, **env: str) -> Settings:
    return settings.load(root, {**ON, "KV_DATA_DIR": str(root / "data"), **env})


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A checkout as far as these steps read it."""
    for name in ("compose", "observability"):
        shutil.copytree(ROOT / name, tmp_path / name)
    (tmp_path / "data" / "secrets").mkdir(parents=True)
    (tmp_path / "data" / "cache").mkdir()
    return tmp_path


@pytest.mark.parametrize(
    ("env", "watched"),
    [
        ({}, "observability"),
        ({"KV_OBSERVABILITY": ""}, ""),
        ({"KV_OBSERVABILITY": "", "KV_IMAGE_SOURCE": "pull"}, "observability grafana"),
        ({"KV_IMAGE_SOURCE": "pull", "KV_DEVICE": "nvidia"}, "observability grafana gpu-metrics"),
        ({"KV_OBSERVABILITY": "0", "KV_IMAGE_SOURCE": "pull"}, ""),
        ({"KV_PERSIST": "0"}, ""),
    ],
)
def test_it_is_on_where_asked_for_or_where_images_are_pulled_and_never_beside_plain_vllm(
    root: Path, env: Env, watched: str
) -> None:
    found = [path.stem for path in layers.resolve(made(root, **env)) if path.stem in layers.OBSERVABILITY]
    assert found == watched.split()


def test_its_layers_are_not_for_the_list_of_storage_layers(root: Path) -> None:
    assert not set(layers.OBSERVABILITY) & set(layers.selectable(root))
    with pytest.raises(KvError, match="no layer 'grafana'"):
        layers.resolve(made(root, KV_LAYERS="nvme,grafana"))


def test_every_target_is_a_service_of_its_layer_and_every_watching_service_is_known() -> None:
    services = {
        path.stem: set(yaml.safe_load(path.read_text())["services"]) for path in (ROOT / "compose").glob("*.yaml")
    }
    own = set().union(*(services[name] for name in layers.OBSERVABILITY)) - {"vllm", "lmcache"}
    assert own == set(observability.SERVICES)
    for source in ("build", "pull"):
        for target in observability.targets(services, source):
            assert target.address.split(":")[0] in set().union(*services.values())
    jobs = [target.job for target in observability.targets(services, "build")]
    assert len(jobs) == len(set(jobs)) == 12
    watched = {service for name in ("vllm", "lmcache", *layers.OBSERVABILITY) for service in services[name]}
    asked = {target.address.split(":")[0] for target in observability.targets(services, "build")}
    assert watched - asked == {"lmcache", "otlp"}, "LMCache is asked through the proxy and pushes through otlp"


def test_the_list_of_targets_follows_the_layers(root: Path) -> None:
    def jobs(kind: str) -> dict[str, list[str]]:
        rows = json.loads((root / "data/observability/targets" / f"{kind}.json").read_text())
        assert all(row["labels"]["host"] == observability.host_name() for row in rows)
        return {row["labels"]["job"]: row["targets"] for row in rows}

    observability.prepare(made(root))
    assert set(jobs("plain")) == {"vllm", "guard", "collector", "prometheus", "alertmanager", "traces", "node"}
    assert jobs("store") == {"lmcache-store": ["proxy:8080"]} and jobs("pushed") == {"lmcache": ["otelcol:8889"]}
    assert jobs("engine") == {} and jobs("plain")["traces"] == ["traces:8888"]
    observability.prepare(made(root, KV_LAYERS="engine,path-a", KV_IMAGE_SOURCE="pull"))
    assert jobs("engine") == {"engine": ["engine:9130"]} and jobs("plain")["traces"] == ["traces:3200"]
    assert jobs("plain")["grafana"] == ["grafana:3000"]


def test_every_file_of_targets_is_read_by_prometheus() -> None:
    text = "".join(path.read_text() for path in (ROOT / "observability/prometheus").rglob("*.yaml"))
    read = set(re.findall(r"/etc/prometheus-targets/([a-z]+)\.json", text))
    assert read == {"plain", "store", "engine", "pushed"}


def test_secrets_are_made_once_and_closed(root: Path) -> None:
    observability.prepare(made(root))
    password = root / "data/secrets/grafana/admin_password"
    first = password.read_text()
    observability.prepare(made(root))
    assert password.read_text() == first and len(first.strip()) >= 24
    for path in (root / "data/secrets").rglob("*"):
        assert path.stat().st_mode & 0o077 == 0, path


def test_prometheus_gets_a_token_of_the_engine_for_its_figures_alone(root: Path) -> None:
    tokens, mine = root / "data/secrets/engine/tokens", root / "data/secrets/prometheus/engine_token"
    tokens.parent.mkdir()
    tokens.write_text("# mine\nstack rw default sha256:ab\n")
    current = made(root, KV_LAYERS="engine,path-a")
    observability.prepare(current)
    token = mine.read_text().strip()
    lines = tokens.read_text().splitlines()
    assert lines[:2] == ["# mine", "stack rw default sha256:ab"]
    assert lines[2] == f"prometheus metrics default sha256:{hashlib.sha256(token.encode()).hexdigest()}"
    before = tokens.stat().st_mtime_ns
    observability.prepare(current)
    assert tokens.stat().st_mtime_ns == before and mine.read_text().strip() == token
    mine.unlink()
    observability.prepare(current)
    assert tokens.read_text().count("prometheus metrics") == 1 and token not in mine.read_text()


def test_a_token_of_prometheus_that_could_read_blocks_becomes_one_that_cannot(root: Path) -> None:
    tokens, mine = root / "data/secrets/engine/tokens", root / "data/secrets/prometheus/engine_token"
    for path in (tokens, mine):
        path.parent.mkdir(parents=True, exist_ok=True)
    mine.write_text("before\n")
    digest = hashlib.sha256(b"before").hexdigest()
    tokens.write_text(f"stack rw default sha256:ab\nprometheus ro default sha256:{digest}\n")
    observability.prepare(made(root, KV_LAYERS="engine,path-a"))
    assert tokens.read_text() == f"stack rw default sha256:ab\nprometheus metrics default sha256:{digest}\n"
    assert mine.read_text() == "before\n"


def test_a_change_of_a_configuration_makes_new_containers_and_one_of_a_dashboard_does_not(root: Path) -> None:
    current = made(root)
    before = observability.managed(current)["KV_OBSERVABILITY_HASH"]
    (root / "observability/grafana/dashboards").mkdir(exist_ok=True)
    (root / "observability/grafana/dashboards/x.json").write_text("{}")
    assert observability.managed(current)["KV_OBSERVABILITY_HASH"] == before
    with (root / "observability/collector/collector.yaml").open("a") as file:
        file.write("# x\n")
    assert observability.managed(current)["KV_OBSERVABILITY_HASH"] != before


@pytest.mark.parametrize(("knob", "code"), [("", 0), ("1", 1)])
def test_images_that_cannot_be_pulled_are_no_reason_not_to_start(
    knob: str, code: int, monkeypatch: pytest.MonkeyPatch, root: Path
) -> None:
    from kvstrata.deploy import observability_up

    shutil.copy(ROOT / "versions.lock", root)
    found = observability_up.begin(made(root, KV_IMAGE_SOURCE="pull", KV_OBSERVABILITY=knob), Steps())
    assert not found.settings.observes and found.images == observability_images.NONE
    assert found.finish(root) == code, "said, and counted where it was asked for"


def test_without_observability_nothing_is_asked_for(root: Path) -> None:
    from kvstrata.deploy import observability_up

    found = observability_up.begin(made(root, KV_OBSERVABILITY="0"), Steps())
    assert found.finish(root) == 0 and set(found.images.values()) == {""}
    assert not (root / "data/observability").exists()


def answers(monkeypatch: pytest.MonkeyPatch, rows: list[dict[str, Any]], alerts: list[dict[str, Any]]) -> None:
    def reply(request: httpx.Request) -> httpx.Response:
        what = {"activeTargets": rows} if request.url.path.endswith("targets") else {"alerts": alerts}
        return httpx.Response(200, json={"data": what})

    real = httpx.Client
    monkeypatch.setattr(httpx, "Client", lambda **rest: real(**rest, transport=httpx.MockTransport(reply)))


def running(root: Path) -> Settings:
    from dataclasses import replace

    files = layers.compose_file(root, layers.resolve(made(root)))
    return replace(made(root), managed={"COMPOSE_FILE": files})


def test_a_target_that_is_down_or_not_there_is_named(monkeypatch: pytest.MonkeyPatch, root: Path) -> None:
    current = running(root)
    up = [target.job for target in observability.targets([p.stem for p in layers.resolve(current)], "build")]
    rows = [{"labels": {"job": job}, "health": "up", "lastError": ""} for job in up if job != "node"]
    rows[0] |= {"health": "down", "lastError": "connection refused"}
    answers(
        monkeypatch,
        rows,
        [{"labels": {"alertname": "A"}, "state": "firing"}, {"labels": {"alertname": "B"}, "state": "pending"}],
    )
    found = observability_status.look(current)
    assert found.targets["node"] == "missing" and found.alerts == ("A",)
    assert len(found.problems) == 2 and "connection refused" in found.problems[0]
    assert "ALERTS: A" in found.line()


def test_a_prometheus_that_does_not_answer_is_one_problem(root: Path) -> None:
    found = observability_status.look(running(root))
    assert len(found.problems) == 1 and "prometheus" in found.problems[0]


def test_without_the_layers_nothing_is_expected(root: Path) -> None:
    found = observability_status.look(made(root))
    assert found.problems == () and not found.targets
