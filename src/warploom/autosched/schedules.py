"""Kernel schedules by name, for any program: what `build(..., schedule="...")` understands.

unpipelined   one slot a ring, one matmul at a time: only the groups of a block overlap
multistage    two slots a ring, matmuls drained every iteration
lcsf          rings as deep as fit, matmuls drained: ThunderKittens' template
lcsf-early    the same, and a slot is given back before the first op that needs what was made of it
inflight      the same with one matmul in flight across iterations
overlapped    the last matmul one iteration behind the first (FlashAttention-3, section 3.2)
pingpong      the same, and groups take turns with the tensor core (section 3.1)
...-early     these two with what the loop does to its last result (rescaling) beside the first
              matmul, right before the last one adds to it
solve         the solver's answer that replays fastest (`autosched.solve`, `autosched.chosen`)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from warploom.autosched.chosen import chosen_kernel
from warploom.autosched.depths import MOST_DEPTH
from warploom.autosched.named import multistage, overlapped
from warploom.autosched.solve import Search, row_axis, solve_kernel
from warploom.codegen.analysis.shared_layout import shared_layout
from warploom.codegen.ir.place import ROWS_PER_GROUP, Placement, place, runs_along
from warploom.codegen.ir.plan import KernelSchedule, LaunchPlan
from warploom.codegen.ir.targets import shared_limit
from warploom.codegen.passes.rings import loop_slot_bytes, rings_of, slots_of
from warploom.errors import InputError
from warploom.tile import Op, Program

NAMES = (
    "unpipelined",
    "multistage",
    "lcsf",
    "lcsf-early",
    "inflight",
    "overlapped",
    "pingpong",
    "overlapped-early",
    "pingpong-early",
    "solve",
)


@dataclass(frozen=True)
class Block:
    """What is said of a kernel's block besides its order; what is not follows from the program.

    registers   (loading, computing) a thread
    groups      compute groups; 0: one for every 64 rows
    depth       slots of the rings, at most; 0: as many as fit
    """

    registers: tuple[int, int] | None = None
    groups: int = 0
    depth: int = 0


def fitting_name(program: Program) -> str | None:
    """The named schedule that suits a program's loops; None for a program without a matmul.

    `pingpong` where the second of two matmuls takes the first's result and nothing touches its own
    after it (it runs a step behind), `inflight` where the step ends with a matmul, `lcsf` where
    arithmetic follows them or the loops differ.
    """
    names: set[str] = set()
    for each in program.loops():
        ops = [op for op in each.body if isinstance(op, Op)]
        products = [op for op in ops if op.kind == "mma"]
        if _is_chain(ops, products):
            names.add("pingpong")
        elif products:
            names.add("inflight" if ops[-1] is products[-1] else "lcsf")
    if not any(op.kind == "mma" for op in program.ops()):
        return None
    return names.pop() if len(names) == 1 else "lcsf"


def _is_chain(ops: list[Op], products: list[Op]) -> bool:
    """Whether the second of two matmuls of a step takes the first's result, and ends the step."""
    if len(products) != 2:
        return False
    first, last = products
    place = ops.index(last)
    if any(last.dst in (op.dst, *op.srcs) for op in ops[place + 1 :]):
        return False
    reached = {var.name for var in last.srcs[:2]}
    for op in reversed(ops[:place]):
        if op.dst is not None and op.dst.name in reached:
            if op is first:
                return True
            reached |= {var.name for var in op.srcs}
    return False


def schedule_named(
    program: Program,
    name: str,
    launch: LaunchPlan | None = None,
    gpu: str = "h200",
    search: Search | None = None,
    block: Block = Block(),
    arch: str = "sm_90a",
    say: Callable[[str], None] = lambda _: None,
) -> KernelSchedule:
    """The schedule of that name for a program under a launch plan.

    An `arch` without TMA and clusters gets a plan without them, and rings that fit its shared
    memory; the solver's costs are Hopper's. Raises `InputError` for an unknown name or where the
    name's shape does not fit the program.
    """
    if name not in NAMES:
        raise InputError(f"schedule {name!r}: expected one of {', '.join(NAMES)}")
    if not any(op.kind == "mma" for op in program.ops()):
        raise InputError(
            f"{program.name} has no matrix product: its loops have nothing to pipeline on the "
            "tensor core; the default schedule lays it over threads"
        )
    if arch != "sm_90a":
        if name == "solve":
            raise InputError(f"schedule 'solve' is for Hopper (sm_90a), not {arch}; name another")
        launch = older_plan(launch or LaunchPlan())
    if name == "solve":
        asked = search or Search(replayed=True)
        if asked.replayed:
            return chosen_kernel(program, launch, gpu, asked, block.registers, say=say)
        return solve_kernel(program, launch, gpu, asked, block.registers)
    plan = launch or LaunchPlan()
    plan = plan if plan.split else plan.with_options(split=row_axis(program))
    rows = {
        op.dst.type.size(plan.split)
        for op in program.ops()
        if op.dst is not None and plan.split in op.dst.type.names
    }
    groups = block.groups or max(1, max(rows, default=ROWS_PER_GROUP) // ROWS_PER_GROUP)
    if any(runs_along(op, plan.split) for op in program.ops()):
        groups = 1  # that axis cannot be shared out

    def make(depth: int) -> KernelSchedule:
        if name.startswith(("overlapped", "pingpong")):
            pingpong, early = name.startswith("pingpong") and groups > 1, name.endswith("-early")
            return overlapped(
                program, depth, plan, groups, pingpong, block.registers, early_rescale=early
            )
        flying, early = int(name == "inflight"), name == "lcsf-early"
        return multistage(program, depth, plan, groups, flying, block.registers, early)

    depth = {"unpipelined": 1, "multistage": 2}.get(name) or _deepest(
        place(program, plan.split, groups), plan, arch
    )
    made = make(min(depth, block.depth or depth))
    return KernelSchedule(name, made.loops, made.launch, made.pingpong)


def older_plan(plan: LaunchPlan) -> LaunchPlan:
    """The plan for a GPU without TMA and clusters: stores from registers, tasks in fixed order."""
    scheduler = "static" if plan.tile_scheduler == "dynamic" else plan.tile_scheduler
    return plan.with_options(
        store="direct", cluster=("", 1), tile_scheduler=scheduler, dependent=False
    )


def _deepest(placement: Placement, plan: LaunchPlan, arch: str) -> int:
    """The deepest rings that fit the block beside everything else."""
    rings = rings_of(placement, slots_of(plan, 2))
    taken = shared_layout(placement, plan, rings, arch).total
    slots = loop_slot_bytes(placement, rings)
    left = max(0, shared_limit(plan.resident, arch) - taken)
    return min(MOST_DEPTH, 2 + left // max(1, slots))
