"""Everything about a kernel without matmuls that is decided before its code is printed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from warploom.codegen.analysis.parameters import array_parameters, scalar_parameters
from warploom.codegen.analysis.stores import STORES
from warploom.codegen.ir.targets import check_threads, check_types, shared_limit
from warploom.codegen.simt.exchanges import shared_bytes
from warploom.codegen.simt.forms import Layout, check_registers, forms_of
from warploom.codegen.simt.schedule import SimtSchedule
from warploom.errors import DoesNotFit, InputError
from warploom.tile import BOOL, Program
from warploom.tile.ops import OPS


@dataclass(frozen=True)
class SimtFacts:
    """What a printer needs to know of a program under a schedule.

    forms           of every variable (`simt.forms`)
    parameters      of the kernel, in order
    shared_bytes    that the ops exchange in turn
    stored, loaded  arrays that are written and read: what other threads of the block stored is read
                    only after all of them did
    """

    layout: Layout
    forms: Mapping[str, str]
    parameters: tuple[dict[str, Any], ...]
    shared_bytes: int
    stored: frozenset[str]
    loaded: frozenset[str]


def simt_facts(program: Program, schedule: SimtSchedule, arch: str) -> SimtFacts:
    """The facts of a program under a schedule for an architecture.

    Raises `InputError` at the user's line for what has no code, and `DoesNotFit` for tiles that are
    too large.
    """
    layout, forms = Layout(schedule), forms_of(program)
    _check(program, layout, forms, arch)
    shared = shared_bytes(program, layout, forms)
    if shared > (limit := shared_limit(arch=arch)):
        raise DoesNotFit(
            f"kernel {program.name} needs {shared:,} B of shared memory for its largest "
            f"exchange, {arch} has {limit:,}; make the tile smaller"
        )
    stored = frozenset(op.array.name for op in program.ops() if op.array and op.kind in STORES)
    loaded = frozenset(op.array.name for op in program.ops() if op.array and op.kind == "load")
    used = stored | loaded | {one.array.name for one in program.reads}
    parameters = [
        one
        for array in program.arrays
        if array.name in used
        for one in array_parameters(program, array.name)
    ]
    parameters += [{"kind": "dim", "name": dim} for dim in program.dims]
    parameters += scalar_parameters(program)
    return SimtFacts(layout, forms, tuple(parameters), shared, stored, loaded)


def _check(program: Program, layout: Layout, forms: Mapping[str, str], arch: str) -> None:
    schedule = layout.schedule
    if schedule.launch.dependent and not arch.startswith("sm_9"):
        raise InputError(
            f"schedule {schedule.name}: dependent launch has code for sm_90, not {arch}"
        )
    check_threads(program.name, schedule.threads, 1, arch)
    for op in program.ops():
        if op.kind == "mma":
            raise InputError(f"{op.where}: a matmul; SIMT schedules are for programs without one")
        if op.dst is not None:
            check_registers(layout, op, forms[op.dst.name], arch)
        check_types(op, arch)
        if OPS[op.kind].group in ("reduce", "scan") and op.srcs[0].type.dtype is BOOL:
            raise InputError(f"{op.where}: {op.kind} of conditions; cast to int32 first")
