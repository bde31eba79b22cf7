"""The measurement itself: `python -m kvstrata.proof.store_bench_run OPTIONS.json RESULT.json`.

Every candidate gets the same buffers; the order is drawn anew each round, medians are taken, and after each load every
byte is compared. The first round of a candidate is not counted: it makes folders, threads and pages.
"""

from __future__ import annotations

import gc
import json
import os
import random
import shutil
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvstrata.proof import store_bench_codecs as codecs
from kvstrata.proof import store_bench_machine as machine
from kvstrata.proof import store_bench_parts as parts
from kvstrata.proof import store_bench_paths as paths
from kvstrata.proof.store_bench_candidates import OURS, Options, candidates, store_env
from kvstrata.proof.store_bench_rows import LMCACHE_FS, Row, table

__all__ = ["measure"]


@dataclass
class _Result:
    machine: dict[str, Any]
    rows: list[Row] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    cold: bool = True
    rest: dict[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        return {"machine": self.machine, "rows": table(self.rows), "codecs": [], **self.rest, "notes": self.notes}


def measure(options: Options, say: Callable[[str], None] = lambda text: None) -> dict[str, Any]:
    """Everything that `options.phases` names, as the JSON of docs/storage.md describes it."""
    work = Path(options.folder)
    lmcache = _has("lmcache")
    result = _Result(machine.describe(work, lmcache))
    kv = _kv(options, result) if {"codecs", "rows"} & set(options.phases) else {}
    if "codecs" in options.phases and kv:
        say("codecs on real KV")
        result.rest["codecs"] = codecs.measure(kv, options.rounds)
    if "rows" in options.phases:
        pool = _pool(options, lmcache)
        result.machine["buffers"] = pool.kind
        for size_mib, count in options.blocks.items():
            say(f"{count} blocks of {size_mib} MiB")
            _Turns(options, pool, size_mib, count, kv.get("bf16", []), result, say).run()
        pool.close()
    if "prefetch" in options.phases and lmcache:
        say("LMCache's own controllers")
        result.rest["prefetch"] = _prefetch(options, result)
    if options.pages:
        say("page cache")
        slots = parts.AnonymousPool(16 * (12 << 20)).take(16, 12 << 20)
        turns = max(1, options.pages * 10**9 // (16 * (12 << 20)))
        result.rest["page_cache"] = paths.page_cache(work / "pages", slots, 512 << 20, turns)
        shutil.rmtree(work / "pages")
    return result.to_json()


def _has(module: str) -> bool:
    try:
        __import__(module)
    except ImportError:
        return False
    return True


def _kv(options: Options, result: _Result) -> dict[str, list[bytes]]:
    if not options.model:
        result.notes.append("no model folder: codecs were not measured on real KV")
        return {}
    try:
        return codecs.real_kv(Path(options.model), options.chunk, options.kv_chunks)
    except (ImportError, OSError) as error:
        result.notes.append(f"no real KV, so no codecs: {type(error).__name__}: {error}"[:300])
        return {}


def _pool(options: Options, lmcache: bool) -> parts.Pool:
    largest = max(size * count for size, count in options.blocks.items()) << 20
    if not lmcache:
        return parts.AnonymousPool(3 * largest)
    from kvstrata.proof.store_bench_lmcache import LmcachePool

    return LmcachePool(3 * largest + (64 << 20))


class _Turns:
    """All candidates at one block size."""

    def __init__(
        self, options: Options, pool: parts.Pool, size_mib: int, count: int, kv: Sequence[bytes], result: _Result,
        say: Callable[[str], None],
    ) -> None:  # fmt: skip
        self._options, self._pool, self._mib, self._result, self._say = options, pool, size_mib, result, say
        self._size, self._count = size_mib << 20, count
        self._target = pool.take(count, self._size)
        self._sources = {"random": pool.take(count, self._size)}
        _fill(self._sources["random"], [os.urandom(self._size)])
        if kv:
            self._sources["kv"] = pool.take(count, self._size)
            _fill(self._sources["kv"], kv)
        self._samples: dict[tuple[str, bool, str, str, int], list[float]] = defaultdict(list)

    def run(self) -> None:
        folder = Path(self._options.folder) / f"bench-{self._mib}"
        order = random.Random(self._options.seed)  # noqa: S311 - an order, no secret
        found = candidates(self._options, self._pool, folder, self._result.rows, "kv" in self._sources)
        for turn in range(self._options.rounds + 1):
            self._say(f"  {self._mib} MiB, round {turn} of {self._options.rounds}, {len(found)} candidates")
            order.shuffle(found)
            for part in list(found):
                try:
                    self._turn(part, counted=turn > 0)
                except Exception as error:
                    self._result.notes.append(f"{part.name}, {self._mib} MiB, {part.threads} threads: {error!r}"[:300])
                    found.remove(part)
        for part in found:
            part.close()
        for slots in (self._target, *self._sources.values()):
            self._pool.give(slots)
        shutil.rmtree(folder, ignore_errors=True)
        for (name, checked, op, state, threads), samples in sorted(self._samples.items()):
            self._result.rows.append(Row(name, checked, op, state, self._mib, threads, tuple(samples)))

    def _turn(self, part: parts.Part, counted: bool) -> None:
        source = self._sources[part.content]
        gc.collect()
        os.sync()
        self._time(part, "store", "hot", counted, lambda: part.store(source))
        for _ in range(2 if part.cached else 0):
            self._load(part, "hot", counted, source)
        files = part.files()
        if self._result.cold and parts.drop_pages(files):
            self._load(part, "cold", counted, source)
            if part.name == "kvstrata raw" and part.checked:
                self._same_files(part, files, source, counted)
        elif self._result.cold:
            self._result.cold = False  # not asked again: dropping all caches of a machine is no small thing
            self._result.notes.append("pages stayed in the page cache after DONTNEED: no cold figures from here on")
        part.clear(self._count)

    def _same_files(self, part: parts.Part, files: list[Path], source: Sequence[parts.Slot], counted: bool) -> None:
        """The very files of our store, cold, by plain preadv: what a checked load is compared with."""
        if len(files) != len(source) or not parts.drop_pages(files):
            return
        reader = parts.Raw("", Path(self._options.folder) / "reader", part.threads)
        parts.wipe(self._target)
        began = time.perf_counter()
        reader.load_files(files, self._target, 4096)
        seconds = time.perf_counter() - began
        reader.close()
        (Path(self._options.folder) / "reader").rmdir()
        self._keep("preadv of kvstrata's files", False, "load", "cold", part.threads, seconds, counted)

    def _load(self, part: parts.Part, state: str, counted: bool, source: Sequence[parts.Slot]) -> None:
        parts.wipe(self._target)
        self._time(part, "load", state, counted, lambda: part.load(self._target))
        if not all(map(parts.equal, source, self._target)):
            raise RuntimeError("what was loaded is not what was stored")

    def _time(self, part: parts.Part, op: str, state: str, counted: bool, work: Callable[[], None]) -> None:
        began = time.perf_counter()
        work()
        self._keep(part.name, part.checked, op, state, part.threads, time.perf_counter() - began, counted)

    def _keep(self, name: str, checked: bool, op: str, state: str, threads: int, seconds: float, counted: bool) -> None:
        if counted:
            gbps = self._size * self._count / 1e9 / seconds
            self._samples[name, checked, op, state, threads].append(gbps)


def _fill(slots: Sequence[parts.Slot], contents: Sequence[bytes]) -> None:
    """Repeat `contents` through the buffers, each beginning elsewhere, so that no two blocks are equal."""
    whole = b"".join(contents)
    for index, slot in enumerate(slots):
        at = index * 4096 % len(whole)
        done = 0
        while done < len(slot.view):
            piece = memoryview(whole)[at : at + len(slot.view) - done]
            slot.view[done : done + len(piece)] = piece
            done, at = done + len(piece), 0


def _prefetch(options: Options, result: _Result) -> list[dict[str, Any]]:
    rows = []
    for size_mib, count in options.blocks.items():
        for name in ("kvstrata raw", LMCACHE_FS):
            folder = Path(options.folder) / f"prefetch-{name}-{size_mib}".replace(" ", "-")
            config = OURS if name != LMCACHE_FS else {"type": "fs", "base_path": str(folder)}
            env = store_env(folder, "raw", "buffered", 0, options.allow_fs)
            try:
                rows.append(paths.prefetch(name, config, folder, env, size_mib << 20, count, options.rounds))
            except Exception as error:
                result.notes.append(f"{name} through the controllers, {size_mib} MiB: {error!r}"[:300])
            shutil.rmtree(folder, ignore_errors=True)
    return rows


def main(argv: list[str]) -> None:
    os.environ.setdefault("LMCACHE_TRACK_USAGE", "false")
    os.environ.setdefault("LMCACHE_LOG_LEVEL", "ERROR")
    figures = measure(Options.read(Path(argv[0])), lambda text: print(text, file=sys.stderr, flush=True))
    Path(argv[1]).write_text(json.dumps(figures), encoding="utf-8")
    sys.stdout.flush()
    os._exit(0)  # native adapters leave threads behind that would not let the interpreter end


if __name__ == "__main__":
    main(sys.argv[1:])
