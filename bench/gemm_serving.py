"""Claim `gemm-serving`: block-scaled fp8 products and grouped ones, as inference engines call them.

    python -m bench.gemm_serving build DIR         our kernels into the cache DIR, without a GPU
    python -m bench.gemm_serving run DIR --out OUT on the GPU machine
    python -m bench.gemm_serving merge FILES       into bench/results/gemm_serving.json

A case (`bench/gemm_serving_cases.py`) is one of

    blocks MxNxK                fp8, scales of 1 x 128 and 128 x 128
    scaled MxNxK                fp8, scales of rows and columns, summed in the tensor core
    grouped MODEL LAYER TOKENS  bf16, the rows of a mixture of experts one expert after another; its
                                layers are `up` and `down`
    grouped8 ...                the same in fp8 with block scales
    rows8 ...                   in fp8 with scales of rows and columns, summed in the tensor core
    experts MODEL TOKENS        both layers with SwiGLU, from the router's choice to the weighed sum
    experts8 MODEL TOKENS       the same with e4m3 weights; rows are rounded before each product
    few MxNxK                   bf16, few rows
    weights8, integers8 MxNxK   fp8 or int8 weights with a scale a column, bf16 rows
    integers4 MxNxK             int4 weights with a scale for a group of 128, bf16 rows

Routers are uneven: the shares of experts are as 0.2 to 1.2, and every 17th of many has none. A call
of ours includes the kernel that makes the list of tasks on the GPU; Triton's is given. Operands
alternate that are larger than L2 together. Bursts in shuffled rounds, with a second copy of the
first library's as A/A control. "by rows" is torch's product of the same fp8 elements with a scale a
row, summed in the tensor core: it has less to do, and is a check. "cuBLAS, dense" is one product of
as many rows with one expert's weights; "ratio at most" is that of a grouped product to the best
baseline if it took as long as this one, or as moving everything once takes at the memory's peak
rate, whichever is longer. Narrow weights stand beside torch's product with bf16 ones, which are two
or four times as many bytes, and int4 also beside torch's own. Both layers of experts begin with the
same sort of the router's choices.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import os
import re
import statistics
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from bench import kernel_bench as kb
from bench import sitting
from bench.evidence import Evidence, read_rows, write_rows
from bench.gemm_serving_cases import (
    BESIDE,
    BY_ROWS,
    CASES,
    DENSE,
    PUBLISHED,
    TYPES,
    Call,
    Case,
    libraries,
    operands,
    own_call,
    rounded,
)
from warploom.kernels.gemm.grouped import SCALED
from warploom.machine import load
from warploom.runtime.stats import median_interval

RESULTS = Path(__file__).parent / "results" / "gemm_serving.json"
ROUNDS = 9
BEYOND_L2 = 2e8  # bytes of weights that alternate
MOST_COPIES = 12
FASTEST = 2  # of Triton's tiles, which are timed with the others
RESULT_BYTES = 2  # of an element of a result
SEEN = 300  # rows of an expert that are checked
TOKENS_SEEN = 8  # of a layer of experts


def build_all(cases: tuple[Case, ...]) -> None:
    """Compile what the cases need."""
    for case in cases:
        for make in case.kernels.values():
            make()
        print(case.name, *case.kernels, flush=True)


def expected(torch: Any, t: Mapping[str, Any]) -> list[tuple[Any, Any]]:
    """(where, what is right in float64) for the first rows of three experts, or first tokens."""
    if "chosen" in t:
        return [(slice(0, TOKENS_SEEN), _tokens_of_layer(torch, t))]
    counts, begin = t["counts"], [0]
    for count in t["counts"]:
        begin.append(begin[-1] + count)
    some = [expert for expert, count in enumerate(counts) if count]
    found: list[tuple[Any, Any]] = []
    for expert in {some[0], some[len(some) // 2], some[-1]}:
        count = min(SEEN, counts[expert])
        at: Any = slice(begin[expert], begin[expert] + count)
        x, w = t["a"][at].double(), t.get("exact", t["b"])[expert].double()
        if "scale_a" in t and t["scale_a"].dim() == 1:
            x, w = x * t["scale_a"][at, None].double(), w * t["scale_b"][expert, :, None].double()
        elif "scale_a" in t:
            x = x * _wide(t["scale_a"][at], x.shape[1], 1)
            scales = _wide(t["scale_b"][expert], w.shape[0], 0)
            w = w * _wide(scales, w.shape[1], 1)
        found.append((at, x @ w.T))
    return found


def _tokens_of_layer(torch: Any, t: Mapping[str, Any]) -> Any:
    """What a layer of experts gives for the first tokens, each by itself."""

    def near(row: Any) -> Any:
        if "scale_up" not in t:
            return row
        narrow, scale = rounded(torch, row)
        return narrow.double() * scale.double()

    found: list[Any] = []
    for x, experts, weights in zip(
        t["x"][:TOKENS_SEEN].double(), t["chosen"], t["weights"].double(), strict=False
    ):
        out = 0.0
        for expert, weight in zip(experts.tolist(), weights, strict=True):
            up, down = (t[name][expert].double() for name in ("up", "down"))
            if "scale_up" in t:
                up = up * t["scale_up"][expert].double()
                down = down * t["scale_down"][expert].double()
            gate, other = (near(x) @ up).chunk(2)
            inner = torch.nn.functional.silu(gate) * other
            out = out + weight * (near(inner) @ down)
        found.append(out)
    return torch.stack(found)


def _wide(scales: Any, size: int, axis: int) -> Any:
    return scales.double().repeat_interleave(SCALED, axis).narrow(axis, 0, size)


def error_of(got: Any, wanted: list[tuple[Any, Any]]) -> float:
    """Largest relative error of an expert's part."""
    return max(float((got[at].double() - want).norm() / want.norm()) for at, want in wanted)


