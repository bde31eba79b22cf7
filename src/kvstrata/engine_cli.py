"""`kvstrata engine …`: run the KV engine here, and check one that runs anywhere."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Annotated

import typer

from kvstrata.deploy.errors import KvError
from kvstrata.engine import check as checking

__all__ = ["make_app"]


def make_app() -> typer.Typer:
    """The commands."""
    app = typer.Typer(no_args_is_help=True, help=__doc__)

    @app.command("check")
    def check(
        url: Annotated[str, typer.Argument(help="Such as http://127.0.0.1:9130.")],
        token_file: Annotated[Path | None, typer.Option(help="File with the token; else KV_ENGINE_TOKEN.")] = None,
        ca: Annotated[Path | None, typer.Option(help="PEM file of who signed an https server.")] = None,
        as_json: Annotated[bool, typer.Option("--json", help="Machine-readable output.")] = False,
    ) -> None:
        """Put, get back, put again, count: does the engine at URL do what it says? Exit 1 if not."""
        try:
            token = checking.token_of(token_file) if token_file else os.environ.get("KV_ENGINE_TOKEN", "")
            report = checking.check(url.rstrip("/"), token, ca)
        except checking.CheckError as error:
            raise KvError(error.found, error.needed, error.fix) from error
        if as_json:
            typer.echo(json.dumps(report.to_json(), indent=2))
        else:
            for row in report.rows:
                typer.echo(f" {row.verdict:<4}  {row.name:<38} {row.detail}".rstrip())
            typer.echo(f"\n{url}: {'passed' if report.passed else 'FAILED'}")
        raise typer.Exit(0 if report.passed else 1)

    @app.command("serve")
    def serve() -> None:
        """Run the engine in the foreground; settings are the KV_ENGINE_* variables (docs/engine.md)."""
        from kvstrata.engine.__main__ import main

        raise typer.Exit(main())

    return app
