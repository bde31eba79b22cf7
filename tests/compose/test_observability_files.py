"""The configuration files of observability, as far as that can be said without running them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from kvstrata.deploy import layers
from kvstrata.deploy.knobs import USER_KEYS
from kvstrata.deploy.lock import load
from tests.compose.rendering import ROOT, Checkout, Version
from tests.compose.test_layers_render import _bytes as byte_count

FOLDER = ROOT / "observability"


def stack(storage: tuple[str, ...] = ("nvme",), watched: bool = True) -> list[Path]:
    names = ["vllm", "lmcache", *storage, *(layers.OBSERVABILITY[:2] if watched else ()), "cpu"]
    return [ROOT / "compose" / f"{name}.yaml" for name in names]


def read(path: str) -> Any:
    return yaml.safe_load((FOLDER / path).read_text())


def test_the_two_ways_to_native_histograms_differ_in_that_alone() -> None:
    flag, native = (read(f"prometheus/scrape/{name}/lmcache.yaml")["scrape_configs"] for name in ("flag", "native"))
    assert native[0].pop("scrape_native_histograms") is True
    assert flag == native


def test_observability_reaches_neither_lmcache_nor_the_store(compose: Version, checkout: Checkout) -> None:
    """LMCache's ZMQ unpickles: what watches is in none of its networks, and mounts none of its sockets."""
    model = compose.config(checkout(stack(("engine", "path-a"))))
    services = model["services"]
    with_lmcache = {name for name, s in services.items() if {"kv", "store"} & set(s.get("networks") or {})}
    assert with_lmcache == {"vllm", "lmcache", "engine"}
    sockets = {name for name, s in services.items() if any(m["source"] == "otlp" for m in s.get("volumes", []))}
    assert sockets == {"vllm", "lmcache", "otlp"}
    assert model["networks"]["obs"]["internal"] is True


def test_switching_it_on_changes_vllm_and_lmcache_and_nothing_else(compose: Version, checkout: Checkout) -> None:
    on = dict(compose.config(checkout(stack()))["services"])
    off = dict(compose.config(checkout(stack(watched=False)))["services"])
    assert {name for name in off if off[name] != on[name]} == {"vllm", "lmcache"}
    assert set(off["vllm"]["networks"]) == set(on["vllm"]["networks"])


def test_pages_are_published_and_what_is_for_machines_is_not(compose: Version, checkout: Checkout) -> None:
    services = compose.config(checkout(stack()))["services"]
    published = {
        name: [port["published"] for port in service["ports"]]
        for name, service in services.items()
        if "ports" in service
    }
    pages = {"prometheus": "9401", "alertmanager": "9402", "traces": "9403", "grafana": "9404"}
    assert {name: ports for name, ports in published.items() if name in pages} == {n: [p] for n, p in pages.items()}
    assert set(published) - set(pages) == {"vllm", "proxy"}
    assert set(pages.values()) <= set(USER_KEYS.values())


@pytest.mark.parametrize("service", ["otelcol", "prometheus", "alertmanager", "traces", "grafana"])
def test_a_new_configuration_makes_a_new_container(compose: Version, checkout: Checkout, service: str) -> None:
    root = checkout(stack())
    before = compose.config(root)["services"][service]["labels"]
    text = (root / ".env").read_text()
    (root / ".env").write_text(re.sub(r"^KV_OBSERVABILITY_HASH=.*$", "KV_OBSERVABILITY_HASH=other", text, flags=re.M))
    assert compose.config(root)["services"][service]["labels"] != before


def test_retention_has_a_size(compose: Version, checkout: Checkout) -> None:
    entry = compose.config(checkout(stack(), KV_PROMETHEUS_GB="7"))["services"]["prometheus"]["entrypoint"]
    assert "--storage.tsdb.retention.size=7GB" in entry


