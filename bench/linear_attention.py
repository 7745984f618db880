"""Recurrent attention beside flash-linear-attention, and beside a copy of its bytes.

    python -m bench.linear_attention build DIR          build every kernel that is timed
    python -m bench.linear_attention run DIR --out OUT  on a GPU machine: rows of `linear-attention`
    python -m bench.linear_attention merge FILE         into bench/results/linear_attention.json

A row is one case under one schedule, in milliseconds of a call. Calls are captured into graphs and
interleaved, with a second copy of the first schedule as A/A control. `copy ms` is what a copy takes
that moves as many bytes as all arrays have; ThunderKittens' times are those of an earlier run on
the same kind of GPU. Results are judged by a loop over rows in float64, over 16384 rows too.
"""

from __future__ import annotations

import argparse
import importlib
import math
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bench import kernel_bench as kb
from warploom.autosched.schedules import schedule_named
from warploom.codegen.compile.build import Built, build
from warploom.codegen.ir.plan import KernelSchedule
from warploom.evidence import Evidence, read_rows, write_rows
from warploom.kernels.recurrent.program import RecurrentConfig, default_launch, recurrent
from warploom.runtime.stats import median_interval

RESULTS = Path(__file__).parent / "results" / "linear_attention.json"
BATCH = HEADS = 16
LONG = 16384  # rows of the long check
LEAST = 64  # of the state's tile along d: a deeper one leaves no registers to a second head
WRONG = 5e-3  # relative error in norm: weights, state and result are rounded to bf16
FLA, COPY, CONTROL = "flash-linear-attention", "copy", "control"


@dataclass(frozen=True)
class Case:
    """A configuration, the heads that share q and k, ThunderKittens' milliseconds by rows."""

    config: RecurrentConfig
    groups: int = HEADS
    kittens: tuple[tuple[int, float], ...] = ()


WIDE = RecurrentConfig("head", key_dim=128, value_dim=128)
CASES = {
    "mamba-2": Case(RecurrentConfig("step", shared=True), 1, ((1024, 0.0445), (4096, 0.152))),
    "mamba-2 with D": Case(RecurrentConfig("step", shared=True, skip=True), 1),
    "decay d128": Case(WIDE, HEADS, ((1024, 0.111), (4096, 0.411))),
    "simple gla d64": Case(RecurrentConfig("token")),
    "mamba-2 state 128": Case(RecurrentConfig("step", shared=True, key_dim=128), 1),
    "simple gla d128": Case(replace(WIDE, decay="token")),
    "linear d64": Case(RecurrentConfig("none")),
    "linear d128": Case(replace(WIDE, decay="none")),
}
ROWS = (1024, 4096)


def inputs(torch: Any, case: Case, batch: int, heads: int, rows: int) -> dict[str, Any]:
    """Random tensors of a case; decays of a layer's usual size."""
    config, groups = case.config, min(case.groups, heads)
    device = {"device": "cuda"}

    def normal(*shape: int) -> Any:
        return torch.randn(shape, **device).bfloat16()

    found = {
        "q": normal(batch, rows, groups, config.key_dim),
        "k": normal(batch, rows, groups, config.key_dim) / config.key_dim**0.5,
        "v": normal(batch, rows, heads, config.value_dim),
        "o": torch.full((batch, rows, heads, config.value_dim), math.nan, **device).bfloat16(),
    }
    if config.decay == "head":
        found["g"] = torch.log1p(-torch.exp2(-5.0 - torch.arange(heads, **device) * 5 / heads))
    if config.decay == "token":
        found["g"] = torch.nn.functional.logsigmoid(torch.randn(batch, rows, heads, **device)) / 8
    if config.decay == "step":
        found["dt"] = torch.rand(batch, rows, heads, **device) * 0.1
        found["a"] = -1.0 - 15.0 * torch.rand(heads, **device)
    if config.skip:
        found["skip"] = torch.randn(heads, **device)
    return found


