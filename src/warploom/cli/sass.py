"""`warploom sass`: read, count, compare, check and verify machine code. No GPU needed."""

from __future__ import annotations

import json
import os
import sys
import textwrap
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from warploom.cli.options import Html, Json
from warploom.cli.page import Command
from warploom.errors import InputError, WarploomWarning
from warploom.files import write_text_atomically
from warploom.report.sass_html import diff_html, show_html
from warploom.report.sass_tables import diff_lines, lint_lines, stats_lines
from warploom.report.sass_text import show as show_lines
from warploom.report.sass_text import source_files
from warploom.report.sass_words import defs_and_uses, reasons
from warploom.sass.decode.container import cubins, load
from warploom.sass.decode.cubin import Cubin
from warploom.sass.decode.kernel import Kernel, decode, decode_all
from warploom.sass.flow.aliasing import AliasMode
from warploom.sass.flow.diff import diff as diff_cubins
from warploom.sass.flow.loops import natural_loops
from warploom.sass.flow.paths import block_edges
from warploom.sass.rules.lint import ERROR, lint
from warploom.sass.rules.verdict import Verdict
from warploom.sass.rules.verify import verify as verify_cubins
from warploom.sass.rules.verify import verify_all
from warploom.sass.show.explain import Explanation, explain
from warploom.sass.show.stats import stats as kernel_stats

sass = typer.Typer(
    name="sass",
    help="Read, count, compare, check and verify GPU machine code.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
)

FILE = "a cubin, or an object, library or fat binary"
File = Annotated[Path, typer.Argument(metavar="FILE", help=FILE)]
Files = Annotated[
    list[Path], typer.Argument(metavar="FILE...", help="cubins, objects, libraries, fat binaries")
]
KernelName = Annotated[
    str | None, typer.Option("--kernel", metavar="NAME", help="which one, if a file has several")
]
Alias = Annotated[
    AliasMode,
    typer.Option(
        "--alias",
        metavar="|".join(mode.value for mode in AliasMode),
        help="; ".join(f"{mode.value}: {mode.about}" for mode in AliasMode),
    ),
]
Arch = Annotated[
    str | None, typer.Option(metavar="SM", help="of a file for several: which, as sm_90a")
]
NoColor = Annotated[bool, typer.Option("--no-color", help="plain text on a terminal too")]


@sass.command(cls=Command)
def show(
    file: File,
    kernel: KernelName = None,
    arch: Arch = None,
    defuse: Annotated[
        bool, typer.Option("--defuse", help="registers written and read, under each instruction")
    ] = False,
    source: Annotated[bool, typer.Option("--source", help="source lines, where recorded")] = False,
    html: Html = None,
    block: Annotated[
        int | None, typer.Option("--block", metavar="N", help="one basic block only")
    ] = None,
    json_output: Json = False,
    no_color: NoColor = False,
) -> None:
    """Print instructions, control bits, and why each stalls."""
    cubin = load(file, kernel, arch)
    decoded = decode(cubin, kernel, with_source=source or json_output or html is not None)
    if block is not None and not 0 <= block < len(decoded.blocks):
        last = len(decoded.blocks) - 1
        raise InputError(f"{file}: {decoded.name} has no block {block}; blocks are 0 to {last}")
    if source and all(item.line.source is None for item in decoded.instructions):
        raise InputError(f"{file} records no source lines; compile it with -lineinfo")
    explanation = explain(decoded)
    if html is not None:
        write_text_atomically(html, show_html(cubin, decoded, explanation, block))
        print(f"wrote {html}", file=sys.stderr)
    if json_output:
        _print_json(_show_json(cubin, decoded, explanation, block))
    elif html is None:
        sources = source_files(decoded, file.parent) if source else None
        _warn_of_missing(file, sources or {})
        _print(show_lines(decoded, explanation, block, defuse, sources), no_color)


def _warn_of_missing(cubin: Path, sources: Mapping[str, Path | None]) -> None:
    if missing := [name for name, path in sources.items() if path is None]:
        others = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        warnings.warn(
            f"{cubin} was compiled from {missing[0]}{others}, which is not there: only line "
            f"numbers are shown; put {Path(missing[0]).name} beside {cubin.name} for the lines",
            WarploomWarning,
            stacklevel=1,
        )


@sass.command(cls=Command)
def stats(
    files: Files,
    kernel: KernelName = None,
    arch: Arch = None,
    json_output: Json = False,
    no_color: NoColor = False,
) -> None:
    """Count instructions, loops, issue cycles and spills."""
    found = [
        (path, kernel_stats(cubin, decoded))
        for path, cubin, decoded in _every_kernel(files, kernel, arch)
    ]
    if json_output:
        _print_json([{"file": str(path), **one.to_json()} for path, one in found])
    else:
        _print((line for _, one in found for line in stats_lines(one)), no_color)


@sass.command(cls=Command)
def diff(
    before: Annotated[Path, typer.Argument(metavar="BEFORE", help=FILE)],
    after: Annotated[Path, typer.Argument(metavar="AFTER", help=FILE)],
    kernel: KernelName = None,
    arch: Arch = None,
    html: Html = None,
    exit_code: Annotated[
        bool, typer.Option("--exit-code", help="exit 1 when the code differs (default: always 0)")
    ] = False,
    json_output: Json = False,
    no_color: NoColor = False,
) -> None:
    """Compare two cubins: moves, control edits, the rest."""
    first, second = load(before, kernel, arch), load(after, kernel, arch)
    found = diff_cubins(first, second, kernel)
    if html is not None:
        write_text_atomically(html, diff_html(first, second, found))
        print(f"wrote {html}", file=sys.stderr)
    if json_output:
        _print_json([one.to_json() for one in found])
    elif html is None:
        _print((line for one in found for line in diff_lines(one)), no_color)
    if exit_code and not all(one.same for one in found):
        raise typer.Exit(1)


