"""Claim `schedule-ablation`: one program under named and solved schedules, model beside machine.

    python -m bench.ablation build              here, no GPU: cubins under out/bench/ablation
    python -m bench.ablation run --out DIR      on the GPU machine: numerics, cycles, times, a table
    python -m bench.ablation merge ROWS         rows of a run to bench/results, predicted anew by
                                                the model as it stands

Predicted cycles an iteration are the model's (`perf.replay`: the machine code replayed on one
scheduler partition).
Measured ones are counted by the kernel itself (`compile.probe`): the SM clock before and after
every steady state, over all blocks and groups, divided by the iterations. Times are those of the
kernel without counters.
"""

from __future__ import annotations

import json
import math
import statistics
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bench import kernel_bench as kb
from bench.evidence import Evidence, read_rows, write_rows
from warploom.autosched.chosen import shallow
from warploom.autosched.schedules import NAMES, Policy, schedule_for
from warploom.autosched.solve import Search
from warploom.codegen.compile.build import Built, build, compile_source
from warploom.codegen.compile.probe import probe
from warploom.codegen.ir.plan import KernelSchedule, LaunchPlan
from warploom.errors import WarploomError
from warploom.flows.optimize_measure import counted_cycles
from warploom.kernels.attention import program as attention_kernel
from warploom.kernels.gemm import program as gemm_kernel
from warploom.perf.replay import replay
from warploom.runtime.driver import CudaDevice
from warploom.runtime.kernel import Kernel
from warploom.runtime.stats import median_interval
from warploom.tile import Program

FOLDER = kb.ROOT / "out" / "bench" / "ablation"
SEARCH = Search(seconds=15.0)
# The solver's first answer, without the choice by replay that `solve` makes (`autosched.chosen`).
FIRST = "solve+first"


@dataclass(frozen=True)
class Case:
    """A program with the launch plan that all its schedules share, and the sizes to run."""

    program: Program
    launch: LaunchPlan
    sizes: tuple[int, ...]
    schedules: tuple[str, ...]
    causal: bool = False


def _gemm() -> Case:
    config = gemm_kernel.GemmConfig()
    plan = gemm_kernel.default_policy(config).launch
    names = tuple(name for name in NAMES if name not in ("overlapped", "pingpong"))
    return Case(gemm_kernel.gemm(config), plan, (8192,), names)


def _attention(causal: bool) -> Case:
    config = attention_kernel.AttentionConfig(causal=causal)
    plan = LaunchPlan(persistent=not causal, split="rows")
    names = (*(name for name in NAMES if name != "inflight"), FIRST, "solve+pingpong")
    return Case(attention_kernel.attention(config), plan, (16384,), names, causal)


def _small_heads(causal: bool) -> Case:
    # Head size 64: the exponentials take as long as the matmuls, so the order decides.
    config = attention_kernel.AttentionConfig(head_dim=64, causal=causal)
    plan = LaunchPlan(persistent=not causal, split="rows")
    names = ("multistage", "lcsf", "overlapped", "pingpong", "solve", FIRST)
    return Case(attention_kernel.attention(config), plan, (16384,), names, causal)


def _narrow() -> Case:
    # One warp group: only a second copy of S lets a matmul run beside its own exponentials.
    config = attention_kernel.AttentionConfig(tile=(64, 64))
    names = ("multistage", "lcsf", "overlapped", "solve", FIRST)
    return Case(attention_kernel.attention(config), LaunchPlan(split="rows"), (16384,), names)


CASES = {
    "gemm": _gemm(),
    "attention": _attention(False),
    "attention causal": _attention(True),
    "attention d64": _small_heads(False),
    "attention d64 causal": _small_heads(True),
    "attention 64x64": _narrow(),
}


def scheduled(case: Case, name: str) -> KernelSchedule:
    """The schedule of a row: a name of `schedules.py` and what is added to it.

    +first   the solver's first answer; without anything added the one that replays fastest
    +pingpong  groups take the tensor core in turn
    +copies  the solver may give tiles two copies (modulo variable expansion)
    +seedN   another seed of the solver
    +shallow two slots a ring
    +nominal the solver takes costs at their values, not at their high ends
    """
    kind, *added = name.split("+")
    seed = next((int(one[4:]) for one in added if one.startswith("seed")), SEARCH.seed)
    end = "nominal" if "nominal" in added else SEARCH.cost_end
    search = replace(SEARCH, expand="copies" in added, seed=seed, cost_end=end, replayed=not added)
    schedule = schedule_for(case.program, Policy(kind, case.launch, search=search))
    if "shallow" in added:
        schedule = shallow(schedule)
    return replace(schedule, pingpong=schedule.pingpong or "pingpong" in added)


def _folder(case: str, name: str, probed: bool) -> Path:
    return FOLDER / case.replace(" ", "-") / f"{name}{'-probe' * probed}"


