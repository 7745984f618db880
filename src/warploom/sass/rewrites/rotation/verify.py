"""Prove that one cubin is another with instructions moved over a loop's back edge.

Works from the bytes and nvdisasm's text of both, and from a claim (which instructions, which loop)
that it trusts nothing of. Three things are shown.

*The same instructions in the same order.* Word by word, the code is the original's up to the latch,
then the moved instructions X again, then the original's from the latch on, without as many NOPs at
the end that nothing reaches. Every branch goes where it went, except the latch's, which passes over
the X at the loop's start. The loop is entered through one block that falls into it. So whatever way
the original takes, the other executes the same instructions, and one more X after the last pass.

*The last X does nothing.* X is on a list of opcodes without side effects, sets no scoreboard,
writes nothing that the latch reads, and nothing that is read after the loop before it is written.

*No new hazard.* Dependences are as far apart as in the original or as the mined table asks, within
blocks and across them; what variable-latency instructions have yet to write or read is waited for;
`lint` has no finding that the original has not.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Final

from warploom.sass.decode import nvinfo
from warploom.sass.decode.branches import relative_target
from warploom.sass.decode.control import CONTROL_MASK, NO_SCOREBOARD, Control
from warploom.sass.decode.cubin import WORD_BYTES, Cubin
from warploom.sass.decode.kernel import Instruction, Kernel
from warploom.sass.decode.resources import resource_name
from warploom.sass.flow.dependence import Dependence, Hazard
from warploom.sass.flow.latency import LONGEST, LatencyTable, table_for
from warploom.sass.flow.mining import key_of, never_both, spread
from warploom.sass.rewrites.rotation.rotate import Rotation
from warploom.sass.rules.boundaries import pairs_across
from warploom.sass.rules.fresh import decode_anew, new_hazards, new_lint
from warploom.sass.rules.verdict import Finding

# Opcodes that compute registers from registers and constants and do nothing else.
SILENT: Final = frozenset(
    "UIADD3 UIMAD ULEA ULOP3 UMOV USEL USGXT USHF UISETP UPLOP3 UIADD3.64 UPRMT UFLO UPOPC UP2UR "
    "IADD3 IMAD VIADD LEA LOP3 MOV SEL SGXT SHF ISETP FSETP PLOP3 PRMT IABS VIADDMNMX IMNMX "
    "VIMNMX FADD FMUL FFMA FMNMX FSEL CS2R F2FP I2FP HADD2 HMUL2 HFMA2 HSETP2 HMNMX2".split()
)
# Control flow this proof follows; a kernel with any other is refused.
FOLLOWED: Final = frozenset("BRA EXIT NOP BSSY BSYNC WARPSYNC BREAK".split())
LEAVING: Final = frozenset(
    "BRA BRX BRXU JMP JMX JMXU CALL RET EXIT KILL BSYNC BREAK RTT BPT WARPSYNC YIELD NANOSLEEP "
    "LEPC RPCMOV".split()
)
# Where a displacement stands in a word: of BSSY, of other branches, and on sm_90 also of these.
SHORT_FIELD: Final = ((1 << 30) - 1) << 34
LONG_FIELD: Final = ((1 << 48) - 1) << 34
LOW_FIELD: Final = 0xFF << 16
PLAIN_TABLES: Final = (0x28, 0x31, 0x1C, 0x1D)
_NOWHERE: Final = -1  # where a branch goes that meets no instruction


def verify_rotation(original: Cubin, rotated: Cubin, name: str, claim: Rotation) -> list[Finding]:
    """Every reason why `rotated` is not `original` with `claim` done; empty when it is."""
    if finding := _container(original, rotated, name):
        return [finding]
    one, other = (decode_anew(cubin, name) for cubin in (original, rotated))
    found = [*_loop(one, claim)]
    if not found:
        found = [*_stream(one, other, claim), *_tables(one, other, claim)]
    if not found:
        found = list(_silent(one, claim))
    if found:
        return found  # hazards of another program say nothing
    origin = _origins(one, claim)
    return [
        *_distances(one, other, origin, table_for(one.sm)),
        *new_hazards(one, other, origin),
        *new_lint(one, other, origin),
    ]


def _container(original: Cubin, rotated: Cubin, name: str) -> Finding | None:
    code = original.kernel(name)
    holes = [(code.text.offset, code.text.size)]
    if code.info is not None:
        holes.append((code.info.offset, code.info.size))
    position, same = 0, len(original.data) == len(rotated.data) and not code.relocations
    for offset, size in (*sorted(holes), (len(original.data), 0)):
        same = same and original.data[position:offset] == rotated.data[position:offset]
        position = offset + size
    if same:
        return None
    return Finding("CONTAINER", 0, name, "bytes outside the code changed, or it has relocations")


def _loop(one: Kernel, claim: Rotation) -> Iterator[Finding]:
    """The claim is about a loop that is entered by falling into it and left at its latch."""
    items, header, latch = one.instructions, claim.header, claim.latch
    if not 0 < header < header + claim.count < latch < len(items) - claim.count:
        yield Finding("LOOP", 0, one.name, f"{claim} is outside the code")
        return
    if items[latch].base != "BRA" or _target(one, items[latch]) != header:
        yield Finding.at("LOOP", items[latch], "is not a branch to the header")
    if items[header - 1].base in LEAVING:
        yield Finding.at("LOOP", items[header - 1], "does not fall into the loop")
    for item in items:
        if item.base in LEAVING and item.base not in FOLLOWED:
            yield Finding.at("CONTROL_FLOW", item, "is not followed by this proof")
        target = _target(one, item)
        if target is None:
            continue
        if header <= target < header + claim.count and item.index != latch:
            yield Finding.at("LOOP", item, "enters the loop, or lands among what moves")


def _target(kernel: Kernel, item: Instruction) -> int | None:
    """The place a branch goes to; None of what is no branch."""
    word = (item.low, item.high)
    target = relative_target(item.line.opcode, item.offset, word, kernel.sm)
    if target is None:
        return None
    return _NOWHERE if target % WORD_BYTES else target // WORD_BYTES


def _origins(one: Kernel, claim: Rotation) -> list[int]:
    """For every place of the rotated code, the original's instruction that stands there."""
    header, count, latch = claim.header, claim.count, claim.latch
    size = len(one.instructions)
    return [*range(latch), *range(header, header + count), *range(latch, size - count)]


