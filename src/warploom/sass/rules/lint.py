"""`lint(kernel)`: what is wrong with one cubin, with nothing to compare it to.

Three families of rules. Control fields: legality, an increment waited for too early, operands kept
past a rewrite. Scoreboards: a variable-latency result used, or a source overwritten, with no
wait on some path. Asynchronous registers: an in-flight warp-group matrix instruction reads its A
registers and updates its accumulators until WARPGROUP.DEPBAR retires its group; nothing else
may write the former or touch the latter, and registers written before it need a WARPGROUP.ARRIVE.

Rules of severity `error` are zero on every cubin of ours that a sound compiler made. `note` marks
what a compiler does knowingly and a person may want to know: pairs covered by distance alone.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from warploom.sass.decode.control import NO_SCOREBOARD
from warploom.sass.decode.kernel import Instruction, Kernel
from warploom.sass.decode.opcodes import UNKNOWN
from warploom.sass.decode.operand_slots import SLOT_NAMES, SLOTS, slot_registers
from warploom.sass.decode.resources import UNIFORM_BASE, resource_name
from warploom.sass.flow import arrivals, inflight, kept, outstanding, pools
from warploom.sass.flow.dependence import Hazard
from warploom.sass.flow.distances import exclusive, key_of, spread
from warploom.sass.flow.latency import table_for
from warploom.sass.flow.minima import least
from warploom.sass.flow.paths import states
from warploom.sass.flow.scoreboard import waited_scoreboards

ERROR: Final = "error"
NOTE: Final = "note"

# Where a rule comes from: what the hardware's encoding defines (nvdisasm refuses the rest), what
# follows from the code by dataflow, or what was never seen in compiler output (`flow.minima`).
ENCODING: Final = "encoding"
DATAFLOW: Final = "dataflow"
MINED: Final = "mined"


@dataclass(frozen=True)
class RuleInfo:
    """What a rule means, where it comes from, and how severe its findings are."""

    means: str
    basis: str
    severity: str = ERROR


RULES: Final[Mapping[str, RuleInfo]] = {
    "CONTROL": RuleInfo("the control field is one the hardware does not define (L1-L3)", ENCODING),
    "REUSE_OPERAND": RuleInfo(
        "a reuse bit where the operand is no register or the pipe keeps none", ENCODING
    ),
    "STALE_REUSE": RuleInfo("a kept operand is read again after its register changed", DATAFLOW),
    "SCOREBOARD_VISIBLE": RuleInfo("a scoreboard is awaited in the cycle after it was set", MINED),
    "SCOREBOARD_WAIT": RuleInfo(
        "a register is used while its producer may still be running", DATAFLOW
    ),
    "ASYNC_SOURCE": RuleInfo(
        "a register an in-flight matrix instruction still reads is written", DATAFLOW
    ),
    "ASYNC_ACCUMULATOR": RuleInfo(
        "an accumulator of an in-flight matrix instruction is touched", DATAFLOW
    ),
    "ASYNC_FENCE": RuleInfo(
        "a matrix instruction uses a register with no WARPGROUP.ARRIVE since its write", DATAFLOW
    ),
    "ARRIVAL": RuleInfo(
        "a warp arrives at a barrier in shared memory while a load from there is on its way",
        DATAFLOW,
    ),
    "REGISTER_POOL": RuleInfo(
        "a register is touched that the warp has given back (setmaxnreg)", DATAFLOW
    ),
    "LATENCY": RuleInfo(
        "a fixed-latency result is used earlier than any compiler ever lets it be", MINED
    ),
    "PREVIOUS_GRID": RuleInfo(
        "memory is read as never changing before the kernel has waited for the previous grid",
        DATAFLOW,
        NOTE,
    ),
    "DISTANCE_ALONE": RuleInfo(
        "a source is overwritten with only issue distance to protect it", DATAFLOW, NOTE
    ),
    "UNKNOWN_OPCODE": RuleInfo(
        "an opcode the tables do not know; nothing is checked about it", ENCODING, NOTE
    ),
}


@dataclass(frozen=True)
class LintFinding:
    """One broken rule: the instruction, the other one it collides with, and why, in words."""

    rule: str
    severity: str
    offset: int
    instruction: str
    other: str
    registers: tuple[str, ...]
    reason: str

    def __str__(self) -> str:
        return f"{self.severity}: {self.rule}: {self.offset:#06x} {self.instruction}: {self.reason}"


def lint(kernel: Kernel) -> list[LintFinding]:
    """Every finding on one kernel, errors first, each by offset."""
    found = [
        *_control(kernel),
        *_reuse(kernel),
        *_early_waits(kernel),
        *_scoreboards(kernel),
        *_arrivals(kernel),
        *_asynchronous(kernel),
        *_latencies(kernel),
        *_pools(kernel),
        *_before_previous_grid(kernel),
        *_unknown(kernel),
    ]
    unique = dict.fromkeys(found)
    return sorted(unique, key=lambda item: (item.severity != ERROR, item.offset, item.rule))


def _finding(
    rule: str,
    item: Instruction,
    reason: str,
    other: Instruction | None = None,
    registers: tuple[str, ...] = (),
) -> LintFinding:
    about = str(other) if other is not None else ""
    return LintFinding(
        rule, RULES[rule].severity, item.offset, item.line.text, about, registers, reason
    )


def _control(kernel: Kernel) -> Iterator[LintFinding]:
    for item in kernel.instructions:
        fault = item.control.fault()
        if fault is not None:
            yield _finding("CONTROL", item, fault)


def _reuse(kernel: Kernel) -> Iterator[LintFinding]:
    """Reuse of what is no register, and kept operands read after their register changed."""
    for item in kernel.instructions:
        known = item.effects.info.name != UNKNOWN.name
        wanted = item.control.reuse if item.control.stay and known else 0
        for slot in range(SLOTS):
            if wanted >> slot & 1 and slot not in slot_registers(item):
                reason = f"slot {SLOT_NAMES[slot]} holds no register"
                yield _finding("REUSE_OPERAND", item, reason)
    for item, state in kept.walk(kernel):
        for old in kept.stale(state, item):
            holder = kernel.instructions[old.holder]
            reason = (
                f"slot {SLOT_NAMES[old.slot]} may still hold the R{old.register} of {holder}, "
                f"from before {kernel.instructions[old.writer]}"
            )
            yield _finding("STALE_REUSE", item, reason, holder, (f"R{old.register}",))


def _early_waits(kernel: Kernel) -> Iterator[LintFinding]:
    """A scoreboard's increment shows one cycle after issue."""
    for first, second in itertools.pairwise(kernel.instructions):
        numbers = {first.control.write_sb, first.control.read_sb} - {NO_SCOREBOARD}
        awaited = sorted(numbers & set(second.control.waits()))
        if awaited and first.control.stall == 1:
            reason = f"waits for scoreboard {awaited[0]} in the cycle after {first} sets it"
            yield _finding("SCOREBOARD_VISIBLE", second, reason, first)


