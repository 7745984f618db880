"""The file around a SIMT kernel's lines: what they say, the helpers that they call, its head."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from warploom.codegen.cuda.lines import indent
from warploom.codegen.cuda.names import c_name, kernel_name
from warploom.codegen.cuda.prelude import (
    DEPENDENT,
    MACROS,
    SIMT_PRELUDE,
    memory_type,
    needed,
    pointer_to,
)
from warploom.codegen.ir.source import CudaSource
from warploom.codegen.simt.facts import SimtFacts
from warploom.codegen.simt.schedule import SimtSchedule
from warploom.tile import Program, dtype


def framed(
    program: Program, schedule: SimtSchedule, facts: SimtFacts, lines: Sequence[str]
) -> CudaSource:
    """One standalone file of a kernel that has these lines."""
    blocks, launch = schedule.cluster, schedule.launch
    signature = ",\n    ".join(_declaration(p, launch.dependent) for p in facts.parameters)
    helpers = needed(
        "\n".join(lines) + signature, SIMT_PRELUDE | (DEPENDENT if launch.dependent else {})
    )
    plain = SIMT_PRELUDE["Plain"]
    if plain not in helpers:
        helpers.insert(0, plain)
    note = [
        f"// {program.name}: emitted by warploom from a tile program and the schedule "
        f'"{schedule.name}":',
        f"// {blocks} blocks of {schedule.threads} threads for a task, "
        f"{schedule.lanes} along the columns, {schedule.vector} columns each.",
        "//",
        *[f"//   {line}" for line in str(program).splitlines()],
        "",
        *MACROS,
    ]
    shape = f" __cluster_dims__({blocks}, 1, 1)" if blocks > 1 else ""
    name = kernel_name(program.name)
    code = [
        *note,
        *[f"{helper}\n" for helper in helpers],
        f'extern "C" __global__ void{shape} '
        f"__launch_bounds__({schedule.threads}, {launch.resident}) {name}(",
        f"    {signature}) {{",
        *indent(lines),
        "}",
        "",
    ]
    return CudaSource(
        name=name,
        text="\n".join(code),
        parameters=facts.parameters,
        shared_bytes=facts.shared_bytes,
        threads=schedule.threads,
        cluster=blocks,
        cluster_axis="",
        grid=program.grid,
        arrays=program.arrays,
        persistent=launch.persistent,
        dependent=launch.dependent,
    )


def _declaration(parameter: dict[str, Any], dependent: bool) -> str:
    kind = parameter["kind"]
    if kind == "pointer":
        element = memory_type(dtype(parameter["dtype"]))
        return f"{pointer_to(element, parameter['written'], dependent)} {parameter['array']}_data"
    if kind == "stride":
        return f"long long {parameter['array']}_stride{parameter['dim']}"
    if kind == "dim":
        return f"int {c_name(parameter['name'])}"
    return f"{'int' if parameter['dtype'] == 'int32' else 'float'} {c_name(parameter['name'])}"
