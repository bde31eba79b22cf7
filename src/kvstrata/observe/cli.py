"""`kvstrata observe …` and `kvstrata report`."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from kvstrata.deploy.errors import KvError
from kvstrata.deploy.settings import Settings
from kvstrata.observe import check as contract
from kvstrata.observe import metrics_page, report, traces
from kvstrata.observe import panel as one
from kvstrata.observe.prometheus import Prometheus

__all__ = ["make_app", "make_report"]

Url = Annotated[str, typer.Option("--prometheus", help="Its address; else the one of .env.")]
_LEAST_CHANGING = 0.8


def make_app(settings: Callable[[], Settings], root: Callable[[], Path]) -> typer.Typer:
    """The commands of `kvstrata observe`."""
    app = typer.Typer(no_args_is_help=True, help="What is measured: no empty panel, no name that nothing exports.")

    @app.command("check")
    def check(
        prometheus: Url = "",
        trace_store: Annotated[str, typer.Option("--traces", help="Address of the trace store; else .env's.")] = "",
        minutes: Annotated[float, typer.Option(min=1, help="How far to look back.")] = 60,
        changing: Annotated[bool, typer.Option(help="4 panels of 5 must have changed (after the scenario).")] = False,
        json_file: Annotated[Path | None, typer.Option("--json", help="Write the result here.")] = None,
    ) -> None:
        """Every name of dashboards, rules and docs is live, every panel has data. Exit 1 on any gap."""
        current = settings()
        spans = trace_store or f"http://127.0.0.1:{current.watch_ports['KV_TRACES_PORT']}"
        found = contract.run(
            Prometheus(prometheus or current.prometheus_url),
            root(),
            contract.parts_of(current.layers, current.device or "cpu"),
            minutes * 60,
            partial(traces.search, spans, minutes * 60),
        )
        if json_file is not None:
            json_file.write_text(json.dumps(found.to_json(), indent=2) + "\n", encoding="utf-8")
        _show(found, Console(highlight=False))
        still = changing and found.changing < _LEAST_CHANGING
        if still:
            typer.echo(f"found: {found.changing:.0%} of the panels changed; needed: {_LEAST_CHANGING:.0%}")
        raise typer.Exit(1 if found.gaps or still else 0)

    @app.command("panel")
    def panel(
        title: Annotated[str, typer.Argument(help="Words of its title.")],
        minutes: Annotated[float, typer.Option(min=2, help="For panels that add up: how far back.")] = 60,
        prometheus: Url = "",
    ) -> None:
        """A dashboard's panel in the terminal: what each of its queries gives now."""
        for line in one.show(Prometheus(prometheus or settings().prometheus_url), root(), title, minutes):
            typer.echo(line)

    @app.command("scenario")
    def scenario() -> None:
        """Traffic that moves every panel: cold, L0, L1, L2, tenants, eviction, a corrupt block, restarts. Minutes."""
        from kvstrata.deploy import turn
        from kvstrata.deploy.steps import Steps
        from kvstrata.observe import scenario as script

        with turn.take(root(), "scenario"):
            script.run(settings(), root(), Steps())

    @app.command("silence")
    def silence(
        minutes: Annotated[float, typer.Option(min=0.1, help="How long.")] = 10,
    ) -> None:
        """Healthy traffic; exit 1 if any alert fires meanwhile."""
        from kvstrata.deploy import turn
        from kvstrata.deploy.steps import Steps
        from kvstrata.observe import silence as quiet

        turn.refuse_while_taken(root())
        with Steps().step("Silence") as step:
            seen = quiet.run(settings(), root(), minutes, step.note)
            step.done(f"{minutes:g} minutes, {seen.requests} requests, {len(seen.fired)} alerts")
        for word, found in (("FIRED", seen.fired), ("pending", seen.pending)):
            for name, second in found.items():
                typer.echo(f"{word}: {name}, after {second:.0f} s")
        raise typer.Exit(1 if seen.fired else 0)

    @app.command("cost")
    def cost(
        rounds: Annotated[int, typer.Option(min=2, help="Of each kind; each takes a restart of vLLM.")] = 3,
        json_file: Annotated[Path | None, typer.Option("--json", help="Write the figures here.")] = None,
    ) -> None:
        """TTFT and throughput with observability and without it, in turn. Restarts servers; takes minutes."""
        from kvstrata.deploy import turn
        from kvstrata.deploy.steps import Steps
        from kvstrata.observe import cost as price

        with turn.take(root(), "cost"):
            found = price.run(root(), rounds, Steps())
        if json_file is not None:
            text = json.dumps({row.name: {"off": row.off, "on": row.on} for row in found}, indent=2)
            json_file.write_text(text + "\n", encoding="utf-8")
        price.show(found, Console(highlight=False))

    @app.command("metrics")
    def metrics(prometheus: Url = "") -> None:
        """The page docs/metrics.md with what the running Prometheus has of each name."""
        found = Prometheus(prometheus or settings().prometheus_url)
        typer.echo(metrics_page.text(found.counts()))

    return app


def make_report(settings: Callable[[], Settings], root: Callable[[], Path]) -> Callable[..., None]:
    """The command `kvstrata report`."""

    def command(
        hours: Annotated[float, typer.Option(min=0.1, help="How far to look back.")] = 6,
        out: Annotated[Path | None, typer.Option(help="The file; else data/reports/report.html.")] = None,
        prometheus: Url = "",
    ) -> None:
        """One HTML page with plots of the last hours: hit rate, TTFT by source, usage."""
        address = prometheus or settings().prometheus_url
        path = out or root() / "data" / "reports" / "report.html"
        text = report.make(Prometheus(address), hours, "kvstrata")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        except OSError as error:
            raise KvError(f"{path}: {error.strerror}", "a file that can be written", "--out FILE") from error
        typer.echo(path)

    return command


def _show(found: contract.Outcome, console: Console) -> None:
    table = Table(title=f"{found.with_data} of {len(found.panels)} panels have data")
    for heading in ("dashboard", "panel", "samples", ""):
        table.add_column(heading, justify="right" if heading == "samples" else "left")
    for panel in found.panels:
        word = "GAP" if panel.gaps else "excused" if panel.excused else "" if panel.changed else "still"
        table.add_row(panel.dashboard, panel.title, str(panel.samples), word)
    console.print(table)
    for name, reason in sorted(found.excused.items()):
        console.print(f"excused: {name}: {reason}", markup=False)
    for gap in found.gaps:
        console.print(f"GAP: {gap}", markup=False)
    console.print(f"{found.names_live} of {found.names_used} names live, {found.changing:.0%} of the panels changed")
