"""`kvstrata <verb>`: what the Makefile calls, one to one. Exit codes: 0 done, 1 proof or command failed, 2 refused."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Annotated, Any

import typer
from rich.console import Console

from kvstrata import engine_cli, store_cli
from kvstrata.deploy import envfile, images, lock, settings, status, turn, up
from kvstrata.deploy.compose import Compose
from kvstrata.deploy.errors import KvError
from kvstrata.deploy.steps import Steps
from kvstrata.observe import cli as observe_cli

__all__ = ["app", "main"]

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, help=__doc__)
lock_app = typer.Typer(no_args_is_help=True, help="versions.lock: every pin of this deployment.")
app.add_typer(lock_app, name="lock")
bench_app = typer.Typer(
    help="Measure: the running stack by itself, `bench store` the block store, `bench engine` the KV engine."
)
app.add_typer(bench_app, name="bench", invoke_without_command=True)

Json = Annotated[bool, typer.Option("--json", help="Machine-readable output.")]


def _root() -> Path:
    """The checkout: KVSTRATA_ROOT (tests, several checkouts with one .venv), else the one that holds this package."""
    return Path(os.environ.get("KVSTRATA_ROOT") or Path(__file__).resolve().parents[2]).absolute()


def _settings() -> settings.Settings:
    return settings.load(_root())


app.add_typer(store_cli.make_app(_settings), name="store")
app.add_typer(engine_cli.make_app(), name="engine")
app.add_typer(observe_cli.make_app(_settings, _root), name="observe")
app.command("report")(observe_cli.make_report(_settings, _root))


def _print_json(data: Any) -> None:
    sys.stdout.write(json.dumps(data, indent=2, default=str) + "\n")


@app.command("up")
def up_(proof: Annotated[bool, typer.Option(help="Prove the running stack at the end.")] = True) -> None:
    """Everything from nothing to a running, proven stack. Safe to repeat."""
    with turn.take(_root(), "up"):
        code = up.up(_root(), Steps(), proof=proof)
    raise typer.Exit(code)


@app.command()
def down() -> None:
    """Stop and remove the containers. Data, images and settings stay."""
    with turn.take(_root(), "down"):
        current = _settings()
        compose = Compose(_root(), current)
        gone = [state.service for state in compose.ps()]
        compose.down()
    removed = f"containers of {', '.join(gone)}, and their networks" if gone else "nothing, no container was there"
    for line in (
        f"removed: {removed}",
        f"stays:   settings ({current.env_file}), data ({current.data_dir}), cache ({current.cache_dir}),",
        "         images and volumes",
        "`make up` starts it again",
    ):
        typer.echo(line)


@app.command()
def rollback() -> None:
    """Back to the plain vLLM: its own arguments, nothing of kvstrata in it. The cache on disk stays."""
    with turn.take(_root(), "rollback"):
        code = up.rollback(_root(), Steps())
    raise typer.Exit(code)


@app.command("status")
def status_(as_json: Json = False) -> None:
    """What runs, how KV moves, how full the tiers are, and the last proof."""
    state = status.collect(_settings(), _root())
    if as_json:
        _print_json(state.to_json())
    else:
        status.render(state, Console(highlight=False))
    raise typer.Exit(0 if state.ok else 1)


@app.command()
def logs(
    service: Annotated[str, typer.Argument(help="A service, such as vllm (make status); else all.")] = "",
    tail: Annotated[int, typer.Option(help="Lines of each service.")] = 100,
    follow: Annotated[bool, typer.Option("--follow", "-f")] = False,
) -> None:
    """The services' log lines."""
    Compose(_root(), _settings()).show_logs(service, tail=tail, follow=follow)


@app.command()
def plan(
    explain: Annotated[bool, typer.Option(help="Say why for each figure.")] = True,
    as_json: Json = False,
) -> None:
    """Flags, sizes and limits for this model on this machine. Changes nothing."""
    made = up.make_plan(_root())
    if as_json:
        _print_json(made.to_json())
    else:
        made.render(Console(highlight=False), explain=explain)


@app.command()
def verify(
    live: Annotated[bool, typer.Option("--live", help="Restart nothing.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Even while others use the server.")] = False,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the report here as well.")] = None,
) -> None:
    """The reuse proof on the running stack: cold, warm, and after a kill of each part. Exit 1 if a phase fails."""
    from kvstrata.proof import verify as proof

    if live:
        # Restarts nothing, so it holds nothing; beside a command that does, it would fail for no fault.
        turn.refuse_while_taken(_root())
    alone = contextlib.nullcontext() if live else turn.take(_root(), "verify")
    with alone, Steps().step("Proof, live" if live else "Proof") as step:
        tell = proof.progress(step.note, live=live)
        report = proof.run(_settings(), _root(), live=live, force=force, json_path=json_file, before=tell)
        step.done("passed" if report.passed else "FAILED")
    report.render(Console(highlight=False))
    raise typer.Exit(0 if report.passed else 1)


@bench_app.callback()
def bench(
    context: typer.Context,
    lengths: Annotated[str, typer.Option(help="Prompt lengths in tokens, comma separated.")] = "",
    repeats: Annotated[int, typer.Option(min=1, help="Prompts of each length.")] = 3,
    out: Annotated[Path | None, typer.Option(help="Folder of the report (JSON, table, plot).")] = None,
) -> None:
    """TTFT cold / L0 / L1 / L2 and plain vLLM at several prompt lengths. Restarts servers; takes minutes."""
    if context.invoked_subcommand:
        return
    from kvstrata.proof import bench as benchmark

    with turn.take(_root(), "bench"):
        benchmark.run(
            _settings(),
            _root(),
            lengths=tuple(int(n) for n in lengths.split(",") if n.strip()),
            repeats=repeats,
            out=out,
            console=Console(highlight=False),
        )


