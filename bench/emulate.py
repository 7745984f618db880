"""How many planted faults the emulation finds, and whether it blames kernels that are right.

    python -m bench.emulate            run what the kept results do not have
    python -m bench.emulate --only "Mamba-2"    emitted kernels of some kinds, others as they are
    python -m bench.emulate --table    write the tables of docs/checks.md from the kept results

Two sets: files of several styles with the faults of `bench/emulated/faults.toml`, and every kind of
emitted kernel with every class of fault of `bench.emulated.kinds`. A fault counts as found where
one of 20 orders of events ends in a report or a wrong result; right kernels run under all 20.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import sys
import time
import tomllib
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from bench.emulated.kinds import (
    CLASSES,
    EQUIVALENT,
    GRADIENTS,
    KINDS,
    Case,
    case,
    gradients,
    library,
    planted,
)
from warploom.emulate.build import MODEL
from warploom.emulate.kernel import Library
from warploom.emulate.program import CudaProgram
from warploom.emulate.report import Fault
from warploom.errors import InputError
from warploom.files import write_text_atomically
from warploom.tile import interpret

ROOT = Path(__file__).parent.parent
FOLDER = Path(__file__).parent / "emulated"
KEPT = ROOT / "bench" / "results" / "raw" / "emulate.json"
PAGE = ROOT / "docs" / "checks.md"
ORDERS = range(1, 21)
FEW = range(1, 4)  # of a kernel of the library
MANY = range(1, 101)  # of a kernel of attention's gradients, whose sums cross blocks
BLOCKS = 2  # of a persistent kernel: each has several tasks
RIGHT = "none"  # the class of a kernel without a fault

Row = dict[str, Any]
Try = Callable[[int], Fault | None]


def styles() -> dict[str, list[tuple[str, str, str]]]:
    """Faults of the files, by file: (class, text, what stands there instead)."""
    data = tomllib.loads((FOLDER / "faults.toml").read_text())
    return {name: [(a, b, c) for a, b, c in part["faults"]] for name, part in data.items()}


def broken(name: str, before: str, after: str) -> str:
    """The text of a file with one fault."""
    text = (FOLDER / f"{name}.cu").read_text()
    if text.count(before) != 1:
        raise InputError(f"{name}.cu has {text.count(before)} of {before!r}, expected 1")
    return text.replace(before, after)


def of_file(text: str, name: str) -> Try:
    """Runs of a program by order of events; a text that does not compile is not a fault."""
    program = CudaProgram(text, f"{name}.cu")
    return lambda seed: program.run(seed).fault


def of_emitted(library: Library, number: int, one: Case) -> Try:
    """Runs of a compiled kernel; a result unlike the interpreter's is a fault."""
    found = interpret(one.program, one.arrays, one.scalars)
    wanted = {name: found[name] for name in found if name not in one.counters}

    def run(seed: int) -> Fault | None:
        try:
            got = library.run(number, one.program, one.arrays, one.scalars, BLOCKS, seed)
        except Fault as fault:
            return fault
        for name, want in wanted.items():
            gap = float(np.linalg.norm(got[name] - want) / (np.linalg.norm(want) or 1.0))
            if not gap <= one.apart:
                return Fault(f"result: {name} is off by {gap:.2g}", (), seed)
        return None

    return run


def tried(run: Try, key: str, names: dict[str, str], orders: range = ORDERS) -> Row:
    """The first order of events that finds something."""
    begun = time.process_time()
    row: Row = {"key": key, **names, "found": "", "orders": 0}
    for seed in orders:
        fault = run(seed)
        row["orders"] = seed
        if fault is not None:
            row |= {"found": fault.kind, "report": str(fault).splitlines()[0][:400]}
            break
    return row | {"seconds": round(time.process_time() - begun, 2)}


def uncommented(text: str) -> str:
    """Emitted code alone: what comments say of the block program may change."""
    return re.sub(r"^\s*//.*\n|[ \t]*//.*$", "", text, flags=re.MULTILINE)


