"""The benchmark's figures for people: tables in the terminal and as Markdown, the targets, and a plot."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

__all__ = ["TARGETS", "Target", "check", "markdown", "plot", "render"]

Figures = Mapping[str, Any]
_KINDS = (("load", "hot"), ("load", "cold"), ("store", "hot"))


@dataclass(frozen=True)
class Target:
    """`found`: the figure in the JSON, None where it was not measured. Met at `least`, or at most that with `below`."""

    text: str
    least: float
    found: Callable[[Figures], float | None]
    below: bool = False


def _best(figures: Figures, name: str, op: str, state: str, mib: int, *, checked: bool | None = None) -> float | None:
    speeds = [
        row["gbps"]
        for row in figures["rows"]
        if (row["name"], row["op"], row["state"], row["block_mib"]) == (name, op, state, mib)
        and row["gbps"] is not None
        and (checked is None or row["checked"] is checked)
    ]
    return max(speeds, default=None)


def _against(name: str, op: str, state: str, mib: int) -> Callable[[Figures], float | None]:
    def ratio(figures: Figures) -> float | None:
        ours = _best(figures, "kvstrata raw", op, state, mib, checked=True)
        theirs = _best(figures, name, op, state, mib)
        return ours / theirs if ours is not None and theirs else None

    return ratio


def _on_many_cores(ratio: Callable[[Figures], float | None]) -> Callable[[Figures], float | None]:
    """16 threads show something only where there are as many cores."""
    return lambda figures: ratio(figures) if figures["machine"]["cores"] >= 16 else None


def _codec(field: str) -> Callable[[Figures], float | None]:
    def value(figures: Figures) -> float | None:
        found = [row[field] for row in figures["codecs"] if (row["name"], row["dtype"]) == ("zstd", "bf16")]
        return max(found, default=None)

    return value


def _scan(field: str) -> Callable[[Figures], float | None]:
    return lambda figures: figures.get("scan", {}).get(field)


TARGETS: tuple[Target, ...] = (
    Target("checked load, page cache, 3 MiB, of the ceiling", 0.80, _against("ceiling", "load", "hot", 3)),
    Target("checked load, page cache, 36 MiB, of the ceiling", 0.85, _against("ceiling", "load", "hot", 36)),
    Target("checked load, 3 MiB, times LMCache fs", 2.0, _against("lmcache fs", "load", "hot", 3)),
    Target("checked load, 36 MiB, times LMCache fs", 1.2, _against("lmcache fs", "load", "hot", 36)),
    Target("checked load, 3 MiB, times LMCache fs, 16 cores", 5.0,
           _on_many_cores(_against("lmcache fs", "load", "hot", 3))),
    Target("checked load, 3 MiB, times nixl_store_dynamic", 2.0,
           _against("lmcache nixl_store_dynamic", "load", "hot", 3)),
    Target("checked load, 3 MiB, of fs_native (unchecked)", 0.85, _against("lmcache fs_native", "load", "hot", 3)),
    Target("store, 3 MiB, of the ceiling", 0.90, _against("ceiling", "store", "hot", 3)),
    Target("store, 36 MiB, of the ceiling", 0.90, _against("ceiling", "store", "hot", 36)),
    Target("store, 3 MiB, times LMCache fs", 3.0, _against("lmcache fs", "store", "hot", 3)),
    Target("cold load, 3 MiB, of preadv of the same files", 1.0,
           _against("preadv of kvstrata's files", "load", "cold", 3)),
    Target("zstd on bf16 KV: ratio", 1.45, _codec("ratio")),
    Target("zstd on bf16 KV: decode GB/s", 1.5, _codec("decode_gbps")),
    Target("index, bytes a block", 250, _scan("index_bytes_per_block"), below=True),
    Target("start with 400,000 blocks, warm, s", 3.0, _scan("warm_s"), below=True),
)  # fmt: skip


def check(figures: Figures) -> list[tuple[Target, float | None, bool | None]]:
    """Each target with its figure and whether it is met; None for what was not measured."""
    rows = []
    for target in TARGETS:
        found = target.found(figures)
        met = None if found is None else found <= target.least if target.below else found >= target.least
        rows.append((target, found, met))
    return rows


def markdown(figures: Figures) -> str:
    """All tables, ready for docs/performance.md."""
    machine = figures["machine"]
    lines = [
        f"{machine['cpu']}, {machine['cores']} cores, {machine['memory_gib']} GiB, Linux {machine['kernel']}; "
        f"{machine['file_system']} on {machine['device']}, read-ahead {machine['read_ahead_kb']} KiB; "
        f"LMCache {machine['lmcache']}, Python {machine['python']}; buffers in {machine.get('buffers', '-')}; "
        f"{machine['at']}.",
        "",
    ]
    for op, state in _KINDS:
        lines += _table(f"{op}, {'page cache' if state == 'hot' else 'cold'}", *_speeds(figures, op, state))
    if figures["codecs"]:
        head = ["codec", "KV", "ratio", "encode GB/s", "decode GB/s", "threads"]
        rows = [
            [row["name"], row["dtype"], f"{row['ratio']:.2f}", f"{row['encode_gbps']:.2f}", f"{row['decode_gbps']:.2f}",
             str(row["threads"])]
            for row in figures["codecs"]
        ]  # fmt: skip
        lines += _table("codecs on the demo model's KV", head, rows)
    if figures.get("prefetch"):
        rows = [
            [row["name"], str(row["block_mib"]), f"{row['store_gbps']:.2f}", f"{row['load_gbps']:.2f}"]
            for row in figures["prefetch"]
        ]
        lines += _table("through LMCache's controllers, GB/s", ["", "MiB", "store", "load"], rows)
    if scan := figures.get("scan"):
        cold = "not measured" if scan["cold_s"] is None else f"{scan['cold_s']:.2f} s"
        lines += [f"Start with {scan['blocks']:,} blocks: {scan['warm_s']:.2f} s warm, {cold} cold; index "
                  f"{scan['index_bytes_per_block']:.0f} bytes a block.", ""]  # fmt: skip
    if figures.get("page_cache"):
        head = ["written pages", "GB", "store GB/s", "load after GB/s", "of another file still cached"]
        rows = [
            [row["mode"], f"{row['written_gb']:.1f}", f"{row['store_gbps']:.2f}", f"{row['load_after_gbps']:.2f}",
             f"{row['victim_resident']:.0%}"]
            for row in figures["page_cache"]
        ]  # fmt: skip
        lines += _table("page cache", head, rows)
    rows = [
        [target.text, f"{'<=' if target.below else '>='} {target.least:g}", "-" if found is None else f"{found:.2f}",
         {True: "yes", False: "**no**", None: "not measured"}[met]]
        for target, found, met in check(figures)
    ]  # fmt: skip
    lines += _table("targets", ["", "target", "found", "met"], rows)
    lines += [f"- {note}" for note in figures["notes"]]
    return "\n".join(lines).rstrip() + "\n"


def _speeds(figures: Figures, op: str, state: str) -> tuple[list[str], list[list[str]]]:
    """Best thread count of each candidate: GB/s (threads), of the ceiling, times LMCache fs; a column a block size."""
    rows = [row for row in figures["rows"] if (row["op"], row["state"]) == (op, state) and row["gbps"] is not None]
    sizes = sorted({row["block_mib"] for row in rows})
    kinds = sorted({(row["name"], row["checked"]) for row in rows})
    body = []
    for name, checked in kinds:
        ours = name.startswith("kvstrata")
        cells = [name + ("" if checked or not ours else " unchecked")]
        for size in sizes:
            of = [r for r in rows if (r["name"], r["checked"], r["block_mib"]) == (name, checked, size)]
            best = max(of, key=lambda r: r["gbps"], default=None)
            cells.append("-" if best is None else _cell(best))
        body.append(cells)
    return [f"{op} GB/s (threads)", *(f"{size} MiB" for size in sizes)], body


def _cell(row: Mapping[str, Any]) -> str:
    parts = [f"{row['gbps']:.2f} ({row['threads'] or '-'})"]
    parts += [f"{row['of_ceiling']:.2f}"] if row["of_ceiling"] is not None else []
    parts += [f"{row['vs_lmcache_fs']:.1f}x"] if row["vs_lmcache_fs"] is not None else []
    return " · ".join(parts)


def _table(title: str, head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    if not rows:
        return []
    lines = [f"**{title}**", "", "| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    return [*lines, *("| " + " | ".join(row) + " |" for row in rows), ""]


def render(figures: Figures, console: Console) -> None:
    console.print(markdown(figures), markup=False, highlight=False, soft_wrap=True)
    for row in figures["rows"]:
        if row.get("reason"):
            console.print(f"not measured: {row['name']}: {row['reason']}", markup=False, soft_wrap=True)


def plot(figures: Figures, path: Path) -> bool:
    """Speed by threads, one panel a kind of work and block size. False where matplotlib is missing."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return False
    rows = [row for row in figures["rows"] if row["gbps"] is not None]
    sizes = sorted({row["block_mib"] for row in rows}) or [0]
    figure = Figure(figsize=(5 * len(sizes), 4 * len(_KINDS)), layout="constrained")
    panels = figure.subplots(len(_KINDS), len(sizes), squeeze=False)
    for line, (op, state) in zip(panels, _KINDS, strict=True):
        for axes, size in zip(line, sizes, strict=True):
            here = [row for row in rows if (row["op"], row["state"], row["block_mib"]) == (op, state, size)]
            for name, checked in sorted({(row["name"], row["checked"]) for row in here}):
                of = sorted((r["threads"], r["gbps"]) for r in here if (r["name"], r["checked"]) == (name, checked))
                label = name + ("" if checked or not name.startswith("kvstrata") else " unchecked")
                axes.plot(*zip(*of, strict=True), marker="o", label=label)
            axes.set(title=f"{op}, {state}, {size} MiB", xlabel="threads", ylabel="GB/s", ylim=(0, None))
            axes.grid(True, alpha=0.3)
    panels[0][0].legend(fontsize=7)
    figure.savefig(path, dpi=120)
    return True
