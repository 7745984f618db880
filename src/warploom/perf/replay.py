"""Cycles an iteration of a built kernel: its machine code replayed on one scheduler partition.

What is walked is what ptxas made of the steps: its order, its waits, its stalls. Each steady loop
of the program is found in the cubin, one warp of each compute group runs it (`timing.partition`),
and the gates are those of the block program (`perf.gates`).

Between the loops the warps take the usual way through the machine code, its gates open.

Groups come to rest in one of few phases, and which one depends on when each begins. Without turns
that is not known before a kernel runs: two groups of heads of 64 in tiles of 128 x 128 were counted
at 2200 cycles an iteration where they begin together (2187 by the replay; 1698 half an iteration
apart), and at 1934 where a causal mask lets them come apart. So each start is taken to be as likely
as another one, and the answer is the mean over several.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from difflib import SequenceMatcher
from itertools import pairwise
from math import inf, prod
from statistics import fmean
from typing import Any

from warploom.codegen.ir.block import BlockProgram, Pipeline
from warploom.codegen.ir.plan import KernelSchedule
from warploom.codegen.ir.steps import Fill, Issue, Step
from warploom.codegen.passes.lower import lower
from warploom.errors import CheckFailed
from warploom.perf.extract import extract
from warploom.perf.gates import SIGNALS, WAITS, Blocks, Copy, Gates, Rates, loading_of, section_of
from warploom.sass.decode.cubin import parse
from warploom.sass.decode.kernel import Kernel, decode
from warploom.sass.decode.opcodes import Pipe
from warploom.sass.flow.loops import natural_loops
from warploom.sass.flow.steady import SteadyLoop, steady_loops, way_between
from warploom.sass.timing.costs import hopper
from warploom.sass.timing.partition import Partition
from warploom.sass.timing.slots import Line, slots_of
from warploom.schedule.model.bounds import Bounds, lower_bounds
from warploom.schedule.model.costs import CostTable, costs
from warploom.schedule.model.graph import Graph
from warploom.schedule.model.target import UNIT_TITLES
from warploom.tile import Op, Program

RULES = 7  # version of the rules: what was concluded from other ones is not used again
ITERATIONS = 24
STARTS = (0.0, 0.15, 0.3, 0.45)  # of the least interval: how late a group begins
BEYOND = 4  # passes, beyond as many as a ring has slots, that are as long where a walk has settled
WARPS = 4  # of a group
MATMUL_ROWS = 64  # of the first operand of a matrix instruction
OPERAND_BYTES = 32  # of a row that a matrix instruction reads
BANK_BYTES, LANE_CYCLES = 128, 4  # of a warp's access of 32 bits a lane, and its cycles in the pipe
# Operands whose products take other energy than those of bf16.
MATMULS = {"fp16": "matmul_fp16", "e4m3": "matmul_fp8", "e5m2": "matmul_fp8"}
TURN_BYTES, TURN_INSTRUCTIONS = 512, 6  # of a step of warps that turn operands


@dataclass(frozen=True)
class Prediction:
    """One loop: cycles an iteration in the steady state, and what no schedule can beat.

    ahead   iterations of which a part runs before the steady state and the rest after it
    events  what a block does in an iteration, by the names that `machine.keys` has behind "energy."
    """

    loop: str
    cycles: float
    bound: int
    reason: str
    flops: int
    ahead: int = 0
    events: Mapping[str, float] = field(default_factory=dict[str, float])


@dataclass(frozen=True)
class Ends:
    """Cycles outside of the steady loops; infinite where the code has no such way.

    begin    from the kernel's entry to the first loop
    between  from each loop to the next one, in the order of the program
    tail     from the last loop to the end of its task
    head     from there to the first loop of the next task
    finish   from the last loop to the kernel's end
    """

    begin: float = 0.0
    between: float = 0.0
    tail: float = 0.0
    head: float = 0.0
    finish: float = 0.0


@dataclass(frozen=True)
class Replay:
    """Predictions by loop, in the order of the program, and what lies around the loops."""

    loops: Mapping[str, Prediction]
    ends: Ends

    @property
    def cycles(self) -> float:
        """Cycles an iteration of all loops together."""
        return cycles_of(self.loops)

    def to_json(self) -> dict[str, Any]:
        """As plain JSON data."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Replay:
        """Back from JSON data."""
        loops = {name: Prediction(**one) for name, one in data["loops"].items()}
        return cls(loops, Ends(**data["ends"]))


def replay(
    program: Program,
    schedule: KernelSchedule,
    cubin: bytes,
    gpu: str = "h200",
    rates: Rates | None = None,
) -> Replay:
    """What the walk of the machine code says that `schedule` was built to.

    `rates` is of loads while all SMs load; where it does not say, all ask for different bytes.
    Raises `CheckFailed` where a loop of the program has no counterpart in the
    cubin, or where the walk comes to a halt.
    """
    block, kernel = lower(program, schedule), decode(parse(cubin, program.name))
    return of_walks(
        list(walked(program, schedule, block, kernel, costs(gpu), rates or {})), block, kernel
    )


