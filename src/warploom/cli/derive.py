"""`warploom derive`: a formula to a derivation, on one GPU, several, or an abstract memory."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from warploom.cli.options import Json
from warploom.derive.compare import compare_gpus, table
from warploom.derive.cost.gpu import gpu as machine
from warploom.derive.cost.structure import MAX_STREAMS
from warploom.derive.derive import Derivation, by_hand, derive_on
from warploom.derive.derive import derive as run_derive
from warploom.derive.formula.graph import Diagram
from warploom.derive.formula.library import FORMULAS
from warploom.derive.pareto import front, front_table
from warploom.derive.show.drawing import draw, draw_steps
from warploom.errors import InputError
from warploom.files import write_text_atomically
from warploom.flows.derived import ELEMENTS, DerivedKernel, build_fitting, diagram_of, verified

LONGEST = 2**31 - 1
SYMBOLS = {"group": "g", "split": "w", "stream": "s"}
ONE = 1
"""Stream loops in a nest that is to be compiled: the emitter schedules one loop."""


def derive(
    name: Annotated[
        str, typer.Argument(metavar="NAME", help="a formula's name, or FILE.py:OBJECT, or 'list'")
    ],
    gpu: Annotated[
        str, typer.Option(metavar="GPU,...", help="a GPU or a machine's FILE.toml, or several")
    ] = "h200",
    dtype: Annotated[
        str, typer.Option(metavar="TYPE,...", help="element type, or several")
    ] = "fp16",
    memory: Annotated[
        float,
        typer.Option(metavar="VALUES", help="derive for so many values on chip and for no GPU"),
    ] = 0,
    sizes: Annotated[
        list[str] | None, typer.Option("--set", metavar="AXIS=SIZE", help="repeatable")
    ] = None,
    as_json: Json = False,
    svg: Annotated[Path | None, typer.Option(metavar="FILE", help="write the drawing here")] = None,
    objective: Annotated[
        str, typer.Option(metavar="time|energy", help="what is least, on a GPU")
    ] = "time",
    split: Annotated[bool, typer.Option("--split", help="with --memory: allow split axes")] = False,
    build: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="compile the derived kernels into it (Hopper)"),
    ] = None,
    nest: Annotated[
        str,
        typer.Option(
            "--nest",
            metavar="NEST",
            help="with --memory: your own, as q=group:128,x=stream:64 (or split)",
        ),
    ] = "",
    pareto: Annotated[
        bool, typer.Option("--pareto", help="memory against transfer, 2^8 to 2^24 values")
    ] = False,
    steps: Annotated[bool, typer.Option("--steps", help="--svg draws every rewrite")] = False,
    no_lemmas: Annotated[
        bool, typer.Option("--no-lemmas", help="search for streaming forms, look none up")
    ] = False,
) -> None:
    """Derive what to fuse, tile and stream, its cost, its distance from a proven bound."""
    if name == "list":
        for entry in FORMULAS:
            typer.echo(f"{entry.name:18} {entry.text}")
        return
    asked = Asked(
        diagram_of(name).resized(parse_sizes(sizes or [])),
        tuple(part for part in gpu.split(",") if part),
        tuple(part for part in dtype.split(",") if part),
        memory,
        objective,
        parse_nest(nest) if nest else None,
        not no_lemmas,
    )
    if wrong := contradiction(asked, pareto, split, steps, svg, build):
        raise InputError(wrong)
    require_writable(svg, build)
    if pareto:
        points = front(asked.diagram, lemmas=asked.lemmas)
        rows = [point.to_json() for point in points]
        typer.echo(json.dumps(rows, indent=1) if as_json else front_table(points))
    elif asked.several and not memory:
        found = compare_gpus(asked.diagram, asked.gpus, asked.dtypes, asked.lemmas)
        rows = [row.to_json() for row in found]
        typer.echo(json.dumps(rows, indent=1) if as_json else table(found))
    else:
        _derive_one(asked, split, build, as_json, svg, steps)


@dataclass(frozen=True)
class Asked:
    """What is to be derived, and for what."""

    diagram: Diagram
    gpus: tuple[str, ...]
    dtypes: tuple[str, ...]
    memory: float
    objective: str
    nest: tuple[dict[str, str], dict[str, int]] | None
    lemmas: bool

    @property
    def several(self) -> bool:
        """Whether it is for several GPUs or types."""
        return len(self.gpus) > 1 or len(self.dtypes) > 1


def _derive_one(
    asked: Asked, split: bool, build: Path | None, as_json: bool, svg: Path | None, steps: bool
) -> None:
    """Derive for one machine and say it; with `build`, compile into that folder."""
    one = derivation(asked, split, MAX_STREAMS if build is None else ONE)
    made: tuple[DerivedKernel, ...] = ()
    why = ""
    if build is not None:
        one, made, why = build_fitting(one, partial(derivation, asked, split, ONE), one.dtype)
    report(one, as_json, svg, steps)
    if why and not as_json:
        typer.echo(f"smaller   {why}")
    if build is not None:
        write_kernels(made, build, quiet=as_json)


def derivation(asked: Asked, split: bool, streams: int, share: float = 1.0) -> Derivation:
    """The derivation for one memory, or for one GPU, of which tiles fill a share, and type."""
    if asked.nest is not None:
        return by_hand(asked.diagram, *asked.nest, asked.memory, asked.lemmas)
    if asked.memory:
        return run_derive(asked.diagram, asked.memory, split=split, lemmas=asked.lemmas)
    return derive_on(
        asked.diagram,
        asked.gpus[0],
        asked.dtypes[0],
        objective=asked.objective,
        streams=streams,
        lemmas=asked.lemmas,
        share=share,
    )


def contradiction(
    asked: Asked, pareto: bool, split: bool, steps: bool, svg: Path | None, build: Path | None
) -> str:
    """Why the options do not go together, and what would; "" when they do."""
    memory, nest, several = asked.memory, asked.nest is not None, asked.several
    if not asked.gpus or not asked.dtypes:
        return "--gpu and --dtype need at least one name each"
    if pareto and (nest or memory or svg is not None or build is not None):
        return "--pareto derives for many memories: leave out --memory, --nest, --svg and --build"
    if split and (not memory or nest):
        return "--split is for a nest that is found: give --memory and no --nest"
    if asked.objective != "time" and (memory or pareto or several):
        return "--objective is of one GPU and one type: leave out --memory and --pareto"
    if nest and not memory:
        return "--nest takes the memory it has to fit: add --memory VALUES"
    if steps and svg is None:
        return "--steps draws: add --svg FILE"
    if svg is not None and several and not memory:
        return "--svg draws one derivation: give one GPU and one type"
    if build is not None and (memory or several):
        return "--build compiles one derivation for a GPU: give one GPU, one type, no --memory"
    if build is not None and machine(asked.gpus[0]).family != "Hopper":
        return f"--build needs a Hopper GPU (--gpu h100 or h200), not {asked.gpus[0]!r}"
    if build is not None and asked.dtypes[0] not in ELEMENTS:
        return (
            f"--build compiles {' and '.join(ELEMENTS)}: give one by --dtype, not {asked.dtypes[0]}"
        )
    return ""


def require_writable(svg: Path | None, build: Path | None) -> None:
    """Refuse outputs that could not be written, before anything long begins."""
    for option, path in (("--svg", svg), ("--build", build)):
        if path is None:
            continue
        if option == "--svg" and path.is_dir():
            raise InputError(f"--svg {path}: is a folder, expected a file")
        if option == "--build" and path.exists() and not path.is_dir():
            raise InputError(f"--build {path}: is a file, expected a folder")
        there = next(p for p in (path, *path.absolute().parents) if p.exists())
        if not os.access(there, os.W_OK) or (there != path and not there.is_dir()):
            raise InputError(f"{option} {path}: {there} is no folder to write in")


def write_kernels(kernels: tuple[DerivedKernel, ...], folder: Path, quiet: bool) -> None:
    """Write every compiled program of a derivation into `folder`/NAME."""
    for number, made in enumerate(kernels):
        made.built.write(folder / f"{number}-{made.program.name}")
        tiles = ", ".join(f"{symbol}={size}" for symbol, size in made.kernel.tiles)
        if not quiet:
            typer.echo(
                f"built     {made.program.name}: {tiles}; schedule {made.schedule.name}, "
                f"{made.built.resources.registers} registers at entry, "
                f"{made.built.source.shared_bytes} B of shared memory"
            )


def report(found: Derivation, as_json: bool, svg: Path | None, steps: bool) -> None:
    """Print a derivation after running it; raises `CheckFailed` when its numbers are wrong."""
    error = verified(found)
    if svg is not None:
        write_text_atomically(svg, draw_steps(found) if steps else draw(found))
    if as_json:
        typer.echo(json.dumps({**found.to_json(), "error": error}, indent=1))
        return
    typer.echo(str(found))
    typer.echo(f"\nchecked: random input agrees with the formula to {error:.1e} (float64)")


def parse_sizes(pairs: list[str]) -> dict[str, int]:
    """`["q=4096", "d=64"]` as a mapping; raises `InputError` naming the bad pair."""
    sizes: dict[str, int] = {}
    for pair in pairs:
        axis, equals, text = pair.partition("=")
        if not equals or not axis or not text.strip().isdigit() or int(text) < 1:
            raise InputError(
                f"--set {pair!r}: expected AXIS=SIZE with a size of at least 1, as q=4096"
            )
        if int(text) > LONGEST:
            raise InputError(f"--set {pair!r}: kernels count to {LONGEST:,}, expected at most that")
        sizes[axis.strip()] = int(text)
    return sizes


def parse_nest(text: str) -> tuple[dict[str, str], dict[str, int]]:
    """`q=group:128,x=split:1024+stream:64` as (loops by axis, tiles by symbol)."""
    loops: dict[str, str] = {}
    tiles: dict[str, int] = {}
    for part in text.split(","):
        axis, equals, words = part.strip().partition("=")
        for word in words.split("+"):
            kind, colon, size = word.partition(":")
            if not (equals and axis and kind in SYMBOLS) or (colon and not size.isdigit()):
                raise InputError(
                    f"--nest {part!r}: expected AXIS=KIND:TILE with KIND group, split or stream, "
                    "as q=group:128,x=stream:64"
                )
            loops[axis] = f"{loops[axis]}+{kind}" if axis in loops else kind
            if size:
                tiles[f"{SYMBOLS[kind]}_{axis}"] = int(size)
    return loops, tiles