def build_all(only: str = "") -> None:
    """Compile every schedule of every case, plain and with counters, and predict its cycles."""
    for title, case in CASES.items():
        if only not in f"{title} ":
            continue
        for name in case.schedules:
            try:
                schedule = scheduled(case, name)
                built = build(case.program, schedule)
                _write(title, name, case, schedule, built)
            except WarploomError as error:
                print(f"{title:18} {name:12} REFUSED {error}", flush=True)


def _write(title: str, name: str, case: Case, schedule: KernelSchedule, built: Built) -> None:
    built.write(_folder(title, name, False))
    source, loops = probe(built.source)
    cubin, resources = compile_source(source, built.arch, ("spills", "stack"))
    replace(built, source=source, cubin=cubin, resources=resources).write(
        _folder(title, name, True)
    )
    found = replay(case.program, schedule, built.cubin).loops
    rows: dict[str, dict[str, Any]] = {
        loop: {"cycles": found[loop].cycles, "bound": found[loop].bound, "why": found[loop].reason}
        for loop in loops
    }
    text = {
        "loops": loops,
        "predicted": rows,
        "pingpong": schedule.pingpong,
        "proof": schedule.any_loop.proof.status,
        "interval": schedule.any_loop.initiation_interval,
    }
    (_folder(title, name, False) / "prediction.json").write_text(json.dumps(text))
    cycles = {loop: round(row["cycles"]) for loop, row in rows.items()}
    print(f"{title:18} {name:12} predicted {cycles}, {built.resources.registers} registers")