def of_walks(walks: Sequence[Walk], block: BlockProgram, kernel: Kernel) -> Replay:
    """What the walks of a kernel's loops say."""
    found = {
        one.index: Prediction(
            one.index,
            one.cycles,
            *machine_bound(one.bounds),
            one.flops,
            len(one.sections[0].prologue),
            _events(block, one.index, one.code, one.unroll),
        )
        for one in walks
    }
    return Replay(found, _ends(kernel, [one.steady for one in walks], block) if walks else Ends())


@dataclass(frozen=True)
class Walk:
    """The walk of one loop: cycles are the mean over starts, all else is of the fastest one.

    sections    the steps of each group; `unroll` iterations of them are a pass through `code`
    copies      what the first block's loading thread did meanwhile
    """

    index: str
    sections: Sequence[Pipeline]
    steady: SteadyLoop
    code: tuple[Line, ...]
    unroll: int
    bounds: Bounds
    flops: int
    cycles: float
    partition: Partition
    copies: tuple[Copy, ...]


def walked(
    program: Program,
    schedule: KernelSchedule,
    block: BlockProgram,
    kernel: Kernel,
    table: CostTable,
    rates: Rates,
) -> Iterator[Walk]:
    """The walk of every loop with a matmul; raises as `replay` does."""
    loops = steady_loops(kernel)
    for loop in program.loops():
        problem = extract(block.placement, loop, table, skip_unit=schedule.launch.skip_unit)
        bounds = lower_bounds(problem.graph, problem.target)
        sections = [section_of(block, loop.index, part) for part in range(block.placement.parts)]
        if not sections[0].steady or not any(isinstance(s, Issue) for s in sections[0].steady):
            continue
        steady, unroll = _counterpart(loops, sections[0], problem.graph)
        code = slots_of(steady)
        starts = [share * bounds.minimum for share in STARTS]
        if len(sections) * schedule.launch.resident == 1:
            starts = [0.0]
        walks = [_pace(block, loop.index, code, unroll, one, table, rates) for one in starts]
        cycles = fmean(pace for pace, _, _ in walks)
        _, partition, copied = min(walks, key=lambda walk: walk[0])
        flops = problem.graph.flops
        yield Walk(
            loop.index, sections, steady, code, unroll, bounds, flops, cycles, partition, copied
        )


def machine_bound(bounds: Bounds) -> tuple[int, str]:
    """(cycles an iteration that no schedule beats on the machine, what binds).

    The graph's own bound less what shared memory is charged with: that adds up reads of operands
    and writes of loads one after another, and is an upper estimate. Steps of 128x192x64 in bf16,
    charged 832 cycles, were counted at 767 on an H200; their matmuls take 768.
    """
    certain = {unit: cycles for unit, cycles in bounds.load.items() if unit != "SMEM"}
    unit = max(certain, key=lambda name: certain[name], default="")
    least = certain.get(unit, 0)
    if bounds.recurrence > least:
        return max(1, bounds.recurrence), replace(bounds, resource=0).reason
    return max(1, least), f"{UNIT_TITLES.get(unit, f'unit {unit}')} is busy all that time"


def cycles_of(found: Mapping[str, Prediction]) -> float:
    """Cycles an iteration of all loops together."""
    return sum(one.cycles for one in found.values())


# ---- which loop of the machine code it is


def _counterpart(
    loops: Sequence[SteadyLoop], section: Pipeline, graph: Graph
) -> tuple[SteadyLoop, int]:
    """The steady loop in the cubin, and iterations a pass: as many gates, signals and matmuls as
    the steps have, in the most similar order (the loop for few iterations has the same ones)."""
    wanted = _steps_as_tokens(section.steady, graph)
    best: tuple[float, SteadyLoop, int] | None = None
    for code in loops:
        tokens = _code_as_tokens(slots_of(code))
        unroll, rest = divmod(len(tokens), len(wanted))
        if rest or sorted(tokens) != sorted(wanted * unroll):
            continue
        alike = SequenceMatcher(None, tokens, wanted * unroll, autojunk=False).ratio()
        if best is None or (unroll, alike) > (best[2], best[0]):
            best = alike, code, unroll
    if best is None:
        raise CheckFailed(
            f"loop {section.loop.index}: no loop of the machine code has its {len(wanted)} waits, "
            "signals and matmuls an iteration"
        )
    return best[1], best[2]


