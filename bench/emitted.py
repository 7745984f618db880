"""Kernels to read: emitted CUDA of at most 650 lines each, with what is known of it beside it.

    python -m bench.emitted      writes examples/emitted anew: NAME.cu, NAME.json and README.md

Three are what `warploom build` gives for the settings named, one is what the row operators of
PyTorch launch. NAME.json has the schedule, the bound of each loop, the cycles predicted from the
machine code with a trace of the steady state, and the measured row. No GPU is needed: what was
measured stands in bench/results.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from bench.evidence import Evidence, read_rows
from warploom.autosched.selected import Selected
from warploom.codegen.compile.build import build, emitted
from warploom.codegen.ir.plan import KernelSchedule
from warploom.errors import CheckFailed
from warploom.files import write_text_atomically
from warploom.kernels.rows.choose import row_kernel
from warploom.kernels.rows.program import RowConfig
from warploom.kernels.select import DEFAULT, full_sizes, select
from warploom.perf.launch_time import Launch
from warploom.perf.replay import replay
from warploom.perf.trace import PREDICTED, perfetto, predicted

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "examples" / "emitted"
MOST_LINES = 650
ITERATIONS = 3  # of a trace


@dataclass(frozen=True)
class Case:
    """A kernel, and which row of bench/results measured it: (file, kernel, shape), or why none."""

    title: str
    name: str
    settings: dict[str, str] = field(default_factory=dict[str, str])
    schedule: str = DEFAULT
    row: tuple[str, str, str] | str = ""

    @property
    def command(self) -> str:
        """What builds it."""
        if self.name == "rows":
            op, columns = self.config.op, self.config.columns
            return f"row_kernel(RowConfig({op!r}, {columns})) of warploom.kernels.rows.choose"
        given = "".join(f" --set {key}={value}" for key, value in self.settings.items())
        named = "" if self.schedule == DEFAULT else f" --schedule {self.schedule}"
        return f"warploom build {self.name}{given}{named} -o out"

    @property
    def config(self) -> RowConfig:
        """Of a row operation."""
        return RowConfig(self.settings["op"], int(self.settings["columns"]))

    def selected(self) -> Selected:
        """The program and its schedule."""
        if self.name == "rows":
            program, schedule, _ = row_kernel(self.config)
            return Selected(schedule.name, self.config, program, schedule)
        return select(self.name, self.settings, policy=self.schedule)

    def evidence(self) -> Evidence | None:
        """The row; raises `StopIteration` where it is not there."""
        if isinstance(self.row, str):
            return None
        file, *wanted = self.row
        rows = read_rows(ROOT / "bench" / "results" / file)
        return next(one for one in rows if [one.kernel, one.shape] == wanted)


HEADS64 = {"head_dim": "64", "rows": "16384", "batch": "1", "heads": "32"}
CASES = {
    "attention": Case(
        "attention forward, head size 64, loads that run ahead",
        "attention",
        HEADS64,
        "multistage",
        ("schedule_ablation.json", "attention d64 multistage", "16384"),
    ),
    "gemm": Case(
        "GEMM, the tuned table's choice for 8192 x 8192 x 8192",
        "gemm",
        {"m": "8192", "n": "8192", "k": "8192", "batch": "1"},
        row=("front_door.json", "gemm 128x192-at-once", "8192x8192x8192"),
    ),
    "recurrent": Case(
        "linear attention without a decay, d = e = 64",
        "recurrent",
        {"decay": "none"},
        row="not measured by itself; with a decay a token it is `simple gla d64` of "
        "linear_attention.json, and too long to read here",
    ),
    "softmax": Case(
        "softmax of rows of 1024",
        "rows",
        {"op": "softmax", "columns": "1024"},
        row=("row_ops.json", "softmax", "131072 x 1024"),
    ),
}


def facts(case: Case) -> dict[str, Any]:
    """What NAME.json says, without what a compiler has to be asked for."""
    selected, row = case.selected(), case.evidence()
    return {
        "title": case.title,
        "command": case.command,
        "schedule": selected.schedule.to_json(),
        "measured": case.row if row is None else asdict(row),
    }


def modelled(case: Case) -> dict[str, Any]:
    """Bounds, cycles and a trace, from the machine code."""
    selected = case.selected()
    schedule = selected.schedule
    if not isinstance(schedule, KernelSchedule):
        return {"predicted": "not predicted: the replay follows loops of matmuls"}
    cubin = build(selected.program, schedule, allow=selected.allow).cubin
    sizes = full_sizes(case.name, case.settings)
    launch = Launch(selected.program, selected.launch, sizes, "h200")
    rates = launch.rates()
    try:
        found = replay(selected.program, schedule, cubin, rates=rates)
    except CheckFailed as error:
        return {"predicted": f"not predicted: {error}"}
    trace = predicted(selected.program, schedule, cubin, "h200", rates, ITERATIONS)
    trace = tuple(replace(mark, cycle=round(mark.cycle, 1)) for mark in trace)
    return {
        "predicted": {
            name: {"cycles": round(one.cycles, 1), "bound": one.bound, "bound is": one.reason}
            for name, one in found.loops.items()
        },
        "microseconds predicted": round(launch.time(found).microseconds, 1),
        "trace": perfetto({PREDICTED: trace}),
    }


def text_of(case: Case) -> str:
    """The CUDA that is emitted today."""
    selected = case.selected()
    return emitted(selected.program, selected.schedule, selected.arch).text


def readme(found: dict[str, dict[str, Any]]) -> str:
    """The list of the kernels."""
    lines = [
        "# Emitted kernels to read",
        "",
        "*Written by `python -m bench.emitted`; a test compares them with what is emitted today.*",
        "",
        "Each `.cu` begins with its tile program and the steps of every role; each step's code",
        "begins with a comment that names it. The `.json` beside it has the schedule, the bound of",
        "each loop, predicted cycles, a trace (give its `trace` to",
        "[Perfetto](https://ui.perfetto.dev)) and the measured row, which is of its date's code.",
        "",
        "| kernel | lines | loop: cycles predicted, bound | launch predicted | measured |",
        "|---|---:|---|---:|---|",
    ]
    for name, one in found.items():
        loops, count = one["predicted"], len(text_of(CASES[name]).splitlines())
        told = (
            loops
            if isinstance(loops, str)
            else "; ".join(f"{loop}: {x['cycles']:,}, {x['bound']:,}" for loop, x in loops.items())
        )
        time = f"{one['microseconds predicted']:,} us" if "trace" in one else ""
        row = one["measured"]
        real = row
        if isinstance(row, dict):
            best = ", ".join(f"{other} {value:,.4g}" for other, value in row["baselines"].items())
            beside = f"{row['ours']:,.4g} {row['unit']} (beside: {best})"
            real = f"{beside}, {row['shape']}, {row['device']}, {row['date']}"
        lines.append(f"| [{one['title']}]({name}.cu) | {count} | {told} | {time} | {real} |")
    lines += ["", *(f"* `{name}.cu`: `{one['command']}`" for name, one in found.items()), ""]
    return "\n".join(lines)


def main() -> None:
    """Write the folder."""
    found = {name: {**facts(case), **modelled(case)} for name, case in CASES.items()}
    for name, one in found.items():
        write_text_atomically(FOLDER / f"{name}.cu", text_of(CASES[name]))
        write_text_atomically(FOLDER / f"{name}.json", json.dumps(one) + "\n")
        print(f"{name}: {one['predicted']}")
    write_text_atomically(FOLDER / "README.md", readme(found))


if __name__ == "__main__":
    main()
