"""The scenario's requests to the KV engine: against a real one, which afterwards is as it was."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest

from kvstrata.deploy.errors import KvError
from kvstrata.observe.catalog import Needs, all_metrics
from kvstrata.observe.engine_traffic import EngineTraffic
from kvstrata.proof.prom import parse
from tests.engine.process import TOKENS, WRITER, EngineProcess

pytestmark = pytest.mark.slow


def test_it_moves_the_engines_counters_and_leaves_nothing_behind(tmp_path: Path) -> None:
    tokens = tmp_path / "tokens"
    tokens.write_text(TOKENS)
    engine = EngineProcess(tmp_path / "engine", TOKENS_FILE=tokens)
    try:
        EngineTraffic(engine.url, WRITER).run()
        with httpx.Client(base_url=engine.url, headers={"Authorization": f"Bearer {WRITER}"}, trust_env=False) as http:
            stats, page = http.get("/kv/stats").json(), parse(http.get("/metrics").text)
        assert stats["total_refs"] == stats["unique_blocks"] == 0
        moved = ("put_new", "dedup_hits", "get_hits", "get_misses", "unauthorized")
        assert {name: page.sum(f"kvstrata_engine_{name}_total") > 0 for name in moved} == dict.fromkeys(moved, True)
        missing = [
            metric.name
            for metric in all_metrics()
            if metric.needs is Needs.ENGINE and not (page.has(metric.name) or page.has(f"{metric.name}_bucket"))
        ]
        assert not missing
        with pytest.raises(KvError, match="401"):
            EngineTraffic(engine.url, "not-a-token-of-it").run()
    finally:
        engine.kill()