def in_turn(calls: list[Call]) -> Call:
    """One after another, the first one first."""
    turn = itertools.cycle(calls)

    def call() -> Any:
        return next(turn)()

    return call


def measured(torch: Any, case: Case) -> Evidence:
    """One case, checked and timed."""
    gc.collect()
    torch.cuda.empty_cache()
    experts, rows, n, k = case.sizes
    size = experts * n * k * case.width
    sets = [
        operands(torch, case, i) for i in range(max(1, min(MOST_COPIES, int(BEYOND_L2 / size))))
    ]
    out = torch.full((rows, n), torch.nan, device="cuda", dtype=torch.bfloat16)
    wanted = expected(torch, sets[0])
    calls = {"warploom": in_turn([own_call(case, t) for t in sets])}
    errors = {"warploom": error_of(calls["warploom"](), wanted)}
    refused: dict[str, str] = {}
    tiles: dict[str, float] = {}
    others = [libraries(torch, case, t, out) for t in sets]
    for name in others[0]:
        call = in_turn([each[name] for each in others])
        try:
            errors[name] = error_of(call(), wanted)
            if name.startswith("Triton"):
                tiles[name] = kb.timed(torch, call, 5)
        except Exception as error:
            refused[name] = f"{type(error).__name__}: {error}"[:200]
            continue
        if errors[name] < case.wrong or name in BESIDE:
            calls[name] = call
    for name in sorted(tiles, key=lambda name: tiles[name])[FASTEST:]:
        calls.pop(name, None)
    gpu = sitting.Gpu(torch, calls)
    control = next(name for name in gpu.names if name != "warploom")
    gpu.again(control)
    bursts = sitting.measure(gpu, ROUNDS, False, 0)["bursts"]
    samples: dict[str, list[float]] = {name: one["ms"] for name, one in bursts.items()}
    used = sum(1 for count in sets[0].get("counts", ()) if count) or experts
    return evidence(case, samples, control, errors, refused | gpu.refused, used)


