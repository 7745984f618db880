"""Kernels a search may start from: loops pipelined, values in other registers, other scoreboards.

Orders and control fields are moves inside one program. Renaming registers, moving instructions over
a back edge and giving scoreboards out anew change what the game keeps, so they make a new *base*,
which the game then reorders like an original. Every base carries its lineage: each step as a whole
cubin with the claim of what was done, and `prove` checks the steps one by one with the checker of
their kind, from the bytes.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Final

from warploom.errors import InputError
from warploom.files import write_bytes_atomically, write_text_atomically
from warploom.sass.decode.cubin import Cubin, parse
from warploom.sass.edit.edit import Editor
from warploom.sass.flow.aliasing import AliasMode
from warploom.sass.flow.loops import natural_loops
from warploom.sass.rewrites.renaming.rename import Renamer, renamed
from warploom.sass.rewrites.renaming.verify import verify_renaming
from warploom.sass.rewrites.rotation.rotate import Rotation, may_cross, padding, rotate, rotations
from warploom.sass.rewrites.rotation.verify import verify_rotation
from warploom.sass.rewrites.scoreboards.renumber import Renumberer
from warploom.sass.rewrites.scoreboards.verify import verify_scoreboards
from warploom.sass.rules.verdict import Finding, Verdict
from warploom.sass.rules.verify import Verifier, counted

TRIES: Final = 40  # changes of scoreboards that the timing model is asked about
SHARES: Final = (0.15, 0.3, 0.6)  # of the values that can move, how many get another register


@dataclass(frozen=True)
class Step:
    """One change of a program: `kind` is `order`, `rotation`, `registers` or `boards`; `why` in
    words."""

    kind: str
    cubin: bytes
    why: str
    rotation: Rotation | None = None


def ordered(image: bytes) -> Step:
    """What a search does to the program it plays on: the last step to most results."""
    return Step("order", image, "instructions and control fields in another order")


@dataclass(frozen=True)
class Base:
    """A program to play on, and how it came from the original; no steps: it is the original."""

    cubin: Cubin
    steps: tuple[Step, ...] = ()

    @property
    def why(self) -> str:
        """The steps in words."""
        return "; ".join(step.why for step in self.steps) or "as compiled"


def prove(original: Cubin, name: str, steps: Sequence[Step], mode: AliasMode) -> list[Finding]:
    """Every reason why the last step's program is not the original's, step by step."""
    found: list[Finding] = []
    before = original
    for number, step in enumerate(steps):
        after = parse(step.cubin, f"step {number}")
        if step.kind == "order":
            found += Verifier(before, name, mode).check_file(after).findings
        elif step.kind == "registers":
            found += verify_renaming(before, after, name)
        elif step.kind == "scoreboards":
            found += verify_scoreboards(before, after, name)
        elif step.kind == "rotation" and step.rotation is not None:
            found += verify_rotation(before, after, name, step.rotation)
        else:
            found.append(Finding("LINEAGE", 0, name, f"a step of unknown kind {step.kind!r}"))
        before = after
    return found


def prove_lineage(
    original: Cubin, candidate: Cubin, kernel: str | None, folder: Path, mode: AliasMode
) -> Verdict:
    """The verdict on a result by the steps in a folder, which must end in it.

    Moves and edits are counted by the last step, against the program before it.
    """
    name = original.kernel(kernel).name
    steps = read_steps(folder)
    if not steps or steps[-1].cubin != candidate.data:
        finding = Finding("LINEAGE", 0, name, f"the steps in {folder} do not end in the candidate")
        return Verdict(False, mode, (finding,))
    findings = prove(original, name, steps, mode)
    verdict = Verdict(not findings, mode, tuple(findings))
    if steps[-1].kind != "order":
        return verdict
    before = original if len(steps) == 1 else parse(steps[-2].cubin, name)
    return counted(verdict, before, candidate, name)


def make_base(
    original: Cubin, name: str, mode: AliasMode, moves: frozenset[str], rng: random.Random
) -> Base:
    """A random base by the allowed `moves` (`rotate`, `rename`, `boards`); the original when none
    is found.

    What is returned has been proved step by step.
    """
    base = Base(original)
    if "rotate" in moves and ("rename" not in moves or rng.random() < 0.7):
        base = pipelined(base, name, mode, rng)
    if "rename" in moves and (not base.steps or rng.random() < 0.5):
        image, done = renamed(_renamer(base.cubin.data, name), rng, rng.choice(SHARES))
        if done:
            step = Step("registers", image.data, f"{len(done)} values in other registers")
            base = Base(image, (*base.steps, step))
    if "scoreboards" in moves and (not base.steps or rng.random() < 0.5):
        found = Renumberer(base.cubin, name).renumbered(rng, TRIES)
        if found is not None:
            step = Step("scoreboards", found[0].data, f"{found[1]} scoreboards given out anew")
            base = Base(found[0], (*base.steps, step))
    return base


@lru_cache(maxsize=2)
def _renamer(image: bytes, name: str) -> Renamer:
    return Renamer(parse(image, name), name)


def pipelined(base: Base, name: str, mode: AliasMode, rng: random.Random) -> Base:
    """The base with some instructions of a loop's beginning done in the pass before.

    They are first brought to the loop's front (an `order` step), then over the back edge. A choice
    that a checker refuses is halved; the base itself comes back when nothing is left.
    """
    editor = Editor(base.cubin, name, mode)
    kernel = editor.kernel
    room = padding(kernel)
    loops = [loop for loop in natural_loops(kernel) if len(loop.latches) == 1]
    rng.shuffle(loops)
    for loop in loops:
        header, latch = kernel.blocks[loop.header], kernel.blocks[loop.latches[0]].end - 1
        keep = rng.choice((0.4, 0.7, 1.0))
        chosen: list[int] = []
        left: list[int] = []
        for index in range(header.start, header.end - 1):
            crosses = may_cross(kernel, index, latch) and len(chosen) < room
            if (
                crosses
                and rng.random() < keep
                and not any(editor.ordered(other, index) for other in left)
            ):
                chosen.append(index)
            else:
                left.append(index)
        count = rng.randint(1, len(chosen)) if chosen else 0
        while count:
            found = _rotated(base, name, mode, loop.header, chosen[:count])
            if found is not None:
                return found
            count //= 2
    return base


def _rotated(
    base: Base, name: str, mode: AliasMode, block: int, chosen: Sequence[int]
) -> Base | None:
    editor = Editor(base.cubin, name, mode)
    header = editor.kernel.blocks[block]
    first = set(chosen)
    rest = [index for index in range(header.start, header.end) if index not in first]
    editor.reorder(block, (*chosen, *rest))
    ordered = editor.cubin()
    if not Verifier(base.cubin, name, mode).check_file(ordered).legal:
        return None
    kernel = Editor(ordered, name, mode).kernel
    longest = next((row for row in rotations(kernel) if row.header == header.start), None)
    if longest is None or longest.count < len(chosen):
        return None
    claim = Rotation(longest.header, len(chosen), longest.latch)
    try:
        image = rotate(ordered, name, claim)
    except InputError:
        return None
    if verify_rotation(ordered, image, name, claim):
        return None
    steps = list(base.steps)
    if ordered.data != base.cubin.data:
        steps.append(Step("order", ordered.data, f"{len(chosen)} instructions to the loop's front"))
    steps.append(Step("rotation", image.data, f"{len(chosen)} of them into the pass before", claim))
    return Base(image, tuple(steps))


# --- keeping a lineage -----------------------------------------------------------------------


def write_steps(folder: Path, steps: Sequence[Step]) -> None:
    """Write a lineage: `N-KIND-HASH.cubin` and, last, `lineage.json`.

    A file's name says its content, so that the `lineage.json` that is there always names whole
    steps of its own; those of an older lineage are taken away afterwards.
    """
    rows: list[dict[str, Any]] = []
    for number, step in enumerate(steps):
        file = f"{number}-{step.kind}-{hashlib.sha256(step.cubin).hexdigest()[:8]}.cubin"
        write_bytes_atomically(folder / file, step.cubin)
        claim = step.rotation and [step.rotation.header, step.rotation.count, step.rotation.latch]
        rows.append({"file": file, "kind": step.kind, "why": step.why, "rotation": claim})
    write_text_atomically(folder / "lineage.json", json.dumps(rows, indent=1) + "\n")
    named = {row["file"] for row in rows}
    for path in folder.glob("[0-9]*-*.cubin"):
        if path.name not in named:
            path.unlink(missing_ok=True)


def read_steps(folder: Path) -> tuple[Step, ...]:
    """A lineage as `write_steps` left it; raises `InputError` when it is damaged."""
    try:
        rows = json.loads((folder / "lineage.json").read_text())
        return tuple(
            Step(
                str(row["kind"]),
                (folder / str(row["file"])).read_bytes(),
                str(row["why"]),
                Rotation(*row["rotation"]) if row["rotation"] else None,
            )
            for row in rows
        )
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(f"{folder}: no lineage can be read there ({error})") from None
