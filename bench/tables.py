"""Write the README's tables from `bench/results`, or check that they agree: `make tables`.

    python bench/tables.py            rewrite README.md
    python bench/tables.py --check    exit 1 when README.md disagrees with the results

A table stands between `<!-- table: FILE COLUMNS... -->` and `<!-- end -->`.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path

from warploom.errors import InputError
from warploom.evidence import Evidence, read_rows
from warploom.files import write_text_atomically

ROOT = Path(__file__).parent.parent
README = ROOT / "README.md"
RESULTS = ROOT / "bench" / "results"
MARKER = re.compile(r"(<!-- table: (\S+) ([^>]*?) -->\n)(.*?)(<!-- end -->)", re.DOTALL)


def _number(value: float) -> str:
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"


def _interval(pair: tuple[float, float] | None) -> str:
    return "" if pair is None else f"{pair[0]:.3f}-{pair[1]:.3f}"


def _best(row: Evidence) -> tuple[str, float]:
    pick = max if row.better == "higher" else min
    return pick(row.baselines.items(), key=lambda item: item[1])


COLUMNS: dict[str, tuple[str, Callable[[Evidence], str]]] = {
    "kernel": ("kernel", lambda row: row.kernel),
    "shape": ("shape", lambda row: row.shape),
    "dtype": ("type", lambda row: row.dtype),
    "ours": ("ours", lambda row: f"{_number(row.ours)} {row.unit}"),
    "best": ("best baseline", lambda row: f"{_number(_best(row)[1])} ({_best(row)[0]})"),
    "ratio": ("ratio", lambda row: f"{row.ratio_to_best:.3f}"),
    "ci95": ("95 % interval", lambda row: _interval(row.ci95)),
    "control": ("A/A control", lambda row: _interval(row.control)),
    "device": ("device", lambda row: row.device),
    "notes": ("notes", lambda row: row.notes),
}


def best_per_shape(rows: list[Evidence]) -> list[Evidence]:
    """The fastest variant of every shape, in the order the shapes were measured."""
    best: dict[str, Evidence] = {}
    for row in rows:
        if row.shape not in best or row.ratio_to_best > best[row.shape].ratio_to_best:
            best[row.shape] = row
    return list(best.values())


def table(file: str, columns: list[str]) -> str:
    """One markdown table; losses included. `best-per-shape` keeps the fastest variant of each."""
    rows = read_rows(RESULTS / file)
    if columns and columns[0] == "best-per-shape":
        rows, columns = best_per_shape(rows), columns[1:]
    for column in columns:
        if column not in COLUMNS:
            raise InputError(
                f"README table {file}: no column {column!r}; there are {', '.join(COLUMNS)}"
            )
    lines = [
        "| " + " | ".join(COLUMNS[column][0] for column in columns) + " |",
        "|" + "---|" * len(columns),
    ]
    lines += [
        "| " + " | ".join(COLUMNS[column][1](row) for column in columns) + " |" for row in rows
    ]
    return "\n".join(lines) + "\n"


def rendered(text: str) -> str:
    """The text with every table made anew."""
    return MARKER.sub(
        lambda match: f"{match[1]}{table(match[2], match[3].split())}{match[5]}", text
    )


def main(arguments: list[str]) -> int:
    """Rewrite or check the README; returns the exit status."""
    text = README.read_text()
    new = rendered(text)
    if "--check" in arguments:
        if new != text:
            print("README.md disagrees with bench/results: run `make tables`", file=sys.stderr)
            return 1
        return 0
    write_text_atomically(README, new)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