def _key(*parts: str) -> str:
    model = "".join(path.read_text() for path in sorted(MODEL.iterdir()))
    return hashlib.sha256("\0".join((model, str(BLOCKS), *parts)).encode()).hexdigest()[:16]


def from_files(kept: dict[str, Row]) -> Iterator[Row]:
    """A row for every file, right and with each of its faults."""
    for name, faults in styles().items():
        texts = [(RIGHT, "", (FOLDER / f"{name}.cu").read_text())]
        texts += [(kind, f"{before} -> {after}", broken(name, before, after))
                  for kind, before, after in faults]  # fmt: skip
        for kind, change, text in texts:
            key = _key(text)
            names = {"set": "styles", "kernel": name, "class": kind, "change": change}
            yield kept[key] if key in kept else tried(of_file(text, name), key, names)


def from_emitted(kept: dict[str, Row], kinds: Iterable[str] = KINDS) -> Iterator[Row]:
    """A row for every kind of emitted kernel, right and with a fault of each class it can have."""
    for kind in kinds:
        one = case(kind)
        found = {name: planted(kind, name) for name in CLASSES}
        sources = {RIGHT: one.source} | {n: s for n, s in found.items() if s is not None}
        keys = {name: _key(uncommented(source.text)) for name, source in sources.items()}
        todo = {name: source for name, source in sources.items() if keys[name] not in kept}
        library = Library(list(todo.values())) if todo else None
        for name in sources:
            names = {"set": "emitted", "kernel": kind, "class": name, "change": ""}
            if name not in todo or library is None:
                yield kept[keys[name]] | names
                continue
            yield tried(of_emitted(library, list(todo).index(name), one), keys[name], names)


def from_library(kept: dict[str, Row]) -> Iterator[Row]:
    """A row for each kernel that the tuned tables give: no order of events is a fault."""
    for name, one in library().items():
        key = _key(uncommented(one.source.text))
        names = {"set": "library", "kernel": name, "class": RIGHT, "change": ""}
        if key in kept:
            yield kept[key] | names
        else:
            yield tried(of_emitted(Library([one.source]), 0, one), key, names, FEW)


def from_gradients(kept: dict[str, Row]) -> Iterator[Row]:
    """A row for each kernel of attention's gradients: no order of events is a fault."""
    for name, one in gradients():
        key = _key(uncommented(one.source.text))
        names = {"set": "gradients", "kernel": name, "class": RIGHT, "change": ""}
        if key in kept and kept[key]["orders"] == MANY[-1]:
            yield kept[key] | names
        else:
            yield tried(of_emitted(Library([one.source]), 0, one), key, names, MANY)


def matrix(rows: list[Row]) -> list[str]:
    """Classes by kinds of emitted kernels: which report found a fault, and in which order."""
    cells = {(row["class"], row["kernel"]): row for row in rows if row["set"] == "emitted"}
    lines = [f"| fault | {' | '.join(KINDS)} |", "|---|" + "---|" * len(KINDS)]
    for name in (*CLASSES, RIGHT):
        shown: list[str] = []
        for kind in KINDS:
            row = cells.get((name, kind))
            if (kind, name) in EQUIVALENT:
                shown.append("no fault")
            elif row is None:
                shown.append("")
            elif row["found"]:
                shown.append(f"{row['found']} ({row['orders']})")
            else:
                shown.append("silent" if name == RIGHT else "**missed**")
        title = "none: the right kernel" if name == RIGHT else name
        lines.append(f"| {title} | {' | '.join(shown)} |")
    for (kind, name), why in EQUIVALENT.items():
        lines += ["", f"{name}: no fault in {kind}, where {why}."]
    return lines


