"""Where everything of a block lies in its shared memory.

One after the other: the rings' slots, the panels of stores, what groups exchange, the parts of sums
over a cluster, operands made in registers, and last the barriers. Operands begin where a swizzle
does; the others are multiples of 16 bytes by themselves.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from warploom.codegen.analysis.cluster_reduce import BARRIERS, exchange_bytes, reduces_in_cluster
from warploom.codegen.analysis.exchanges import WORD, region_bytes
from warploom.codegen.analysis.grid import TASK_SLOTS
from warploom.codegen.analysis.stores import over_ring, panel_bytes, store_paths
from warploom.codegen.ir.block import BlockProgram, Ring
from warploom.codegen.ir.layout import ALIGNMENT, CHUNK
from warploom.codegen.ir.place import Placement
from warploom.codegen.ir.plan import LaunchPlan
from warploom.codegen.ir.targets import shared_limit
from warploom.errors import DoesNotFit
from warploom.tile import Op, TileType
from warploom.tile.evaluate import parts_of

BARRIER_BYTES = 8
TASK_BYTES = 4  # of a task's number
HANDED_SLOTS = 2
BASE_ALIGNMENT = 1024  # of the block's first byte: swizzled tiles need it


@dataclass(frozen=True)
class SharedLayout:
    """Byte offsets in a block's shared memory, from its aligned base on.

    rings, full, empty   the slots of every ring and the first of its barriers
    panels               of stores; over an operand's slot where the plan says so
    scratch              what each group exchanges (`scratch_bytes` of each)
    vectors              that each group shares among its threads (`vector_bytes` of each)
    handed               vectors that one group makes for all, with two slots in turn
    parts                of sums over a cluster (`parts_bytes` of each group)
    staged               operands made in registers, by variable: those of all groups
                         (`common_bytes` from slot to slot), then of the first group its own
                         (`staged_bytes` of each)
    parts_full           barriers of the sums
    carried              barriers of what warps of the loading group copy
    tasks                barriers and numbers of the tasks that are handed over
    total                bytes of the block, the alignment of its base included
    """

    rings: Mapping[str, int]
    full: Mapping[str, int]
    empty: Mapping[str, int]
    panels: int
    panel_bytes: int
    scratch: int
    scratch_bytes: int
    vectors: Mapping[str, int]
    vector_bytes: int
    handed: Mapping[str, int]
    parts: int
    parts_bytes: int
    staged: Mapping[str, int]
    common_bytes: Mapping[str, int]
    staged_bytes: int
    parts_full: int
    carried: int
    tasks: int
    total: int


def block_layout(block: BlockProgram, arch: str = "sm_90a") -> SharedLayout:
    """The layout of a block program; raises `DoesNotFit` where a block of `arch` has less."""
    return shared_layout(block.placement, block.launch, block.rings, arch)


def shared_layout(
    placement: Placement, plan: LaunchPlan, rings: Sequence[Ring], arch: str = "sm_90a"
) -> SharedLayout:
    """The layout of a block with these rings; raises `DoesNotFit` where a block of `arch` has less.

    With several blocks on an SM the base is not rounded up, as every KiB counts: drivers give an
    aligned one, which the kernel checks.
    """
    groups = placement.groups
    panels = panel_bytes(plan, store_paths(placement, plan, rings))
    scratch, parts = region_bytes(placement), exchange_bytes(placement)
    used = _Cursor()
    kept = kept_rings(placement, rings)
    copies = {ring.name: 1 if ring.name in kept else placement.abreast for ring in rings}
    slots = {
        ring.name: used.take(copies[ring.name] * ring.depth * ring.slot_bytes) for ring in rings
    }
    over = over_ring(plan, rings)
    panels_at = used.take(panels * groups) if over is None else slots[over.name]
    scratch_at = used.take(scratch * groups)
    among = _Cursor()
    kinds = {op.dst.name: op.dst.type for op in placement.program.ops() if op.dst is not None}
    vectors = {
        name: used.at + among.take(-(-kinds[name].shape[0] * WORD // CHUNK) * CHUNK)
        for name in sorted(placement.spread)
    }
    used.take(among.at * groups)
    vectors_handed = sorted(placement.handed - placement.staged.keys())
    handed = {name: used.take(HANDED_SLOTS * handed_bytes(kinds[name])) for name in vectors_handed}
    parts_at = used.take(parts * groups)
    if placement.staged:
        used.align(ALIGNMENT)
    tiles = placement.staged.items()
    room = {name: -(-tile.bytes // ALIGNMENT) * ALIGNMENT for name, tile in tiles}
    staged = {
        name: used.take(plan.staged_slots * room[name]) for name in room if name in placement.common
    }
    common = {name: room[name] for name in room if name in placement.common}
    inside = _Cursor()
    staged |= {
        name: used.at + inside.take(room[name]) for name in room if name not in placement.common
    }
    used.take(inside.at * groups)
    full: dict[str, int] = {}
    empty: dict[str, int] = {}
    for ring in rings:
        full[ring.name] = used.take(copies[ring.name] * ring.depth * BARRIER_BYTES)
        empty[ring.name] = used.take(copies[ring.name] * ring.depth * BARRIER_BYTES)
    barriers = BARRIERS * groups if reduces_in_cluster(placement.program) else 0
    parts_full = used.take(barriers * BARRIER_BYTES)
    carried = used.take(2 * BARRIER_BYTES * groups * plan.store_warps)
    dynamic = plan.tile_scheduler == "dynamic"
    tasks = used.take(TASK_SLOTS * (2 * BARRIER_BYTES + TASK_BYTES) * dynamic)
    total = used.at + (BASE_ALIGNMENT if plan.resident == 1 else 0)
    found = SharedLayout(
        slots, full, empty, panels_at, panels, scratch_at, scratch, vectors, among.at, handed,
        parts_at, parts, staged, common, inside.at, parts_full, carried, tasks, total,
    )  # fmt: skip
    _check_fit(found, placement, plan.resident, rings, arch)
    return found


def kept_rings(placement: Placement, rings: Sequence[Ring]) -> frozenset[str]:
    """The rings with what lies at one place in memory for all tasks, where groups do tasks abreast:
    the block loads them once."""
    if placement.abreast == 1:
        return frozenset()
    loads = {ring.name: [op for b in ring.buffers for op in b.loads] for ring in rings}
    return frozenset(
        name
        for name, own in loads.items()
        if all(op.kind == "load" and not _moves(op) and len(op.spans) == 2 for op in own)
    )


def _moves(op: Op) -> bool:
    return any(span.start.symbols() for spans in parts_of(op.spans) for span in spans)


def handed_bytes(kind: TileType) -> int:
    """Bytes of one slot of a vector that one group makes for all."""
    return -(-kind.shape[0] * WORD // CHUNK) * CHUNK


class _Cursor:
    """The next free byte."""

    def __init__(self) -> None:
        self.at = 0

    def take(self, count: int) -> int:
        """Where the next `count` bytes lie."""
        start = self.at
        self.at += count
        return start

    def align(self, step: int) -> None:
        self.at = -(-self.at // step) * step


def _check_fit(
    layout: SharedLayout, placement: Placement, resident: int, rings: Sequence[Ring], arch: str
) -> None:
    limit = shared_limit(resident, arch)
    if layout.total <= limit:
        return
    each = ", ".join(f"{r.name} {r.depth} x {r.slot_bytes:,}" for r in rings)
    others = {
        "store panels": layout.panel_bytes,
        "exchanges": layout.scratch_bytes,
        "vectors": layout.vector_bytes,
        "operands": layout.staged_bytes,
    }
    rest = "".join(f", {what} {n * placement.groups:,}" for what, n in others.items() if n)
    many = f" a block for {resident} on an SM" if resident > 1 else ""
    raise DoesNotFit(
        f"kernel {placement.program.name} needs {layout.total:,} B of shared memory "
        f"({each}{rest}), {arch} has {limit:,}{many}; make a ring shallower or the "
        "tile smaller"
    )
