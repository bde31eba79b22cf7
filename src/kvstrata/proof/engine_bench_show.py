"""The engine benchmark's figures: rows with their two ratios, the targets, and the tables for people."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median, quantiles
from typing import Any, TypeAlias

from rich.console import Console

from kvstrata.proof.engine_bench_client import Sample
from kvstrata.proof.engine_bench_servers import EPISTEMIC_DURABLE, HTTP, REDIS, REDIS_AOF, RESP

__all__ = ["TARGETS", "Target", "Work", "check", "markdown", "render", "table"]

Work: TypeAlias = tuple[str, str, int, int]
"""(server, op, block size in KiB, connections)."""
Figures = Mapping[str, Any]


def table(samples: Mapping[Work, Sequence[Sample]], reasons: Mapping[str, str]) -> list[dict[str, Any]]:
    """The JSON rows. `mibps`: median of the rounds; p50 and p99: of all requests of all rounds; the ratios are those of
    the rows as they stand there. A server that failed has one row with the reason."""
    speed = {work: round(median(sample.mibps for sample in some), 1) for work, some in samples.items()}
    rows: list[dict[str, Any]] = []
    for work in sorted(samples):
        server, op, kib, number = work
        times = [ms for sample in samples[work] for ms in sample.latencies_ms]
        rows.append({
            "server": server, "op": op, "block_kib": kib, "connections": number, "mibps": speed[work],
            "p50_ms": round(median(times), 3), "p99_ms": round(_p99(times), 3),
            "vs_redis": _ratio(speed[work], speed.get((REDIS, op, kib, number))),
            "vs_epistemic_durable": _ratio(speed[work], speed.get((EPISTEMIC_DURABLE, op, kib, number))),
            "samples": [round(sample.mibps, 1) for sample in samples[work]],
        })  # fmt: skip
    empty = dict.fromkeys(
        ("op", "block_kib", "connections", "mibps", "p50_ms", "p99_ms", "vs_redis", "vs_epistemic_durable")
    )
    return rows + [{"server": name, **empty, "samples": [], "reason": why} for name, why in sorted(reasons.items())]


def _p99(times: Sequence[float]) -> float:
    return quantiles(times, n=100, method="inclusive")[98] if len(times) > 1 else times[0]


def _ratio(mine: float, theirs: float | None) -> float | None:
    return round(mine / theirs, 3) if theirs else None


@dataclass(frozen=True)
class Target:
    """`found`: the worst of those rows of the JSON, None where one of them was not measured. Met at `least`."""

    text: str
    least: float
    found: Callable[[Figures], float | None]


def _worst(
    server: str, against: str, op: str, blocks: Sequence[int], connections: Sequence[int]
) -> Callable[[Figures], float | None]:
    def ratio(figures: Figures) -> float | None:
        speed = {
            (row["server"], row["op"], row["block_kib"], row["connections"]): row["mibps"] for row in figures["rows"]
        }
        pairs = [
            (speed.get((server, op, kib, number)), speed.get((against, op, kib, number)))
            for kib in blocks
            for number in connections
        ]
        ratios = [ours / theirs for ours, theirs in pairs if ours and theirs]
        return min(ratios) if ratios and len(ratios) == len(pairs) else None

    return ratio


def _targets(server: str) -> list[Target]:
    every, big = (1, 4, 16), (1024, 4096)
    return [
        Target(f"{server}: GET 1 MiB, times redis", 1.2, _worst(server, REDIS, "get", (1024,), every)),
        Target(f"{server}: GET 4 MiB, times redis", 1.0, _worst(server, REDIS, "get", (4096,), every)),
        Target(f"{server}: PUT 1 and 4 MiB, 4 connections, times redis", 1.0, _worst(server, REDIS, "put", big, (4,))),
        Target(f"{server}: PUT 1 and 4 MiB, 1 connection, times redis", 0.85, _worst(server, REDIS, "put", big, (1,))),
        Target(f"{server}: PUT 1 and 4 MiB, times redis aof-always", 2.0, _worst(server, REDIS_AOF, "put", big, every)),
        Target(f"{server}: GET, times epistemic durable", 2.0, _worst(server, EPISTEMIC_DURABLE, "get", big, every)),
        Target(f"{server}: PUT, times epistemic durable", 2.0, _worst(server, EPISTEMIC_DURABLE, "put", big, every)),
    ]


TARGETS: tuple[Target, ...] = (*_targets(HTTP), *_targets(RESP))


def check(figures: Figures) -> list[tuple[Target, float | None, bool | None]]:
    """Each target with its figure and whether it is met; None for what was not measured."""
    found = [(target, target.found(figures)) for target in TARGETS]
    return [(target, value, None if value is None else value >= target.least) for target, value in found]


def markdown(figures: Figures) -> str:
    """All tables, ready for docs/performance.md."""
    about = figures["machine"]
    lines = [
        f"{about['cpu']}, {about['cores']} cores, {about['memory_gib']} GiB, Linux {about['kernel']}; "
        f"{about['file_system']} on {about['device']}; Python {about['python']}; {about['at']}. "
        f"Median of {figures['options']['rounds']}; client and server share the machine.",
        "",
    ]
    for op in ("get", "put"):
        lines += _table(f"{op}: MiB/s (p50 / p99 ms), times redis", *_speeds(figures, op))
    lines += _table("most memory resident", ["", "MiB"], [[n, f"{mib:.0f}"] for n, mib in figures["rss_mib"].items()])
    lines += [
        f"The check of every read runs at {figures['check_gbps']:.1f} GB/s: "
        f"{(1 << 20) / figures['check_gbps'] / 1e6:.3f} ms a MiB.",
        "",
    ]
    rows = [
        [target.text, f">= {target.least:g}", "-" if found is None else f"{found:.2f}",
         {True: "yes", False: "**no**", None: "not measured"}[met]]
        for target, found, met in check(figures)
    ]  # fmt: skip
    lines += _table("targets (the worst of the rows that they speak of)", ["", "target", "found", "met"], rows)
    lines += [f"- not measured: {row['server']}: {row['reason']}" for row in figures["rows"] if row.get("reason")]
    return "\n".join(lines).rstrip() + "\n"


def _speeds(figures: Figures, op: str) -> tuple[list[str], list[list[str]]]:
    rows = {
        (row["server"], row["block_kib"], row["connections"]): row for row in figures["rows"] if row["op"] == op
    }  # fmt: skip
    columns = sorted({(kib, number) for _, kib, number in rows})
    body = [
        [server, *(_cell(rows.get((server, *column))) for column in columns)]
        for server in sorted({s for s, _, _ in rows})
    ]
    return ["", *(f"{_size(kib)} x{number}" for kib, number in columns)], body


def _size(kib: int) -> str:
    return f"{kib} KiB" if kib < 1024 else f"{kib >> 10} MiB"


def _cell(row: Mapping[str, Any] | None) -> str:
    if row is None:
        return "-"
    ratio = "" if row["vs_redis"] is None else f" {row['vs_redis']:.2f}x"
    return f"{row['mibps']:.0f} ({row['p50_ms']:.2f} / {row['p99_ms']:.2f}){ratio}"


def _table(title: str, head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    if not rows:
        return []
    lines = [f"**{title}**", "", "| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    return [*lines, *("| " + " | ".join(row) + " |" for row in rows), ""]


def render(figures: Figures, console: Console) -> None:
    """The tables in the terminal."""
    console.print(markdown(figures), markup=False, highlight=False, soft_wrap=True)
