"""Claim `gemm-serving`: block-scaled fp8 products and grouped ones, as inference engines call them.

    python -m bench.gemm_serving build DIR         our kernels into the cache DIR, without a GPU
    python -m bench.gemm_serving run DIR --out OUT on the GPU machine
    python -m bench.gemm_serving merge FILES       into bench/results/gemm_serving.json

A case is `blocks MxNxK` (fp8, scales of 1 x 128 and 128 x 128), `grouped MODEL LAYER TOKENS` (bf16,
the rows of a mixture of experts one expert after another; `up` and `down` are its two layers), or
`grouped8 ...`, the same in fp8 with block scales; `few MxNxK` is bf16 of few rows, `weights8` the
same with fp8 weights, beside torch's product with bf16 ones, which are twice as many bytes. Routers
are uneven: the shares of experts are as 0.2 to 1.2, and every 17th of many has none. A call of ours
includes the kernel that makes the list of tasks on the GPU; Triton's is given. Operands alternate
that are larger than L2 together. Bursts in shuffled rounds, with a second copy of the first
library's as A/A control. "by rows" is torch's product of the same fp8 elements with a scale a row,
summed in the tensor core: it has less to do. Where torch has no other (grouped8), it is the
baseline, else a check.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import itertools
import os
import re
import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from bench import kernel_bench as kb
from bench import sitting
from warploom.autosched.schedules import schedule_for
from warploom.codegen.compile.build import build
from warploom.codegen.ir.plan import KernelSchedule
from warploom.errors import InputError
from warploom.evidence import Evidence, read_rows, write_rows
from warploom.kernels.gemm.grouped import (
    SCALED,
    GroupedConfig,
    grouped,
    work_list,
    work_schedule,
)
from warploom.kernels.gemm.grouped_plan import plan_grouped
from warploom.kernels.gemm.program import GemmConfig, combine, combine_schedule, gemm
from warploom.kernels.gemm.variant import choose_gemm
from warploom.kernels.gemm.weight_only import (
    WeightOnlyConfig,
    plan_weight_only,
    weight_only,
    weight_only_policy,
)
from warploom.runtime.stats import median_interval
from warploom.tile import E4M3, Program

RESULTS = Path(__file__).parent / "results" / "gemm_serving.json"
ROUNDS = 9
BEYOND_L2 = 2e8  # bytes of weights that alternate
MOST_COPIES = 12
WRONG = 6e-3  # relative error of a result that fails
FASTEST = 2  # of Triton's tiles, which are timed with the others
SEEN = 300  # rows of an expert that are checked
# Model -> (experts, of which a token takes, width, width of an expert)
MODELS = {
    "mixtral-8x7b": (8, 2, 4096, 14336),
    "deepseek-v3": (256, 8, 7168, 2048),
    "qwen3-30b-a3b": (128, 8, 2048, 768),
    "qwen3-235b-a22b": (128, 8, 4096, 1536),
    "gpt-oss-120b": (128, 4, 2880, 2880),
}
# TFLOP/s that DeepGEMM's authors publish for an H800, not measured here.
PUBLISHED = {
    "blocks 4096x7168x16384": 1484,
    "blocks 4096x4096x7168": 1424,
    "blocks 4096x24576x1536": 1263,
    "blocks 4096x2112x7168": 1296,
}
NARROW = ((4096, 4096), (28672, 4096), (4096, 14336))  # n, k
LARGE = ((7168, 2048), (7168, 16384), (4096, 7168), (24576, 1536), (2112, 7168))
CASES = (
    *(f"blocks {m}x{n}x{k}" for m in (4096, 128) for n, k in LARGE),
    *(f"grouped {model} {layer} 4096" for model in MODELS for layer in ("up", "down")),
    *(f"grouped {model} up 128" for model in MODELS),
    *(f"grouped8 {model} {layer} 4096" for model in MODELS for layer in ("up", "down")),
    *(f"few {m}x{n}x{k}" for m in (1, 16, 64, 128) for n, k in NARROW),
    *(f"weights8 {m}x{n}x{k}" for m in (1, 16, 64) for n, k in NARROW),
)
TYPES = {"grouped": "bf16", "few": "bf16", "weights8": "bf16, e4m3 weights"}
BY_ROWS = "torch, by rows"
Call = Callable[[], Any]


@dataclass(frozen=True)
class Case:
    """A kind of product and its sizes."""

    name: str

    @property
    def kind(self) -> str:
        """blocks, grouped, grouped8, few or weights8."""
        return self.name.split()[0]

    @cached_property
    def sizes(self) -> tuple[int, int, int, int]:
        """Experts, rows of all together, n, k."""
        words = self.name.split()
        if "grouped" not in self.kind:
            m, n, k = (int(one) for one in words[1].split("x"))
            return 1, m, n, k
        if len(words) != 4 or words[1] not in MODELS or words[2] not in ("up", "down"):
            raise InputError(f"case {self.name!r}: expected KIND MODEL up|down TOKENS")
        experts, taken, width, inner = MODELS[words[1]]
        n, k = (2 * inner, width) if words[2] == "up" else (width, inner)
        return experts, int(words[3]) * taken, n, k

    @property
    def width(self) -> int:
        """Bytes of a weight."""
        return 2 if self.kind in ("grouped", "few") else 1

    @property
    def kernel(self) -> tuple[str, Program, KernelSchedule]:
        """What the operator runs: tile, program, schedule."""
        experts, rows, n, k = self.sizes
        if self.kind == "weights8":
            few = plan_weight_only(WeightOnlyConfig(), rows, n)
            return (
                str(few.tile),
                weight_only(few),
                schedule_for(weight_only(few), weight_only_policy(few)),
            )
        if self.kind == "few":
            choice = choose_gemm(rows, n, k, GemmConfig(b="nk"), 1, sliced=True)
            own = choice.config(GemmConfig(b="nk"))
            return choice.name, gemm(own), choice.schedule(own)
        config = GroupedConfig(groups="none" if self.kind == "blocks" else "rows")
        if self.kind != "grouped":
            config = replace(config, dtype=E4M3, scales="blocks", promote=True)
        plan = plan_grouped(config, rows // experts, n, k, self.kind != "grouped")
        return str(plan.config.tile), grouped(plan.config), plan.schedule()


def build_all(cases: tuple[Case, ...]) -> None:
    """Compile what the cases need."""
    for case in cases:
        tile, program, schedule = case.kernel
        build(program, schedule)
        rows = min(op.dst.type.shape[0] for op in program.ops() if op.kind == "mma" and op.dst)
        if "grouped" in case.kind:
            build(work_list(case.sizes[0], rows), work_schedule(case.sizes[0]))
        if case.kind == "few":
            _, rows, n, k = case.sizes
            choice = choose_gemm(rows, n, k, GemmConfig(b="nk"), 1, sliced=True)
            own = choice.config(GemmConfig(b="nk"))
            if own.workspace:
                build(combine(own), combine_schedule(own))
        print(case.name, tile, flush=True)


def counts_of(torch: Any, experts: int, rows: int) -> Any:
    """Rows of every expert, uneven."""
    generator = torch.Generator().manual_seed(1)
    shares = torch.rand(experts, generator=generator) + 0.2
    if experts > 20:
        shares[::17] = 0
    found = (shares / shares.sum() * rows).floor().long()
    found[-1] += rows - found.sum()
    return found


def scaled(torch: Any, *shape: int) -> tuple[Any, Any]:
    """(fp8 elements, scales of their rows' blocks of 128)."""
    values = torch.randn(shape, device="cuda", dtype=torch.bfloat16).to(torch.float8_e4m3fn)
    return values, torch.rand((*shape[:-1], -(-shape[-1] // SCALED)), device="cuda") + 0.5


def operands(torch: Any, case: Case, number: int) -> dict[str, Any]:
    """Tensors of a case: a, b: [experts, n, k] with their scales, and whose rows are whose."""
    torch.manual_seed(number)
    experts, rows, n, k = case.sizes
    counts = counts_of(torch, experts, rows) if experts > 1 else torch.tensor([rows])
    found: dict[str, Any] = {"counts": counts.tolist()}
    found["ends"] = counts.cumsum(0).int().cuda()
    if case.kind in ("grouped", "few", "weights8"):
        found["a"] = torch.randn(rows, k, device="cuda", dtype=torch.bfloat16)
        found["b"] = torch.randn(experts, n, k, device="cuda", dtype=torch.bfloat16)
        found["b"] *= k**-0.5
        if case.kind == "weights8":
            found["wide"] = (found["b"] * 8).to(torch.float8_e4m3fn).bfloat16()
            found["b"] = found["wide"].to(torch.float8_e4m3fn)
        return found
    found["b"], _ = scaled(torch, experts, n, k)
    wide, deep = -(-n // SCALED), -(-k // SCALED)
    found["scale_b"] = torch.rand((experts, wide, deep), device="cuda") + 0.5
    found["a"], found["scale_a"] = scaled(torch, rows, k)
    # torch has the scales of rows with the rows next to each other.
    found["scale_a"] = found["scale_a"].transpose(-1, -2).contiguous().transpose(-1, -2)
    return found


def own_call(case: Case, t: Mapping[str, Any]) -> Call:
    """The operator."""
    module = importlib.import_module("warploom.integrations.torch_gemm")
    weights = t["b"].transpose(-1, -2)
    if case.kind == "grouped":
        return lambda: module.grouped_mm(t["a"], weights, t["ends"])
    if case.kind == "few":
        operators = importlib.import_module("warploom.integrations.torch_op")
        return lambda: operators.gemm(t["a"], weights[0])
    if case.kind == "weights8":
        ones = t["ends"].new_ones(weights.shape[-1]).float()
        return lambda: module.weight_only_mm(t["a"], weights[0], ones)
    scale_b = t["scale_b"].transpose(-1, -2)
    if case.kind == "grouped8":
        return lambda: module.scaled_grouped_mm(t["a"], weights, t["scale_a"], scale_b, t["ends"])
    return lambda: module.scaled_mm(t["a"], weights[0], t["scale_a"], scale_b[0])


def libraries(torch: Any, case: Case, t: Mapping[str, Any], out: Any) -> dict[str, Call]:
    """The same product by others, and torch's by rows."""
    weights = t["b"].transpose(1, 2)
    if case.kind == "grouped":
        triton = importlib.import_module("bench.gemm_serving_triton")
        own = importlib.import_module("warploom.integrations.torch_gemm")

        def lists(rows: int) -> Any:
            return own.list_of_tasks(t["ends"], t["a"], rows)

        found = triton.candidates(torch, t["a"], t["b"], out, lists)
        return {"torch": lambda: torch._grouped_mm(t["a"], weights, offs=t["ends"]), **found}
    if case.kind in ("few", "weights8"):
        wide = t.get("wide", t["b"])[0].t()
        return {"torch": lambda: torch.mm(t["a"], wide)}
    rows = torch.ones(t["a"].shape[0], device="cuda")
    columns = torch.ones(t["b"].shape[:2], device="cuda")
    fast = {"out_dtype": torch.bfloat16, "use_fast_accum": True}
    if case.kind == "grouped8":
        return {
            BY_ROWS: lambda: torch._scaled_grouped_mm(
                t["a"], weights, rows, columns, offs=t["ends"], **fast
            )
        }
    wide, deep = t["scale_b"].shape[1:]
    # cuBLAS wants the rows of b's scales padded to 16 bytes.
    padded = columns.new_zeros(wide, -(-deep // 4) * 4)
    padded[:, :deep] = t["scale_b"][0]
    scale_b = padded[:, :deep].t()
    return {
        "torch": lambda: torch._scaled_mm(
            t["a"], weights[0], t["scale_a"], scale_b, out_dtype=torch.bfloat16
        ),
        BY_ROWS: lambda: torch._scaled_mm(t["a"], weights[0], rows[:, None], columns, **fast),
    }


def expected(torch: Any, t: Mapping[str, Any]) -> list[tuple[Any, Any]]:
    """(where, what is right in float64) for the first rows of three experts."""
    counts, begin = t["counts"], [0]
    for count in t["counts"]:
        begin.append(begin[-1] + count)
    some = [expert for expert, count in enumerate(counts) if count]
    found: list[tuple[Any, Any]] = []
    for expert in {some[0], some[len(some) // 2], some[-1]}:
        count = min(SEEN, counts[expert])
        at: Any = slice(begin[expert], begin[expert] + count)
        x, w = t["a"][at].double(), t["b"][expert].double()
        if "scale_a" in t:
            x = x * _wide(t["scale_a"][at], x.shape[1], 1)
            scales = _wide(t["scale_b"][expert], w.shape[0], 0)
            w = w * _wide(scales, w.shape[1], 1)
        found.append((at, x @ w.T))
    return found


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
        if errors[name] < WRONG or name == BY_ROWS:
            calls[name] = call
    for name in sorted(tiles, key=lambda name: tiles[name])[FASTEST:]:
        calls.pop(name, None)
    gpu = sitting.Gpu(torch, calls)
    control = next(name for name in gpu.names if name != "warploom")
    gpu.again(control)
    bursts = sitting.measure(gpu, ROUNDS, False, 0)["bursts"]
    samples: dict[str, list[float]] = {name: one["ms"] for name, one in bursts.items()}
    return evidence(case, samples, control, errors, refused | gpu.refused)


def evidence(
    case: Case,
    samples: Mapping[str, list[float]],
    control: str,
    errors: Mapping[str, float],
    refused: Mapping[str, str],
) -> Evidence:
    """The row of a case; of Triton's tiles it keeps the fastest."""
    experts, rows, n, k = case.sizes
    ms = {name: statistics.median(one) for name, one in samples.items()}
    rates = {name: 2e-9 * rows * n * k / one for name, one in ms.items()}
    rivals = {name: rate for name, rate in rates.items() if name not in ("warploom", "control")}
    slower = sorted((name for name in rivals if name.startswith("Triton")), key=rivals.__getitem__)
    for name in slower[:-1]:
        del rivals[name]
    same = {name: rate for name, rate in rivals.items() if name != BY_ROWS} or rivals
    best = max(same, key=lambda name: same[name])
    middle, *interval = median_interval(samples["warploom"], samples[best])
    _, *again = median_interval(samples[control], samples[sitting.CONTROL])
    tile, program, schedule = case.kernel
    checks = {
        "numerics": "pass" if errors["warploom"] < WRONG else "fail",
        "errors": {n: float(f"{errors[n]:.2g}") for n in ("warploom", *same) if n != BY_ROWS},
        "us": round(1e3 * ms["warploom"], 2),
        "TB/s of weights": round(experts * n * k * case.width / ms["warploom"] * 1e-9, 3),
        "refused": refused,
    }
    checks |= {name: round(rate, 1) for name, rate in rivals.items() if name not in same}
    if case.name in PUBLISHED:
        checks["DeepGEMM on an H800, published"] = PUBLISHED[case.name]
    return Evidence(
        claim="gemm-serving",
        kernel=case.kind,
        shape=case.name,
        dtype=TYPES.get(case.kind, "e4m3, block scales"),
        **kb.provenance(),
        compiler=build(program, schedule).resources.compiler,
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
    parser.add_argument("--only", default="", help="cases that contain one of these")
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
    chosen = tuple(Case(n) for n in CASES if any(one in n for one in args.only.split(",")))
    if args.what == "build":
        build_all(chosen)
    else:
        kb.measure(chosen, measured, args.seconds, args.out / "gemm_serving.json")


if __name__ == "__main__":
    main()
