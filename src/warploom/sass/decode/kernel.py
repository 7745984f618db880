"""A kernel as the other passes see it: instructions with text, effects and control, and blocks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Final

from warploom.sass.decode import nvinfo
from warploom.sass.decode.branches import indirect_targets, relative_target
from warploom.sass.decode.control import CONTROL_MASK, Control
from warploom.sass.decode.cubin import WORD_BYTES, Cubin, KernelCode
from warploom.sass.decode.disassembly import Line, Listing, disassemble
from warploom.sass.decode.effects import Effects, effects_of
from warploom.sass.decode.opcodes import TERMINATORS, Order, Pipe
from warploom.sass.decode.operand_slots import slot_words
from warploom.sass.decode.operands import Kind
from warploom.sass.decode.resources import UNIFORM_BASE, Access

GROUP_SLOT: Final = "group"

# Instructions whose word encodes a distance from their own address.
RELATIVE: Final = frozenset("BRA CALL RET BSSY WARPSYNC BRX JMP UBSSY LEPC".split())


@dataclass(frozen=True)
class Instruction:
    """One instruction. `pinned` names why it keeps its offset, empty when it may move."""

    index: int
    line: Line
    low: int
    high: int
    control: Control
    effects: Effects
    pinned: str

    @property
    def offset(self) -> int:
        """Byte offset in the kernel's code."""
        return self.index * WORD_BYTES

    @property
    def identity(self) -> tuple[int, int]:
        """The word without its control field: what a reordering must preserve."""
        return self.low, self.high & ~CONTROL_MASK

    # Flows and rules ask for these of every instruction many times over.

    @cached_property
    def base(self) -> str:
        """The opcode without modifiers."""
        return self.line.opcode.split(".", 1)[0]

    @cached_property
    def slot_words(self) -> dict[int, tuple[int, ...]]:
        """{slot of the operand cache: every register read through it}, in order."""
        return slot_words(self)

    def __str__(self) -> str:
        return f"{self.offset:#06x} {self.line.text}"


@dataclass(frozen=True)
class Block:
    """A basic block: instructions `start` to `end` (exclusive) and where control goes after it."""

    index: int
    start: int
    end: int
    successors: tuple[int, ...]
    predecessors: tuple[int, ...]

    @property
    def size(self) -> int:
        """Number of instructions."""
        return self.end - self.start