def _stream(one: Kernel, other: Kernel, claim: Rotation) -> Iterator[Finding]:
    """The same words, branches to the same instructions, NOPs dropped that nothing reaches."""
    items, count, latch = one.instructions, claim.count, claim.latch
    for item in items[len(items) - count :]:
        if item.base != "NOP" or one.blocks[one.block_of[item.index]].predecessors:
            yield Finding.at("PADDING", item, "is dropped and is no padding")
    for place, (index, new) in enumerate(
        zip(_origins(one, claim), other.instructions, strict=True)
    ):
        old = items[index]
        aim = _target(one, old)
        moving = ~_displacement(old, one.sm) if aim is not None else -1
        before = old.low | (old.high & ~CONTROL_MASK) << 64
        after = new.low | (new.high & ~CONTROL_MASK) << 64
        if (before ^ after) & moving:
            yield Finding.at("INSTRUCTION", new, f"the original has {old.line.text}")
        if aim is not None:
            wanted = aim if aim <= latch else aim + count
            if index == latch:
                wanted = claim.header + count
            if _target(other, new) != wanted:
                yield Finding.at("BRANCH", new, f"does not go where {old} goes")
        if not _same_control(old.control, new.control, place == latch - 1):
            yield Finding.at("CONTROL_FIELD", new, "a rotation keeps the control fields")


def _displacement(item: Instruction, sm: int) -> int:
    if item.base == "BSSY":
        return SHORT_FIELD
    return LONG_FIELD | LOW_FIELD if sm >= 90 else LONG_FIELD


def _same_control(old: Control, new: Control, last: bool) -> bool:
    """Equal; before the moved instructions a longer stall, with what it forbids, is allowed."""
    if old == new:
        return True
    kept = (old.write_sb, old.read_sb, old.wait) == (new.write_sb, new.read_sb, new.wait)
    return last and kept and new.stall >= old.stall and new.reuse in (0, old.reuse)