def _scoreboards(kernel: Kernel) -> Iterator[LintFinding]:
    for item, state in outstanding.walk(kernel):
        for open_entry, hazard in outstanding.conflicts(kernel, state, item):
            yield from _unsettled(kernel, item, open_entry, hazard)


def _missing(mask: int) -> str:
    numbers = [str(number) for number in range(NO_SCOREBOARD) if mask >> number & 1]
    return f"no wait for scoreboard {' or '.join(numbers)}" if numbers else "no scoreboard set"


def _unsettled(
    kernel: Kernel, item: Instruction, entry: outstanding.Unsettled, hazard: Hazard
) -> Iterator[LintFinding]:
    if item.effects.info.name == UNKNOWN.name:
        return
    producer = kernel.instructions[entry.producer]
    register = resource_name(entry.resource)
    if hazard is Hazard.WAR and producer.control.read_sb == NO_SCOREBOARD:
        reason = f"overwrites {register} that {producer} reads; only distance protects it"
        yield _finding("DISTANCE_ALONE", item, reason, producer, (register,))
        return
    verb = {Hazard.RAW: "reads", Hazard.WAW: "overwrites", Hazard.WAR: "overwrites"}[hazard]
    what = "still reads" if hazard is Hazard.WAR else "still writes"
    missing = _missing(entry.mask)
    reason = f"{verb} {register} while {producer} {what} it on some path: {missing} in between"
    yield _finding("SCOREBOARD_WAIT", item, reason, producer, (register,))


def _arrivals(kernel: Kernel) -> Iterator[LintFinding]:
    """Arrivals that may give a slot back before a load has read it."""
    for index, loads in arrivals.early(kernel).items():
        masks = {one.producer: one.mask for one in loads}
        for producer, mask in sorted(masks.items()):
            load = kernel.instructions[producer]
            reason = f"{load} is on its way: {_missing(mask)} in between"
            yield _finding("ARRIVAL", kernel.instructions[index], reason, load)


def _asynchronous(kernel: Kernel) -> Iterator[LintFinding]:
    matrices = {
        item.index: inflight.group_registers(item)
        for item in kernel.instructions
        if inflight.is_asynchronous(item)
    }
    if not matrices:
        return
    for item, state in inflight.walk(kernel):
        for index, age in sorted(state.items()):
            yield from _collision(item, kernel.instructions[index], age, matrices)
    yield from _fences(kernel)


def _collision(
    item: Instruction,
    matrix: Instruction,
    age: int,
    matrices: Mapping[int, inflight.GroupRegisters],
) -> Iterator[LintFinding]:
    """What `item` does to the registers of a matrix instruction that may be in flight."""
    if exclusive(item, matrix) or item.base == "WARPGROUP":
        return
    used = matrices[matrix.index]
    read, written = inflight.touched_registers(item)
    if inflight.is_asynchronous(item):
        mine = matrices[item.index]
        # One accumulator tile after another runs in order; anything else needs the wait.
        same_tile = mine.accumulators == used.accumulators
        read = mine.sources if same_tile else mine.sources | mine.accumulators
        written = frozenset[int]() if same_tile else mine.accumulators
    overwritten = sorted(written & used.sources)
    touched = sorted((read | written) & used.accumulators)
    wait = (
        f"WARPGROUP.DEPBAR.LE gsb0, {age - 1:#x}"
        if age
        else "gsb0 on its group and a WARPGROUP.DEPBAR"
    )
    for rule, registers, doing in (
        ("ASYNC_SOURCE", overwritten, "writes {} that {} still reads"),
        ("ASYNC_ACCUMULATOR", touched, "touches accumulator {} of {}, still in flight"),
    ):
        if registers:
            names = tuple(resource_name(register) for register in registers)
            shown = names[0] if len(names) == 1 else f"{names[0]}..{names[-1]}"
            reason = f"{doing.format(shown, matrix)}; missing before it: {wait}"
            yield _finding(rule, item, reason, matrix, names)