def _steps_as_tokens(steps: Sequence[Step], graph: Graph) -> list[str]:
    tokens: list[str] = []
    for step in steps:
        if isinstance(step, WAITS):
            tokens.append("gate")
        elif isinstance(step, SIGNALS):
            tokens.append("signal")
        elif isinstance(step, Issue):
            node = next(n for n in graph.nodes if n.id.rsplit("/", 1)[0] == step.op.label)
            tokens.append(f"matmul {sum(u.cycles for u in node.uses if u.unit == 'TC')}")
    return tokens


def _code_as_tokens(code: Sequence[Line]) -> list[str]:
    tokens: list[str] = []
    matmul = 0.0
    for slot, _ in code:
        if slot.matmul:
            matmul += slot.matmul
            if slot.commits:
                tokens.append(f"matmul {round(matmul)}")
                matmul = 0.0
        elif slot.gate:
            tokens.append("gate")
        elif slot.signal:
            tokens.append("signal")
    return tokens


# ---- the walk


def _ends(kernel: Kernel, loops: Sequence[SteadyLoop], block: BlockProgram) -> Ends:
    first, last = loops[0], loops[-1]
    groups = block.placement.parts

    def cycles(*ends: tuple[SteadyLoop | int, int | None]) -> float:
        total = 0.0
        for one, other in ends:
            way = way_between(kernel, one, other)
            total += inf if way is None else _walked(slots_of(way), groups)
        return total

    around = [
        loop
        for loop in natural_loops(kernel)
        if all(one.header in loop.blocks and one.header != loop.header for one in (first, last))
    ]
    tail, head = inf, inf
    if around:  # blocks take several tasks: the innermost loop around all others
        task = min(around, key=lambda loop: len(loop.blocks))
        tail, head = cycles((last, task.header)), cycles((task.header, first.header))
    return Ends(
        cycles((0, first.header)),
        cycles(*((one, other.header) for one, other in pairwise(loops))),
        tail,
        head,
        cycles((last, None)),
    )


def _walked(code: tuple[Line, ...], groups: int) -> float:
    """Cycles of code outside of loops, by as many groups at a time, with its gates open."""
    if not code:
        return 0.0
    walk = Partition([code] * groups, [0.0] * groups)
    return max(own[0] for own in walk.run(1))


def _events(
    block: BlockProgram, index: str, code: tuple[Line, ...], unroll: int
) -> Mapping[str, float]:
    """What all groups do in an iteration, and the KiB that are loaded for it."""
    found: dict[str, float] = {}

    def add(name: str, count: float) -> None:
        found[name] = found.get(name, 0.0) + count

    groups = block.placement.parts / unroll
    matmul = matmul_of(block, index)
    for slot, _ in code:
        if slot.matmul:
            rows = slot.matmul * hopper().columns + (0 if slot.from_registers else MATMUL_ROWS)
            add(matmul, groups * slot.matmul)
            add("operands", groups * rows * OPERAND_BYTES)
        elif slot.pipe is Pipe.LSU:
            add("smem", groups * WARPS * slot.occupancy * BANK_BYTES / LANE_CYCLES)
        elif slot.reads:
            add("instruction", groups * WARPS)
    for step in (step for section in loading_of(block, index) for step in section.steady):
        if not isinstance(step, Fill) or step.op.dst is None:
            continue
        size = prod(step.op.dst.type.shape) * step.op.dst.type.dtype.bytes
        if block.is_turned(block.ring(step.ring)):
            add("smem", 2 * size)
            add("instruction", size / TURN_BYTES * TURN_INSTRUCTIONS)
        else:
            add("copy", block.placement.shared[step.op.dst.name][1].bytes)
    return found


def matmul_of(block: BlockProgram, index: str) -> str:
    """The name that the energy of a loop's matmuls has, by the operands of the first."""
    loops = block.placement.program.loops()
    body = next(loop.body for loop in loops if loop.index == index)
    kinds = (op.srcs[0].type.dtype.name for op in body if isinstance(op, Op) and op.kind == "mma")
    return MATMULS.get(next(kinds, ""), "matmul")


def _pace(
    block: BlockProgram,
    index: str,
    code: tuple[Line, ...],
    unroll: int,
    late: float,
    table: CostTable,
    rates: Rates,
) -> tuple[float, Partition, tuple[Copy, ...]]:
    groups = block.placement.parts * block.launch.resident
    passes = max(8, ITERATIONS // unroll)
    gates = Blocks([Gates(block, index, table, rates) for _ in range(block.launch.resident)])
    walk = Partition([code] * groups, [late * group for group in range(groups)], None, gates)
    ends = walk.run(passes, BEYOND + max(ring.depth for ring in block.rings))
    last = min(passes, *map(len, ends)) - 1
    half = passes // 2 if last == passes - 1 else last - BEYOND
    pace = max((own[last] - own[half]) / (last - half) for own in ends) / unroll
    return pace, walk, gates.blocks[0].copies()
