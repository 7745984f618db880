"""The command line: thin, one file a command group, all work done in the floors."""

from __future__ import annotations

import os
import re
import sys
import warnings
from difflib import get_close_matches
from importlib import import_module
from typing import Any, NoReturn, TextIO

import typer
from typer.core import TyperGroup

from warploom import __version__
from warploom.cli.page import Command
from warploom.errors import InputError, WarploomError, WarploomWarning

INTERRUPTED = 130  # the exit code of a program that Ctrl-C ended

# What `--help` says of the modules here: each has a function or a group of its own name.
COMMANDS = {
    "run": "run a kernel on random data and compare every output with float64",
    "build": "emit and compile a kernel: CUDA C++, cubin, schedule, manifest",
    "optimize": "search for the fastest kernel of a program; a report says why it is",
    "derive": "derive what to fuse, tile and stream from a formula, with a proven bound",
    "schedule": "solve, prove, check, simulate and draw a loop's software pipeline",
    "emulate": "run CUDA C++ on an emulated Hopper: races, missing waits, deadlocks",
    "tune": "search for a faster order of a kernel's machine code, Triton's too",
    "sass": "read, count, compare, check and verify machine code",
    "judge": "a kernel somebody else wrote: is it right, is it faster, does it cheat",
    "export": "write kernels as folders that run without warploom, nvcc or network",
    "check": "build an export's kernels again and hold them against what it states",
    "variants": "list the tuned variants of attention or gemm",
    "doctor": "what is here and what is missing: GPUs, compilers, packages",
}
# The last line of a command's `--help`.
EXAMPLES = {
    "run": "warploom run gemm --set m=300 --on emulated",
    "build": "warploom build attention --set causal=true --gpu h200 -o out/attention",
    "optimize": "warploom optimize examples/textbook_gemm.py:kernel --set m=4096 -o out/best",
    "derive": "warploom derive attention --gpu h100,h200 --set q=8192 --set x=8192",
    "schedule": "warploom schedule attention --html out/attention.html",
    "emulate": "warploom emulate gemm --set m=130 --set n=64 --set k=72 --seeds 3",
    "tune": "warploom tune examples/tune_gemm_leaky_relu.py:kernel --alias triton -o out/tuned",
    "judge": "warploom judge mine.py:softmax --against problem.py",
    "export": "warploom export attention gemm --to python -o out/kernels",
    "check": "warploom check out/kernels",
    "variants": "warploom variants gemm",
}
QUIET: dict[str, Any] = {"add_completion": False, "rich_markup_mode": None}


class Commands(TyperGroup):
    """Commands whose modules are imported when they are named: `--help` needs no solver."""

    def list_commands(self, ctx: Any) -> list[str]:
        """Their names."""
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """The command, or None when there is none of that name."""
        if cmd_name not in COMMANDS:
            return None
        found = getattr(import_module(f"warploom.cli.{cmd_name}"), cmd_name)
        if not isinstance(found, typer.Typer):
            alone = typer.Typer(**QUIET)
            alone.command(cmd_name, cls=Command, epilog=EXAMPLES.get(cmd_name))(found)
            found = alone
        return typer.main.get_command(found)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """The list of `--help`, from the table."""
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))


app = typer.Typer(
    cls=Commands,
    name="warploom",
    help="From a formula to the last machine instruction: derive, tile, schedule, emit, tune.",
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,
    **QUIET,
)


@app.callback(invoke_without_command=True)
def root(version: bool = typer.Option(False, "--version", help="print the version")) -> None:
    """Derive, tile, schedule, emit and tune GPU kernels."""
    if version:
        typer.echo(__version__)
        raise typer.Exit


def main() -> None:
    """Entry point: errors of ours become one line on stderr and their exit code."""
    warnings.showwarning = _show_warning
    # Tiles are small: with more threads the interpreter of the first page's kernel took three times
    # the CPU time, waiting for one another. NumPy reads this when it is imported, by a command.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
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


def _show_warning(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: TextIO | None = None,
    line: str | None = None,
) -> None:
    """A warning of ours in one line; anybody else's as Python shows it."""
    if issubclass(category, WarploomWarning):
        print(f"warploom: {message}", file=sys.stderr)
    else:
        text = warnings.formatwarning(message, category, filename, lineno, line)
        print(text, file=file or sys.stderr, end="")


def usage(error: Exception, message: str) -> str:
    """A wrong command line in one line; without arguments: the help."""
    if type(error).__name__ == "NoArgsIsHelpError":
        print(message)
        sys.exit(InputError.exit_code)
    path = getattr(getattr(error, "ctx", None), "command_path", "warploom")
    text = message.rstrip(".").replace("\n", " ")
    command = str(path).removeprefix("warploom").strip()
    asked = re.fullmatch(r"No such command '(\w+)'", text)
    if asked and (near := get_close_matches(asked[1], COMMANDS, n=1)) and not command:
        text += f", nearest: {near[0]}"
    return f"{command}: {text} (see {path} --help)" if command else f"{text} (see {path} --help)"


def leave(message: str, code: int) -> NoReturn:
    """One line on stderr and the exit code."""
    print(f"warploom: {' '.join(message.split())}", file=sys.stderr)
    sys.exit(code)
