"""Why every instruction stalls and waits as it does, in words and as data.

A stall is held up by the pairs whose issue distance it is part of: each has cycles to spare, and
the one with the fewest is the reason. A wait is there for the operations outstanding on its
scoreboard and for the first instruction that touches their registers, itself or a later one.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Final

from warploom.sass.decode.control import NO_SCOREBOARD
from warploom.sass.decode.kernel import GROUP_SLOT, Block, Instruction, Kernel
from warploom.sass.decode.resources import resource_name
from warploom.sass.flow import inflight, outstanding
from warploom.sass.flow.aliasing import AliasMode
from warploom.sass.flow.distances import exclusive, issue_times, key_of, pipe_neighbours, spread
from warploom.sass.flow.latency import LatencyTable, job, table_for
from warploom.sass.flow.outstanding import State, Unsettled
from warploom.sass.flow.scoreboard import waited_scoreboards
from warploom.sass.rules.constraints import derive
from warploom.sass.rules.rules import Ints, Rule

AS_COMPILED: Final = "kept as compiled"

# Rules of `constraints` about two instructions' distance, beside register latencies: in words, and
# where the number comes from.
OTHER_GAPS: Final = {
    "SPACING": ("no wait protects the pair", AS_COMPILED),
    "SYNC_DISTANCE": ("kept apart by synchronisation", "mined"),
}


@dataclass(frozen=True)
class StallReason:
    """What keeps a stall from being shorter. `spare`: cycles it could lose before a rule breaks.

    `producer` and `consumer` are instruction numbers (None when the rule is no pair), `needed` the
    cycles the pair must keep, `actual` those it has, `source` where the number comes from.
    """

    stall: int
    spare: int
    rule: str
    producer: int | None
    consumer: int | None
    register: str
    needed: int
    actual: int
    source: str


@dataclass(frozen=True)
class Setter:
    """An operation a wait ends: what it leaves open (`writes` or `reads`) and its registers."""

    instruction: int
    action: str
    registers: tuple[str, ...]


@dataclass(frozen=True)
class WaitReason:
    """One awaited scoreboard (None: matrix groups): who set it, which instructions rely on it."""

    scoreboard: int | None
    setters: tuple[Setter, ...]
    consumers: tuple[int, ...]


@dataclass(frozen=True)
class Explanation:
    """Reasons by instruction number."""

    stalls: dict[int, StallReason]
    waits: dict[int, tuple[WaitReason, ...]]


@dataclass(frozen=True, slots=True)
class _Pair:
    start: int
    end: int
    spare: int
    reason: StallReason


def explain(kernel: Kernel) -> Explanation:
    """Reasons for every stall above one cycle and every wait of a kernel."""
    table = table_for(kernel.sm)
    stalls: dict[int, StallReason] = {}
    constrained = _constrained(kernel, table)
    neighbours = _pipe_pairs(kernel, table)
    for block in kernel.blocks:
        pairs = [*_pairs(kernel, block, table), *neighbours[block.index], *constrained[block.index]]
        stalls.update(_stalls(kernel, block, pairs, table))
    return Explanation(stalls, _waits(kernel))


def _pairs(kernel: Kernel, block: Block, table: LatencyTable) -> Iterator[_Pair]:
    """Every pair of the block that issue distance alone keeps apart."""
    for dependence, actual in spread(kernel, block):
        earlier = kernel.instructions[dependence.earlier]
        later = kernel.instructions[dependence.later]
        key = key_of(dependence, earlier, later)
        if key is None or exclusive(earlier, later):
            continue
        needed = table.gap(key, actual)
        mined = table.gaps.get(key)
        if mined is None:
            source = f"never mined ({key}), {AS_COMPILED}"
        elif mined > actual:
            source = f"closer than the mined {mined} ({key}), kept as compiled"
        else:
            source = f"mined ({key})"
        register = resource_name(dependence.resource)
        rule = dependence.hazard.value
        yield _pair(earlier.index, later.index, rule, register, needed, actual, source)


def _pipe_pairs(kernel: Kernel, table: LatencyTable) -> dict[int, list[_Pair]]:
    """Neighbours in one pipe, which the compiler spaces by the pipe's occupancy, by block. A pair
    may span blocks that stand one after the other."""
    times = issue_times(kernel.instructions)
    found: dict[int, list[_Pair]] = {block.index: [] for block in kernel.blocks}
    for earlier, later in pipe_neighbours(kernel.instructions):
        actual = times[later.index] - times[earlier.index]
        needed = min(actual, table.spacing(earlier, later))
        rule = f"next in pipe {earlier.effects.info.pipe.value}"
        pair = _pair(earlier.index, later.index, rule, "", needed, actual, "mined")
        for number in range(kernel.block_of[earlier.index], kernel.block_of[later.index] + 1):
            found[number].append(pair)
    return found


def _pair(
    earlier: int, later: int, rule: str, register: str, needed: int, actual: int, source: str
) -> _Pair:
    reason = StallReason(
        stall=0,
        spare=actual - needed,
        rule=rule,
        producer=earlier,
        consumer=later,
        register=register,
        needed=needed,
        actual=actual,
        source=source,
    )
    return _Pair(earlier, later, actual - needed, reason)


def _constrained(kernel: Kernel, table: LatencyTable) -> dict[int, list[_Pair]]:
    """What a reordering must keep beyond register latencies, by block: pairs no wait protects,
    results used in a later block, distances to a block's edge, blocks that must last."""
    constraints = derive(kernel, AliasMode.STRICT, table)
    found: dict[int, list[_Pair]] = {block.index: [] for block in kernel.blocks}
    times: list[int] = []
    lengths: list[int] = []
    for block in kernel.blocks:
        items = kernel.items(block)
        times.extend(issue_times(items))
        lengths.append(sum(item.control.stall for item in items))
    for producer, consumer, needed in _rows(constraints.cross):
        home, away = kernel.block_of[producer], kernel.block_of[consumer]
        actual = lengths[home] - times[producer] + times[consumer]
        source = "both blocks' shares of the distance"
        pair = _pair(producer, consumer, "used in a later block", "", needed, actual, source)
        found[home].append(replace(pair, end=kernel.blocks[home].end))
        found[away].append(replace(pair, start=kernel.blocks[away].start))
    for earlier, later, needed, rule, resource in _rows(constraints.gaps):
        if rule != Rule.LATENCY:
            words, source = OTHER_GAPS.get(Rule(rule).name, (Rule(rule).name.lower(), "mined"))
            register = resource_name(resource) if rule == Rule.SPACING else ""
            actual = times[later] - times[earlier]
            pair = _pair(earlier, later, words, register, needed, actual, source)
            found[kernel.block_of[earlier]].append(pair)
    for index, number, needed, at_end in _rows(constraints.edge_gaps):
        block = kernel.blocks[number]
        actual = lengths[number] - times[index] if at_end else times[index]
        first, last = (index, block.end) if at_end else (block.start, index)
        rule = "no wait protects a result of another block"
        pair = _pair(first, min(last, block.end - 1), rule, "", needed, actual, AS_COMPILED)
        found[number].append(replace(pair, end=last))
    for number, needed in _rows(constraints.durations):
        block = kernel.blocks[number]
        rule = "a result passes through the block"
        pair = _pair(block.start, block.end - 1, rule, "", needed, lengths[number], AS_COMPILED)
        found[number].append(replace(pair, end=block.end))
    return found


