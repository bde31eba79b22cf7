"""The contract on a live stack: after the scenario every name is live and no panel is empty."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvstrata.observe.catalog import find
from tests.observability.watched import Watched

pytestmark = [pytest.mark.docker, pytest.mark.slow, pytest.mark.stack]


def test_after_the_scenario_every_name_is_live_and_no_panel_is_empty(watched: Watched, tmp_path: Path) -> None:
    print(watched.patiently("observe", "scenario"))
    found = tmp_path / "check.json"
    done = watched.cli("observe", "check", "--minutes", "45", "--changing", "--json", str(found))
    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr
    seen = json.loads(found.read_text())
    assert not seen["gaps"]
    assert all(row["reason"] for row in seen["excused"])
    assert all(find(row["name"]) for row in seen["excused"])


def test_the_report_of_a_live_stack_has_every_plot(watched: Watched, tmp_path: Path) -> None:
    page = tmp_path / "report.html"
    watched.ok("report", "--hours", "1", "--out", str(page))
    assert "nothing was measured" not in page.read_text(encoding="utf-8")
