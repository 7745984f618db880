"""Everything about a block program that its code states besides its steps, computed before it.

A printer reads these and the block program and decides nothing; the solver, the depth chooser and
the timing models read the same numbers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from warploom.codegen.analysis.cluster_reduce import check_cluster_reductions
from warploom.codegen.analysis.entry import block_threads, declared_threads
from warploom.codegen.analysis.grid import cluster_axis
from warploom.codegen.analysis.multicast import crosses_blocks
from warploom.codegen.analysis.parameters import Parameters, kernel_parameters, plain_parameters
from warploom.codegen.analysis.role_code import RoleCode, overwritten, role_code
from warploom.codegen.analysis.shared_layout import SharedLayout, block_layout
from warploom.codegen.analysis.stores import STORES, StorePath, store_paths
from warploom.codegen.ir.block import BlockProgram, Role
from warploom.codegen.ir.place import Placement
from warploom.codegen.ir.targets import check_threads, check_types
from warploom.errors import InputError
from warploom.tile import Loop, Op
from warploom.tile.ir import walk

HOPPER = "sm_90a"


@dataclass(frozen=True)
class KernelFacts:
    """What a printer needs to know of a block program for one architecture.

    layout       of shared memory
    parameters   of the kernel
    stores       the path of every store, by the op's number
    threads      of a block; `declared`: as many as its launch bounds say
    moves_registers  the groups give registers to one another once they run
    crossing     rings with a tile that is multicast over the cluster
    read_by_lanes  rings with a tile that a group also reads into registers
    taken_by     loops by index, of which one store alone takes what they make, that ends with a row
                 of the array: where it has no rows, all roles leave out the loop and the store
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
    crossing: frozenset[str]
    read_by_lanes: frozenset[str]
    taken_by: Mapping[str, Op]
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
    cluster_axis(program, plan)
    check_cluster_reductions(placement, plan)
    paths = store_paths(placement, plan, block.rings)
    layout = block_layout(block, arch)
    hopper = arch == HOPPER
    if placement.led and not hopper:
        raise InputError(
            f"kernel {program.name}: split columns {placement.split!r}: only sm_90a has code for "
            f"groups that take what one has made, not {arch}; split rows"
        )
    parameters = (kernel_parameters if hopper else plain_parameters)(block, paths)
    threads = block_threads(block)
    check_threads(program.name, threads, plan.resident, arch)
    # mma.sync has no way to overwrite.
    sums = overwritten(program) if hopper and not plan.rotate_loops else frozenset[str]()
    (loader,) = (role for role in block.roles if role.loads)
    return KernelFacts(
        layout,
        parameters,
        paths,
        threads,
        declared_threads(block) if hopper else threads,
        hopper,
        frozenset(ring.name for ring in block.rings if crosses_blocks(program, plan, ring)),
        frozenset(
            ring.name
            for op in program.ops()
            if op.kind != "mma" and op.id in placement.fusion.kept
            for ring in block.rings_read(op)
        ),
        _taken_by(placement, paths) if hopper and not plan.overlap_next_task else {},
        sums,
        role_code(block, loader, sums),
        next((role_code(block, role, sums) for role in block.roles if role.transposes), None),
        tuple(role_code(block, role, sums) for role in _distinct(block)),
    )


def _taken_by(placement: Placement, paths: Mapping[int, StorePath]) -> dict[str, Op]:
    kept = [op for op in placement.program.ops() if op.id in placement.fusion.kept]
    found: dict[str, Op] = {}
    body = placement.program.body
    for number, loop in enumerate(body):
        if not isinstance(loop, Loop) or loop.reads:
            continue
        inside = {op.id for op in walk(loop.body)}
        made = {op.dst.name for op in kept if op.id in inside and op.dst is not None}
        after = [op for op in kept if op.id not in inside and op.kind != "fill"]
        takers = [
            op for op in after if made & {var.name for var in placement.fusion.sources(op)}
        ]
        stores = any(op.id in inside and op.kind in STORES for op in kept)
        follow = [one for one in body[number + 1 :] if isinstance(one, Loop)]
        late = {op.id for one in follow for op in walk(one.body)}
        if (
            len(takers) == 1
            and not stores
            and takers[0].kind == "store"
            and paths[takers[0].id].ends_in_panels
            and not late & {takers[0].id}
        ):
            found[loop.index] = takers[0]
    return found


def _distinct(block: BlockProgram) -> tuple[Role, ...]:
    computes = [role for role in block.roles if role.computes]
    same = all(role.sections == computes[0].sections for role in computes)
    return (computes[0],) if same else tuple(computes)
