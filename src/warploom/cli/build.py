"""`warploom build`: a tile program to a cubin."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from warploom.autosched.schedules import NAMES
from warploom.autosched.selected import Selected
from warploom.cli.named import Gpu, Name
from warploom.cli.options import Json, Out, Settings, say, settings_of
from warploom.codegen.compile.build import ALLOWED, certified
from warploom.codegen.ir.block import BlockProgram
from warploom.codegen.ir.text import block_text
from warploom.codegen.passes.lower import PASSES, START, lower
from warploom.codegen.simt.schedule import SimtSchedule
from warploom.errors import InputError
from warploom.files import check_folder
from warploom.flows.built import from_file, write_build_note
from warploom.kernels.select import select

AFTER = (START, *PASSES)  # what --print-after knows


def build(
    name: Name,
    out: Out,
    gpu: Gpu = "h200",
    settings: Settings = None,
    schedule: Annotated[
        str, typer.Option(metavar="NAME", help="default, a schedule.json, or " + ", ".join(NAMES))
    ] = "default",
    allow: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="accept, by name: " + ", ".join(ALLOWED)),
    ] = None,
    print_after: Annotated[
        str,
        typer.Option(
            metavar="PASS", help="print the block program after it: all, " + ", ".join(AFTER)
        ),
    ] = "",
    invariant: Annotated[
        str,
        typer.Option(
            metavar="DIM",
            help="a dimension of the results: refuse a kernel whose bits are not proved to be the "
            "same whatever its other indices hold and however many there are",
        ),
    ] = "",
    as_json: Json = False,
) -> None:
    """Emit and compile a kernel: NAME.cu, NAME.cubin, schedule.json, manifest.json, build.json."""
    started = time.perf_counter()
    check_folder(out)
    if print_after not in ("", "all", *AFTER):
        raise InputError(f"--print-after {print_after!r}: expected all, {', '.join(AFTER)}")
    given, accepted = settings_of(settings), tuple(allow or ())
    if schedule.endswith(".json"):
        chosen = from_file(Path(schedule), name, given, gpu)
    else:
        chosen = select(name, given, gpu, schedule, allow=accepted, say=say)
    chosen = replace(chosen, allow=(*chosen.allow, *accepted))
    if print_after:
        print_passes(chosen, print_after)
    if invariant:
        certified(chosen.program, chosen.schedule).require(invariant)
    built = chosen.build()
    built.write(out)
    write_build_note(out, name, given, gpu, built)
    seconds = time.perf_counter() - started
    if as_json:
        typer.echo(json.dumps({**built.manifest(), "seconds": round(seconds, 3)}))
        return
    res = built.resources
    typer.echo(
        f"{name} for {gpu}, {chosen}: {built.source.threads} threads, "
        f"{res.registers} registers at entry, {built.source.shared_bytes} B of shared memory, "
        f"{res.compiler}, {seconds:.2f} s -> {out}"
    )


def print_passes(chosen: Selected, wanted: str) -> None:
    """Print the block program after the pass `wanted`, or after each where that is "all".

    Raises `InputError` for a kernel without one.
    """
    if isinstance(chosen.schedule, SimtSchedule):
        raise InputError(f"--print-after: {chosen} has no matmul, so it has no block program")

    def show(name: str, block: BlockProgram) -> None:
        if wanted in (name, "all"):
            typer.echo(f"# after {name}\n{block_text(block)}", err=True)

    lower(chosen.program, chosen.schedule, show)
