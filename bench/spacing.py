"""Which distances does the hardware keep by itself, and which corrupt a result when undercut?

    python -m bench.spacing build DIR              # needs NVRTC and nvdisasm
    python DIR/spacing.py DIR OUT.json             # needs a GPU, cuda-bindings and numpy
    python -m bench.spacing report OUT.json        # needs neither

`build` compiles random kernels and lowers one row of the mined table at a time, step by step, in
the control bits of the pairs that the row is about (`spacing_parts/closer.py`). The run launches
every patched kernel beside the original on the same inputs, with one warp on a scheduler and with
many, alone and beside another kernel, and compares every bit. `report` writes what came of it.
"""

from __future__ import annotations

import argparse
import json
import shutil
import struct
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any, Final

from bench.spacing_parts.closer import ACROSS, LATENCY, SPACING, STALL, SYNC, Closer, Patch, Target
from bench.spacing_parts.source import PROFILES, kernel
from warploom.errors import WarploomError
from warploom.files import write_text_atomically
from warploom.runtime.nvrtc import compile_source
from warploom.sass.decode.cubin import parse

ROOT: Final = Path(__file__).parent.parent
RESULT: Final = ROOT / "bench" / "results" / "raw" / "spacing-h200.json"
TABLE: Final = ROOT / "src" / "warploom" / "sass" / "data" / "latency_sm90a.json"
PAGE: Final = ROOT / "docs" / "sass.md"
BEGIN, END = "<!-- spacing: begin -->", "<!-- spacing: end -->"
RUNNER: Final = Path(__file__).parent / "spacing_parts" / "run.py"
SEEDS: Final = {"uniform": 4, "all": 3}
KERNELS: Final = {SPACING: 4, STALL: 3, SYNC: 3, ACROSS: 2, LATENCY: 2}  # of each target, at most
SAME: Final = "same"
ENOUGH: Final = 4
KINDS: Final = {
    "control": "nothing",
    SPACING: "neighbours in one pipe",
    STALL: "least stall of an opcode",
    SYNC: "around an operation that synchronises",
    ACROSS: "dependent pairs over a block's edge",
    LATENCY: "dependent pairs in one block",
}


def build(folder: Path) -> None:
    """Write kernels, patches and the script that runs them."""
    folder.mkdir(parents=True, exist_ok=True)
    made: Counter[Target] = Counter()
    rows: list[dict[str, Any]] = []
    kernels: list[str] = []
    for profile in PROFILES:
        for seed in range(SEEDS.get(profile, 2)):
            name = f"{profile}-{seed}"
            image = compile_source(kernel(profile, seed), "sm_90a")
            (folder / f"{name}.cubin").write_bytes(image)
            closer = Closer(parse(image, name))
            start = closer.kernel.code.text.offset
            count = 0
            for target in closer.targets():
                if made[target] >= KERNELS[target.kind]:
                    continue
                patch = closer.patch(target)
                if patch is None:
                    continue
                made[target] += 1
                count += 1
                rows.append(_row(len(kernels), start, patch))
            kernels.append(name)
            print(f"{name}: {closer.known.count} instructions, {count} patches", flush=True)
    rows.sort(key=lambda row: (list(KERNELS).index(row["kind"]), -row["distance"]))
    (folder / "patches.json").write_text(json.dumps({"kernels": kernels, "rows": rows}))
    shutil.copy(RUNNER, folder / "spacing.py")


def _row(number: int, start: int, patch: Patch) -> dict[str, Any]:
    target = patch.target
    return {
        "kernel": number,
        "kind": target.kind,
        "key": target.key,
        "mined": target.mined,
        "distance": target.distance,
        "pairs": len(patch.pairs),
        "bytes": [
            [start + index * 16 + 8, struct.pack("<Q", high).hex()]
            for index, high in sorted(patch.words.items())
        ],
    }


def report(path: Path) -> None:
    """Keep what a run found, and put what the hardware keeps apart into the table."""
    found = json.loads(path.read_text())
    rows = _condensed(found["rows"])
    kept = {name: value for name, value in found.items() if name != "rows"}
    kept |= {"date": time.strftime("%Y-%m-%d", time.gmtime(path.stat().st_mtime)), "rows": rows}
    lines = ",\n".join(json.dumps(row) for row in rows)
    head = json.dumps({**kept, "rows": []}, indent=1)
    write_text_atomically(RESULT, head.replace("[]\n}", f"[\n{lines}\n]\n}}") + "\n")
    data = json.loads(TABLE.read_text())
    data["interlocked"] = interlocked(rows)
    write_text_atomically(TABLE, json.dumps(data, indent=0) + "\n")
    head, _, rest = PAGE.read_text().partition(BEGIN)
    _, _, tail = rest.partition(END)
    write_text_atomically(PAGE, f"{head}{BEGIN}\n{table(rows)}\n{END}{tail}")


def _condensed(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One row for each row of the table and distance: patches by outcome, pairs and launches."""
    found: dict[tuple[str, str, int, int], dict[str, Any]] = {}
    for row in rows:
        place = row["kind"], row["key"], row["mined"], row["distance"]
        empty: dict[str, Any] = {"patches": {}, "pairs": 0, "launches": 0, "wrong": 0}
        into = found.setdefault(place, empty)
        into["patches"][row["outcome"]] = into["patches"].get(row["outcome"], 0) + 1
        if row["outcome"] != "not run":
            for name in ("pairs", "launches", "wrong"):
                into[name] += row[name]
    names = ("kind", "key", "mined", "distance")
    return [{**dict(zip(names, place, strict=True)), **into} for place, into in found.items()]


def interlocked(rows: list[dict[str, Any]]) -> dict[str, int]:
    """The least distance of each spacing with `ENOUGH` pairs, where no distance gave other bits."""
    least: dict[str, int] = {}
    bad = {row["key"] for row in rows if row["kind"] == SPACING and set(row["patches"]) != {SAME}}
    for row in rows:
        if row["kind"] == SPACING and row["key"] not in bad and row["pairs"] >= ENOUGH:
            least[row["key"]] = min(row["distance"], least.get(row["key"], row["distance"]))
    return dict(sorted(least.items()))


def table(rows: list[dict[str, Any]]) -> str:
    """What came of each kind, in Markdown."""
    lines = [
        "| lowered, one row of the table at a time | rows | patches | pairs | the same bits | "
        "other bits | crashed | not run |",
        "|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for kind, words in KINDS.items():
        some = [row for row in rows if row["kind"] == kind]
        patches: Counter[str] = Counter()
        for row in some:
            patches.update(row["patches"])
        counts = (SAME, "wrong", "crashed", "not run")
        cells = [len({row["key"] for row in some}), patches.total(), sum(r["pairs"] for r in some)]
        cells += [patches[outcome] for outcome in counts]
        lines.append(f"| {words} | {' | '.join(map(str, cells))} |")
    return "\n".join(lines)


def main(words: list[str]) -> int:
    """Run one step; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m bench.spacing", description=__doc__)
    parser.add_argument("step", choices=("build", "report"))
    parser.add_argument("path", type=Path)
    options = parser.parse_args(words)
    {"build": build, "report": report}[options.step](options.path)
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except WarploomError as error:
        print(error, file=sys.stderr)
        sys.exit(2)
