"""`python -m tests.mutants`: plant faults in the checkers, and see which the tests catch.

Exit status 1 when one survives or does not fit its file. With `--json` what was found is kept, and
a later run goes on where this one stopped; `--table` writes it to docs/checks.md.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
from pathlib import Path

from tests.mutants.generate import generated
from tests.mutants.model import PACKAGE, ROOT, Mutant, MutantError, load
from tests.mutants.runner import BROKEN, EQUIVALENT, SURVIVED, Row, Runner, identity
from tests.mutants.table import write

STOPPED = 130


def chosen(options: argparse.Namespace) -> list[Mutant]:
    """The mutants that the options ask for."""
    checkers = load()
    found: list[Mutant] = []
    if options.kind != "generated":
        found += [mutant for checker in checkers for mutant in checker.mutants]
    if options.kind != "semantic":
        found += generated(checkers)
    found = [m for m in found if options.only in m.checker or options.only in m.file]
    if options.survivors:
        rows = known(options.json)
        found = [m for m in found if rows.get(told(m), {}).get("outcome") == SURVIVED]
    if options.sample is not None:
        of: dict[str, list[Mutant]] = {}
        for mutant in found:
            if mutant.kind == "generated":
                of.setdefault(mutant.checker, []).append(mutant)
        found = [mutant for mutant in found if mutant.kind == "semantic"]
        for checker, all_ in of.items():
            rng = random.Random(f"{options.seed} {checker}")
            found += rng.sample(all_, min(options.sample, len(all_)))
    if options.new:
        rows = known(options.json)
        found = [m for m in found if told(m) not in rows]
    return found


def told(mutant: Mutant) -> tuple[object, ...]:
    """What a row has to be about to be that of a fault as it is judged today."""
    return identity(vars(mutant)), bool(mutant.equivalent)


def known(store: Path) -> dict[tuple[object, ...], Row]:
    """The rows of a file by what they are about; those that came to nothing are none."""
    rows = [row for row in json.loads(store.read_text()) if row["outcome"] != BROKEN]
    return {(identity(row), row["outcome"] == EQUIVALENT): row for row in rows}


def of_today(rows: dict[tuple[object, ...], Row]) -> list[Row]:
    """The rows of the faults that there are, with their lines and arguments as they stand."""
    checkers = load()
    every = [m for checker in checkers for m in checker.mutants] + generated(checkers)
    found: list[Row] = []
    for mutant in every:
        if row := rows.get(told(mutant)):
            source = (ROOT / PACKAGE / mutant.file).read_text()
            found.append({**row, "line": mutant.line(source), "reason": mutant.equivalent})
    return found


def main(words: list[str] | None = None) -> int:
    """Run what the command line asks for."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__)
    parser.add_argument("--kind", choices=("semantic", "generated"), help="only these")
    parser.add_argument("--only", default="", help="only of checkers or files whose name has this")
    parser.add_argument(
        "--sample", type=int, metavar="N", help="so many generated ones of each checker, at random"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the sample")
    parser.add_argument("--jobs", type=int, default=1, help="so many at once")
    parser.add_argument("--json", type=Path, metavar="FILE", help="keeps the results; goes on")
    parser.add_argument("--survivors", action="store_true", help="only what survived in --json")
    parser.add_argument("--new", action="store_true", help="only what --json has no row of")
    parser.add_argument("--list", action="store_true", help="count the mutants, run none")
    parser.add_argument("--table", action="store_true", help="results of --json to docs/checks.md")
    options = parser.parse_args(words)
    if options.jobs < 1 or (options.sample is not None and options.sample < 1):
        parser.error("--jobs and --sample take a number from 1 up")
    rows_needed = options.table or options.survivors or options.new
    if rows_needed and not (options.json and options.json.is_file()):
        parser.error("--table, --survivors and --new need a file of --json that is there")
    if options.table:
        write(of_today(known(options.json)), ROOT / "docs" / "checks.md")
        return 0
    mutants = chosen(options)
    if not mutants:
        parser.error(f"no {'new ' if options.new else ''}mutant of {options.only!r}")
    if options.list:
        for kind in ("semantic", "generated"):
            print(f"{sum(m.kind == kind for m in mutants):5} {kind}")
        return 0
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    try:
        rows = Runner(options.json, jobs=options.jobs, say=lambda s: print(s, flush=True)).run(
            mutants
        )
    except MutantError as error:
        print(error, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        kept = f"; what was found is in {options.json}" if options.json else ""
        print(f"stopped{kept}", file=sys.stderr)
        return STOPPED
    bad = [row for row in rows if row["outcome"] in (SURVIVED, BROKEN)]
    for row in bad:
        print(f"{row['outcome']}: {row['file']}:{row['line']}: {row['why']} {row['reason']}")
        print(f"  {row['before']!r} -> {row['after']!r}")
    print(f"{len(rows)} mutants, {len(bad)} not caught")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