@dataclass(frozen=True)
class Kernel:
    """A decoded kernel of a cubin."""

    name: str
    sm: int
    code: KernelCode
    instructions: tuple[Instruction, ...]
    blocks: tuple[Block, ...]
    labels: Mapping[int, tuple[str, ...]]
    info: bytes

    def items(self, block: Block) -> tuple[Instruction, ...]:
        """The instructions of a block."""
        return self.instructions[block.start : block.end]

    @cached_property
    def block_of(self) -> tuple[int, ...]:
        """The block index of every instruction."""
        return tuple(block.index for block in self.blocks for _ in range(block.size))

    @cached_property
    def labelled_blocks(self) -> dict[str, int]:
        """The block that each label inside the code is in."""
        return {
            name: self.block_of[offset // WORD_BYTES]
            for offset, names in self.labels.items()
            for name in names
            if offset // WORD_BYTES < len(self.instructions)
        }


def decode(cubin: Cubin, name: str | None = None, with_source: bool = False) -> Kernel:
    """Decode one kernel of a cubin (the only one when `name` is None)."""
    code = cubin.kernel(name)
    return build_kernel(cubin, code, disassemble(cubin, with_source)[code.name])


def decode_all(cubin: Cubin) -> dict[str, Kernel]:
    """Decode every kernel of a cubin with one run of the disassembler."""
    listings = disassemble(cubin)
    return {name: build_kernel(cubin, code, listings[name]) for name, code in cubin.kernels.items()}


def build_kernel(cubin: Cubin, code: KernelCode, listing: Listing) -> Kernel:
    """Join words, text, effects and pins, and split the code into blocks."""
    info = cubin.section_bytes(code.info) if code.info else b""
    named = nvinfo.pinned_offsets(info, len(code.words) * WORD_BYTES)
    instructions: list[Instruction] = []
    for index, ((low, high), line) in enumerate(zip(code.words, listing.lines, strict=True)):
        effects = effects_of(line, (low, high), cubin.sm)
        instructions.append(
            Instruction(
                index=index,
                line=line,
                low=low,
                high=high,
                control=Control.decode(high),
                effects=effects,
                pinned=_pin(line, effects, code, named),
            )
        )
    instructions = _with_group_registers(instructions)
    blocks = split_blocks(instructions, listing.labels, info, cubin.sm)
    return Kernel(
        code.name, cubin.sm, code, tuple(instructions), blocks, dict(listing.labels), info
    )


def _with_group_registers(instructions: list[Instruction]) -> list[Instruction]:
    """Let WARPGROUP instructions touch every register an asynchronous matrix instruction touches.

    Between a warp-group matrix instruction and the WARPGROUP.DEPBAR that retires it the hardware
    reads its A registers and updates its accumulators. With these accesses no instruction that
    names such a register can cross a WARPGROUP instruction in either direction.
    """
    touched = sorted(
        {
            access.resource
            for item in instructions
            if item.effects.info.pipe is Pipe.ASYNC
            for access in (*item.effects.reads, *item.effects.writes)
            if access.resource < UNIFORM_BASE
        }
    )
    if not touched:
        return instructions
    accesses = tuple(Access(resource, GROUP_SLOT) for resource in touched)
    return [
        replace(
            item,
            effects=replace(
                item.effects,
                reads=(*item.effects.reads, *accesses),
                writes=(*item.effects.writes, *accesses),
            ),
        )
        if item.base == "WARPGROUP"
        else item
        for item in instructions
    ]


def _pin(line: Line, effects: Effects, code: KernelCode, named: Mapping[int, str]) -> str:
    """Why this instruction keeps its offset; empty when it may move."""
    base = line.opcode.split(".", 1)[0]
    if effects.info.name == "UNKNOWN":
        return f"unknown opcode {line.opcode}"
    if effects.info.order is Order.FIXED:
        return "control flow"
    if base in RELATIVE:
        return "relative to its own address"
    if line.offset in named:
        return f".nv.info {named[line.offset]}"
    if any(offset in code.relocations for offset in range(line.offset, line.offset + WORD_BYTES)):
        return "a relocation points into it"
    if any(operand.kind is Kind.CONVERGENCE for operand in effects.operands):
        return "convergence barrier"
    if "CLOCK" in line.operands or "TIMER" in line.operands:
        return "reads a clock"
    return ""


@dataclass(frozen=True)
class _Flow:
    """What is needed to find a block's successors."""

    block_at: Mapping[int, int]
    targets: Mapping[int, int]
    anywhere: tuple[int, ...]
    after_call: tuple[int, ...]
    convergence: Mapping[str, set[int]]
    count: int


def split_blocks(
    instructions: Sequence[Instruction], labels: Mapping[int, tuple[str, ...]], info: bytes, sm: int
) -> tuple[Block, ...]:
    """Basic blocks and their edges. Indirect control flow may go to every block start we know.

    Newer nvdisasm also labels instructions that a table of `.nv.info` lists (lane exchanges,
    mbarrier operations);
    such a label begins a block only where something branches to it.
    """
    size = len(instructions) * WORD_BYTES
    targets = {
        item.index: target // WORD_BYTES
        for item in instructions
        if (target := relative_target(item.line.opcode, item.offset, (item.low, item.high), sm))
        is not None
        and 0 <= target < size
    }
    # nvdisasm 13.5 labels what .nv.info names (each SHFL of a cooperative group, each mbarrier
    # operation), 13.1 does not: such a label is no entry, and blocks must not depend on who printed
    # the listing.
    said = set(labels) - nvinfo.labelled_offsets(info, size)
    entered = {offset // WORD_BYTES for offset in (*said, *indirect_targets(info, size))}
    entered |= set(targets.values())
    starts = {0, *entered, *(item.index + 1 for item in instructions if item.base in TERMINATORS)}
    ordered = sorted(start for start in starts if start < len(instructions))
    ends = [*ordered[1:], len(instructions)]
    block_at = {start: position for position, start in enumerate(ordered)}
    convergence: dict[str, set[int]] = {}
    for item in instructions:
        if item.base == "BSSY" and item.index in targets:
            barrier = item.effects.operands[0].text
            convergence.setdefault(barrier, set()).add(block_at[targets[item.index]])
    flow = _Flow(
        block_at=block_at,
        targets=targets,
        anywhere=tuple(sorted(block_at[start] for start in entered if start in block_at)),
        after_call=tuple(
            block_at[item.index + 1]
            for item in instructions
            if item.base == "CALL" and item.index + 1 in block_at
        ),
        convergence=convergence,
        count=len(ordered),
    )
    successors = [
        _successors(instructions[end - 1], position, flow) for position, end in enumerate(ends)
    ]
    predecessors: list[list[int]] = [[] for _ in ordered]
    for position, following in enumerate(successors):
        for successor in following:
            predecessors[successor].append(position)
    return tuple(
        Block(position, start, end, successors[position], tuple(predecessors[position]))
        for position, (start, end) in enumerate(zip(ordered, ends, strict=True))
    )


def _successors(last: Instruction, position: int, flow: _Flow) -> tuple[int, ...]:
    base = last.base
    fallthrough = (position + 1,) if position + 1 < flow.count else ()
    if base not in TERMINATORS:
        return fallthrough
    guarded = bool(last.line.guard) and not last.line.guard.startswith("PT")
    if base == "BRA" and any(
        operand.kind in (Kind.PREDICATE, Kind.UNIFORM_PREDICATE)
        for operand in last.effects.operands
    ):
        guarded = True
    if base == "BRA" and ".DIV" in last.line.opcode:
        guarded = True  # taken only when the warp has diverged
    also = fallthrough if guarded else ()
    if base in ("EXIT", "KILL"):
        return also
    target = flow.targets.get(last.index)
    known = () if target is None else (flow.block_at[target],)
    if base in ("WARPSYNC", "BREAK"):
        return tuple(sorted({*fallthrough, *known}))
    if base in ("BRA", "CALL") and known:
        return tuple(sorted({*known, *also}))
    if base == "BSYNC":
        # Threads go on where a BSSY of this convergence barrier said; staying is possible too.
        barrier = last.effects.operands[0].text if last.effects.operands else ""
        return tuple(sorted({*flow.convergence.get(barrier, flow.anywhere), *fallthrough}))
    if base == "RET":
        return tuple(sorted({*flow.after_call, *also}))
    return tuple(sorted({*flow.anywhere, *fallthrough, *flow.after_call}))