def _fences(kernel: Kernel) -> Iterator[LintFinding]:
    """Registers written since the last WARPGROUP.ARRIVE may not reach a matrix instruction.

    A state is a set of writes as the bits of one integer: a set of pairs for every instruction took
    a third of all rules' time on a kernel with hundreds of accumulators.
    """
    writes = sorted(
        {
            (access.resource, item.index)
            for item in kernel.instructions
            for access in item.effects.writes
            if access.resource < UNIFORM_BASE
        }
    )
    of_register, of_item = defaultdict[int, int](int), defaultdict[int, int](int)
    for place, (register, index) in enumerate(writes):
        of_register[register] |= 1 << place
        of_item[index] |= 1 << place

    def step(state: int, item: Instruction) -> int:
        if item.line.opcode.startswith("WARPGROUP.ARRIVE"):
            return 0
        if inflight.is_asynchronous(item) or item.base == "WARPGROUP":
            return state
        return state | of_item.get(item.index, 0)

    for item, state in states(kernel, 0, step, int.__or__):
        if inflight.is_asynchronous(item):
            used = inflight.group_registers(item)
            mine = sum(of_register.get(each, 0) for each in used.sources | used.accumulators)
            if unfenced := state & mine:
                register, index = writes[(unfenced & -unfenced).bit_length() - 1]
                writer, name = kernel.instructions[index], resource_name(register)
                reason = f"{name} comes from {writer} with no WARPGROUP.ARRIVE in between"
                yield _finding("ASYNC_FENCE", item, reason, writer, (name,))


def _latencies(kernel: Kernel) -> Iterator[LintFinding]:
    """Reads inside a block closer to the write than the minimum of their kind (`flow.minima`)."""
    minima = table_for(kernel.sm).minima
    for block in kernel.blocks:
        for dependence, distance in spread(kernel, block):
            earlier = kernel.instructions[dependence.earlier]
            later = kernel.instructions[dependence.later]
            if dependence.hazard is not Hazard.RAW or exclusive(earlier, later):
                continue
            key = key_of(dependence, earlier, later)
            need = 0 if key is None else least(minima, key)
            if distance < need and not _waits_in_between(kernel, earlier, later):
                name = resource_name(dependence.resource)
                reason = f"reads {name} {distance} cycles after {earlier}, the least is {need}"
                yield _finding("LATENCY", later, reason, earlier, (name,))


def _waits_in_between(kernel: Kernel, earlier: Instruction, later: Instruction) -> bool:
    """Whether a result that is started behind one is there before the other issues: how many
    cycles that takes stalls do not say."""
    started = 0
    for item in kernel.instructions[earlier.index + 1 : later.index + 1]:
        if waited_scoreboards(item) & started:
            return True
        if item.control.write_sb != NO_SCOREBOARD:
            started |= 1 << item.control.write_sb
    return False


def _pools(kernel: Kernel) -> Iterator[LintFinding]:
    for index, registers in sorted(pools.registers_at(kernel).items()):
        item = kernel.instructions[index]
        read, written = inflight.touched_registers(item)
        beyond = sorted(register for register in read | written if register >= registers)
        if beyond:
            names = tuple(resource_name(register) for register in beyond)
            reason = f"touches {names[0]}, the warp has {registers} registers here"
            yield _finding("REGISTER_POOL", item, reason, registers=names)


def _before_previous_grid(kernel: Kernel) -> Iterator[LintFinding]:
    """Loads of memory that never changes in front of the wait for a grid that may still write it:
    where the source has them behind it, ptxas moved them."""
    waits = [item for item in kernel.instructions if item.base == "ACQBULK"]

    def step(ahead: int, item: Instruction) -> int:
        return 0 if item.base == "ACQBULK" else ahead

    for item, ahead in states(kernel, 1, step, int.__or__) if waits else ():
        if ahead and item.base == "LDG" and "CONSTANT" in item.line.opcode:
            reason = f"may read what the previous grid has not written yet; it waits at {waits[0]}"
            yield _finding("PREVIOUS_GRID", item, reason, waits[0])


def _unknown(kernel: Kernel) -> Iterator[LintFinding]:
    for item in kernel.instructions:
        if item.effects.info.name == UNKNOWN.name:
            reason = f"{item.line.opcode} is not in the tables"
            yield _finding("UNKNOWN_OPCODE", item, reason)
