"""`schedule="solve"`: a kernel schedule from the program, the machine and a launch plan alone.

    extract     each loop's graph (`perf.extract`)
    solve       interval, times, registers, least ring depths, proof (`solve.solve`)
    confirm     a search that shares nothing with the solver's proves the interval again
    deepen      the rings get the shared memory that is left: loads vary more than the model says
    release     a slot goes back where the group waits for its reader anyway, or when that is done

The sub-tiles are the parts of the split axis, one warp group each, and run one program at a shift
(`solve.uniform`). Answers are kept in the user's cache by the hash of the problem.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from warploom.autosched.depths import deepen
from warploom.autosched.named import REGISTERS, groups
from warploom.autosched.releases import releases
from warploom.codegen.analysis.shared_layout import shared_layout
from warploom.codegen.ir.place import ROWS_PER_GROUP, Placement, place
from warploom.codegen.ir.plan import KernelSchedule, LaunchPlan
from warploom.codegen.ir.targets import shared_limit
from warploom.codegen.passes.rings import loop_slot_bytes, rings_of, slots_of
from warploom.errors import CheckFailed, InputError
from warploom.files import cache_folder, keep, read_kept
from warploom.perf.extract import Extraction, extract
from warploom.schedule.check.simulate import verify
from warploom.schedule.model.bounds import lower_bounds
from warploom.schedule.model.costs import CostTable, costs
from warploom.schedule.model.rules import Rules
from warploom.schedule.model.schedule import Schedule
from warploom.schedule.refute.refute import confirmed
from warploom.schedule.solve.objectives import LENGTH, REGISTER_TIME
from warploom.schedule.solve.solve import Problem, solve
from warploom.schedule.solve.solver import Effort
from warploom.tile import Loop, Program

RING_BARRIERS = 256  # bytes kept for the barriers of deeper rings
CONFIRMING = 2.0  # seconds a loop that a second search has for the bound of the first
VERSION = 14  # of what is done with an answer: kept schedules of another one are not used


@dataclass(frozen=True)
class Search:
    """How hard to look: seconds of the solver a loop, its seed, and the cost table's end.

    A schedule for the high end of every cost is legal for all lower values, so it has slack where
    the machine is slower than its table. If there is none, `solve_kernel` tries the nominal costs.
    `replayed` compiles several answers and takes the one whose machine code replays fastest
    (`autosched.chosen`).
    """

    seconds: float = 10.0
    seed: int = 1
    workers: int = 1
    cost_end: str = "high"
    replayed: bool = False


def solve_kernel(
    program: Program,
    launch: LaunchPlan | None = None,
    gpu: str = "h200",
    search: Search | None = None,
    registers: tuple[int, int] | None = None,
) -> KernelSchedule:
    """The solved schedule of a program.

    launch      what is outside of the loops; without a split axis the rows of the accumulator are
                split over as many groups as give the shortest interval
    registers   (producer, consumer) a thread where the usual split does not fit
    Where nothing is found at the high end of the costs, the nominal ones are tried. Raises
    `InputError` for a program without matmuls and `CheckFailed` when no schedule is found.
    """
    chosen = search or Search()
    try:
        return _solve_at(program, launch, gpu, chosen, registers)
    except CheckFailed:
        if chosen.cost_end == "nominal":
            raise
    nominal = replace(chosen, cost_end="nominal")
    return _solve_at(program, launch, gpu, nominal, registers)


def _solve_at(
    program: Program,
    launch: LaunchPlan | None,
    gpu: str,
    chosen: Search,
    registers: tuple[int, int] | None,
) -> KernelSchedule:
    plan = launch or LaunchPlan()
    table = costs(gpu, "nominal").at(chosen.cost_end)
    if plan.split:
        return _solved(program, plan, _parts_of(program, plan), table, chosen, registers)
    plan = plan.with_options(split=row_axis(program))
    found: list[KernelSchedule] = []
    refusals: list[str] = []
    for parts in _divisions(program, plan.split):
        try:
            found.append(_solved(program, plan, parts, table, chosen, registers))
        except (CheckFailed, InputError) as error:
            refusals.append(f"{parts} groups: {error}")
    if not found:
        raise CheckFailed(f"{program.name} has no schedule: {'; '.join(refusals)}")
    return min(found, key=lambda one: sum(s.initiation_interval for s in one.loops.values()))


def _extracted(
    placement: Placement, plan: LaunchPlan, table: CostTable, fixed: int, loop: Loop
) -> Extraction:
    # What contention costs was measured between warp groups.
    several = placement.parts > 1
    return extract(placement, loop, table, fixed, plan.skip_unit, crowded=several)


def loop_problem(program: Program, launch: LaunchPlan, table: CostTable, name: str = "") -> Problem:
    """The problem that one loop poses, as `solve_kernel` solves it under a launch plan with a split
    axis; without a `name` that of the first loop with a matmul.

    Raises `InputError` for an unknown name, or where no loop has a matmul.
    """
    plan = launch if launch.split else launch.with_options(split=row_axis(program))
    placement = place(program, plan.split, _parts_of(program, plan))
    program = placement.program
    fixed = fixed_bytes(placement, plan)
    for loop in (loop for loop in program.loops() if name in ("", loop.index)):
        found = _extracted(placement, plan, table, fixed, loop)
        if any(node.op == "mma" for node in found.graph.nodes):
            return _problem(found, Search(), Rules())
    known = [loop.index for loop in program.loops()]
    raise InputError(
        f"{program.name}: no loop {name} with a matmul, expected one of {', '.join(known)}"
        if known
        else f"{program.name} has no loop to schedule"
    )


def row_axis(program: Program) -> str:
    """The rows of the accumulators: the axis a block can share out among warp groups."""
    axes = {op.dst.type.names[0] for op in program.ops() if op.kind == "mma" and op.dst}
    if len(axes) > 1:
        # Rows of a tile that is an operand itself belong to all groups.
        placement = place(program, "", 1)
        named = placement.staged.keys()
        held = {v.name: v.type for op in program.ops() for v in op.srcs if v.name in named}
        axes -= {axis for kind in held.values() for axis in kind.names}
    if len(axes) != 1:
        raise InputError(
            f"{program.name}: accumulators have row axes {sorted(axes)}; name the one to split in "
            "the launch plan"
        )
    return axes.pop()


def _rows(program: Program, split: str) -> int:
    sizes = {
        op.dst.type.size(split) for op in program.ops() if op.dst and split in op.dst.type.names
    }
    if len(sizes) != 1:
        raise InputError(f"{program.name}: axis {split!r} has sizes {sorted(sizes)}, expected one")
    return sizes.pop()


def _divisions(program: Program, split: str) -> list[int]:
    rows = _rows(program, split)
    return [p for p in sorted(REGISTERS, reverse=True) if rows % (p * ROWS_PER_GROUP) == 0]


def _parts_of(program: Program, plan: LaunchPlan) -> int:
    # A named split axis: one group for every 64 rows, as the named schedules have it.
    parts = _rows(program, plan.split) // ROWS_PER_GROUP
    return parts if parts in REGISTERS else max(_divisions(program, plan.split), default=1)


def _solved(
    program: Program,
    plan: LaunchPlan,
    parts: int,
    table: CostTable,
    search: Search,
    registers: tuple[int, int] | None,
) -> KernelSchedule:
    placement = place(program, plan.split, parts, share_vectors=plan.share_vectors)
    program = placement.program
    fixed = fixed_bytes(placement, plan)
    problems = [_extracted(placement, plan, table, fixed, loop) for loop in program.loops()]
    if not any(node.op == "mma" for e in problems for node in e.graph.nodes):
        raise InputError(f"{program.name} has no loop with a matmul; use a named schedule")
    key = _key(problems, plan, search, registers)
    kept = cache_folder() / "schedule" / f"{key}.json"
    if (data := read_kept(kept)) is not None:
        return KernelSchedule.from_json(json.loads(data), str(kept))
    answers = {e.loop: _answer(e, search) for e in problems}
    answers = {e.loop: _with_bound_checked(e, answers[e.loop], search) for e in problems}
    result = assemble(placement, plan, problems, answers, fixed, registers)
    keep(kept, json.dumps(result.to_json()).encode())
    return result


def _key(
    problems: Sequence[Extraction],
    plan: LaunchPlan,
    search: Search,
    registers: tuple[int, int] | None,
) -> str:
    parts: list[Any] = [[e.graph.to_json(), e.target.to_json()] for e in problems]
    text = json.dumps(parts) + repr((VERSION, plan, search, registers))
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def _problem(problem: Extraction, search: Search, rules: Rules) -> Problem:
    return Problem(
        problem.graph,
        problem.target,
        effort=Effort(search.seconds, search.workers, search.seed),
        objectives=(REGISTER_TIME, LENGTH),
        pins=problem.pins,
        rules=rules,
        uniform=True,
    )


def _answer(problem: Extraction, search: Search) -> Schedule:
    return solve(_problem(problem, search, Rules()))


def _with_bound_checked(problem: Extraction, answer: Schedule, search: Search) -> Schedule:
    """The schedule with what a second search says of its bound. It may leave groups that are no
    copies of each other, so it can confirm a bound of those that are, not refute it."""
    posed = _problem(problem, search, answer.rules)
    return replace(answer, proof=confirmed(posed, answer.proof, CONFIRMING))


def fixed_bytes(placement: Placement, plan: LaunchPlan) -> int:
    """Shared memory that the rings of the loops do not take: task rings, panels, barriers.

    They are those of the layout of the block with one slot a ring.
    """
    rings = rings_of(placement, slots_of(plan, 1))
    taken = shared_layout(placement, plan, rings).total
    return taken - loop_slot_bytes(placement, rings) + RING_BARRIERS


def assemble(
    placement: Placement,
    plan: LaunchPlan,
    problems: Sequence[Extraction],
    answers: Mapping[str, Schedule],
    fixed: int,
    registers: tuple[int, int] | None = None,
) -> KernelSchedule:
    """One kernel schedule from the schedules of its loops."""
    own = groups(placement.parts, registers, plan.resident)
    for name, answer in answers.items():
        need = max(g.registers for g in answer.groups if g.warps > 1)
        if need > own[1].registers:
            raise CheckFailed(
                f"loop {name}: its compute groups need {need} registers a thread, "
                f"{placement.parts} groups have {own[1].registers}; make the tile smaller"
            )
    depths = deepen(placement, answers, shared_limit(plan.resident) - fixed)
    plain = {
        name: replace(answer, ring_depth=depths[name], groups=own)
        for name, answer in answers.items()
    }
    provisional = KernelSchedule("solved", plain, plan)
    loops: dict[str, Schedule] = {}
    for problem in problems:
        schedule = plain[problem.loop]
        answer = answers[problem.loop]
        rates = verify(problem.graph, problem.target, answer)
        latency = {node.id: node.latency for node in problem.graph.nodes}
        chosen = releases(placement, provisional, problem.loop, latency)
        params: dict[str, Any] = {
            **schedule.params,
            "release": chosen,
            "least_depth": dict(answer.ring_depth),
            "needed_registers": max(g.registers for g in answer.groups),
            "free_running": rates.free,
            "unit_bound": lower_bounds(problem.graph, problem.target).resource,
        }
        loops[problem.loop] = replace(schedule, params=params)
    return KernelSchedule("solved", loops, plan)