def evidence(
    case: Case,
    samples: Mapping[str, list[float]],
    control: str,
    errors: Mapping[str, float],
    refused: Mapping[str, str],
    used: int,
) -> Evidence:
    """The row of a case; of Triton's tiles it keeps the fastest. `used`: experts that have rows."""
    experts, rows, n, k = case.sizes
    ms = {name: statistics.median(one) for name, one in samples.items()}
    rates = {name: 2e-9 * rows * n * k / one for name, one in ms.items()}
    rivals = {name: rate for name, rate in rates.items() if name not in ("warploom", "control")}
    slower = sorted((name for name in rivals if name.startswith("Triton")), key=rivals.__getitem__)
    for name in slower[:-1]:
        del rivals[name]
    others = {name: rate for name, rate in rivals.items() if name != DENSE}
    same = {name: rate for name, rate in others.items() if name != BY_ROWS}
    best = max(same, key=lambda name: same[name])
    middle, *interval = median_interval(samples["warploom"], samples[best])
    _, *again = median_interval(samples[control], samples[sitting.CONTROL])
    tile, make = next(iter(case.kernels.items()))
    checks = {
        "numerics": "pass" if errors["warploom"] < case.wrong else "fail",
        "errors": {n: float(f"{errors[n]:.2g}") for n in ("warploom", *same) if n != BY_ROWS},
        "us": round(1e3 * ms["warploom"], 2),
        "TB/s of weights": round(used * n * k * case.width / ms["warploom"] * 1e-9, 3),
        "refused": refused,
    }
    if DENSE in ms:
        moved = case.width * (used * n + rows) * k + RESULT_BYTES * rows * n
        least = max(ms[DENSE], 1e3 * moved / load("h200").value("dram.bandwidth"))
        checks["of the dense rate"] = round(ms[DENSE] / ms["warploom"], 3)
        checks["ratio at most"] = round(ms[best] / least, 3)
    checks |= {name: round(rate, 1) for name, rate in rivals.items() if name not in same}
    if case.name in PUBLISHED:
        checks["DeepGEMM on an H800, published"] = PUBLISHED[case.name]
    return Evidence(
        claim="gemm-serving",
        kernel=case.kind,
        shape=case.name,
        dtype=TYPES.get(case.kind, "e4m3, block scales"),
        **kb.provenance(),
        compiler=make().resources.compiler,
        unit="TFLOP/s",
        better="higher",
        ours=rates["warploom"],
        baselines=same,
        ratio_to_best=middle,
        ci95=(interval[0], interval[1]),
        control=(again[0], again[1]),
        samples=ROUNDS,
        checks=checks,
        notes=f"experts {experts}, rows {rows}, n {n}, k {k}; tile {tile}",
    )


def anywhere(row: Evidence) -> Evidence:
    """A row whose command does not say where its machine had its files."""
    return replace(row, command=re.sub(r" --out \S+", "", row.command))


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=("build", "run", "merge"))
    parser.add_argument("paths", nargs="*", type=Path, help="the cache, or files of rows to merge")
    parser.add_argument(
        "--only", default="", help="cases that contain one of these, in their order"
    )
    parser.add_argument("--seconds", type=float, default=1e9, help="begin no case after them")
    parser.add_argument("--out", type=Path, default=Path("out/bench"))
    args = parser.parse_args()
    if args.what == "merge":
        old = read_rows(RESULTS) if RESULTS.exists() else []
        fresh = [anywhere(row) for file in args.paths for row in read_rows(file)]
        known = {row.shape: row for row in (*old, *fresh)}
        write_rows(RESULTS, sorted(known.values(), key=lambda row: CASES.index(row.shape)))
        return
    if args.paths:
        os.environ["WARPLOOM_CACHE"] = str(args.paths[0].resolve())
    words = args.only.split(",")
    chosen = tuple(dict.fromkeys(Case(name) for one in words for name in CASES if one in name))
    if args.what == "build":
        build_all(chosen)
    else:
        kb.measure(chosen, measured, args.seconds, args.out / "gemm_serving.json")


if __name__ == "__main__":
    main()
