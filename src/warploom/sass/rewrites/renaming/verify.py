"""Prove that one cubin is another with values in other registers, and that no hazard was made.

Works from the bytes and nvdisasm's text of both; shares nothing with what chose the registers.

*Same dataflow.* Both kernels run in lockstep over every path (a bisimulation). The state is a
relation between registers: (r, s) when r of the original and s of the other hold the same value.
At the kernel's start every register is related to itself. Each pair of instructions must be equal
but for register numbers, and every register one reads must be related to the one the other reads
in the same place; what they write is related afterwards, and nothing else is to either. Where paths
meet only pairs that hold on all of them remain. So equal inputs give equal values everywhere.

Tuples of registers stay aligned.

*No new hazard.* A register used anew brings dependences the compiler never timed. Those inside a
block and across blocks must be as far apart as the mined table asks; a pair it does not know is
refused. Registers still to be written or read by a variable-latency instruction, asynchronous
matrix registers and kept operands are judged by `lint`: the other may have no finding that the
original has not.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from warploom.sass.decode.control import CONTROL_MASK
from warploom.sass.decode.cubin import WORD_BYTES, Cubin
from warploom.sass.decode.kernel import GROUP_SLOT, Instruction, Kernel
from warploom.sass.decode.nvinfo import pinned_offsets, rewritten_offsets
from warploom.sass.decode.resources import UNIFORM_BASE, resource_name
from warploom.sass.flow.dependence import Dependence, dependences
from warploom.sass.flow.latency import LONGEST, LatencyTable, table_for
from warploom.sass.flow.mining import key_of, never_both, spread
from warploom.sass.flow.paths import states
from warploom.sass.rewrites.renaming.fields import occurrences, shape
from warploom.sass.rules.boundaries import pairs_across
from warploom.sass.rules.fresh import change_outside, decode_anew, new_hazards, new_lint
from warploom.sass.rules.verdict import Finding

STACK: Final = 1


@dataclass(frozen=True)
class _Relation:
    """(r, s) is in it when r == s and r is not in `apart`, or when it is in `extra`."""

    apart: frozenset[int]
    extra: frozenset[tuple[int, int]]

    def holds(self, one: int, other: int) -> bool:
        return (one == other and one not in self.apart) or (one, other) in self.extra

    def meet(self, other: _Relation) -> _Relation:
        """What holds on both of two paths that come together."""
        return _Relation(self.apart | other.apart, self.extra & other.extra)


_EQUAL: Final = _Relation(frozenset(), frozenset())


def verify_renaming(original: Cubin, renamed: Cubin, name: str) -> list[Finding]:
    """Every reason why `renamed` is not `original` in other registers; empty when it is.

    Both hold the kernel `name`; everything else in the files must be the same bytes.
    """
    if finding := change_outside(original, renamed, name):
        return [finding]
    one, other = (decode_anew(cubin, name) for cubin in (original, renamed))
    found = [
        finding
        for first, second in zip(one.instructions, other.instructions, strict=True)
        if (finding := _same_shape(one, first, second)) is not None
    ]
    if found:
        return found
    found = _limits(one, other)
    found += _lockstep(one, other)
    if found:
        return found  # hazards of another program say nothing
    same = range(len(one.instructions))
    return [
        *_distances(one, other, table_for(one.sm)),
        *new_hazards(one, other, same),
        *new_lint(one, other, same),
        *_groups(one, other),
    ]


# --- the same program ------------------------------------------------------------------------


def _same_shape(kernel: Kernel, first: Instruction, second: Instruction) -> Finding | None:
    """Equal but for register numbers; control fields too."""
    if (first.low, first.high) == (second.low, second.high):
        return None
    if shape(first.line.text) != shape(second.line.text) or first.line.note != second.line.note:
        return Finding.at("INSTRUCTION", second, f"the original has {first.line.text}")
    if (first.high ^ second.high) & CONTROL_MASK:
        return Finding.at("CONTROL_FIELD", second, "a renaming keeps the control fields")
    if occurrences(first.line.text) == occurrences(second.line.text):
        return Finding.at("INSTRUCTION", second, "a bit that the text does not show changed")
    size = len(kernel.instructions) * WORD_BYTES
    if first.offset in {**pinned_offsets(kernel.info, size), **rewritten_offsets(kernel.info)}:
        return Finding.at("NV_INFO", second, ".nv.info names this instruction and its registers")
    return None


def _limits(one: Kernel, other: Kernel) -> list[Finding]:
    """No register above those the original uses: more may not be allocated to the kernel."""

    def highest(kernel: Kernel) -> tuple[int, int]:
        used = [
            access.resource
            for item in kernel.instructions
            for access in (*item.effects.reads, *item.effects.writes)
        ]
        general = max((r for r in used if r < UNIFORM_BASE), default=0)
        return general, max((r for r in used if UNIFORM_BASE <= r < 2 * UNIFORM_BASE), default=0)

    limits = highest(one)
    found: list[Finding] = []
    for first, second in zip(one.instructions, other.instructions, strict=True):
        for access in (*second.effects.reads, *second.effects.writes):
            limit = limits[0] if access.resource < UNIFORM_BASE else limits[1]
            if access.resource < 2 * UNIFORM_BASE and access.resource > limit:
                reason = f"{resource_name(access.resource)} is above what the original uses"
                found.append(Finding.at("ALLOCATION", second, reason))
        found += _alignment(first, second)
        pairs = zip(first.effects.writes, second.effects.writes, strict=False)
        if any(STACK in (a.resource, b.resource) and a.resource != b.resource for a, b in pairs):
            found.append(Finding.at("ALLOCATION", second, "R1 is the stack pointer"))
    return found


def _alignment(first: Instruction, second: Instruction) -> Iterator[Finding]:
    """A pair begins at an even register, wider tuples at a multiple of four, as far as before."""
    for mine, theirs in (
        (first.effects.writes, second.effects.writes),
        (first.effects.reads, second.effects.reads),
    ):
        tuples: dict[str, list[tuple[int, int]]] = {}
        for one, other in zip(mine, theirs, strict=False):
            if one.slot[-1:].isdigit():
                place = tuples.setdefault(one.slot.rstrip("0123456789"), [])
                place.append((one.resource, other.resource))
        for rows in tuples.values():
            step = 1 if len(rows) == 1 else 2 if len(rows) == 2 else 4
            shifts = {other - one for one, other in rows}
            if len(shifts) > 1 or min(shifts) % step:
                yield Finding.at("ALIGNMENT", second, f"{len(rows)} registers moved by {shifts}")


def _lockstep(one: Kernel, other: Kernel) -> list[Finding]:
    """Run both kernels side by side over every path; see the module."""

    def step(state: _Relation, first: Instruction) -> _Relation:
        return _after(state, first, other.instructions[first.index])

    found: dict[tuple[int, int], Finding] = {}
    for first, state in states(one, _EQUAL, step, _Relation.meet):
        second = other.instructions[first.index]
        pairs = _reads(first, second)
        if pairs is None:
            found[first.index, -1] = Finding.at(
                "DATAFLOW", second, "reads other places than before"
            )
        for mine, theirs in pairs or ():
            if not state.holds(mine, theirs):
                reason = (
                    f"reads {resource_name(theirs)}, which need not hold what "
                    f"{resource_name(mine)} holds in the original"
                )
                found[first.index, mine] = Finding.at("DATAFLOW", second, reason)
    return list(found.values())


def _reads(first: Instruction, second: Instruction) -> list[tuple[int, int]] | None:
    """Registers read in the same places; None when the places differ."""
    mine = [(access.resource, access.slot) for access in first.effects.reads]
    theirs = [(access.resource, access.slot) for access in second.effects.reads]
    if [slot for _, slot in mine] != [slot for _, slot in theirs]:
        return None
    return [(a[0], b[0]) for a, b in zip(mine, theirs, strict=True)]


def _after(state: _Relation, first: Instruction, second: Instruction) -> _Relation:
    mine = [access.resource for access in first.effects.writes]
    theirs = [access.resource for access in second.effects.writes]
    if not mine and not theirs:
        return state
    gone, lost = set(mine), set(theirs)
    apart = state.apart | gone | lost
    extra = {pair for pair in state.extra if pair[0] not in gone and pair[1] not in lost}
    if len(mine) == len(theirs):
        for one, other in zip(mine, theirs, strict=True):
            if one == other:
                apart = apart - {one}
            else:
                extra.add((one, other))
    return _Relation(frozenset(apart), frozenset(extra))


# --- no new hazard ---------------------------------------------------------------------------


def _distances(one: Kernel, other: Kernel, table: LatencyTable) -> list[Finding]:
    """Dependences the original has not are as far apart as the mined table asks."""
    found: list[Finding] = []
    for block in other.blocks:
        known = {_key(row) for row in dependences(one.items(block))}
        for row, distance in spread(other, block):
            if _key(row) not in known:
                found += _too_close(other, row, distance, table)
    across = {_key(row) for row, _ in pairs_across(one, table)}
    for row, distance in pairs_across(other, table):
        if _key(row) not in across:
            found += _too_close(other, row, distance, table)
    return found


def _key(row: Dependence) -> tuple[int, int, str, str, str]:
    return row.earlier, row.later, row.hazard.name, row.earlier_slot, row.later_slot


def _too_close(
    kernel: Kernel, row: Dependence, distance: int, table: LatencyTable
) -> list[Finding]:
    earlier, later = kernel.instructions[row.earlier], kernel.instructions[row.later]
    key = key_of(row, earlier, later)
    if key is None or never_both(kernel, row.earlier, row.later):
        return []  # a scoreboard's business
    need = min(table.gaps.get(key, LONGEST), LONGEST)
    if distance >= need:
        return []
    reason = (
        f"{distance} cycles after {earlier}, a dependence through {resource_name(row.resource)} "
        f"that the original has not; needs {need}"
    )
    return [Finding.at("NEW_DEPENDENCE", later, reason)]


def _groups(one: Kernel, other: Kernel) -> list[Finding]:
    """Asynchronous matrix instructions keep their registers: what waits for them names these."""
    return [
        Finding.at("ASYNCHRONOUS", second, "touches other registers of a matrix group")
        for first, second in zip(one.instructions, other.instructions, strict=True)
        if [access for access in first.effects.reads if access.slot == GROUP_SLOT]
        != [access for access in second.effects.reads if access.slot == GROUP_SLOT]
    ]