def test_the_collector_is_bounded_below_its_containers_limit(compose: Version, checkout: Checkout) -> None:
    config = read("collector/collector.yaml")
    limit = byte_count(compose.config(checkout(stack()))["services"]["otelcol"]["mem_limit"])
    assert config["processors"]["memory_limiter"]["limit_mib"] << 20 < limit
    for pipeline in config["service"]["pipelines"].values():
        assert pipeline["processors"][0] == "memory_limiter", "first, or it limits nothing"
    queue = config["exporters"]["otlp_http/traces"]
    assert queue["sending_queue"]["queue_size"] and queue["retry_on_failure"]["max_elapsed_time"]


def test_the_collector_sends_traces_where_either_store_listens() -> None:
    endpoint = read("collector/collector.yaml")["exporters"]["otlp_http/traces"]["endpoint"]
    tempo, jaeger = read("traces/tempo.yaml")["distributor"], read("traces/jaeger.yaml")
    for store in (tempo, jaeger):
        (way,) = store["receivers"]["otlp"]["protocols"].values()
        assert endpoint == f"http://traces:{way['endpoint'].rpartition(':')[2]}"


def test_the_collector_that_is_built_has_what_its_configuration_names() -> None:
    """Its components are listed twice, for the builder and in Go; the contrib image has all of them."""
    config = read("collector/collector.yaml")
    folder = ROOT / "images/observability/otelcol"
    built = yaml.safe_load((folder / "builder.yaml").read_text())
    for kind in ("receivers", "processors", "exporters", "extensions"):
        named = {name.partition("/")[0].replace("_", "") for name in config.get(kind) or {}}
        modules = {one["gomod"].split()[0] for one in built.get(kind) or ()}
        assert {module.rpartition("/")[2].removesuffix(kind[:-1]) for module in modules} == named, kind
        assert all(f'"{module}"' in (folder / "components.go").read_text() for module in modules)


def test_datasources_have_the_uids_of_the_dashboards_and_point_at_services(
    compose: Version, checkout: Checkout
) -> None:
    sources = read("grafana/provisioning/datasources/kvstrata.yaml")["datasources"]
    services = compose.config(checkout(stack()))["services"]
    assert {source["uid"] for source in sources} == {"prometheus", "traces", "alertmanager"}
    for source in sources:
        assert re.fullmatch(r"http://([a-z]+):\d+", source["url"])[1] in services  # type: ignore[index]
    assert sum(bool(source.get("isDefault")) for source in sources) == 1


def test_grafana_begins_with_a_dashboard_that_is_there(compose: Version, checkout: Checkout) -> None:
    grafana = compose.config(checkout(stack()))["services"]["grafana"]
    home = Path(grafana["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"])
    mounts = {Path(mount["target"]): mount["source"] for mount in grafana["volumes"]}
    assert mounts[home.parent].endswith("grafana/dashboards")
    assert (FOLDER / "grafana/dashboards" / home.name).is_file()


def test_grafana_has_a_password_file_and_anonymous_eyes_only_behind_a_knob(
    compose: Version, checkout: Checkout
) -> None:
    env = compose.config(checkout(stack()))["services"]["grafana"]["environment"]
    assert env["GF_SECURITY_ADMIN_PASSWORD__FILE"].startswith("/run/kvstrata-grafana/")
    assert env["GF_AUTH_ANONYMOUS_ENABLED"] == "0" and env["GF_AUTH_ANONYMOUS_ORG_ROLE"] == "Viewer"
    assert (
        compose.config(checkout(stack(), KV_GRAFANA_ANONYMOUS="1"))["services"]["grafana"]["environment"][
            "GF_AUTH_ANONYMOUS_ENABLED"
        ]
        == "1"
    )


def test_every_upstream_image_that_observability_names_is_in_the_lock() -> None:
    from kvstrata.deploy.observability_images import _IMAGES

    assert {name for name, _ in _IMAGES.values()} <= {image.name for image in load(ROOT).upstream}