@bench_app.command("store")
def bench_store(
    quick: Annotated[bool, typer.Option("--quick", help="Seconds instead of minutes; no figure to believe.")] = False,
    folder: Annotated[Path | None, typer.Option("--dir", help="Where it writes; else the disk of the cache.")] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the figures here.")] = None,
    markdown: Annotated[Path | None, typer.Option("--markdown", help="Write the tables here.")] = None,
    plot: Annotated[
        Path | None, typer.Option("--plot", help="Write a plot here (.svg, .png); needs matplotlib.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Of the order of the measurements.")] = 1,
) -> None:
    """The block store against raw reads and LMCache's own adapters, in one run. Touches no running stack."""
    from kvstrata.proof import store_bench

    store_bench.run(
        _settings(), _root(), quick=quick, folder=folder, json_file=json_file, markdown=markdown, plot=plot, seed=seed,
        console=Console(highlight=False),
    )  # fmt: skip


@bench_app.command("engine")
def bench_engine(
    quick: Annotated[bool, typer.Option("--quick", help="Seconds instead of minutes; no figure to believe.")] = False,
    folder: Annotated[
        Path | None, typer.Option("--dir", help="Where the servers write; else the disk of the cache.")
    ] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the figures here.")] = None,
    markdown: Annotated[Path | None, typer.Option("--markdown", help="Write the tables here.")] = None,
    seed: Annotated[int, typer.Option(help="Of the order of the measurements.")] = 1,
) -> None:
    """The KV engine's HTTP and RESP beside Redis and epistemic-graph-server. Touches no running stack."""
    from kvstrata.proof import engine_bench

    engine_bench.run(
        _settings(), engine_bench.options(quick=quick, seed=seed), folder=folder, json_file=json_file,
        markdown=markdown, console=Console(highlight=False),
    )  # fmt: skip


@app.command()
def size(
    model: Annotated[
        str, typer.Option(help="Folder, name of configs/models, or a well-known model; else .env's.")
    ] = "",
    tokens: Annotated[int, typer.Option(min=1, help="Tokens to be kept.")] = 100_000,
    tp: Annotated[int, typer.Option(min=1, help="Tensor-parallel ranks.")] = 1,
    dtype: Annotated[str, typer.Option(help="KV element type; else the model's own.")] = "",
    working_set: Annotated[float, typer.Option(min=0.001, help="GB (10^9) that should stay on disk.")] = 200.0,
    common: Annotated[bool, typer.Option("--common", help="A table of well-known models instead.")] = False,
    as_json: Json = False,
) -> None:
    """Disk space of a model's KV cache: a token, a block, 1k tokens, and what a capacity holds."""
    from kvstrata.proof import sizing

    if common:
        table = sizing.common(tokens=tokens, working_set_gb=working_set)
        if as_json:
            _print_json([one.to_json() for one in table])
        else:
            print(sizing.markdown(table))
        return
    found = sizing.of_model(_settings(), model, dtype=dtype, tp=tp, tokens=tokens, working_set_gb=working_set)
    if as_json:
        _print_json(found.to_json())
    else:
        sizing.render(found, Console(highlight=False))


@app.command()
def build() -> None:
    """Build the images here and use them from the next `up` on."""
    _images("build", images.build)


@app.command()
def pull() -> None:
    """Pull the images by the digests of versions.lock and use them from the next `up` on."""
    _images("pull", images.pull)


def _images(source: str, get: Callable[[settings.Settings, Steps], images.ImageSet]) -> None:
    steps = Steps()
    with turn.take(_root(), source):
        found = get(up.prepare(_root(), steps), steps)
        envfile.set_value(_root(), "KV_IMAGE_SOURCE", source)
    Console(highlight=False).print(f"{found.vllm}\n{found.proxy}", soft_wrap=True)


@lock_app.command("update")
def lock_update() -> None:
    """Ask the registries for digests that are still `unresolved`. Never invents one."""
    for line in lock.update(_root()):
        typer.echo(line)


def _terminated(_signal: int, _frame: FrameType | None) -> None:
    """As Ctrl-C: killed servers are started again, and compose is told."""
    raise KeyboardInterrupt


_SERVERS_BACK = "servers that it had stopped were told to start again (make status)"
_INTERRUPTED = {
    "up": "what was started keeps starting; `make up` goes on from here",
    "rollback": "what was started keeps starting; `make rollback` goes on from here",
    "down": "`make down` goes on from here",
    "verify": _SERVERS_BACK,
    "bench": _SERVERS_BACK,
    "build": "`make build` goes on from here",
    "pull": "`make pull` goes on from here",
}


def main() -> int:
    """Run the command line; a refusal becomes found / needed / to fix on stderr and exit code 2, Ctrl-C 130."""
    if signal.getsignal(signal.SIGTERM) == signal.SIG_DFL:
        signal.signal(signal.SIGTERM, _terminated)
    try:
        code = app(standalone_mode=False)  # click hands back the code of a typer.Exit
        if code == 130:  # what typer makes of a Ctrl-C
            raise KeyboardInterrupt
    except KvError as error:
        print(f"\n{error}", file=sys.stderr)
        return error.exit_code
    except (typer.Abort, KeyboardInterrupt):
        verb = sys.argv[1] if len(sys.argv) > 1 else ""
        print(f"\ninterrupted; {_INTERRUPTED.get(verb, 'nothing was left half done')}", file=sys.stderr)
        return 130
    except Exception as error:
        # click's usage errors know how to show themselves; anything else is a bug and keeps its trace.
        show = getattr(error, "show", None)
        if show is None:
            raise
        show()
        return 2
    return code if isinstance(code, int) else 0


if __name__ == "__main__":
    sys.exit(main())
