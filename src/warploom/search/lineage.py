"""Kernels a search may start from: the original, and programs with other scoreboards.

Orders and control fields are moves inside one program. Giving scoreboards out anew changes what the
game keeps, so it makes a new *base*, which the game then reorders like an original. Every base
carries its lineage: each step as a whole cubin, and `prove` checks the steps one by one with the
checker of their kind, from the bytes.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from warploom.errors import InputError
from warploom.files import write_bytes_atomically, write_text_atomically
from warploom.sass.decode.cubin import Cubin, parse
from warploom.sass.flow.aliasing import AliasMode
from warploom.sass.rules.verdict import Finding, Verdict
from warploom.sass.rules.verify import Verifier, counted
from warploom.sass.scoreboards.renumber import Renumberer
from warploom.sass.scoreboards.verify import verify_scoreboards

TRIES: Final = 40  # changes of scoreboards that the timing model is asked about


@dataclass(frozen=True)
class Step:
    """One change of a program: `kind` is `order` or `scoreboards`; `why` in words."""

    kind: str
    cubin: bytes
    why: str


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
        elif step.kind == "scoreboards":
            found += verify_scoreboards(before, after, name)
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


def make_base(original: Cubin, name: str, rng: random.Random) -> Base:
    """A random base with other scoreboards; the original when there is none."""
    found = Renumberer(original, name).renumbered(rng, TRIES)
    if found is None:
        return Base(original)
    step = Step("scoreboards", found[0].data, f"{found[1]} scoreboards given out anew")
    return Base(found[0], (step,))


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
        rows.append({"file": file, "kind": step.kind, "why": step.why})
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
            Step(str(row["kind"]), (folder / str(row["file"])).read_bytes(), str(row["why"]))
            for row in rows
        )
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(f"{folder}: no lineage can be read there ({error})") from None
