"""Numbers about a kernel: instruction mix, loops, issue cycles, spills, serialised groups."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

from warploom.sass.decode.cubin import Cubin
from warploom.sass.decode.kernel import Instruction, Kernel
from warploom.sass.flow import inflight
from warploom.sass.flow.loops import Loop, natural_loops
from warploom.sass.flow.paths import block_edges
from warploom.sass.rules.lint import LintFinding, lint

PADDING: Final = "NOP"

# What a person asks about first; opcodes by base name.
KINDS: Final = {
    "tensor": frozenset("HMMA IMMA DMMA BMMA QMMA HGMMA QGMMA IGMMA BGMMA UTCHMMA UTCQMMA".split()),
    "mufu": frozenset(("MUFU",)),
    "global load": frozenset(("LDG", "LD")),
    "global store": frozenset(("STG", "ST", "RED", "REDG", "ATOM", "ATOMG")),
    "async copy": frozenset("LDGSTS UTMALDG UTMASTG UTMAREDG UBLKCP UBLKRED".split()),
    "shared load": frozenset(("LDS", "LDSM")),
    "shared store": frozenset("STS STSM ATOMS STAS".split()),
    "spill store": frozenset(("STL",)),
    "spill load": frozenset(("LDL",)),
    "barrier": frozenset(("BAR", "SYNCS", "UCGABAR_ARV", "UCGABAR_WAIT")),
}


@dataclass(frozen=True)
class LoopStats:
    """One loop. Cycles are issue cycles of one warp (sums of stalls, waits not counted) along the
    shortest and the longest way round; inner loops are gone through once."""

    header: int
    depth: int
    blocks: tuple[int, ...]
    instructions: int
    shortest_cycles: int
    longest_cycles: int
    kinds: dict[str, int]
    pipes: dict[str, int]


@dataclass(frozen=True)
class KernelStats:
    """One kernel. `movable` is the share of instructions that may leave their offset,
    `distance_alone` the pairs that only issue distance protects (`sass lint` names them)."""

    name: str
    arch: str
    compiler: str
    instructions: int
    registers: int
    blocks: int
    pipes: dict[str, int]
    kinds: dict[str, int]
    loops: tuple[LoopStats, ...]
    serialised_groups: int
    matrix_instructions: int
    movable: float
    distance_alone: int

    def to_json(self) -> dict[str, Any]:
        """The fields as JSON data."""
        return asdict(self)


def stats(
    cubin: Cubin, kernel: Kernel, findings: Sequence[LintFinding] | None = None
) -> KernelStats:
    """Count a kernel; NOPs are padding and do not count. `findings`: those of `lint`, where they
    are known."""
    items = [item for item in kernel.instructions if item.base != PADDING]
    findings = lint(kernel) if findings is None else findings
    return KernelStats(
        name=kernel.name,
        arch=cubin.arch,
        compiler=cubin.compiler,
        instructions=len(items),
        registers=kernel.code.registers,
        blocks=len(kernel.blocks),
        pipes=_pipes(items),
        kinds=_kinds(items),
        loops=tuple(_loop(kernel, loop) for loop in natural_loops(kernel)),
        serialised_groups=serialised_groups(kernel),
        matrix_instructions=sum(inflight.is_asynchronous(item) for item in items),
        movable=sum(not item.pinned for item in items) / max(1, len(items)),
        distance_alone=sum(finding.rule == "DISTANCE_ALONE" for finding in findings),
    )


def _pipes(items: Iterable[Instruction]) -> dict[str, int]:
    return dict(Counter(item.effects.info.pipe.value for item in items).most_common())


def _kinds(items: Sequence[Instruction]) -> dict[str, int]:
    """Counts of `KINDS`; a load that never executes (`@!PT`) is none."""
    bases = Counter(item.base for item in items if item.line.guard != "!PT")
    counts = {kind: sum(bases[base] for base in names) for kind, names in KINDS.items()}
    return {kind: count for kind, count in counts.items() if count}


def _loop(kernel: Kernel, loop: Loop) -> LoopStats:
    items = [item for number in loop.blocks for item in kernel.items(kernel.blocks[number])]
    shortest, longest = _round_trip(kernel, loop)
    return LoopStats(
        header=loop.header,
        depth=loop.depth,
        blocks=loop.blocks,
        instructions=len(items),
        shortest_cycles=shortest,
        longest_cycles=longest,
        kinds=_kinds(items),
        pipes=_pipes(items),
    )


def _round_trip(kernel: Kernel, loop: Loop) -> tuple[int, int]:
    """(fewest, most) issue cycles from the header to a latch, no block twice.

    Back edges inside are cut by visiting the blocks in reverse postorder.
    """
    following = block_edges(kernel)
    inside = set(loop.blocks)
    order: list[int] = []
    seen: set[int] = set()
    pending: list[tuple[int, bool]] = [(loop.header, False)]
    while pending:
        block, finished = pending.pop()
        if finished:
            order.append(block)
        elif block not in seen:
            seen.add(block)
            pending.append((block, True))
            pending.extend((other, False) for other in following[block] if other in inside)
    order.reverse()
    place = {block: number for number, block in enumerate(order)}
    cost = {
        number: sum(item.control.stall for item in kernel.items(kernel.blocks[number]))
        for number in order
    }
    least, most = {loop.header: cost[loop.header]}, {loop.header: cost[loop.header]}
    for block in order[1:]:
        before = [
            other for other in order[: place[block]] if other in least and block in following[other]
        ]
        if before:
            least[block] = cost[block] + min(least[other] for other in before)
            most[block] = cost[block] + max(most[other] for other in before)
    ends = [latch for latch in loop.latches if latch in least]
    if not ends:
        return sum(cost.values()), sum(cost.values())
    return min(least[latch] for latch in ends), max(most[latch] for latch in ends)


def serialised_groups(kernel: Kernel) -> int:
    """Matrix instructions that wait for the one before them to end although both stand in one
    block and nothing between them reads a result: what ptxas does when it gives up on asynchronous
    groups."""
    count = 0
    for block in kernel.blocks:
        drained = False
        results: set[int] = set()
        for item in kernel.items(block):
            if inflight.is_asynchronous(item):
                count += bool(results) and drained
                results |= {access.resource for access in item.effects.writes}
                drained = False
            elif inflight.groups_left(item) == 0:
                drained = True
            elif drained and any(access.resource in results for access in item.effects.reads):
                results.clear()  # the wait was for this
    return count
