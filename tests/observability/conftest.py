"""A real Prometheus over a target that exposes the whole catalogue."""

from __future__ import annotations

import socket
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from kvstrata.deploy.errors import KvError
from kvstrata.observe import promtool
from kvstrata.observe.catalog import all_metrics
from kvstrata.observe.prometheus import Prometheus
from tests.observability.synthetic import Target
from tests.observability.watched import watched  # noqa: F401 - a fixture

_CONFIG = """
global: {{scrape_interval: 1s, scrape_timeout: 1s, evaluation_interval: 1s}}
rule_files: [{rules}, {quick}]
scrape_configs:
  - job_name: lmcache-store
    static_configs: [{{targets: ["{address}"], labels: {{host: here}}}}]
"""
#: An alert that comes and goes with a metric of the target, for two things at a time.
_QUICK = """
groups:
  - name: quick
    rules:
      - alert: NoBlocks
        expr: >
          label_replace(absent(kvstrata_store_blocks), "of", "one", "", "")
          or label_replace(absent(kvstrata_store_blocks), "of", "two", "", "")
"""
ROOT = Path(__file__).parents[2]


@dataclass
class Running:
    prometheus: Prometheus
    target: Target

    def scrapes(self, count: int) -> None:
        """Wait for `count` more scrapes that succeeded."""
        time.sleep(count)


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


@pytest.fixture(scope="session")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder = tmp_path_factory.mktemp("prometheus")
    target = Target(all_metrics())
    config = folder / "prometheus.yml"
    quick, rules = folder / "quick.yml", ROOT / "observability/prometheus/rules/*.yaml"
    quick.write_text(_QUICK)
    config.write_text(_CONFIG.format(rules=rules, quick=quick, address=target.address))
    port = _free_port()
    server = subprocess.Popen(
        [
            promtool.prometheus(), f"--config.file={config}", f"--storage.tsdb.path={folder / 'data'}",
            f"--web.listen-address=127.0.0.1:{port}", "--enable-feature=native-histograms",
        ],
        stdout=subprocess.DEVNULL, stderr=(folder / "log").open("w"),
    )  # fmt: skip
    prometheus = Prometheus(f"http://127.0.0.1:{port}")
    try:
        for _ in range(300):
            try:
                if "kvstrata_store_blocks" in prometheus.names(60):
                    break
            except KvError:
                pass  # it starts
            time.sleep(0.2)
        else:
            raise AssertionError((folder / "log").read_text()[-2000:])
        time.sleep(8)
        yield Running(prometheus, target)
    finally:
        prometheus.close()
        server.terminate()
        server.wait()
        target.close()
