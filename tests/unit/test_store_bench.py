"""The block store's benchmark: the shape of its figures, its ratios, and that it measures what it says. No speeds."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstrata.proof import store_bench_codecs, store_bench_paths, store_bench_run, store_bench_scan, store_bench_show
from kvstrata.proof import store_bench_parts as parts
from kvstrata.proof.store_bench_candidates import Options
from kvstrata.proof.store_bench_rows import CEILING, LMCACHE_FS, Row, table
from kvstrata.store.settings import StoreSettings

ALLOW = "tmpfs,overlay,ramfs"
KEYS = {"name", "checked", "op", "state", "block_mib", "threads", "gbps", "of_ceiling", "vs_lmcache_fs"}


@pytest.fixture(scope="module")
def figures(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The quick run, with what can be imported here."""
    folder = tmp_path_factory.mktemp("bench")
    found = store_bench_run.measure(Options(str(folder), {1: 3}, (1, 2), rounds=1, allow_fs=ALLOW, pages=0))
    found["scan"] = store_bench_scan.measure(folder / "scan", 50, ALLOW, repeats=1)
    assert list(folder.iterdir()) == []
    return json.loads(json.dumps(found))  # type: ignore[no-any-return]


def test_the_figures_have_the_shape_that_is_documented(figures: dict[str, Any]) -> None:
    assert {"machine", "rows", "codecs", "scan", "notes"} <= figures.keys()
    assert {"cpu", "cores", "kernel", "file_system", "buffers"} <= figures["machine"].keys()
    for row in figures["rows"]:
        assert row.keys() >= KEYS
        assert row["op"] in ("load", "store")
        assert row["state"] in ("hot", "cold")
        assert isinstance(row["checked"], bool)
        assert (row["gbps"] is None) == (row["samples"] == []) == ("reason" in row)
    text = (Path(__file__).parents[2] / "docs" / "performance.md").read_text()
    assert all(f"`{key}`" in text for key in KEYS)


def test_every_candidate_is_there_or_says_why_not(figures: dict[str, Any]) -> None:
    names = {row["name"] for row in figures["rows"]}
    assert names >= {CEILING, "device", "kvstrata raw", LMCACHE_FS, "lmcache fs_native", "lmcache nixl_store_dynamic"}
    measured = {(row["name"], row["checked"], row["op"], row["state"]) for row in figures["rows"] if row["gbps"]}
    for checked in (True, False):
        assert {("kvstrata raw", checked, op, "hot") for op in ("load", "store")} <= measured


def test_every_ratio_is_that_of_two_rows(figures: dict[str, Any]) -> None:
    compared = 0
    for row in figures["rows"]:
        for field, name in (("of_ceiling", CEILING), ("vs_lmcache_fs", LMCACHE_FS)):
            same = [r["gbps"] for r in figures["rows"] if r["name"] == name and r["gbps"] is not None
                    and all(r[key] == row[key] for key in ("op", "state", "block_mib"))]  # fmt: skip
            expected = round(row["gbps"] / max(same), 3) if same and row["gbps"] is not None and max(same) else None
            assert row[field] == expected
            compared += expected is not None
    assert compared


speeds = st.lists(st.floats(0.01, 100), min_size=1, max_size=5)


@settings(deadline=None)
@given(ceiling=st.lists(speeds, min_size=1, max_size=3), ours=speeds)
def test_the_ceiling_is_its_best_thread_count(ceiling: list[list[float]], ours: list[float]) -> None:
    rows = [Row(CEILING, False, "load", "hot", 3, 2**n, tuple(samples)) for n, samples in enumerate(ceiling)]
    other = Row(CEILING, False, "load", "cold", 3, 1, (10**6,))
    *ceilings, mine, _ = table([*rows, Row("kvstrata raw", True, "load", "hot", 3, 1, tuple(ours)), other])
    assert max(row["of_ceiling"] for row in ceilings) == 1.0
    best = max(row["gbps"] for row in ceilings)
    assert mine["of_ceiling"] == round(mine["gbps"] / best, 3)
    assert mine["vs_lmcache_fs"] is None


