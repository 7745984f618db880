"""What the power of a GEMM at the GPU's limit goes to, from the rows of `gemm_power.json`.

    python -m bench.gemm_shares            fit, print shares and what they bound

Energy a FLOP is the limit over the rate of a variant that runs alone. Variants of one shape differ
in three things that can be counted: operands that wgmma reads from shared memory, rows that blocks
ask L2 for, and bytes from DRAM (the dispatch replayed through an LRU cache). Least squares over the
variants gives what each costs, and what is left for the multiplies themselves.
"""

from __future__ import annotations

import argparse
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from bench import gemm_cases as cases
from warploom.evidence import Evidence, read_rows
from warploom.kernels.gemm.program import GemmConfig
from warploom.kernels.gemm.variant import SMS, Constants, GemmChoice

ROOT = Path(__file__).resolve().parent.parent

RESULTS = ROOT / "bench" / "results" / "gemm_power.json"
SHAPE = 16384
CACHE = 50e6  # bytes of L2 that a scan by all SMs keeps (bench/counters.py, probes)
STEP = 64  # of k
NAMES = ("operands from shared memory", "rows through L2", "bytes from DRAM")


@dataclass(frozen=True)
class Point:
    """A variant: energy a FLOP in picojoules, and what it moves (relative; DRAM in GB)."""

    name: str
    energy: float
    operands: float
    requests: float
    dram: float


def replayed(choice: GemmChoice, size: int, cache: float = CACHE) -> float:
    """GB that the loads of a square product of bf16 bring from DRAM, task by task in launch order.

    All blocks walk over k in step; a step's tiles of a wave are touched once.
    """
    along, blocks = choice.cluster
    high = choice.tile[0] * (blocks if along == "m_tile" else 1)
    wide = choice.tile[1] * (blocks if along == "n_tile" else 1)
    rows, cols = -(-size // high), -(-size // wide)
    kept: OrderedDict[tuple[str, int, int], int] = OrderedDict()
    used, missed = 0, 0
    places = SMS // blocks
    for first in range(0, rows * cols, places):
        tasks = range(first, min(first + places, rows * cols))
        spots = [_place(task, choice.supergroup, rows, cols) for task in tasks]
        sides = [("a", m, high * STEP * 2) for m in sorted({m for m, _ in spots})]
        sides += [("b", n, wide * STEP * 2) for n in sorted({n for _, n in spots})]
        for step in range(size // STEP):
            for array, at, count in sides:
                key = (array, at, step)
                if key in kept:
                    kept.move_to_end(key)
                    continue
                kept[key] = count
                used, missed = used + count, missed + count
                while used > cache:
                    used -= kept.popitem(last=False)[1]
    return missed / 1e9


def _place(task: int, band_rows: int, rows: int, cols: int) -> tuple[int, int]:
    band, inside = divmod(task, band_rows * cols)
    high = min(band_rows, rows - band * band_rows)
    return band * band_rows + inside % high, inside // high


def points(rows: list[Evidence]) -> list[Point]:
    """The variants of the shape whose clock the power cap set, the mean of its rows."""
    found: list[Point] = []
    one = {"operands": 1.0, "requested": 0.0}, {"operands": 0.0, "requested": 1.0}
    zero = dict.fromkeys(Constants.__dataclass_fields__, 0.0)
    for row in rows:
        choice = cases.CHOICES.get(row.kernel.removeprefix("gemm "))
        if choice is None or row.shape != "x".join([str(SHAPE)] * 3):
            continue
        operands, requests = (
            choice.power(GemmConfig(), Constants(**{**zero, **only})) for only in one
        )
        energy = float(row.checks["pJ/FLOP"])
        found.append(Point(choice.name, energy, operands, requests, replayed(choice, SHAPE)))
    return found


def fit(found: list[Point]) -> np.ndarray:
    """(multiplies, a unit of operands, of requests, a GB): picojoules a FLOP; none negative."""
    table = np.array([[1.0, p.operands, p.requests, p.dram] for p in found])
    energies = np.array([p.energy for p in found])
    used = [0, 1, 2, 3]
    while True:
        solved = np.linalg.lstsq(table[:, used], energies, rcond=None)[0]
        if (solved >= 0).all():
            break
        used.remove(used[int(np.argmin(solved))])
    result = np.zeros(4)
    result[used] = solved
    return result


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=Path, default=RESULTS)
    args = parser.parse_args()
    rows = read_rows(args.rows)
    found = points(rows)
    costs = fit(found)
    print(f"{'variant':24} pJ/FLOP  fitted  operands  requests  DRAM GB")
    for p in found:
        fitted = costs @ np.array([1.0, p.operands, p.requests, p.dram])
        print(
            f"{p.name:24} {p.energy:7.4f} {fitted:7.4f} {p.operands:9.3f} {p.requests:9.3f} "
            f"{p.dram:8.2f}"
        )
    base = next(p for p in found if p.name == "128x256")
    amounts = np.array([1.0, base.operands, base.requests, base.dram]) * costs
    for name, amount in zip(("multiplies and the rest", *NAMES), amounts, strict=True):
        print(f"{name:30} {amount:.3f} pJ/FLOP, {amount / amounts.sum():.1%} of 128x256")
    least = min(found, key=lambda p: p.energy)
    once = 2 * SHAPE * SHAPE * 2 / 1e9  # GB of a and b
    floor = costs @ np.array([1.0, least.operands, least.requests, once])
    shape = f"{SHAPE}x{SHAPE}x{SHAPE}"
    row = next(r for r in rows if (r.kernel, r.shape) == (f"gemm {least.name}", shape))
    cublas = float(row.checks["cuBLAS pJ/FLOP"])
    print(
        f"{least.name}: {least.energy:.3f} pJ/FLOP, {cublas / least.energy:.3f} of cuBLAS' rate; "
        f"if a and b came from DRAM once {floor:.3f}, at most {cublas / floor:.3f}"
    )


if __name__ == "__main__":
    main()