def _tables(one: Kernel, other: Kernel, claim: Rotation) -> Iterator[Finding]:
    """`.nv.info` is the original's with plain tables of offsets following the code."""
    wrong = Finding("NV_INFO", 0, one.name, "a record does not follow the code")
    rows = list(nvinfo.records(one.info))
    others = list(nvinfo.records(other.info))
    if len(rows) != len(others):
        yield wrong
        return
    for row, new in zip(rows, others, strict=True):
        if (row.attribute, row.offset) != (new.attribute, new.offset):
            yield wrong
        elif row.attribute not in PLAIN_TABLES:
            if row.payload != new.payload or row.attribute in nvinfo.PINNED:
                yield wrong
        else:
            size = len(row.payload) // 4
            old = struct.unpack(f"<{size}I", row.payload)
            shifted = claim.count * WORD_BYTES
            border = claim.latch * WORD_BYTES
            moved = [value + shifted if value >= border else value for value in old]
            start = claim.header * WORD_BYTES
            named = any(start <= value < start + shifted for value in old)
            if named or list(struct.unpack(f"<{size}I", new.payload)) != moved:
                yield wrong


def _silent(one: Kernel, claim: Rotation) -> Iterator[Finding]:
    """One more X after the last pass changes nothing that anybody reads."""
    items = one.instructions
    latch = items[claim.latch]
    decides = {access.resource for access in latch.effects.reads}
    needed = _needed(one, one.block_of[claim.latch] + 1)
    for item in items[claim.header : claim.header + claim.count]:
        fixed = not item.effects.info.variable
        settled = item.control.write_sb == NO_SCOREBOARD == item.control.read_sb
        if item.base not in SILENT or not fixed or not settled or item.pinned:
            yield Finding.at(
                "SIDE_EFFECT", item, "is not known to do nothing but compute registers"
            )
        for access in item.effects.writes:
            if access.resource in decides:
                reason = f"writes {resource_name(access.resource)}, which the latch reads"
                yield Finding.at("DATAFLOW", item, reason)
            if access.resource in needed:
                reason = f"{resource_name(access.resource)} is read after the loop"
                yield Finding.at("DATAFLOW", item, reason)


def _needed(one: Kernel, start: int) -> set[int]:
    """Resources that some path from a block on reads before it writes them."""
    needed: set[int] = set()
    pending: list[tuple[int, frozenset[int]]] = [(start, frozenset())]
    seen: dict[int, frozenset[int]] = {}
    while pending:
        number, written = pending.pop()
        known = seen.get(number)
        if known is not None and known <= written:
            continue
        written = written if known is None else written & known
        seen[number] = written
        done = set(written)
        block = one.blocks[number]
        for item in one.items(block):
            needed |= {a.resource for a in item.effects.reads if a.resource not in done}
            if not item.effects.partial:
                done |= {access.resource for access in item.effects.writes}
        pending += [(successor, frozenset(done)) for successor in block.successors]
    return needed


# --- no new hazard ---------------------------------------------------------------------------

_Key = tuple[int, int, str, str, str]


def _distances(
    one: Kernel, other: Kernel, origin: list[int], table: LatencyTable
) -> Iterator[Finding]:
    """Every dependence keeps its distance in the original, or what the mined table asks."""
    before: dict[_Key, int] = {}
    same = list(range(len(one.instructions)))
    for row, distance in _spread(one, table):
        key = _key(row, same)
        before[key] = min(distance, before.get(key, distance))
    for row, distance in _spread(other, table):
        earlier, later = other.instructions[row.earlier], other.instructions[row.later]
        name = key_of(row, earlier, later)
        if name is None or never_both(other, row.earlier, row.later):
            continue  # a scoreboard's business
        if row.hazard is Hazard.WAR and earlier.base == "BRA":
            continue  # where a branch goes is known before anything after it issues
        need = min(table.gaps.get(name, LONGEST), LONGEST)
        if distance < min(need, before.get(_key(row, origin), need)):
            reason = f"{distance} cycles after {earlier}, which the original keeps further apart"
            yield Finding.at("LATENCY", later, reason)


def _spread(kernel: Kernel, table: LatencyTable) -> Iterator[tuple[Dependence, int]]:
    for block in kernel.blocks:
        yield from spread(kernel, block)
    yield from pairs_across(kernel, table)


def _key(row: Dependence, origin: list[int]) -> _Key:
    return (
        origin[row.earlier],
        origin[row.later],
        row.hazard.name,
        row.earlier_slot,
        row.later_slot,
    )
