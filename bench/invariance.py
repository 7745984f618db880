"""Claim `invariance`: the same bits in any batch, and what they cost.

    python -m bench.invariance build DIR               our kernels into the cache DIR, without a GPU
    python -m bench.invariance run DIR --out OUT       on the GPU machine; with --seconds no case
                                                       takes more than its share of them
    python -m bench.invariance merge FILES             into bench/results/invariance.json

A case is one of `bench.decode`, whose sequences stand alone first, each with a cache just as long
as it needs, and then in `BATCHES` random batches: so many of them, in any order, some twice, in
caches of any room. `gemm NxK` has rows for sequences. A row of the results counts the batches in
which a bit of any result differs from alone (`checks.differing`), and how many do of some batches
of the fastest form (`checks.otherwise`), whose GEMMs have one of few numbers of rows, each a choice
among all variants; `ours` is the rate of the batch invariant form beside the fastest.
"""

from __future__ import annotations

import argparse
import importlib
import math
import os
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bench import decode as cases
from bench import kernel_bench as kb
from bench import sitting
from bench.decode import Case, operands, plan_of
from bench.evidence import Evidence, write_rows
from warploom.autosched.plans import ADDING
from warploom.autosched.schedules import compiled
from warploom.codegen.compile.build import build
from warploom.integrations.torch_op import NOMINAL_ROWS
from warploom.kernels.attention.combine import combine, combine_schedule
from warploom.kernels.attention.decode import PART, decode, decode_policy
from warploom.kernels.attention.decode_plan import planned
from warploom.kernels.gemm import program as gemm
from warploom.kernels.gemm.variant import GEMM, choose_gemm
from warploom.runtime.stats import median_interval

RESULTS = Path(__file__).parent / "results" / "invariance.json"
BATCHES, FEWER = 10_000, 500  # of the invariant form and of the fastest
DECODE = (
    "page16 16x4096 32/8 d128",
    "page64 4x4096 32/8 d128",
    "page64 1x16384 32/8 d128",
    "page64 64x1024 32/8 d128",
    "page16 16x4096 32/8 d64",
)
GEMMS = ("gemm 4096x4096", "gemm 6144x16384")
CASES = (*DECODE, *GEMMS)
ROWS = 512  # of a GEMM, at most
CHOSEN = (1, 3, 8, 16, 33, 64, 96, 128, 256, 384, ROWS)  # of the fastest form of a GEMM
LIKELY = 3  # variants of a shape of which one may be chosen
SPLITS = (1, 2, 4, 8, 16, 32, 64, 128)  # of which every number of parts is at most one
Draw = Callable[[random.Random, bool], tuple[list[int], int]]  # of a form: members, room
Run = Callable[[Any, int, bool], tuple[Any, Any]]  # of these on the GPU: results, and alone


@dataclass(frozen=True)
class Forms:
    """A case: who is in a random batch, its results beside what they gave alone, calls to time, and
    their work in TFLOP or TB a second of a millisecond."""

    draw: Draw
    run: Run
    calls: dict[str, Callable[[], Any]]
    size: float
    compiler: str


def gemm_sizes(name: str) -> tuple[int, int]:
    """n and k of a case."""
    n, k = name.split()[1].split("x")
    return int(n), int(k)


def build_all(names: tuple[str, ...]) -> None:
    """Compile what the cases need."""
    for name in names:
        if name in GEMMS:
            for rows in {NOMINAL_ROWS, *CHOSEN}:
                _build_gemm(rows, *gemm_sizes(name))
            print(name, flush=True)
            continue
        case = Case(name)
        equal = plan_of(replace(case.config, part=PART), case)
        some = [planned(case.config, 1, 1, case.sizes[1], 1, splits) for splits in SPLITS]
        for plan in (equal, *some):
            compiled(decode(plan.config), decode_policy(plan.config))
            if plan.config.split:
                build(combine(plan.config, plan.room), combine_schedule(plan.config, plan.room))
        print(name, flush=True)