def _operands(torch: Any, title: str, size: int, seed: int) -> dict[str, Any]:
    torch.manual_seed(seed)

    def rand(*shape: int) -> Any:
        return torch.randn(*shape, device="cuda").to(torch.bfloat16)

    if title == "gemm":
        v = {"a": rand(size, size), "b": rand(size, size)}
        return {**v, "c": torch.full_like(v["a"], math.nan)}
    b, h = max(1, 16384 // size), 16
    d = 64 if "d64" in title else 128
    v = {name: rand(b, h * 128 // d, size, d) for name in "qkv"}
    return {**v, "o": torch.full_like(v["q"], math.nan)}


def _reference(torch: Any, title: str, v: dict[str, Any]) -> Any:
    if title == "gemm":
        return v["a"].float() @ v["b"].float()
    f = torch.nn.functional
    return f.scaled_dot_product_attention(v["q"], v["k"], v["v"], is_causal="causal" in title)


def case(name: str, rounds: int) -> dict[str, Any]:
    """One case in a worker: `TITLE SIZE`."""
    torch = kb.load_torch()
    title, number = name.rsplit(" ", 1)
    size, it = int(number), CASES[title]
    data = [_operands(torch, title, size, s) for s in range(2)]
    want = _reference(torch, title, data[0]).float()
    out = "c" if title == "gemm" else "o"
    candidates: dict[str, Any] = {}
    result: dict[str, Any] = {"title": title, "size": size, "rows": {}}
    every = (FOLDER / title.replace(" ", "-")).glob("*/prediction.json")
    built = sorted(path.parent.name for path in every)
    for schedule in dict.fromkeys([*it.schedules, *built]):
        folder = _folder(title, schedule, False)
        if not (folder / "prediction.json").is_file():
            continue
        kernel, probed = (
            Built.read(folder).kernel(),
            Built.read(_folder(title, schedule, True)).kernel(),
        )
        stream = torch.cuda.current_stream().cuda_stream
        data[0][out].fill_(math.nan)
        kernel(data[0], stream=stream)
        error = float((data[0][out].float() - want).norm() / want.norm())
        kernel_of = json.loads((folder / "prediction.json").read_text())
        row = {"error": error, **kernel_of}
        row["counted"] = _count(torch, probed, data, tuple(kernel_of["loops"]))
        result["rows"][schedule] = row
        turn = [0]

        def call(kernel: Any = kernel, turn: list[int] = turn) -> None:
            turn[0] ^= 1
            kernel(data[turn[0]], stream=torch.cuda.current_stream().cuda_stream)

        candidates[schedule] = call
    result["twice"] = "solve" if "solve" in candidates else next(iter(candidates))
    candidates["again"] = candidates[result["twice"]]
    result["samples"] = kb.interleave(candidates, rounds)
    return result


def _count(
    torch: Any, kernel: Kernel, data: list[dict[str, Any]], loops: tuple[str, ...]
) -> list[dict[str, Any]]:
    """Readings of five series of launches after a warm-up, each on its own."""
    device, turn = CudaDevice(), [0]
    torch.cuda.synchronize()

    def launch() -> None:
        turn[0] ^= 1
        kernel(data[turn[0]], stream=device.stream)

    series = counted_cycles(device, kernel, launch, loops)
    device.close()
    return [
        {loop: [r.cycles_an_iteration, r.gigahertz, r.iterations] for loop, r in one.items()}
        for one in series
    ]


def _measured(row: dict[str, Any], loop: str) -> tuple[float, float, int]:
    """(cycles an iteration, GHz, iterations): medians over the launches."""
    values = [reading[loop] for reading in row["counted"]]
    cycles, clock, count = (statistics.median(v[i] for v in values) for i in range(3))
    return cycles, clock, int(count)


def merge(files: list[Path]) -> None:
    """Rows of runs as the evidence file: what was measured, beside what the model says now.

    A later file's row replaces an earlier one of the same schedule; schedules that no case has any
    more are left out.
    """
    rows: dict[str, Evidence] = {}
    for row in (row for path in files for row in read_rows(path)):
        title, name = row.kernel.rsplit(" ", 1)
        if name not in CASES[title].schedules:
            continue
        program, schedule = CASES[title].program, scheduled(CASES[title], name)
        (model,) = replay(program, schedule, build(program, schedule).cubin).loops.values()
        counted = float(row.checks["counted cycles"])
        checks = {
            **row.checks,
            "predicted cycles": round(model.cycles, 1),
            "model error": round(model.cycles / counted - 1, 4),
            "lower bound": model.bound,
        }
        kernel = f"{title} {name}"
        rows[kernel] = replace(row, kernel=kernel, checks=checks)
    target = kb.ROOT / "bench" / "results" / "schedule_ablation.json"
    order = [f"{title} {name}" for title, case in CASES.items() for name in case.schedules]
    write_rows(target, [rows[kernel] for kernel in order if kernel in rows])
    worst = max(rows.values(), key=lambda row: abs(row.checks["model error"]))
    error = worst.checks["model error"]
    print(
        f"{len(rows)} rows in {target}; the model's largest error is {error:+.1%}: {worst.kernel}"
    )


def main() -> None:
    """Command line."""
    args = kb.arguments(__doc__ or "", build=("only",))
    if args.mode == "merge":
        merge(args.files)
        return
    if args.mode == "build":
        build_all(args.only)
        return
    names = [f"{title} {size}" for title, it in CASES.items() for size in it.sizes]
    results = kb.run_workers(case, args, [n for n in names if args.only in n])
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "ablation_raw.json").write_text(json.dumps(results))
    _report(args.out, results)


def _report(out: Path, results: list[dict[str, Any]]) -> None:
    env = kb.environment()
    head: list[object] = ["case", "schedule", "predicted", "counted", "error", "GHz", "ms"]
    table: list[list[object]] = [[*head, "vs best named", "95 %", "numerics"]]
    evidence: list[Evidence] = []
    for result in results:
        if "rows" not in result:
            print(json.dumps(result)[:400])
            continue
        samples = result["samples"]
        named = [n for n in result["rows"] if n in NAMES and n != "solve"]
        middle = {n: statistics.median(samples[n]) for n in samples}
        best = min(named, key=lambda n: middle[n])
        _, low, high = median_interval(samples["again"], samples[result["twice"]])
        for name, row in result["rows"].items():
            loop = row["loops"][0]
            cycles, clock, count = _measured(row, loop)
            model = row["predicted"][loop]["cycles"]
            ratio, lo, hi = median_interval(samples[name], samples[best])
            fine = "pass" if row["error"] < 0.01 else f"fail {row['error']:.3g}"
            shape = f"{result['title']} {result['size']}"
            table.append(
                [shape, name, round(model), round(cycles), f"{model / cycles - 1:+.1%}", clock,
                 middle[name], ratio, f"{lo:.3f}..{hi:.3f}", fine]
            )  # fmt: skip
            evidence.append(
                Evidence(
                    "schedule-ablation",
                    f"{result['title']} {name}",
                    str(result["size"]),
                    "bf16",
                    env["device"],
                    env["driver"],
                    Built.read(_folder(result["title"], name, False)).resources.compiler,
                    env["date"],
                    "python -m bench.ablation run",
                    "ms",
                    "lower",
                    middle[name],
                    {f"best named: {best}": middle[best]},
                    ratio,
                    (lo, hi),
                    (low, high),
                    len(samples[name]),
                    {
                        "numerics": fine,
                        "predicted cycles": round(model, 1),
                        "counted cycles": round(cycles, 1),
                        "model error": round(model / cycles - 1, 4),
                        "lower bound": row["predicted"][loop]["bound"],
                        "clock GHz": round(clock, 3),
                        "iterations counted": count,
                    },
                    f"torch {env['torch']}; ping-pong {row['pingpong']}; proof {row['proof']}",
                )
            )
    write_rows(out / "schedule_ablation.json", evidence)
    print(json.dumps(env))
    print(kb.table(table))


if __name__ == "__main__":
    main()
