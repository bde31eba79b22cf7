"""`kvstrata store …`: look at, check and prune the blocks on disk, with the stack stopped or (looking only) running."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Annotated, Any

import typer

from kvstrata import store_show as show
from kvstrata.deploy.errors import KvError
from kvstrata.deploy.settings import Settings
from kvstrata.store import admin, survey
from kvstrata.store.errors import StoreError
from kvstrata.store.settings import CLASSES, ClassRule, class_rules
from kvstrata.store.survey import Survey

__all__ = ["make_app"]

Root = Annotated[Path | None, typer.Option("--root", help="Folder of the store; else the one of .env.")]
Json = Annotated[bool, typer.Option("--json", help="Machine-readable output.")]
Target = Annotated[
    str, typer.Argument(help="Path of a block or folder, a glob of namespace names, or the beginning of a chunk hash.")
]
_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}


def make_app(settings: Callable[[], Settings]) -> typer.Typer:
    """The commands. Without --root it is the store of `settings`."""
    app = typer.Typer(no_args_is_help=True, help=__doc__)

    def look(given: Path | None, tick: Callable[[int], None] = lambda count: None) -> Survey:
        if given is None:
            current = settings()
            return Survey(survey.check_root(current.store_root), tick, class_rules(str(current.store_classes)))
        root = survey.check_root(given.absolute())
        rules: tuple[ClassRule, ...] = ()
        with suppress(KvError):  # another root needs no .env
            current = settings()
            if os.path.realpath(root) == os.path.realpath(current.store_root):  # the table is of .env's store alone
                rules = class_rules(str(current.store_classes))
        return Survey(root, tick, rules)

    @app.command("ls")
    def ls(
        target: Annotated[str, typer.Argument(help="As for stat; all blocks when left out.")] = "",
        sort: Annotated[str, typer.Option(help="none | age (oldest use first) | size (largest first)")] = "none",
        limit: Annotated[int, typer.Option(min=0, help="Lines at most; 0 = all.")] = 0,
        root: Root = None,
        as_json: Json = False,
    ) -> None:
        """Blocks: last use, bytes on disk, class, path."""
        with _errors(), show.counting("blocks", shown=not sys.stdout.isatty()) as tick:
            found = look(root, tick)
            rows = survey.matching(found, target) if target else found.all()
            show.print_blocks(show.in_order(rows, sort), found, limit, as_json)

    @app.command("stat")
    def stat(target: Target, root: Root = None, as_json: Json = False) -> None:
        """Everything about the blocks that TARGET names, headers included. Exit 1 if there is none."""
        with _errors():
            found = look(root)
            rows = [show.described(found.root, folder, block) for folder, block in survey.matching(found, target)]
            if as_json:
                show.print_json(rows)
            for row in rows if not as_json else []:
                print("\n".join(f"{key:12} {show.plain(str(value))}" for key, value in row.items()) + "\n")
        if not rows:
            print(f"no block {target}", file=sys.stderr)
            raise typer.Exit(1)

    @app.command("namespaces")
    def namespaces(root: Root = None, as_json: Json = False) -> None:
        """Namespaces and salts with size, age and class."""
        with _errors(), show.counting("blocks") as tick:
            found = look(root, tick)
            rows = [show.summed(folder, of) for folder, of in survey.totals(found).items()]
        show.print_folders(rows, found, as_json)

    @app.command("report")
    def report(root: Root = None, as_json: Json = False) -> None:
        """What is kept longest first: by class, then by last use. `upto` adds up the bytes from the top."""
        with _errors(), show.counting("blocks") as tick:
            found = look(root, tick)
            rows, upto = [], 0
            for folder, of in admin.ranking(survey.totals(found)):
                upto += of.disk
                rows.append({**show.summed(folder, of), "upto": upto})
        show.print_folders(rows, found, as_json)

    @app.command("verify")
    def verify(
        target: Annotated[str, typer.Argument(help="As for stat; all blocks when left out.")] = "",
        repair: Annotated[bool, typer.Option("--repair", help="Remove bad blocks; the store must be stopped.")] = False,
        root: Root = None,
        as_json: Json = False,
    ) -> None:
        """Read every block and check it. Exit 1 if bad blocks are left."""
        with _errors():
            found = look(root)
            owned: AbstractContextManager[None] = admin.owning(found.root) if repair else nullcontext()
            with owned:
                rows = list(survey.matching(found, target) if target else found.all())
                with show.reading(sum(block.length for _, block in rows)) as done:
                    result = admin.verify(found, rows, repair=repair, done=done)
        if as_json:
            show.print_json({
                "blocks": len(rows), "whole": result.whole, "bytes": result.disk, "gone": result.gone,
                "bad": [vars(bad) for bad in result.bad], "odd": [odd._asdict() for odd in result.odd],
            })  # fmt: skip
        else:
            for bad in result.bad:
                print(f"bad   {bad.path}  {bad.reason}: {bad.detail}{'  (removed)' if bad.removed else ''}")
            show.print_odd(found)
            removed = len(result.bad) - len(result.left)
            print(
                f"{result.whole} whole blocks, {show.size_text(result.disk)}; {len(result.bad)} bad, {removed} removed"
                f"; {result.gone} went away meanwhile"
            )
        raise typer.Exit(1 if result.left else 0)

    @app.command("evict")
    def evict(
        nbytes: Annotated[str, typer.Option("--bytes", help="How much to free: 500M, 20G (10^9), 20Gi (2^30).")],
        root: Root = None,
        as_json: Json = False,
    ) -> None:
        """Remove the least recently used blocks, lowest class first. Exit 1 if that much cannot be freed."""
        with _errors():
            found, wanted = look(root), _bytes(nbytes)
            with admin.owning(found.root), show.reading(wanted) as done:
                result = admin.evict(found, wanted, done)
        if as_json:
            show.print_json(vars(result))
        else:
            print(f"{result.blocks} blocks removed, {show.size_text(result.disk)} free")
            if result.short:
                print(f"{show.size_text(result.short)} short: the rest is pinned or cannot be removed")
        raise typer.Exit(1 if result.short else 0)

    @app.command("pin")
    def pin(
        target: Target,
        cls: Annotated[str, typer.Option("--class", help=f"For a folder: {' | '.join(CLASSES)}.")] = "pin",
        root: Root = None,
        as_json: Json = False,
    ) -> None:
        """Keep a block, or give a whole namespace or salt folder a retention class."""
        with _errors():
            _pin(look(root), target, cls, as_json)

    @app.command("unpin")
    def unpin(target: Target, root: Root = None, as_json: Json = False) -> None:
        """Take the pin of a block, or the class of a folder, away."""
        with _errors():
            _pin(look(root), target, None, as_json)

    return app


def _pin(found: Survey, target: str, cls: str | None, as_json: bool) -> None:
    if cls is not None and cls not in CLASSES:
        raise KvError(f"--class {cls}", f"one of {', '.join(CLASSES)}", "mend --class")
    changed: list[dict[str, Any]]
    with admin.owning(found.root):
        wanted = target.removeprefix(f"{found.root}/").strip("/")
        folders = [folder for folder in found.folders() if folder.named(wanted)]
        if folders:
            for folder in {folder.path if folder.path == wanted else folder.ns: folder for folder in folders}.values():
                whole = folder.path != wanted
                admin.set_class(found.root, folder, cls or ("normal" if whole else None), whole_namespace=whole)
            # A salt's own class and KV_STORE_CLASSES outrank a namespace's: say what holds now.
            changed = [
                {"folder": folder.path, "class": folder.cls} for folder in found.folders() if folder.named(wanted)
            ]
        elif cls not in (None, "pin"):
            raise KvError(f"--class {cls} for {target}", "a namespace or salt folder: a block is pinned or not",
                          "name a folder (kvstrata store namespaces), or leave --class out")  # fmt: skip
        else:
            blocks = [block for _, block in survey.matching(found, target)]
            if not blocks:
                raise KvError(f"no block {target}", "a block or folder that is there", "kvstrata store ls")
            changed = [{"blocks": len(blocks), "changed": admin.set_pinned(found.root, blocks, cls is not None)}]
    if as_json:
        show.print_json(changed)
    for row in changed if not as_json else []:
        print("  ".join(f"{key} {value}" for key, value in row.items()))


def _bytes(text: str) -> int:
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmgt]?i?)b?", text.strip().lower())
    if not found or found[2] not in _UNITS:
        raise KvError(f"--bytes {text}", "a size such as 500M, 20G or 20Gi", "mend --bytes")
    return int(float(found[1]) * _UNITS[found[2]])


@contextmanager
def _errors() -> Iterator[None]:
    """The store imports nothing of the project, so its refusals become the command line's here."""
    try:
        yield
        sys.stdout.flush()
    except BrokenPipeError:  # `… ls | head`: nobody reads on
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except StoreError as error:
        raise KvError(error.found, error.needed, error.fix) from error
    except PermissionError as error:
        raise KvError(
            str(error), "the owner's rights", "run this as root (sudo) or as the owner (KV_UID in .env)"
        ) from error