def exact(torch: Any, case: Case, given: dict[str, Any], scale: float) -> Any:
    """The result in float64, a row at a time."""
    wide = {name: one.double() for name, one in given.items()}
    v = wide["v"]
    batch, rows, heads, columns = v.shape
    q, k = (wide[name].repeat_interleave(heads // wide[name].shape[2], 2) for name in "qk")
    decay, added = torch.ones(batch, rows, heads, device="cuda"), v
    if "g" in wide:
        decay = torch.exp(wide["g"]).expand(batch, rows, heads)
    if "dt" in wide:
        decay, added = torch.exp(wide["dt"] * wide["a"]), wide["dt"][..., None] * v
    state = torch.zeros(batch, heads, q.shape[3], columns, device="cuda", dtype=torch.float64)
    out = torch.empty_like(v)
    for i in range(rows):
        state.mul_(decay[:, i, :, None, None])
        state.add_(k[:, i, :, :, None] * added[:, i, :, None])
        out[:, i] = scale * torch.einsum("bhd,bhde->bhe", q[:, i], state)
    return out + wide["skip"][:, None] * v if "skip" in wide else out


def theirs(case: Case, given: dict[str, Any], scale: float) -> Callable[[], Any]:
    """The same by flash-linear-attention, which wants q and k of every head and g of every row.

    What it has no argument for is computed before: shared heads, dt a, dt v; D is left out.
    """
    q, k, v = (given[name] for name in "qkv")
    heads = v.shape[2]
    q, k = (one.repeat_interleave(heads // one.shape[2], 2) for one in (q, k))
    if case.config.decay == "none":
        plain = importlib.import_module("fla.ops.linear_attn").chunk_linear_attn
        return lambda: plain(q, k, v, scale=scale, normalize=False)
    gated = importlib.import_module("fla.ops.simple_gla").chunk_simple_gla
    if "dt" in given:
        g, v = given["dt"] * given["a"], (given["dt"][..., None] * v).bfloat16()
    else:
        g = given["g"].expand(v.shape[:3]).contiguous()
    return lambda: gated(q, k, v, g=g, scale=scale)


def schedules(config: RecurrentConfig) -> dict[str, KernelSchedule]:
    """The schedules that are timed, by name."""
    program, plan = recurrent(config), default_launch(config)
    found = {name: schedule_named(program, name, plan) for name in ("lcsf", "skewed")}
    if config.shared and config.depth == LEAST:
        # Two heads take one copy of q and k; a producer that multicasts needs more registers.
        pair = plan.with_options(cluster=("heads_tile", 2))
        for name in list(found):
            found[f"{name} pair"] = schedule_named(program, name, pair, registers=(40, 216))
    return found


def errors(torch: Any, case: Case, kernels: dict[str, Any], rows: int) -> dict[str, float]:
    """The relative error in norm of every kernel, with heads of one sequence."""
    scale = case.config.key_dim**-0.5
    given = inputs(torch, case, 1, 2, rows)
    right = exact(torch, case, given, scale)
    found: dict[str, float] = {}
    for name, kernel in kernels.items():
        given["o"].fill_(math.nan)
        kernel(given, {"scale": scale}, int(torch.cuda.current_stream().cuda_stream))
        found[name] = float((given["o"].double() - right).norm() / right.norm())
    return found


def measured(torch: Any, name: str, built: dict[str, Built], rounds: int) -> Iterator[Evidence]:
    """The rows of one case."""
    case, scale = CASES[name], CASES[name].config.key_dim ** -0.5
    kernels = {key: one.kernel() for key, one in built.items()}
    env, off = kb.environment(), {n: errors(torch, case, kernels, n) for n in (987, LONG)}
    stream = torch.cuda.current_stream
    for rows in ROWS:
        given = inputs(torch, case, BATCH, HEADS, rows)

        def call(kernel: Any, given: dict[str, Any] = given) -> Callable[[], None]:
            return lambda: kernel(given, {"scale": scale}, int(stream().cuda_stream))

        moved = sum(one.numel() * one.element_size() for one in given.values())
        half = torch.empty(moved // 2, dtype=torch.uint8, device="cuda")
        other = torch.empty_like(half)
        calls = {key: call(kernel) for key, kernel in kernels.items()}
        calls[CONTROL] = call(kernels["lcsf"])
        calls[COPY] = lambda half=half, other=other: other.copy_(half)
        best = COPY
        try:
            calls[FLA] = theirs(case, given, scale)
            calls[FLA]()
            best = FLA
        except (ImportError, RuntimeError, TypeError, ValueError) as error:
            calls.pop(FLA, None)
            print(f"{name}: {FLA} does not run: {error!r}"[:300], flush=True)
        samples = kb.interleave(calls, rounds)
        _, *control = median_interval(samples["lcsf"], samples[CONTROL])
        median = {key: statistics.median(one) for key, one in samples.items()}
        kittens = dict(case.kittens).get(rows)
        for key, one in built.items():
            ratio, *interval = median_interval(samples[key], samples[best])
            wrong = {f"error {n} rows": round(found[key], 6) for n, found in off.items()}
            yield Evidence(
                claim="linear-attention",
                kernel=f"{name} {key}",
                shape=f"{BATCH}x{HEADS}x{rows}, q and k of {case.groups}",
                dtype="bf16",
                device=env["device"],
                driver=env["driver"],
                compiler=one.resources.compiler,
                date=env["date"],
                command=kb.command_line(),
                unit="ms",
                better="lower",
                ours=median[key],
                baselines={best: median[best]},
                ratio_to_best=ratio,
                ci95=(interval[0], interval[1]),
                control=(control[0], control[1]),
                samples=rounds,
                checks={
                    "numerics": "pass" if all(x < WRONG for x in wrong.values()) else "fail",
                    **wrong,
                    "copy ms": round(median[COPY], 5),
                    "percent of copy": round(100 * median[COPY] / median[key], 1),
                    **({} if kittens is None else {"ThunderKittens ms, earlier run": kittens}),
                },
                notes=f"torch {env['torch']}",
            )


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=("build", "run", "merge"))
    parser.add_argument("where", type=Path)
    parser.add_argument("--out", type=Path, default=Path("out/bench"))
    parser.add_argument("--rounds", type=int, default=15)
    args = parser.parse_args()
    if args.what == "merge":
        write_rows(RESULTS, read_rows(args.where))
        return
    if args.what == "build":
        for name, case in CASES.items():
            program = recurrent(case.config)
            for key, schedule in schedules(case.config).items():
                build(program, schedule).write(args.where / kb.slug(name) / kb.slug(key))
        return
    torch = kb.load_torch()
    torch.manual_seed(0)
    found: list[Evidence] = []
    for name in CASES:
        folders = sorted((args.where / kb.slug(name)).iterdir())
        built = {one.name.replace("-", " "): Built.read(one) for one in folders}
        for row in measured(torch, name, built, args.rounds):
            found.append(row)
            write_rows(args.out / "linear_attention.json", found)
            percent = row.checks["percent of copy"]
            print(row.kernel, row.shape, round(row.ours, 4), round(row.ratio_to_best, 2), percent,
                  row.checks["numerics"], flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