def _build_gemm(m: int, n: int, k: int) -> str:
    """Compile what a shape gets, and what comes next: sums of floats, and so a choice between two
    that are as fast, differ between versions of Python. Gives the compiler."""
    base, sizes = gemm.GemmConfig(), {"m": m, "n": n, "k": k, "batch": 1}
    kind = GEMM.kind(base)
    names = [name for name in kind.replays if GEMM.variants[name].takes(base)]
    next_ones = (GEMM.variants[one] for one in GEMM.fastest(kind, names, base, sizes, LIKELY))
    compiler = ""
    for choice in (*next_ones, choose_gemm(m, n, k, sliced=True)):
        config = choice.config(base)
        if config.workspace:
            compiled(gemm.combine(config), ADDING)
        compiler = choice.selected(base).build().resources.compiler
    return compiler


def decode_forms(torch: Any, name: str) -> Forms:
    """Sequences of random lengths over pages; the batch is a choice of rows of the page table."""
    case = Case(name)
    batch, keys, *_ = case.sizes
    operator = importlib.import_module("warploom.integrations.torch_decode")
    one = operands(torch, case)[0]
    page = case.page or 1
    torch.manual_seed(1)
    lengths = torch.randint(1, keys + 1, (batch,), device="cuda").int()
    needed = [-(-length // page) for length in lengths.tolist()]

    def attend(picked: Any, columns: int, invariant: bool) -> Any:
        return operator.attention_with_kvcache(
            one["q"][picked], one["pages of k"], one["pages of v"], lengths[picked],
            one["table"][picked, :columns].contiguous(), causal=case.config.causal,
            batch_invariant=invariant,
        )  # fmt: skip

    own = torch.arange(batch, device="cuda")
    alone = {
        form: torch.cat([attend(own[n : n + 1], needed[n], form) for n in range(batch)])
        for form in (True, False)
    }

    def draw(draws: random.Random, _: bool) -> tuple[list[int], int]:
        picked = [draws.randrange(batch) for _ in range(draws.randint(1, 64))]
        least = max(needed[n] for n in picked)
        return picked, draws.randint(least, one["table"].shape[1])

    def run(index: Any, columns: int, form: bool) -> tuple[Any, Any]:
        return attend(index, columns, form), alone[form][index]

    full = torch.full_like(lengths, keys)

    def call(form: bool) -> Callable[[], Any]:
        arguments = (one["q"], one["pages of k"], one["pages of v"], full, one["table"])
        return lambda: operator.attention_with_kvcache(
            *arguments, causal=case.config.causal, batch_invariant=form
        )

    size = 4 * batch * keys * case.sizes[3] * case.sizes[4] * 1e-9
    plan = plan_of(replace(case.config, part=PART), case).config
    compiler = compiled(decode(plan), decode_policy(plan)).resources.compiler
    return Forms(draw, run, {"invariant": call(True), "fastest": call(False)}, size, compiler)


def gemm_forms(torch: Any, name: str) -> Forms:
    """Rows of one matrix: a batch is a choice of them."""
    n, k = gemm_sizes(name)
    operator = importlib.import_module("warploom.integrations.torch_op")
    a, b = (torch.randn(s, device="cuda").bfloat16() for s in ((ROWS, k), (k, n)))
    alone = {
        form: torch.cat([operator.gemm(a[m : m + 1], b, batch_invariant=form) for m in range(ROWS)])
        for form in (True, False)
    }

    def draw(draws: random.Random, form: bool) -> tuple[list[int], int]:
        count = draws.randint(1, ROWS) if form else draws.choice(CHOSEN)
        return [draws.randrange(ROWS) for _ in range(count)], count

    def run(index: Any, _: int, form: bool) -> tuple[Any, Any]:
        return operator.gemm(a[index], b, batch_invariant=form), alone[form][index]

    calls = {
        "invariant": lambda: operator.gemm(a, b, batch_invariant=True),
        "fastest": lambda: operator.gemm(a, b),
    }
    return Forms(draw, run, calls, 2 * ROWS * n * k * 1e-9, _build_gemm(NOMINAL_ROWS, n, k))


def differing(torch: Any, forms: Forms, form: bool, batches: int, until: float) -> tuple[int, int]:
    """(random batches in which some bit differs, counted on the GPU; batches until that time)."""
    draws, count = random.Random(0), torch.zeros((), dtype=torch.int64, device="cuda")
    drawn = [forms.draw(draws, form) for _ in range(batches)]
    # One copy for all: the GPU would wait for each batch's own.
    members = torch.tensor([n for picked, _ in drawn for n in picked], device="cuda")
    for number, ((_, room), index) in enumerate(
        zip(drawn, members.split([len(picked) for picked, _ in drawn]), strict=True)
    ):
        if time.monotonic() > until:
            return int(count), number
        got, want = forms.run(index, room, form)
        count += (got.view(torch.int16) != want.view(torch.int16)).any()
    return int(count), batches


def measured(torch: Any, name: str, batches: int, seconds: float) -> Evidence:
    """One case, counted for so many seconds at most, and timed."""
    until = time.monotonic() + seconds
    forms = (gemm_forms if name in GEMMS else decode_forms)(torch, name)
    otherwise, some = differing(torch, forms, False, min(FEWER, batches), until)
    differ, done = differing(torch, forms, True, batches, until)
    gpu = sitting.Gpu(torch, forms.calls)
    gpu.again("fastest")
    bursts = sitting.measure(gpu, cases.ROUNDS, False, 0)["bursts"]
    samples: dict[str, list[float]] = {n: one["ms"] for n, one in bursts.items()}
    middle, *interval = median_interval(samples["invariant"], samples["fastest"])
    _, *same = median_interval(samples["fastest"], samples[sitting.CONTROL])
    rates = {n: forms.size / sorted(ms)[len(ms) // 2] for n, ms in samples.items()}
    return Evidence(
        claim="invariance",
        kernel=name.split(maxsplit=1)[0] if name in GEMMS else "decode",
        shape=name,
        dtype="bf16",
        **kb.provenance(),
        compiler=forms.compiler,
        unit="TFLOP/s" if name in GEMMS else "TB/s",
        better="higher",
        ours=rates["invariant"],
        baselines={"fastest form": rates["fastest"]},
        ratio_to_best=middle,
        ci95=(interval[0], interval[1]),
        control=(same[0], same[1]),
        samples=cases.ROUNDS,
        checks={
            "batches": done,
            "differing": differ,
            "of the fastest form": some,
            "otherwise": otherwise,
            "numerics": "fail" if differ else "pass",
        },
    )


def run(names: tuple[str, ...], batches: int, seconds: float, out: Path) -> None:
    """Measure; what was measured is kept as it comes."""
    torch = kb.load_torch()
    rows: list[Evidence] = []
    out.mkdir(parents=True, exist_ok=True)
    for name in names:
        rows.append(measured(torch, name, batches, seconds / len(names)))
        print(name, rows[-1].ours, rows[-1].ratio_to_best, rows[-1].checks, flush=True)
        write_rows(out / "invariance.json", rows)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=("build", "run", "merge"))
    parser.add_argument("paths", nargs="*", type=Path, help="the cache, or files of rows to merge")
    parser.add_argument("--only", default="", help="cases that contain one of these")
    parser.add_argument("--batches", type=int, default=BATCHES)
    parser.add_argument("--seconds", type=float, default=math.inf, help="of counting, at most")
    parser.add_argument("--out", type=Path, default=Path("out/bench"))
    args = parser.parse_args()
    if args.what == "merge":
        kb.merge(RESULTS, args.paths)
        return
    if args.paths:
        os.environ["WARPLOOM_CACHE"] = str(args.paths[0].resolve())
    names = tuple(name for name in CASES if any(one in name for one in args.only.split(",")))
    if args.what == "build":
        build_all(names)
    else:
        run(names, args.batches, args.seconds, args.out)


if __name__ == "__main__":
    main()