@sass.command(cls=Command)
def verify(
    original: Annotated[Path, typer.Argument(metavar="ORIGINAL", help=FILE)],
    candidate: Annotated[Path, typer.Argument(metavar="CANDIDATE", help=FILE)],
    kernel: KernelName = None,
    arch: Arch = None,
    alias: Alias = AliasMode.STRICT,
    json_output: Json = False,
) -> None:
    """Is CANDIDATE a legal reordering of ORIGINAL? Exit 0: yes, 1: no."""
    verdicts = _verdicts(original, candidate, kernel, arch, alias)
    several = len(verdicts) > 1
    if json_output:
        data = [{"kernel": name, **_verdict_json(one)} for name, one in verdicts]
        _print_json(data if several else data[0])
    else:
        for name, verdict in verdicts:
            print(f"{name}: {verdict}" if several else verdict)
            for finding in verdict.findings:
                print(textwrap.indent(finding.explained(), "  "))
    if not all(verdict.legal for _, verdict in verdicts):
        raise typer.Exit(1)


def _verdicts(
    original: Path, candidate: Path, kernel: str | None, arch: str | None, alias: AliasMode
) -> list[tuple[str, Verdict]]:
    """The verdict on the named kernel, or on each of the file."""
    if kernel is not None:
        first, last = load(original, kernel, arch), load(candidate, kernel, arch)
        name = first.kernel(kernel).name
        return [(name, verify_cubins(first, last, name, alias))]
    before, after = cubins(original, arch), cubins(candidate, arch)
    if len(before) != len(after):
        raise InputError(f"{candidate} holds {len(after)} cubins, {original} {len(before)}")
    several = len(before) > 1
    return [
        (f"{name} ({first.arch})" if several else name, verdict)
        for first, last in zip(before, after, strict=True)
        for name, verdict in verify_all(first, last, alias).items()
    ]


def _verdict_json(verdict: Verdict) -> dict[str, Any]:
    return {
        "legal": verdict.legal,
        "alias": verdict.mode.value,
        "moved": verdict.moved,
        "control_edits": verdict.control_edits,
        "findings": [asdict(finding) for finding in verdict.findings],
    }


@sass.command("lint", cls=Command)
def lint_command(
    files: Files,
    kernel: KernelName = None,
    arch: Arch = None,
    json_output: Json = False,
    no_color: NoColor = False,
) -> None:
    """Check waits and registers. Exit 1: errors."""
    found = [
        (path, decoded.name, lint(decoded))
        for path, _, decoded in _every_kernel(files, kernel, arch)
    ]
    if json_output:
        _print_json(
            [
                {"file": str(path), "kernel": name, "findings": [asdict(one) for one in findings]}
                for path, name, findings in found
            ]
        )
    else:
        _print(
            (
                line
                for path, name, findings in found
                for line in lint_lines(f"{path.name} {name}", findings)
            ),
            no_color,
        )
    if any(finding.severity == ERROR for _, _, findings in found for finding in findings):
        raise typer.Exit(1)


def _every_kernel(
    files: list[Path], kernel: str | None, arch: str | None
) -> list[tuple[Path, Cubin, Kernel]]:
    found: list[tuple[Path, Cubin, Kernel]] = []
    for path in files:
        for cubin in cubins(path, arch) if kernel is None else [load(path, kernel, arch)]:
            kernels = decode_all(cubin) if kernel is None else {kernel: decode(cubin, kernel)}
            found.extend((path, cubin, decoded) for decoded in kernels.values())
    return found


def _show_json(
    cubin: Cubin, kernel: Kernel, explanation: Explanation, block: int | None
) -> dict[str, Any]:
    """Version 1 of the listing as data; offsets in bytes, instruction numbers in reasons."""
    following = block_edges(kernel)
    chosen = [entry for entry in kernel.blocks if block is None or entry.index == block]
    return {
        "version": 1,
        "file": cubin.origin,
        "arch": cubin.arch,
        "compiler": cubin.compiler,
        "kernel": kernel.name,
        "registers": kernel.code.registers,
        "loops": [asdict(loop) for loop in natural_loops(kernel)],
        "blocks": [
            {
                "block": entry.index,
                "successors": following[entry.index],
                "instructions": [
                    _instruction_json(kernel, explanation, index)
                    for index in range(entry.start, entry.end)
                ],
            }
            for entry in chosen
        ],
    }


def _instruction_json(kernel: Kernel, explanation: Explanation, index: int) -> dict[str, Any]:
    item = kernel.instructions[index]
    writes, reads = defs_and_uses(item)
    stall = explanation.stalls.get(index)
    return {
        "index": index,
        "offset": item.offset,
        "guard": item.line.guard,
        "opcode": item.line.opcode,
        "operands": item.line.operands,
        "control": asdict(item.control),
        "writes": writes,
        "reads": reads,
        "pinned": item.pinned,
        "source": item.line.source,
        "stall_reason": asdict(stall) if stall is not None else None,
        "wait_reasons": [asdict(wait) for wait in explanation.waits.get(index, ())],
        "reasons": reasons(kernel, explanation, index),
    }


def _print(lines: Iterable[Text], no_color: bool) -> None:
    """Colour on a terminal; plain when piped, with NO_COLOR set or when asked."""
    plain = no_color or bool(os.environ.get("NO_COLOR")) or not sys.stdout.isatty()
    if plain:
        for line in lines:
            print(line.plain)
        return
    console = Console(highlight=False, soft_wrap=True)
    for line in lines:
        console.print(line)


def _print_json(data: Any) -> None:
    print(json.dumps(data, indent=1))
