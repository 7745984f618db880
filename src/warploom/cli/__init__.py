"""The command line: thin, one file a command group, all work done in the floors."""

from __future__ import annotations

import sys

import typer

from warploom import __version__
from warploom.cli.bench import bench
from warploom.cli.build import build
from warploom.cli.derive import derive
from warploom.cli.doctor import doctor
from warploom.cli.optimize import optimize
from warploom.cli.run import run
from warploom.cli.sass import sass
from warploom.cli.schedule import schedule
from warploom.cli.tune import tune
from warploom.errors import WarploomError

app = typer.Typer(
    name="warploom",
    help="From a formula to the last machine instruction: derive, tile, schedule, emit, tune.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


app.command()(bench)
app.command()(build)
app.command()(run)
app.command()(derive)
app.command()(doctor)
app.command()(optimize)
app.command()(schedule)
app.command()(tune)
app.add_typer(sass)


@app.callback(invoke_without_command=True)
def root(version: bool = typer.Option(False, "--version", help="print the version")) -> None:
    """Derive, tile, schedule, emit and tune GPU kernels."""
    if version:
        typer.echo(__version__)
        raise typer.Exit


def main() -> None:
    """Entry point: errors of ours become one line on stderr and their exit code."""
    try:
        app()
    except WarploomError as error:
        message = " ".join(str(error).split())
        print(f"warploom: {message}", file=sys.stderr)
        sys.exit(error.exit_code)
    except BrokenPipeError:
        sys.exit(0)
