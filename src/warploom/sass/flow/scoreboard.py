"""Which results are still outstanding where: scoreboards, inherited waits, in-order completion.

A variable-latency instruction is *outstanding* from its issue until some instruction has waited
for its scoreboard. An operation with no scoreboard of its own joins the next one of its pipe that
has one (a pipe completes in order). The sets are carried over block edges to a fixed point,
because the compiler lets a whole region rely on one wait (an inherited wait).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Final

from warploom.sass.decode.control import NO_SCOREBOARD
from warploom.sass.decode.kernel import Block, Instruction, Kernel
from warploom.sass.decode.opcodes import Order, Pipe
from warploom.sass.decode.resources import PREDICATE_BASE

UNATTACHED: Final = -1
REGISTERS: Final = 256


@dataclass(frozen=True, slots=True)
class Pending:
    """Something outstanding: the producer, its release (`W` result, `R` sources), the scoreboard
    that covers it and the instruction whose scoreboard that is (`holder`)."""

    producer: int
    release: str
    scoreboard: int
    holder: int
    pipe: Pipe


def waited_scoreboards(item: Instruction) -> int:
    """Mask of scoreboards known to be zero after this instruction issued."""
    mask = item.control.wait
    if item.base == "DEPBAR":
        match = re.fullmatch(r"SB(\d),0x0", item.line.operands.replace(" ", ""))
        if match:
            mask |= 1 << int(match.group(1))
    return mask


def takes_no_wait(item: Instruction) -> bool:
    """True where a wait mask is undefined: nvdisasm refuses a WARPGROUP.DEPBAR with one."""
    return item.line.opcode.startswith("WARPGROUP.DEPBAR")


def counting_waits(item: Instruction) -> int | None:
    """The scoreboard a DEPBAR waits on with a non-zero count, which makes setter order matter."""
    if item.base != "DEPBAR" or item.line.opcode.startswith("DEPBAR.LE") is False:
        return None
    match = re.match(r"SB(\d),(0x[0-9a-f]+)", item.line.operands.replace(" ", ""))
    return int(match.group(1)) if match and int(match.group(2), 16) else None


def protected_sources(item: Instruction) -> tuple[int, ...]:
    """The registers that must not change until the instruction has read its sources.

    Vector registers; where it reads none but has a read scoreboard (TMA copies and mbarrier
    operations of the uniform datapath), its uniform registers: compilers wait for that scoreboard
    before they overwrite them, and for no other uniform register.
    """
    sources = [
        access.resource for access in item.effects.reads if access.slot not in ("guard", "old")
    ]
    vector = tuple(resource for resource in sources if resource < REGISTERS)
    if vector or item.control.read_sb == NO_SCOREBOARD:
        return vector
    return tuple(resource for resource in sources if resource < PREDICATE_BASE)


def releases(item: Instruction) -> Iterator[Pending]:
    """What an instruction leaves outstanding at issue."""
    info = item.effects.info
    control = item.control
    if item.line.guard == "!PT" or info.pipe is Pipe.ASYNC or info.order is Order.FIXED:
        return
    has_result = bool(item.effects.writes)
    reads_registers = bool(protected_sources(item))
    write_sb, read_sb = control.write_sb, control.read_sb
    if has_result and (write_sb != NO_SCOREBOARD or info.variable):
        yield _pending(item, "W", write_sb)
    if reads_registers and (info.variable or read_sb != NO_SCOREBOARD):
        # A result that has arrived proves that the sources were read.
        yield _pending(item, "R", read_sb if read_sb != NO_SCOREBOARD else write_sb)


def _pending(item: Instruction, release: str, scoreboard: int) -> Pending:
    attached = scoreboard != NO_SCOREBOARD
    return Pending(
        item.index,
        release,
        scoreboard if attached else UNATTACHED,
        item.index if attached else UNATTACHED,
        item.effects.info.pipe,
    )


def step(state: set[Pending], item: Instruction) -> set[Pending]:
    """The outstanding set after `item` issued."""
    waited = waited_scoreboards(item)
    after = {
        pending
        for pending in state
        if pending.scoreboard == UNATTACHED or not waited >> pending.scoreboard & 1
    }
    attached: set[Pending] = set()
    for pending in after:
        holder = attaches(pending, item)
        attached.add(
            pending if holder is None else replace(pending, scoreboard=holder, holder=item.index)
        )
    attached.update(releases(item))
    return attached


def attaches(pending: Pending, item: Instruction) -> int | None:
    """The scoreboard of `item` that will also cover an unattached operation of its pipe."""
    if pending.scoreboard != UNATTACHED or pending.pipe is not item.effects.info.pipe:
        return None
    control = item.control
    if control.write_sb != NO_SCOREBOARD:
        return control.write_sb
    if pending.release == "R" and control.read_sb != NO_SCOREBOARD:
        return control.read_sb
    return None


def outstanding_at_entry(kernel: Kernel) -> list[frozenset[Pending]]:
    """What may be outstanding at the start of every block."""
    entry: list[set[Pending]] = [set() for _ in kernel.blocks]
    pending_blocks = list(range(len(kernel.blocks)))
    while pending_blocks:
        block = kernel.blocks[pending_blocks.pop(0)]
        state = block_exit(kernel, block, entry[block.index])
        for successor in block.successors:
            if not state <= entry[successor]:
                entry[successor] |= state
                if successor not in pending_blocks:
                    pending_blocks.append(successor)
    return [frozenset(state) for state in entry]


def block_exit(kernel: Kernel, block: Block, entry: set[Pending]) -> set[Pending]:
    """What is outstanding after the last instruction of a block."""
    state = set(entry)
    for item in kernel.items(block):
        state = step(state, item)
    return state
