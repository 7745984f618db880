"""Everything about a block program that its code states besides its steps, computed before it.

A printer reads these and the block program and decides nothing; the solver, the depth chooser and
the timing models read the same numbers.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from warploom.codegen.analysis.cluster_reduce import check_cluster_reductions
from warploom.codegen.analysis.entry import block_threads, declared_threads
from warploom.codegen.analysis.grid import cluster_axis
from warploom.codegen.analysis.matmuls import held_rings
from warploom.codegen.analysis.multicast import crosses_blocks
from warploom.codegen.analysis.parameters import Parameters, kernel_parameters, plain_parameters
from warploom.codegen.analysis.role_code import RoleCode, overwritten, role_code
from warploom.codegen.analysis.shared_layout import SharedLayout, block_layout, kept_rings
from warploom.codegen.analysis.stores import STORES, StorePath, store_paths
from warploom.codegen.ir.block import BlockProgram, Pipeline, Role, steps_of
from warploom.codegen.ir.place import Placement
from warploom.codegen.ir.steps import Release, Wait
from warploom.codegen.ir.targets import check_threads, check_types
from warploom.errors import InputError
from warploom.tile import Op
from warploom.tile.ir import walk

HOPPER = "sm_90a"


@dataclass(frozen=True)
class Ending:
    """A loop of which one store takes what it makes, with what is done for them alone before it.

    store    ends with a row of the array: where it has no rows, every role leaves all of this out
    before   ops in front of the loop, by number
    """

    store: Op
    before: frozenset[int]


@dataclass(frozen=True)
class KernelFacts:
    """What a printer needs to know of a block program for one architecture.

    layout       of shared memory
    parameters   of the kernel
    stores       the path of every store, by the op's number
    threads      of a block; `declared`: as many as its launch bounds say
    moves_registers  the groups give registers to one another once they run
    kept         rings that are filled once a block (`shared_layout.kept_rings`)
    crossing     rings with a tile that is multicast over the cluster
    read_by_lanes  rings with a tile that a group also reads into registers
    cursors      the ring whose cursor a ring has in the groups, where several go together
    endings      loops that all roles leave out where the store behind them has no rows, by index
    overwritten  sums that the first matmul overwrites
    loader       the code of the role that copies
    transposer   the code of the role that turns operands; None: there is none
    codes        the code of the compute roles: of one for all groups where they do the same
    """

    layout: SharedLayout
    parameters: Parameters
    stores: Mapping[int, StorePath]
    threads: int
    declared: int
    moves_registers: bool
    kept: frozenset[str]
    crossing: frozenset[str]
    read_by_lanes: frozenset[str]
    cursors: Mapping[str, str]
    endings: Mapping[str, Ending]
    overwritten: frozenset[str]
    loader: RoleCode
    transposer: RoleCode | None
    codes: tuple[RoleCode, ...]


def kernel_facts(block: BlockProgram, arch: str = HOPPER) -> KernelFacts:
    """The facts of a block program for an architecture.

    Raises `InputError` at the user's line for what the architecture cannot do, and `DoesNotFit` for
    a block that is too large.
    """
    placement, plan = block.placement, block.launch
    program = placement.program
    for op in program.ops():
        check_types(op, arch)
    if placement.abreast > 1 and (placement.parts > 1 or placement.turned or arch != HOPPER):
        raise InputError(
            f"launch plan: abreast={placement.abreast}: {program.name} has {placement.parts} "
            f"groups a task on {arch}, expected one on {HOPPER}, and no operands that warps turn"
        )
    cluster_axis(program, plan)
    check_cluster_reductions(placement, plan)
    paths = store_paths(placement, plan, block.rings)
    layout = block_layout(block, arch)
    hopper = arch == HOPPER
    if placement.led and not hopper:
        raise InputError(
            f"kernel {program.name}: split columns or divided work, {placement.split!r}: only "
            f"sm_90a has code for groups that take what one has made, not {arch}; split rows, and "
            "let every group do it all"
        )
    parameters = (kernel_parameters if hopper else plain_parameters)(block, paths)
    threads = block_threads(block)
    check_threads(program.name, threads, plan.resident, arch)
    # mma.sync has no way to overwrite.
    sums = overwritten(program) if hopper else frozenset[str]()
    (loader,) = (role for role in block.roles if role.loads)
    return KernelFacts(
        layout,
        parameters,
        paths,
        threads,
        declared_threads(block) if hopper else threads,
        hopper,
        kept_rings(placement, block.rings),
        frozenset(ring.name for ring in block.rings if crosses_blocks(program, plan, ring)),
        frozenset(
            ring.name
            for op in program.ops()
            if op.kind != "mma" and op.id in placement.fusion.kept
            for ring in block.rings_read(op)
        )
        | held_rings(block),
        _cursors(block) if plan.one_cursor else {},
        _endings(placement, paths) if hopper and not plan.overlap_next_task else {},
        sums,
        role_code(block, loader, sums),
        next((role_code(block, role, sums) for role in block.roles if role.transposes), None),
        tuple(role_code(block, role, sums) for role in _distinct(block)),
    )


def _cursors(block: BlockProgram) -> dict[str, str]:
    """The first of the rings that go together, by ring: those that all groups wait for and give
    back once in each iteration of one loop, as many slots each."""
    role, *others = _distinct(block)
    steps = [step for section in role.sections for step in steps_of(section)]
    taken = [step.ring for step in steps if isinstance(step, Wait)]
    found: dict[str, str] = {}
    for section in () if others else role.sections:
        if not isinstance(section, Pipeline) or section.depth or section.skip:
            continue
        given = [step.ring for step in section.steady if isinstance(step, Release)]
        first: dict[int, str] = {}
        for step in section.steady:
            if isinstance(step, Wait) and taken.count(step.ring) == given.count(step.ring) == 1:
                found[step.ring] = first.setdefault(block.ring(step.ring).depth, step.ring)
    return found


def _endings(placement: Placement, paths: Mapping[int, StorePath]) -> dict[str, Ending]:
    """The loops that are left out where a store has no rows, by index."""
    program, fusion = placement.program, placement.fusion
    kept = [op for op in program.ops() if op.id in fusion.kept]
    inside = {op.id: loop.index for loop in program.loops() for op in walk(loop.body)}

    def readers(ops: Collection[int]) -> set[int]:
        made = {op.dst.name for op in kept if op.id in ops and op.dst is not None}
        found = {op.id for op in kept if made & {var.name for var in fusion.sources(op)}}
        return found - set(ops)

    found: dict[str, Ending] = {}
    for loop in program.loops():
        own = {op.id for op in kept if inside.get(op.id) == loop.index}
        (taker, *others) = [op for op in kept if op.id in readers(own)] or [None]
        plain = not loop.reads and not any(op.kind in STORES for op in kept if op.id in own)
        if taker is None or others or not plain or taker.id in inside or taker.kind != "store":
            continue
        if paths[taker.id].ends_in_panels:
            known = own | {taker.id}
            outside = [op.id for op in reversed(kept) if op.id not in inside and op.id < min(own)]
            before = {one for one in outside if readers({one}) <= known}
            found[loop.index] = Ending(taker, frozenset(before))
    return found


def _distinct(block: BlockProgram) -> tuple[Role, ...]:
    computes = [role for role in block.roles if role.computes]
    same = all(role.sections == computes[0].sections for role in computes)
    return (computes[0],) if same else tuple(computes)
