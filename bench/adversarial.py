"""Claim `adversarial`: wrong edits of machine code are refused, right ones are not.

    python -m bench.adversarial [--each N] [--kernels NAME...]     # needs nvdisasm, no GPU

Every kind of wrong edit (`tests/sass/mutators.py`) and of right edit (`tests/sass/legal_edits.py`)
is made on every kernel of the test corpus and on kernels of our own, and judged in both alias
modes. Whether an edit is wrong or right is known from how it was made, not from the rules. Writes
`bench/results/raw/adversarial.json` and the table of docs/checks.md.
"""

from __future__ import annotations

import argparse
import json
import lzma
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from tests.corpus.build import DEFAULT_DIRECTORY, build_corpus
from tests.sass.adversarial import Tally, judge
from tests.sass.facts import Code, closest_neighbours

from warploom.files import write_text_atomically
from warploom.sass.decode import kernel
from warploom.sass.decode.cubin import WORD_BYTES, Cubin, load, parse
from warploom.sass.decode.disassembly import Listing, disassemble
from warploom.sass.decode.kernel import Kernel, decode_all
from warploom.sass.flow.aliasing import AliasMode
from warploom.sass.rules import verify
from warploom.sass.rules.verify import Verifier

ROOT: Final = Path(__file__).parent.parent
OWN: Final = ROOT / "tests" / "sass" / "data" / "own"
RESULT: Final = ROOT / "bench" / "results" / "raw" / "adversarial.json"
PAGE: Final = ROOT / "docs" / "checks.md"
BEGIN, END = "<!-- adversarial: begin -->", "<!-- adversarial: end -->"
LARGEST: Final = 5000  # instructions: one of 8,432 would take as long as all others


def cubins() -> Iterator[tuple[str, Cubin]]:
    """Every file with its name: the corpus of the architectures that have tables, and our own."""
    for entry in build_corpus():
        if entry.arch in ("sm_80", "sm_90a"):
            yield entry.name, load(DEFAULT_DIRECTORY / entry.file)
    for path in sorted(OWN.glob("*.cubin.xz")):
        name = path.name.removesuffix(".cubin.xz")
        yield name, parse(lzma.decompress(path.read_bytes()), name)


def disassembled_once() -> None:
    """One run of nvdisasm for each file: the same bytes give the same text."""
    known: dict[str, dict[str, Listing]] = {}

    def listing(cubin: Cubin, with_source: bool = False) -> dict[str, Listing]:
        if cubin.digest not in known:
            known[cubin.digest] = disassemble(cubin, with_source)
        return known[cubin.digest]

    kernel.disassemble = listing
    verify.disassemble = listing


def run(each: int, legal: int, largest: int, wanted: list[str]) -> dict[str, Any]:
    """All edits of all kernels."""
    disassembled_once()
    rows: list[tuple[str, Cubin, Kernel]] = []
    for name, cubin in cubins():
        size = max(code.text.size // WORD_BYTES for code in cubin.kernels.values())
        if size <= largest and (not wanted or any(word in name for word in wanted)):
            rows += [(name, cubin, found) for found in decode_all(cubin).values()]
    rows.sort(key=lambda row: len(row[2].instructions))
    closest = {sm: closest_neighbours([k for _, _, k in rows if k.sm == sm]) for sm in (80, 90)}
    tally, began = Tally(), time.monotonic()
    files: set[str] = set()
    data: dict[str, Any] = {}
    for number, (name, cubin, found) in enumerate(rows, 1):
        code = Code(cubin, found, closest[found.sm])
        verifiers = {mode: Verifier(cubin, found.name, mode) for mode in AliasMode}
        judge(tally, code, verifiers, each, legal)
        files.add(name)
        data = _data(tally, files, number, time.monotonic() - began)
        if not wanted:  # what was judged is kept when the run is stopped
            write_text_atomically(RESULT, json.dumps(data, indent=1) + "\n")
        print(f"{time.monotonic() - began:6.0f} s {name} {found.name}", flush=True)
    return data


def _data(tally: Tally, files: set[str], kernels: int, seconds: float) -> dict[str, Any]:
    refused: dict[str, Counter[str]] = {}
    for (kind, rule), count in tally.refused.items():
        refused.setdefault(kind, Counter())[rule] += count
    return {
        "date": time.strftime("%Y-%m-%d"),
        "command": f"python -m bench.adversarial {' '.join(sys.argv[1:])}".strip(),
        "cubins": len(files),
        "kernels": kernels,
        "modes": [mode.value for mode in AliasMode],
        "seconds": round(seconds),
        "wrong": {kind: [n, tally.kernels[kind]] for kind, n in sorted(tally.edits.items())},
        "accepted": tally.accepted,
        "other": tally.other,
        "legal": dict(sorted(tally.legal.items())),
        "refused": {kind: dict(rules) for kind, rules in sorted(refused.items())},
        "refusals": tally.refusals[:: max(1, len(tally.refusals) // 40)],
    }


def table(data: dict[str, Any]) -> str:
    """The result in words and as two tables."""
    wrong, legal = data["wrong"], data["legal"]
    count, right = sum(n for n, _ in wrong.values()), sum(legal.values())
    refused = sum(sum(rules.values()) for rules in data["refused"].values())
    lines = [
        f"{count:,} wrong edits of {len(wrong)} kinds on {data['kernels']} kernels of "
        f"{data['cubins']} cubins, in both alias modes: {len(data['accepted'])} accepted, "
        f"{len(data['other'])} refused for another reason alone. {right:,} right edits of "
        f"{len(legal)} kinds: {refused:,} refused ({refused / max(1, right):.1%}).",
        "",
        "| wrong edit | edits | kernels |",
        "|---|---:|---:|",
        *(f"| {_words(kind)} | {n} | {places} |" for kind, (n, places) in wrong.items()),
        "",
        "| right edit | edits | refused | by |",
        "|---|---:|---:|---|",
    ]
    for kind, number in legal.items():
        rules = data["refused"].get(kind, {})
        by = ", ".join(f"`{rule}` {n}" for rule, n in sorted(rules.items()))
        lines.append(f"| {_words(kind)} | {number} | {sum(rules.values())} | {by} |")
    return "\n".join(lines)


def _words(kind: str) -> str:
    return kind.replace("_", " ")


def main(words: list[str]) -> int:
    """Run the claim; exit status 1 when a wrong edit was accepted."""
    parser = argparse.ArgumentParser(prog="python -m bench.adversarial", description=__doc__)
    parser.add_argument("--each", type=int, default=6, help="wrong edits of a kind on a kernel")
    parser.add_argument("--legal", type=int, default=12, help="right edits of a kind on a kernel")
    parser.add_argument("--largest", type=int, default=LARGEST, help="instructions of a kernel")
    parser.add_argument("--kernels", nargs="*", default=[], help="only cubins with these in a name")
    parser.add_argument("--table", action="store_true", help="only write the last result's table")
    options = parser.parse_args(words)
    data = (
        json.loads(RESULT.read_text())
        if options.table
        else run(options.each, options.legal, options.largest, options.kernels)
    )
    print(table(data))
    for line in (*data["accepted"], *data["other"]):
        print(line)
    if not options.kernels:
        head, _, rest = PAGE.read_text().partition(BEGIN)
        _, _, tail = rest.partition(END)
        write_text_atomically(PAGE, f"{head}{BEGIN}\n{table(data)}\n{END}{tail}")
    return 1 if data["accepted"] else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
