"""The one chooser: from a program and a `Policy` to its schedule.

Whoever wants a schedule says in a policy what is known of it, from the order alone to the slots of
a ring: kernels of the library, tuned and searched points, programs of users, the command line.
`schedule_for` finds the rest. Orders by name, for any program:

unpipelined   one slot a ring, one matmul at a time: only the groups of a block overlap
multistage    two slots a ring, matmuls drained every iteration
lcsf          rings as deep as fit, matmuls drained: ThunderKittens' template
inflight      the same with one matmul in flight across iterations
...-early     these two, and a slot is given back before the first op that needs what was made of it
lcsf-behind   as lcsf-early, and what is done with the last matmul's result follows the first matmul
              of the next iteration
lcsf-ahead    as lcsf-early, and the first matmuls of loaded operands alone start behind the last
              one of the iteration before
overlapped    the last matmul one iteration behind the first (FlashAttention-3, section 3.2)
pingpong      the same, and groups take turns with the tensor core (section 3.1)
...-early     these two with what the loop does to its last result (rescaling) beside the first
              matmul, right before the last one adds to it
solve         the solver's answer that replays fastest (`autosched.solve`, `autosched.chosen`)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from warploom.autosched.chosen import chosen_kernel
from warploom.autosched.depths import MOST_DEPTH
from warploom.autosched.named import groups, multistage, overlapped
from warploom.autosched.solve import Search, row_axis, solve_kernel
from warploom.codegen.analysis.shared_layout import shared_layout
from warploom.codegen.compile.build import Built, build
from warploom.codegen.ir.place import ROWS_PER_GROUP, Placement, placed_for, runs_along
from warploom.codegen.ir.plan import KernelSchedule, LaunchPlan
from warploom.codegen.ir.targets import shared_limit
from warploom.codegen.passes.rings import loop_slot_bytes, rings_of, slots_of
from warploom.codegen.simt.choose import simt
from warploom.codegen.simt.schedule import SimtSchedule
from warploom.errors import InputError
from warploom.tile import Op, Program

NAMES = (
    "unpipelined",
    "multistage",
    "lcsf",
    "inflight",
    "lcsf-early",
    "inflight-early",
    "lcsf-behind",
    "lcsf-ahead",
    "overlapped",
    "pingpong",
    "overlapped-early",
    "pingpong-early",
    "solve",
)
SLOTS = {"unpipelined": 1, "multistage": 2}  # of the rings, by orders that say so
LEAST_FITTED = 2  # slots of rings that are as deep as fit


@dataclass(frozen=True)
class Policy:
    """What is said of a schedule; what is not follows from the program.

    order      one of `NAMES`; "": the one that suits the program's loops (`fitting_name`)
    launch     how the grid is laid over the GPU; of a block with several groups, a split axis that
               it does not name is the program's
    groups     compute groups; 0: one for every 64 rows
    depth      slots of the rings, at most; 0: as many as fit
    slots      of the rings of arrays by name, where they are not those of the others
    registers  (loading, computing) a thread; None: the usual split
    vectors    the loading group also brings vectors along columns; without it each thread loads
               its elements
    search     how hard the solver looks
    """

    order: str = ""
    launch: LaunchPlan = field(default_factory=LaunchPlan)
    groups: int = 0
    depth: int = 0
    slots: Mapping[str, int] = field(default_factory=dict[str, int])
    registers: tuple[int, int] | None = None
    vectors: bool = False
    search: Search | None = None


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


def schedule_for(
    program: Program,
    policy: Policy | SimtSchedule = Policy(),
    gpu: str = "h200",
    arch: str = "sm_90a",
    say: Callable[[str], None] = lambda _: None,
) -> KernelSchedule | SimtSchedule:
    """The schedule of a program under a policy.

    A program without a matmul is laid over threads: as a `SimtSchedule` says, or by its sizes. An
    `arch` without TMA and clusters gets a plan without them, and rings that fit its shared memory;
    the solver's costs are those of `gpu`, and `say` hears of its answers. Raises `InputError` for
    an unknown order or where an order does not fit the program.
    """
    if isinstance(policy, SimtSchedule):
        return policy
    if not policy.order:
        name = fitting_name(program)
        if name is None:
            return simt(program)
        policy = replace(policy, order=name)
    if policy.order not in NAMES:
        raise InputError(f"schedule {policy.order!r}: expected one of {', '.join(NAMES)}")
    if not any(op.kind == "mma" for op in program.ops()):
        raise InputError(
            f"{program.name} has no matrix product: its loops have nothing to pipeline on the "
            "tensor core; the default schedule lays it over threads"
        )
    if arch != "sm_90a":
        if policy.order == "solve":
            raise InputError(f"schedule 'solve' is for Hopper (sm_90a), not {arch}; name another")
        policy = replace(policy, launch=older_plan(policy.launch))
    if policy.order == "solve":
        own = ("groups", "depth", "slots", "vectors")
        if told := [name for name in own if getattr(policy, name)]:
            said = f"{told[0]}={getattr(policy, told[0])}"
            raise InputError(f"schedule 'solve' with {said}: the solver finds that itself")
        asked = policy.search or Search(replayed=True)
        if asked.replayed:
            return chosen_kernel(program, policy.launch, gpu, asked, policy.registers, say=say)
        return solve_kernel(program, policy.launch, gpu, asked, policy.registers)
    return _named(program, policy, arch)


def compiled(
    program: Program,
    policy: Policy | SimtSchedule = Policy(),
    arch: str = "sm_90a",
    allow: tuple[str, ...] = (),
) -> Built:
    """The program under a policy, built; raises what `schedule_for` and `build` raise."""
    return build(program, schedule_for(program, policy, arch=arch), arch, allow)


def _named(program: Program, policy: Policy, arch: str) -> KernelSchedule:
    """The schedule of an order that people wrote."""
    plan, order = policy.launch, policy.order
    if not plan.split and policy.groups != 1:
        plan = plan.with_options(split=row_axis(program))
    count = policy.groups or _groups(program, plan.split)
    placement = placed_for(program, plan, count, policy.vectors)
    own = groups(count, policy.registers, plan.resident, plan.abreast)
    depth = policy.depth or SLOTS.get(order, MOST_DEPTH)
    if depth > LEAST_FITTED:
        depth = min(depth, _fitting(placement, plan, arch))
    behind = order.endswith("-behind")
    ahead = order.endswith("-ahead")
    early = behind or ahead or order.endswith("-early")
    pingpong = order.startswith("pingpong") and count > 1
    if order.startswith(("overlapped", "pingpong")):
        loops = overlapped(placement, own, depth, pingpong, early, policy.slots)
    else:
        in_flight = order.startswith("inflight")
        loops = multistage(placement, own, depth, in_flight, early, behind, ahead, policy.slots)
    return KernelSchedule(order, loops, plan, pingpong)


def _groups(program: Program, split: str) -> int:
    """One compute group for every 64 rows of the axis that they share out; one alone where an op
    runs along it, so that it cannot be shared out."""
    if any(runs_along(op, split) for op in program.ops()):
        return 1
    rows = {
        op.dst.type.size(split)
        for op in program.ops()
        if op.dst is not None and split in op.dst.type.names
    }
    return max(1, max(rows, default=ROWS_PER_GROUP) // ROWS_PER_GROUP)


def older_plan(plan: LaunchPlan) -> LaunchPlan:
    """The plan for a GPU without TMA and clusters: stores from registers, tasks in fixed order."""
    scheduler = "static" if plan.tile_scheduler == "dynamic" else plan.tile_scheduler
    return plan.with_options(
        store="direct", cluster=("", 1), tile_scheduler=scheduler, dependent=False
    )


def _fitting(placement: Placement, plan: LaunchPlan, arch: str) -> int:
    """The slots that rings may have beside everything else in the block; raises `DoesNotFit` where
    there is no room for two."""
    rings = rings_of(placement, slots_of(plan, LEAST_FITTED))
    taken = shared_layout(placement, plan, rings, arch).total
    slots = loop_slot_bytes(placement, rings)
    left = max(0, shared_limit(plan.resident, arch) - taken)
    return LEAST_FITTED + left // max(1, slots)
