"""The command line: thin, one file a command group, all work done in the floors."""

from __future__ import annotations

import sys
from typing import Any, NoReturn

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
from warploom.errors import InputError, WarploomError

INTERRUPTED = 130  # the exit code of a program that Ctrl-C ended

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
        code: Any = app(prog_name="warploom", standalone_mode=False)
    except WarploomError as error:
        leave(str(error), error.exit_code)
    except (KeyboardInterrupt, typer.Abort):
        leave("interrupted", INTERRUPTED)
    except BrokenPipeError:
        sys.exit(0)
    except Exception as error:
        # Typer has click's usage errors, or its own: what they share is how they read.
        message = getattr(error, "format_message", None)
        if message is None:
            raise
        leave(usage(error, str(message())), InputError.exit_code)
    if code == INTERRUPTED:
        leave("interrupted", INTERRUPTED)
    sys.exit(code if isinstance(code, int) else 0)


def usage(error: Exception, message: str) -> str:
    """A wrong command line in one line; without arguments: the help."""
    if type(error).__name__ == "NoArgsIsHelpError":
        print(message)
        sys.exit(InputError.exit_code)
    path = getattr(getattr(error, "ctx", None), "command_path", "warploom")
    text = message.rstrip(".").replace("\n", " ")
    command = str(path).removeprefix("warploom").strip()
    return f"{command}: {text} (see {path} --help)" if command else f"{text} (see {path} --help)"


def leave(message: str, code: int) -> NoReturn:
    """One line on stderr and the exit code."""
    print(f"warploom: {' '.join(message.split())}", file=sys.stderr)
    sys.exit(code)
