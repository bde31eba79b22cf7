"""How `kvstrata store` shows what it found: plain lines, JSON, and progress on a terminal."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, MofNCompleteColumn, Progress, TextColumn, TransferSpeedColumn

from kvstrata.deploy.errors import KvError
from kvstrata.store import admin
from kvstrata.store.blockfile import BlockIO
from kvstrata.store.codecs import CodecError
from kvstrata.store.format import BadBlock
from kvstrata.store.survey import Block, Folder, Survey, Totals

__all__ = [
    "counting", "described", "in_order", "plain", "print_blocks", "print_folders", "print_json", "print_odd", "reading",
    "size_text", "summed",
]  # fmt: skip


def in_order(rows: Iterator[tuple[Folder, Block]], sort: str) -> Iterator[tuple[Folder, Block]]:
    if sort == "none":
        return rows
    if sort == "age":
        return iter(sorted(rows, key=lambda row: row[1].last_use_ns))
    if sort == "size":
        return iter(sorted(rows, key=lambda row: -row[1].disk))
    raise KvError(f"--sort {sort}", "none, age or size", "mend --sort")


def print_blocks(rows: Iterator[tuple[Folder, Block]], found: Survey, limit: int, as_json: bool) -> None:
    """Plain lines, written as they come: a table of 400,000 rows would take minutes and gigabytes."""
    count = disk = 0
    write = sys.stdout.write
    if as_json:
        write('{"root": ' + json.dumps(str(found.root)) + ', "blocks": [')
    for folder, block in islice(rows, limit or None):
        if as_json:
            row = {"path": block.path, "disk": block.disk, "length": block.length, "last_use_ns": block.last_use_ns,
                   "class": folder.cls_of(block)}  # fmt: skip
            write((",\n" if count else "\n") + json.dumps(row))
        else:
            write(f"{when(block.last_use_ns)} {block.disk:>12} {folder.cls_of(block):6} {block.path}\n")
        count += 1
        disk += block.disk
    if as_json:
        write('\n], "odd": ' + json.dumps([odd._asdict() for odd in found.odd]) + "}\n")
    else:
        print_odd(found)
        write(f"{count} blocks, {size_text(disk)}\n")


def described(root: Path, folder: Folder, block: Block) -> dict[str, Any]:
    row = {
        "path": block.path, "namespace": folder.namespace, "salt": folder.salt, "class": folder.cls_of(block),
        "pinned": block.pinned, "disk": block.disk, "length": block.length, "last_use": when(block.last_use_ns),
    }  # fmt: skip
    try:
        header = BlockIO(root, codec="raw").check(Path(block.path), admin.key_of(folder, block))
    except (BadBlock, CodecError, OSError) as error:
        return row | {"state": f"bad: {error}"}
    key = header.key
    return row | {
        "state": "whole", "codec": header.codec, "itemsize": header.itemsize, "raw_len": header.raw_len,
        "stored_len": header.stored_len, "sub_blocks": header.sub_count, "sub_bytes": header.sub_bytes,
        "chunk": key and key.chunk.hex(), "rank": key and key.rank, "group": key and key.group,
    }  # fmt: skip


def summed(folder: Folder, of: Totals) -> dict[str, Any]:
    age = None if of.newest_ns is None else round(max(0.0, time.time() - of.newest_ns / 1e9))
    return {
        "folder": folder.path, "namespace": folder.namespace, "salt": folder.salt, "class": folder.cls,
        "blocks": of.blocks, "bytes": of.disk, "pinned": of.pinned, "age_s": age,
        "last_use": None if of.newest_ns is None else when(of.newest_ns),
        "first_use": None if of.oldest_ns is None else when(of.oldest_ns),
    }  # fmt: skip


def print_folders(rows: list[dict[str, Any]], found: Survey, as_json: bool) -> None:
    if as_json:
        print_json({"root": str(found.root), "folders": rows, "odd": [odd._asdict() for odd in found.odd]})
        return
    for row in rows:
        salt = "-" if row["salt"] == "" else row["salt"] or "?"
        upto = f" {size_text(row['upto']):>9}" if "upto" in row else ""
        sizes = (
            f"{row['class']:6} {row['blocks']:>7} blocks {size_text(row['bytes']):>9}{upto} {age(row['age_s']):>5} ago"
        )
        names = f"{row['folder']}  {plain(row['namespace'] or '?')}  salt {plain(salt)}"
        print(f"{sizes}  {row['pinned']} pinned  {names}")
    print_odd(found)
    print(f"{sum(row['blocks'] for row in rows)} blocks, {size_text(sum(row['bytes'] for row in rows))}")


def print_odd(found: Survey) -> None:
    for odd in found.odd[:20]:
        print(f"odd   {plain(odd.path)}  {plain(odd.why)}", file=sys.stderr)
    if len(found.odd) > 20:
        print(f"odd   and {len(found.odd) - 20} more", file=sys.stderr)


def plain(text: str) -> str:
    """Names come from clients and from strange files: nothing in them may steer a terminal or fail to print."""
    return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in text)


def when(ns: int) -> str:
    return _instant(ns // 10**9)


@lru_cache(maxsize=4096)  # most of a listing's blocks share their second with others
def _instant(seconds: int) -> str:
    try:
        return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M:%S")
    except (ValueError, OverflowError, OSError):
        return "?"


def age(seconds: float | None) -> str:
    if seconds is None:
        return "never"
    for unit, size in (("d", 86400), ("h", 3600), ("m", 60)):
        if seconds >= size:
            return f"{seconds / size:.0f}{unit}"
    return f"{seconds:.0f}s"


def size_text(nbytes: int) -> str:
    return f"{nbytes / 1e9:.2f} GB" if nbytes >= 10**8 else f"{nbytes / 1e6:.2f} MB"


def print_json(data: Any) -> None:
    sys.stdout.write(json.dumps(data, indent=2, default=str) + "\n")


@contextmanager
def counting(what: str, shown: bool = True) -> Iterator[Callable[[int], None]]:
    console = Console(stderr=True)
    with Progress(
        TextColumn("looking"), BarColumn(), MofNCompleteColumn(), TextColumn(what), console=console, transient=True,
        disable=not (shown and console.is_terminal),
    ) as bar:  # fmt: skip
        task = bar.add_task("", total=None)
        yield lambda count: bar.advance(task, count)


@contextmanager
def reading(total: int) -> Iterator[Callable[[int], None]]:
    console = Console(stderr=True)
    with Progress(
        BarColumn(), DownloadColumn(), TransferSpeedColumn(), console=console, transient=True,
        disable=not console.is_terminal,
    ) as bar:  # fmt: skip
        task = bar.add_task("", total=total)
        yield lambda nbytes: bar.advance(task, nbytes)
