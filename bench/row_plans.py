"""Which plan a row operation gets: candidates, timed on a GPU, and the table they make.

    python -m bench.row_plans build [CASES]         compile the candidates, without a GPU
    python -m bench.row_plans run [CASES] --out OUT        time them, on a GPU
    python -m bench.row_plans record FILES          into src/warploom/kernels/rows/tuned.toml

Cases are those of `bench.row_ops`. A candidate has registers for its row, or leaves it in shared
memory, with so many bytes a thread; a kernel that spills is none. Bursts of captured launches in
shuffled rounds, on the tensors of `bench.row_ops`; the first candidate twice as A/A control.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Any

from bench import kernel_bench as kb
from bench import row_ops
from warploom.codegen.compile.build import Built, build
from warploom.codegen.simt.choose import simt
from warploom.errors import DoesNotFit, InputError, Spills
from warploom.kernels.rows.plans import TABLE, PlanRow, RowPlan, as_toml, read_plans
from warploom.kernels.rows.program import RowConfig, row_program, width_of
from warploom.runtime.interface import Interface
from warploom.runtime.kernel import Kernel

ARCH = "sm_90a"
ROUNDS, SECONDS = 7, 0.003  # of graphs of so many seconds
SM_THREADS, SM_BYTES = 1536, 220 << 10  # at 40 registers of a thread; of shared memory
LINE = 8  # elements of an access
CLOSE = 0.005  # a plan that no row prefers by more than this is not kept
DTYPES = {"bf16": "bfloat16", "fp32": "float32", "int32": "int32", "e4m3": "float8_e4m3fn"}
OUTPUTS = ("y", "rstd", "mean", "lse", "summed", "scale")
CASES = (
    "cross_entropy", "softmax", "rmsnorm", "layernorm", "softmax_backward",
    "cross_entropy with its gradient", "rmsnorm residual", "rmsnorm fp8", "quantised",
    "rmsnorm_backward", "layernorm_backward",
)  # fmt: skip


def name_of(plan: RowPlan) -> str:
    """What a plan is called: how it differs from others."""
    kind = "again" if plan.again else "staged" if plan.staged else "held"
    parts = [f"{kind}-{plan.threads}x{plan.cluster}"]
    parts += [f"lanes-{plan.lanes}"] * (plan.lanes != plan.threads)
    parts += [f"rows-{plan.rows}"] * (plan.rows > 1)
    parts += [f"stages-{plan.stages}"] * (plan.stages > 1)
    parts += ["tasks"] * (plan.persistent and not plan.again)
    parts += [f"resident-{plan.resident}"] * (plan.resident > 1) + ["last"] * plan.last
    return "-".join(parts)


def candidates(config: RowConfig) -> dict[str, RowPlan]:
    """Plans to try for a configuration, the compiler's own schedule first."""
    program = row_program(config)
    own, loads = simt(program), sum(len(array.dims) == 2 and array.dims[-1] == "n" for array in
                                    program.arrays if _read(program, array.name))  # fmt: skip
    found = [RowPlan(own.threads, own.lanes, own.cluster, 1, own.stages, own.launch.resident,
                     own.launch.persistent)]  # fmt: skip
    if config.op.endswith("norm_backward"):
        found += [plan for cluster in (1, 2, 4, 8) for plan in _backward(config.columns, cluster)]
    else:
        found += _held(width_of(config), 1) if loads < 4 else []
    for cluster in (1, 2, 4, 8):
        for threads in (128, 256, 512, 1024) if config.columns == width_of(config) else ():
            each = -(-config.columns // (cluster * threads * LINE)) * LINE
            if config.op.endswith("norm_backward"):
                found += _again(config.columns // cluster, threads, cluster, each)
            elif each in (32 // loads, 64 // loads):
                room = SM_BYTES // (config.columns // cluster * 2 * loads)
                most = min(16, SM_THREADS // threads, room)
                shares = {most, most * 2 // 3, SM_THREADS // 2 // threads} - {0}
                found += [
                    RowPlan(threads, threads, cluster, resident=one, staged=True) for one in shares
                ]
    found += [replace(plan, last=True) for plan in found if not plan.last]
    return {name_of(plan): plan for plan in found}


def _held(columns: int, stages: int) -> list[RowPlan]:
    """Plans of rows that stay in registers."""
    return [
        RowPlan(lanes * rows, lanes, 1, rows, stages, resident, stages > 1)
        for lanes in {1 << (-(-columns // each) - 1).bit_length() for each in (8, 16, 32)}
        for rows in (1, 2, 4)
        if lanes >= 32 and 64 <= lanes * rows <= 512
        for share in (SM_THREADS // 2, 1024, SM_THREADS)
        if (resident := share // (lanes * rows))
    ]


def _backward(columns: int, cluster: int) -> list[RowPlan]:
    """The same of a backward pass, which has two rows, their sum and what comes next."""
    own = columns // cluster
    both = [plan for stages in (2, 3) for plan in _held(own, stages)]
    return [
        replace(plan, cluster=cluster, resident=resident, persistent=True)
        for plan in both
        for resident in {512 // plan.threads, SM_THREADS // 2 // plan.threads} - {0}
        if 8 <= own // plan.lanes <= 16 and (cluster == 1 or plan.lanes == plan.threads == 512)
    ]


def _again(columns: int, threads: int, cluster: int, each: int) -> list[RowPlan]:
    """Plans of a backward pass for a block's columns."""
    found: list[RowPlan] = []
    for rows in (1, 2):
        for stages in (2, 3):
            fit = SM_BYTES // (columns * 4 * rows * stages)
            if 8 <= each <= 32 and fit * threads >= 512:
                resident = min(fit, 1024 // threads)
                found.append(
                    RowPlan(threads, threads, cluster, rows, stages, resident, True, again=True)
                )
    return found


def _read(program: Any, name: str) -> bool:
    return any(op.kind == "load" and op.array.name == name for op in program.ops())


def built(config: RowConfig, plan: RowPlan) -> Built | None:
    """The kernel of a plan; None where it has none, or spills."""
    try:
        return build(*plan.kernel(config), ARCH)
    except (Spills, DoesNotFit, InputError):
        return None


def timed(torch: Any, case: str, columns: int) -> dict[str, Any]:
    """The microseconds of every candidate of a case."""
    config, given = row_ops.config(case, columns), row_ops.tensors(torch, case, columns)
    plans = candidates(config)
    calls: dict[str, Callable[[], None]] = {}
    results: dict[Any, Any] = {}
    for name, plan in plans.items():
        if (kernel := built(config, plan)) is not None:
            calls[name] = _call(torch, case, columns, kernel, plan, given, results)
    runs = dict(calls)
    calls["control"] = next(iter(calls.values()))
    samples = kb.interleave(calls, ROUNDS, SECONDS)
    times = {name: 1e3 * statistics.median(one) for name, one in samples.items()}
    return {
        "case": case, "columns": columns, "us": times, "plans": {n: vars(plans[n]) for n in runs},
        "device": torch.cuda.get_device_name(), "date": date.today().isoformat(),
    }  # fmt: skip


def _call(
    torch: Any, case: str, columns: int, one: Built, plan: RowPlan, given: dict[str, Any],
    results: dict[Any, Any],
) -> Callable[[], None]:  # fmt: skip
    """A launch of a kernel on the tensors of a case; `results` are those that launches share."""
    data, registers = one.source.to_json(), one.resources.registers
    kernel = Kernel(Interface(**Interface.read(data), arch=ARCH, registers=registers), one.cubin)
    rows = row_ops.ELEMENTS // columns
    sizes = {"m": rows, "n": columns, "words": 2, "seeds": 2}
    sizes["parts"] = kernel.resident_tasks(-(-rows // plan.rows))
    arrays: dict[str, Any] = {}
    for spec in kernel.interface.arrays:
        known = None if spec.name in OUTPUTS and "backward" not in case else given.get(spec.name)
        if spec.name == "target":
            known = given["target"].view(rows, 1).view(torch.int32)
        if known is None or (spec.name == "x" and case == row_ops.BOTH):
            shape = tuple(sizes[dim] for dim in spec.dims)
            kind = getattr(torch, DTYPES[spec.dtype.name])
            if (spec.name, shape) not in results:
                empty = torch.empty(shape, dtype=kind, device="cuda")
                results[spec.name, shape] = empty if known is None else known.clone()
            known = results[spec.name, shape]
        arrays[spec.name] = known
    numbers = {"eps": 1e-6, "p": 0.1}
    parameters = kernel.interface.parameters
    scalars = {p["name"]: numbers[p["name"]] for p in parameters if p["kind"] == "scalar"}
    return lambda: kernel(arrays, scalars, torch.cuda.current_stream().cuda_stream)


def record(files: list[Path], where: Path = TABLE) -> None:
    """The table with what files of `run` tell: of each case a plan within `CLOSE` of its best, such
    that they are few."""
    plans, rows = read_plans(where) if where.exists() else ({}, [])
    for line in (line for file in files for line in file.read_text().splitlines()):
        one = json.loads(line)
        config = row_ops.config(one["case"], one["columns"])
        plans |= {name: RowPlan(**plan) for name, plan in one["plans"].items()}
        measured = {name: one["us"][name] for name in one["plans"]}
        source = f"{one['device']}, {one['date']}"
        rows.append(PlanRow(config.op, sorted(config.options), config.columns, measured, source))
    known = {(row.op, tuple(row.options), row.columns): row for row in rows}
    kept = _few([_good(row) for row in known.values()])
    rows = [
        replace(row, measured={name: row.measured[name] for name in kept if name in row.measured})
        for _, row in sorted(known.items())
    ]
    where.write_text(as_toml({name: plans[name] for name in kept}, rows))


def _good(row: PlanRow) -> set[str]:
    """The plans within `CLOSE` of a row's best."""
    best = min(row.measured.values())
    return {name for name, time in row.measured.items() if time * (1 - CLOSE) <= best}


def _few(sets: list[set[str]]) -> list[str]:
    """Names of which every set has one: those of most sets first."""
    kept: list[str] = []
    while sets:
        names = sorted(set[str]().union(*sets))
        kept.append(max(names, key=lambda name: sum(name in one for one in sets)))
        sets = [one for one in sets if kept[-1] not in one]
    return sorted(kept)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=("build", "run", "record"))
    parser.add_argument("which", nargs="*", help="cases, or files to record")
    parser.add_argument("--out", type=Path, default=Path("out/bench"))
    args = parser.parse_args()
    if args.what == "record":
        record([Path(one) for one in args.which])
        return
    cases = row_ops.chosen(",".join(args.which or CASES))
    if args.what == "build":
        for case, columns in cases:
            config = row_ops.config(case, columns)
            made = [name for name, plan in candidates(config).items() if built(config, plan)]
            print(case, columns, made, flush=True)
        return
    import torch  # noqa: PLC0415

    args.out.mkdir(parents=True, exist_ok=True)
    with (args.out / "row_plans.jsonl").open("a") as file:
        for case, columns in cases:
            one = timed(torch, case, columns)
            file.write(json.dumps(one) + "\n")
            file.flush()
            told = sorted(one["us"].items(), key=lambda pair: pair[1])[:4]
            print(case, columns, {name: round(us, 1) for name, us in told}, flush=True)


if __name__ == "__main__":
    main()
