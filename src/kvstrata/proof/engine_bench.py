"""`kvstrata bench engine`: our HTTP and RESP beside Redis and the epistemic-graph server, interleaved in one run.

Each server is alone while it is measured, in an order drawn anew each round, started on an empty folder. It touches no
running stack, but it needs the machine for itself to mean anything.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from kvstrata.deploy.engine_apt import ensure_command
from kvstrata.deploy.errors import KvError
from kvstrata.deploy.host import existing_parent
from kvstrata.deploy.settings import Settings
from kvstrata.deploy.steps import Steps
from kvstrata.proof import engine_bench_show as show
from kvstrata.proof import store_bench_machine as machine
from kvstrata.proof.engine_bench_client import Failed, Sample, cell
from kvstrata.proof.engine_bench_servers import SERVERS, Server
from kvstrata.store.checksum import crc32

__all__ = ["Options", "measure", "options", "run"]

_KIB, _MIB, _GIB = 1 << 10, 1 << 20, 1 << 30
#: What it writes at a time, times the most that a server takes for it (epistemic: powers of two, and a frame).
_DISK_FACTOR = 3
_BEFORE_BYTES, _BEFORE_CONNECTIONS = 4 << 10, 16


@dataclass(frozen=True)
class Options:
    """`volume`: bytes of a cell, at least; every connection has two requests or more. `before`: small puts before the
    first cell, so that what a server makes once, such as folders, is there.
    """

    blocks_kib: tuple[int, ...]
    connections: tuple[int, ...]
    rounds: int
    volume: int
    seed: int = 1
    before: int = 16

    def count(self, block_kib: int, connections: int) -> int:
        """Requests of each connection."""
        return max(2, self.volume // (block_kib * _KIB * connections))

    def disk(self) -> int:
        """Bytes that one server keeps at most."""
        return max(
            sum(self.count(kib, number) * number * kib * _KIB for number in self.connections) for kib in self.blocks_kib
        )


def options(*, quick: bool, seed: int = 1) -> Options:
    """What is measured: everything, or with `quick` a little of it."""
    if quick:
        return Options((256, 1024), (1, 4), rounds=1, volume=8 * _MIB, seed=seed)
    return Options((256, 1024, 4096, 16384), (1, 4, 16), rounds=5, volume=256 * _MIB, seed=seed, before=1024)


def run(
    settings: Settings, options: Options, *, folder: Path | None, json_file: Path | None, markdown: Path | None,
    console: Console,
) -> dict[str, Any]:  # fmt: skip
    """Measure, show, write. Raises KvError where there is no room."""
    place = folder or existing_parent(settings.cache_dir)
    if not place.is_dir():
        raise KvError(
            f"--dir {place}, which is no folder that is there", "a folder on the disk to be measured", "mkdir it"
        )
    free, needed = shutil.disk_usage(place).free, _DISK_FACTOR * options.disk()
    if free < needed or not os.access(place, os.W_OK):
        raise KvError(f"{free / _GIB:.1f} GiB free at {place}", f"{needed / _GIB:.1f} GiB, writable", "--dir FOLDER")
    with Steps().step("Redis") as step, suppress(KvError):  # without it its rows say why they are empty
        ensure_command("redis-check-rdb", "redis-tools", step, root=os.geteuid() == 0, found="no Redis here")
    work = Path(tempfile.mkdtemp(prefix=".kvstrata-bench-", dir=place))
    try:
        found = measure(options, work, lambda text: console.print(text, markup=False, highlight=False))
    finally:
        shutil.rmtree(work, ignore_errors=True)
    show.render(found, console)
    if json_file is not None:
        json_file.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    if markdown is not None:
        markdown.write_text(show.markdown(found), encoding="utf-8")
    return found


def measure(
    options: Options, work: Path, say: Callable[[str], None], servers: Sequence[Server] = SERVERS
) -> dict[str, Any]:  # fmt: skip
    """The JSON of the whole run: machine, rows (show.table), peak RSS of each server in MiB, what the check costs."""
    order = random.Random(options.seed)  # noqa: S311 - an order, no secret
    samples: dict[show.Work, list[Sample]] = defaultdict(list)
    rss: dict[str, float] = {}
    reasons: dict[str, str] = {}
    turns = [(server, kib) for server in servers for kib in options.blocks_kib]
    for turn in range(options.rounds):
        order.shuffle(turns)
        for number, (server, kib) in enumerate(turns):
            if server.name in reasons:
                continue
            say(f"round {turn + 1} of {options.rounds}, {number + 1} of {len(turns)}: {server.name}, {kib} KiB")
            try:
                peak = _turn(server, kib, options, work / "data", turn, samples)
                rss[server.name] = max(rss.get(server.name, 0.0), peak)
            except (Failed, OSError) as error:
                reasons[server.name] = f"{type(error).__name__}: {error}"[:300]
    return {
        "machine": machine.describe(work, lmcache=False),
        "options": {"rounds": options.rounds, "volume_mib": options.volume // _MIB, "puts_before": options.before},
        "rows": show.table(samples, reasons),
        "rss_mib": {name: round(value, 1) for name, value in sorted(rss.items())},
        "check_gbps": round(_check_speed(), 2),
    }


def _turn(
    server: Server, kib: int, options: Options, folder: Path, turn: int, samples: dict[show.Work, list[Sample]]
) -> float:  # fmt: skip
    """All connection counts of one server at one block size. Returns its peak RSS in MiB."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    os.sync()
    running = server.start(folder)
    try:
        cell(running.target, "put", _BEFORE_BYTES, _BEFORE_CONNECTIONS, options.before // _BEFORE_CONNECTIONS, "before")
        cell(running.target, "put", kib * _KIB, 1, 2, "warm")
        cell(running.target, "get", kib * _KIB, 1, 2, "warm")
        for connections in options.connections:
            count = options.count(kib, connections)
            for op in ("put", "get"):
                sample = cell(running.target, op, kib * _KIB, connections, count, f"round-{turn}")
                samples[server.name, op, kib, connections].append(sample)
        return running.peak_rss_mib()
    finally:
        running.stop()
        shutil.rmtree(folder, ignore_errors=True)


def _check_speed() -> float:
    """GB/s of the checksum that every read pays, on bytes that are in the processor's cache."""
    piece, turns = memoryview(os.urandom(256 * _KIB)), 200
    crc32(piece)
    began = time.perf_counter()
    for _ in range(turns):
        crc32(piece)
    return len(piece) * turns / 1e9 / (time.perf_counter() - began)