def _rows(array: Ints) -> list[list[int]]:
    return [[int(value) for value in row] for row in array]


def _stalls(
    kernel: Kernel, block: Block, pairs: list[_Pair], table: LatencyTable
) -> Iterator[tuple[int, StallReason]]:
    """The tightest pair over every stall; the nearest consumer first among equals."""
    tightest: dict[int, _Pair] = {}
    for pair in sorted(pairs, key=lambda pair: (pair.spare, pair.end - pair.start)):
        for index in range(pair.start, pair.end):
            tightest.setdefault(index, pair)
    for item in kernel.items(block):
        stall = item.control.stall
        if stall <= 1:
            continue
        floor = _own_floor(kernel, item, stall, table)
        pair = tightest.get(item.index)
        if pair is None or stall - floor.needed < pair.spare:
            yield item.index, floor
        else:
            spare = min(pair.spare, stall - floor.needed)
            yield item.index, replace(pair.reason, stall=stall, spare=spare)


def _own_floor(kernel: Kernel, item: Instruction, stall: int, table: LatencyTable) -> StallReason:
    """What an instruction's own kind asks for: its least stall, or a scoreboard's visibility."""
    least = min(stall, table.own_stall(item))
    rule, consumer, register = f"least stall of {item.base}", None, ""
    source = "mined" if job(item) in table.stalls else "never mined, kept as compiled"
    if item.index + 1 < len(kernel.instructions):
        following = kernel.instructions[item.index + 1]
        sets = {item.control.write_sb, item.control.read_sb} - {NO_SCOREBOARD}
        awaited = sets & set(following.control.waits())
        if awaited and least < 2 <= stall:
            least, consumer, register = 2, following.index, f"SB{min(awaited)}"
            rule, source = "a scoreboard shows one cycle after it is set", "fixed"
    return StallReason(
        stall=stall,
        spare=stall - least,
        rule=rule,
        producer=None,
        consumer=consumer,
        register=register,
        needed=least,
        actual=stall,
        source=source,
    )


