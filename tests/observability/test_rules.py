"""promtool on the rules: their syntax, and the unit test of each alert."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from kvstrata.observe import promtool

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2] / "observability" / "prometheus"


@pytest.mark.parametrize(("verb", "files"), [("check", "rules"), ("test", "tests")])
def test_promtool_finds_no_fault(verb: str, files: str) -> None:
    paths = sorted((ROOT / files).glob("*.yaml"))
    assert paths
    done = subprocess.run([promtool.find(), verb, "rules", *paths], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_tests_of_the_rules_can_fail(tmp_path: Path) -> None:
    """Every alert's condition is turned into one that never holds: each test that expects an alert fails."""
    (tmp_path / "rules").mkdir()
    (tmp_path / "tests").mkdir()
    rules = (ROOT / "rules/kvstrata.yaml").read_text(encoding="utf-8")
    never = "\n".join(
        "        expr: vector(0) > 1" if line.strip().startswith("expr:") else line
        for line in rules.splitlines()
        if not line.startswith("          ") or line.strip().startswith(("summary", "description", "runbook"))
    )
    (tmp_path / "rules/kvstrata.yaml").write_text(never, encoding="utf-8")
    copy = tmp_path / "tests/kvstrata_test.yaml"
    copy.write_text((ROOT / "tests/kvstrata_test.yaml").read_text(encoding="utf-8"), encoding="utf-8")
    done = subprocess.run([promtool.find(), "test", "rules", copy], capture_output=True, text=True)
    assert done.returncode != 0