class Lying(parts.Raw):
    """Says that it loaded, and loaded something else."""

    def load(self, slots: Any) -> None:
        super().load(slots)
        slots[-1].view[-1] ^= 1


def test_a_candidate_that_loads_wrong_bytes_has_no_figures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def candidates(options: Options, pool: Any, folder: Path, rows: Any, kv: bool) -> list[parts.Part]:
        return [Lying("liar", folder / "liar", 1), parts.Raw(CEILING, folder / "raw", 1)]

    monkeypatch.setattr(store_bench_run, "candidates", candidates)
    found = store_bench_run.measure(Options(str(tmp_path), {1: 2}, (1,), rounds=1, phases=("rows",)))
    assert {row["name"] for row in found["rows"]} == {CEILING}
    assert any("liar" in note and "not what was stored" in note for note in found["notes"])


def test_without_checks_the_store_computes_none_and_with_them_it_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The unchecked rows must differ from the checked ones by the checks, and only the former may lack them."""
    slots = parts.AnonymousPool(2 << 20).take(2, 1 << 20)
    for checked in (True, False):
        settings = StoreSettings(tmp_path / str(checked), 1 << 30, free_floor=0, allow_fs=tuple(ALLOW.split(",")))
        part = parts.Store("kvstrata raw", settings, checked=checked)
        part.store(slots)
        if checked:
            (victim, *_) = part.files()
            with victim.open("r+b") as file:
                file.seek(5000)
                file.write(b"\xff")
            with pytest.raises(RuntimeError, match="payload_crc"):
                part.load(slots)
        else:
            part.load(slots)
        part.close()


def test_dropped_pages_are_really_gone_or_it_says_so(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(os.urandom(1 << 20))
    gone = parts.drop_pages([path])
    fd = os.open(path, os.O_RDONLY)
    try:
        try:
            cached = os.preadv(fd, [bytearray(4096)], 0, os.RWF_NOWAIT) > 0
        except OSError:
            cached = False
    finally:
        os.close(fd)
    assert gone is not cached


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_codecs_are_measured_on_what_they_give_back(dtype: str) -> None:
    smooth = b"".join(i.to_bytes(4, "little") for i in range(1 << 18)) * 2
    rows = store_bench_codecs.measure({dtype: [smooth, os.urandom(1 << 20)]}, repeats=1, threads=2)
    assert [(row["name"], row["dtype"]) for row in rows] == [("lz4", dtype), ("zstd", dtype)]
    for row in rows:
        assert row["bytes"] == 3 << 20
        assert 1.0 < row["ratio"] < 3.0
        assert row["encode_gbps"] > 0 < row["decode_gbps"]


def test_the_page_cache_question_is_asked_both_ways(tmp_path: Path) -> None:
    slots = parts.AnonymousPool(4 << 20).take(2, 2 << 20)
    rows = store_bench_paths.page_cache(tmp_path / "pages", slots, 1 << 20, turns=2)
    assert [row["mode"] for row in rows] == ["keep", "drop"]
    assert all(0 <= row["victim_resident"] <= 1 for row in rows)


def test_options_survive_the_way_into_the_container(tmp_path: Path) -> None:
    options = Options("x", {3: 64, 36: 16}, (1, 16), 5, model="/m", phases=("rows",), only=("kvstrata",), pages=4)
    options.write(tmp_path / "o.json")
    assert Options.read(tmp_path / "o.json") == options


# -- showing ---------------------------------------------------------------------------------------------------------


def made(**speed: float) -> dict[str, Any]:
    """Figures with one row a name: load, hot, 3 MiB."""
    rows = [Row(name.replace("_", " "), name.startswith("kv"), "load", "hot", 3, 2, (gbps,))
            for name, gbps in speed.items()]  # fmt: skip
    machine: dict[str, Any] = dict.fromkeys(
        ("cpu", "memory_gib", "kernel", "file_system", "device", "read_ahead_kb", "lmcache", "python", "at"),
        "x",
    )
    machine["cores"] = 2
    return {"machine": machine, "rows": table(rows), "codecs": [], "notes": ["a note"]}


@pytest.mark.parametrize(
    ("speed", "met"), [({"kvstrata_raw": 8.1, "ceiling": 10.0}, True), ({"kvstrata_raw": 7.9, "ceiling": 10.0}, False),
                       ({"kvstrata_raw": 8.1}, None)],
)  # fmt: skip
def test_a_target_is_met_missed_or_not_measured(speed: dict[str, float], met: bool | None) -> None:
    target, found, result = store_bench_show.check(made(**speed))[0]
    assert "of the ceiling" in target.text
    assert result is met
    assert (found is None) == (met is None)


@pytest.mark.parametrize(("cores", "met"), [(2, None), (16, False)])
def test_the_16_thread_target_asks_for_16_cores(cores: int, met: bool | None) -> None:
    data = made(kvstrata_raw=8.0, lmcache_fs=4.0)
    data["machine"]["cores"] = cores
    results = {target.text: result for target, _, result in store_bench_show.check(data)}
    assert results["checked load, 3 MiB, times LMCache fs, 16 cores"] is met


def test_a_target_that_is_an_upper_bound() -> None:
    for value, met in ((249, True), (251, False)):
        data = made(ceiling=1.0) | {"scan": {"index_bytes_per_block": value, "warm_s": 1}}
        results = {target.text: result for target, _, result in store_bench_show.check(data)}
        assert results["index, bytes a block"] is met


def test_the_tables_show_the_best_thread_count_and_both_ratios(figures: dict[str, Any]) -> None:
    text = store_bench_show.markdown(made(kvstrata_raw=8.0, ceiling=10.0, lmcache_fs=4.0))
    assert "| kvstrata raw | 8.00 (2) · 0.80 · 2.0x |" in text
    assert "- a note" in text
    assert "**targets**" in store_bench_show.markdown(figures)


def test_the_plot_is_written_where_matplotlib_is(figures: dict[str, Any], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    assert store_bench_show.plot(figures, tmp_path / "bench.svg")
    assert (tmp_path / "bench.svg").read_text().startswith("<?xml")


# -- the command -----------------------------------------------------------------------------------------------------


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """Run `kvstrata bench store` on this interpreter: no engine, and a checkout without a model."""
    from kvstrata import cli
    from kvstrata.proof import store_bench

    (tmp_path / "configs" / "models").mkdir(parents=True)
    monkeypatch.setenv("KVSTRATA_ROOT", str(tmp_path))
    monkeypatch.setenv("KV_CACHE_ALLOW_FS", ALLOW)
    monkeypatch.setattr(store_bench.shutil, "which", lambda name: None)
    small = store_bench.options

    def options(*args: Any, **kwargs: Any) -> Options:
        return replace(small(*args, **kwargs), threads=(1,), blocks={1: 2})

    monkeypatch.setattr(store_bench, "options", options)

    def run(*words: str) -> int:
        monkeypatch.setattr(sys, "argv", ["kvstrata", "bench", "store", *words])
        return cli.main()

    return run


def test_the_command_writes_what_it_is_asked_for_and_leaves_nothing_else(
    here: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    assert here("--quick", "--dir", str(disk), "--json", str(tmp_path / "a"), "--markdown", str(tmp_path / "b")) == 0
    assert list(disk.iterdir()) == []
    data = json.loads((tmp_path / "a").read_text())
    assert (tmp_path / "b").read_text() == store_bench_show.markdown(data)
    out = capsys.readouterr().out
    assert "kvstrata raw" in out
    assert "not measured: lmcache" in out or data["machine"]["lmcache"]


def test_a_folder_that_cannot_be_written_is_refused(here: Callable[..., int], tmp_path: Path) -> None:
    assert here("--quick", "--dir", str(tmp_path / "nowhere")) == 2