def _waits(kernel: Kernel) -> dict[int, tuple[WaitReason, ...]]:
    """Who set each awaited scoreboard on some path here, and who first relies on the wait."""
    setters: dict[tuple[int, int], set[Unsettled]] = {}
    for item, state in outstanding.walk(kernel):
        waited = waited_scoreboards(item)
        for number in range(NO_SCOREBOARD) if waited else ():
            if waited >> number & 1:
                known = setters.setdefault((item.index, number), set())
                known.update(open_ for open_ in state if open_.mask >> number & 1)
    found: dict[int, list[WaitReason]] = {}
    for (index, number), open_set in sorted(setters.items(), key=lambda pair: pair[0]):
        consumers = _consumers(kernel, index, frozenset(open_set))
        by = _group(open_set) or _signals(kernel, index, number)
        found.setdefault(index, []).append(WaitReason(number, by, consumers))
    _group_waits(kernel, found)
    return {index: tuple(reasons) for index, reasons in found.items()}


def _group(open_set: set[Unsettled]) -> tuple[Setter, ...]:
    merged: dict[tuple[int, str], list[int]] = {}
    for entry in open_set:
        action = "writes" if entry.written else "reads"
        merged.setdefault((entry.producer, action), []).append(entry.resource)
    return tuple(
        Setter(producer, action, tuple(resource_name(number) for number in sorted(numbers)))
        for (producer, action), numbers in sorted(merged.items())
    )


def _signals(kernel: Kernel, index: int, number: int) -> tuple[Setter, ...]:
    """The instruction of the block that set the scoreboard last, when no register hangs on it."""
    block = kernel.blocks[kernel.block_of[index]]
    for item in reversed(kernel.instructions[block.start : index]):
        if number in (item.control.write_sb, item.control.read_sb):
            return (Setter(item.index, "completes", ()),)
    return ()


def _consumers(kernel: Kernel, index: int, open_set: State) -> tuple[int, ...]:
    """The instructions of the block, from `index` on, that touch what the wait settles."""
    block = kernel.blocks[kernel.block_of[index]]
    left = set(open_set)
    found: list[int] = []
    for item in kernel.instructions[index : block.end]:
        read = {access.resource for access in item.effects.reads if access.slot != GROUP_SLOT}
        written = {access.resource for access in item.effects.writes if access.slot != GROUP_SLOT}
        hit = {
            entry
            for entry in left
            if entry.resource in written or (entry.written and entry.resource in read)
        }
        if hit:
            found.append(item.index)
            left -= {entry for entry in hit if entry.resource in written}
    return tuple(found)


def _group_waits(kernel: Kernel, found: dict[int, list[WaitReason]]) -> None:
    """WARPGROUP.DEPBAR: the matrix instructions it retires and who first uses their results."""
    retired: dict[int, set[int]] = {}
    for item, state in inflight.walk(kernel):
        if inflight.groups_left(item) is not None:
            after = inflight.step(state, item)
            retired.setdefault(item.index, set()).update(state.keys() - after.keys())
    for index, matrices in sorted(retired.items()):
        setters: list[Setter] = []
        used: set[int] = set()
        for number in sorted(matrices):
            registers = inflight.group_registers(kernel.instructions[number])
            used |= registers.sources | registers.accumulators
            names = sorted(registers.accumulators)
            setters.append(Setter(number, "updates", tuple(map(resource_name, names))))
        block = kernel.blocks[kernel.block_of[index]]
        consumer = next(
            (
                item.index
                for item in kernel.instructions[index + 1 : block.end]
                if used & frozenset().union(*inflight.touched_registers(item))
            ),
            None,
        )
        consumers = () if consumer is None else (consumer,)
        found.setdefault(index, []).append(WaitReason(None, tuple(setters), consumers))
