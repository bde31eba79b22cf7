"""The last proof as metrics: a file that the node exporter reads, so that it needs nothing that runs."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path

from kvstrata.proof.report import Report

__all__ = ["text", "write"]

_FILE = "proof.prom"
_METRICS = {
    "kvstrata_proof_timestamp_seconds": "When the last proof ended, seconds since 1970.",
    "kvstrata_proof_passed": "1 when it passed.",
    "kvstrata_proof_worth_it": "1 when it passed and every cached phase began sooner than the cold one.",
    "kvstrata_proof_ttft_seconds": "Time to first token of a phase.",
    "kvstrata_proof_hit_tokens": "Prompt tokens of a phase that were not computed, by where they came from.",
}


def write(report: Report, folder: Path) -> None:
    """Replace the file of the run before. Nothing where `folder` is not there (no observability) or not ours."""
    if not folder.is_dir():
        return
    temporary = folder / f".{_FILE}.tmp"
    with contextlib.suppress(OSError):
        temporary.write_text(text(report, time.time()), encoding="utf-8")
        temporary.chmod(0o644)
        temporary.replace(folder / _FILE)


def text(report: Report, ended: float) -> str:
    """The exposition. `ended`: seconds since 1970."""
    rows = list(_rows(report, ended))
    lines = []
    for name, told in _METRICS.items():
        lines += [f"# HELP {name} {told}", f"# TYPE {name} gauge"]
        lines += [f"{name}{labels} {value:.15g}" for row, labels, value in rows if row == name]
    return "\n".join(lines) + "\n"


def _rows(report: Report, ended: float) -> Iterator[tuple[str, str, float]]:
    yield "kvstrata_proof_timestamp_seconds", "", ended
    yield "kvstrata_proof_passed", "", float(report.passed)
    yield "kvstrata_proof_worth_it", "", float(report.worth_it)
    for phase in report.phases:
        if phase.ttft_s is not None:
            yield "kvstrata_proof_ttft_seconds", f'{{phase="{phase.name}"}}', phase.ttft_s
        yield "kvstrata_proof_hit_tokens", f'{{phase="{phase.name}",source="{phase.source}"}}', float(phase.hit_tokens)
