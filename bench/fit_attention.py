"""Fit the constants of the attention time model to measured rows, and say how honest the fit is.

    python -m bench.fit_attention             fit to bench/results, print, write the constants
    python -m bench.fit_attention --check     print only

Two constants a variant, kind of mask and head size: least squares of relative errors, none below
zero. Leave one out: for each measured length the constants are fitted without its rows, the model
picks a variant, and the loss of that pick against the best one measured there is reported.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.attention_cases import PACKED
from warploom.evidence import read_rows
from warploom.kernels.attention.choose import CONSTANTS_FILE, START, kind_of, microseconds
from warploom.kernels.attention.program import AttentionConfig
from warploom.kernels.attention.variants import ATTENTION_CHOICES
from warploom.tile import BF16, E4M3

ROOT = Path(__file__).resolve().parent.parent

RESULTS = ROOT / "bench" / "results" / "attention_variants.json"
TOKENS, WIDTH = 16384, 2048  # batch * length and heads * head size of the measured shapes
Constants = dict[str, tuple[float, float]]


@dataclass(frozen=True)
class Row:
    """One measured variant; `length` is rows and keys, or those of packed sequences by name."""

    kind: str
    name: str
    config: AttentionConfig
    length: int | str
    time: float

    @property
    def heads(self) -> int:
        """Of all the batch; of packed sequences, of one."""
        batch = 1 if isinstance(self.length, str) else max(1, TOKENS // self.length)
        return batch * WIDTH // self.config.head_dim

    def predicted(self, of: tuple[float, float]) -> float:
        """Microseconds."""
        choice = ATTENTION_CHOICES[self.name]
        length = PACKED[self.length] if isinstance(self.length, str) else self.length
        return microseconds(choice, self.config, length, length, self.heads, of)


def read(path: Path) -> list[Row]:
    """The measured variants of dense and of packed shapes."""
    found: list[Row] = []
    for row in read_rows(path):
        name, words = row.kernel.split()[-1], row.shape.split()
        lead = words.pop(0) if words[0] in ("fp8", "packed") else ""
        if name not in ATTENTION_CHOICES or not words[0].isdigit():
            continue
        dim, mask = int(words[0]), words[1]
        length = (words[2:] or ["mixed"])[0] if lead == "packed" else int(words[2])
        config = AttentionConfig(
            dtype=E4M3 if lead == "fp8" else BF16,
            head_dim=dim,
            causal=mask == "causal",
            packed=lead == "packed",
        )
        pairs = (
            sum(n * n for n in PACKED[length])
            if isinstance(length, str)
            else TOKENS // length * length**2
        )
        work = 4 * pairs * WIDTH * (0.5 if config.causal else 1.0)
        found.append(Row(kind_of(config), name, config, length, work / row.ours * 1e-6))
    return found


def fit(rows: Iterable[Row]) -> Constants:
    """Constants of every variant that has rows of two lengths."""
    by_name: dict[str, list[Row]] = {}
    for row in rows:
        by_name.setdefault(row.name, []).append(row)
    return {
        name: _line([(*_terms(row), row.time) for row in own])
        for name, own in by_name.items()
        if len({row.length for row in own}) > 1
    }


def _terms(row: Row) -> tuple[float, float]:
    # The model is linear in its constants.
    return row.predicted((1.0, 0.0)) - START, row.predicted((0.0, 1.0)) - START


def _line(points: Sequence[tuple[float, float, float]]) -> tuple[float, float]:
    scaled = [(a / t, b / t, (t - START) / t) for a, b, t in points]
    aa, ab, bb = (sum(p[i] * p[j] for p in scaled) for i, j in ((0, 0), (0, 1), (1, 1)))
    ay, by = (sum(p[i] * p[2] for p in scaled) for i in (0, 1))
    determinant = aa * bb - ab * ab
    task = (ay * bb - by * ab) / determinant if determinant > 1e-12 * aa * bb else 0.0
    if task < 0:
        task = 0.0
    return task, (by - ab * task) / bb


def pick(rows: Sequence[Row], of: Constants) -> tuple[str, float]:
    """(the model's variant among the rows of a length, its loss against the best measured)."""
    known = [row for row in rows if row.name in of]
    chosen = min(known, key=lambda row: row.predicted(of[row.name]))
    return chosen.name, chosen.time / min(row.time for row in rows) - 1


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing")
    parser.add_argument("--rows", type=Path, default=RESULTS)
    args = parser.parse_args()
    rows = read(args.rows)
    result: dict[str, Constants] = {}
    left_out: dict[str, float] = {}
    print(f"{'shape':20} {'fitted pick':32} {'loss':>6}   {'left-out pick':32} {'loss':>6}")
    for kind in dict.fromkeys(row.kind for row in rows):
        own = [row for row in rows if row.kind == kind]
        whole = fit(own)
        result[kind] = {name: (round(t, 4), round(s, 5)) for name, (t, s) in whole.items()}
        errors = [abs(r.predicted(whole[r.name]) / r.time - 1) for r in own if r.name in whole]
        for length in dict.fromkeys(row.length for row in sorted(own, key=lambda r: r.time)):
            there = [row for row in own if row.length == length]
            name, loss = pick(there, whole)
            rest = fit(row for row in own if row.length != length)
            other, lost = pick(there, rest) if rest else ("", float("nan"))
            if rest:
                left_out[f"{kind} {length}"] = round(lost, 4)
            label = f"{kind} {length}"
            print(f"{label:20} {name:32} {loss:6.1%}   {other:32} {lost:6.1%}")
        print(
            f"{kind}: error at most {max(errors):.1%}, on average {sum(errors) / len(errors):.1%}"
        )
    if not args.check:
        data = {
            "source": f"bench/fit_attention.py on {len(rows)} rows of {args.rows.name} (H200)",
            "constants": result,
            "loss_with_the_length_left_out": left_out,
        }
        CONSTANTS_FILE.parent.mkdir(parents=True, exist_ok=True)
        CONSTANTS_FILE.write_text(json.dumps(data, indent=1) + "\n")
        print(f"constants in {CONSTANTS_FILE.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