def counts(rows: list[Row]) -> list[str]:
    """Faults planted and found, and false alarms, by kernel."""
    lines = ["| kernel | planted | found | by a wrong number alone | in the first order | "
             "false alarms in 20 orders |", "|---|---:|---:|---:|---:|---:|"]  # fmt: skip
    total = [0, 0, 0, 0, 0]
    sets = (row for row in rows if row["set"] in ("emitted", "styles"))
    for name in dict.fromkeys((row["set"], row["kernel"]) for row in sets):
        own = [row for row in rows if (row["set"], row["kernel"]) == name]
        faults = [row for row in own if row["class"] != RIGHT]
        first = [row for row in faults if row["found"] and row["orders"] == 1]
        alarms = sum(bool(row["found"]) for row in own if row["class"] == RIGHT)
        found = [row["found"] for row in faults if row["found"]]
        numbers = [len(faults), len(found), found.count("result"), len(first), alarms]
        total = [a + b for a, b in zip(total, numbers, strict=True)]
        title = f"`{name[1]}.cu`" if name[0] == "styles" else f"emitted: {name[1]}"
        lines.append(f"| {title} | {' | '.join(map(str, numbers))} |")
    ours = [row for row in rows if row["set"] == "library"]
    blamed = sum(bool(row["found"]) for row in ours)
    return [
        *lines,
        f"| all | {' | '.join(map(str, total))} |",
        "",
        f"{len(ours)} kernels that the tuned tables give for shapes of the docs, on small arrays, "
        f"{len(FEW)} orders each: {blamed} blamed.",
        *_of_gradients([row for row in rows if row["set"] == "gradients"]),
    ]


def _of_gradients(rows: list[Row]) -> list[str]:
    blamed, orders = sum(bool(row["found"]) for row in rows), sum(row["orders"] for row in rows)
    return [
        f"{len(rows)} kernels of attention's gradients ({len(GRADIENTS)} configurations of head "
        f"size, mask and order of sums), {len(MANY)} orders each, {orders} in all: {blamed} "
        "blamed."
    ]


def write_tables(rows: list[Row]) -> None:
    """Both tables between their marks."""
    text = PAGE.read_text()
    for name, lines in {"classes": matrix(rows), "counts": counts(rows)}.items():
        begin, end = f"<!-- emulation: {name} -->\n", "<!-- end -->"
        head, _, rest = text.partition(begin)
        if not rest:
            raise InputError(f"{PAGE} has no {begin.strip()}")
        text = head + begin + "\n".join(lines) + "\n" + rest[rest.index(end) :]
    write_text_atomically(PAGE, text)


def main(words: list[str]) -> int:
    """Run what is asked for; 1 where a fault was missed or a right kernel blamed."""
    parser = argparse.ArgumentParser(prog="python -m bench.emulate", description=__doc__)
    parser.add_argument("--table", action="store_true", help="only write the tables")
    parser.add_argument("--only", help="kinds of emitted kernels, with commas")
    options = parser.parse_args(words)
    rows: list[Row] = json.loads(KEPT.read_text()) if KEPT.exists() else []
    if not options.table:
        kept = {row["key"]: row for row in rows}
        parts: list[Callable[[dict[str, Row]], Iterator[Row]]]
        parts = [from_emitted, from_files, from_library, from_gradients]
        if options.only:
            kinds = options.only.split(",")
            parts = [partial(from_emitted, kinds=kinds)]
            others = [row for row in rows if row["set"] != "emitted" or row["kernel"] not in kinds]
        else:
            others = []
        rows = others
        for part in parts:
            for row in part(kept):
                rows.append(row)
                kept[row["key"]] = row
                good = bool(row["found"]) != (row["class"] == RIGHT)
                if row["orders"] > 1 or not good:
                    print(f"{'ok ' if good else 'BAD'} {row['kernel']}: {row['class']} "
                          f"{row['found']} {row['orders']}", flush=True)  # fmt: skip
                write_text_atomically(KEPT, json.dumps(list(kept.values()), indent=1) + "\n")
        write_text_atomically(KEPT, json.dumps(rows, indent=1) + "\n")
    write_tables(rows)
    return int(any(bool(row["found"]) == (row["class"] == RIGHT) for row in rows))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
