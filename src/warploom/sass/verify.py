"""`verify(original, candidate)`: is the candidate a legal reordering of the original?

Reads both files from their bytes and trusts nothing the editor recorded. A `Verifier` derives the
constraints of one original once; checking a candidate is then a few vector operations, so that a
search can ask for a verdict on every candidate it thinks of.
"""

from __future__ import annotations

import itertools
from functools import cached_property
from typing import Final

import numpy as np
import numpy.typing as npt

from warploom.errors import InputError
from warploom.sass import nvinfo
from warploom.sass.aliasing import AliasMode, is_sync
from warploom.sass.constraints import (
    ARITHMETIC,
    BLOCK_EDGE,
    Constraints,
    Ints,
    Rule,
    derive,
)
from warploom.sass.control import (
    CONTROL_MASK,
    MAX_STALL_STAYING,
    NO_SCOREBOARD,
    SCOREBOARDS,
)
from warploom.sass.cubin import WORD_BYTES, Cubin, parse
from warploom.sass.disassembly import disassemble
from warploom.sass.effects import resource_name
from warploom.sass.kernel import Instruction, Kernel, build_kernel
from warploom.sass.latency import SPACED, LatencyTable, spacing_key, table_for
from warploom.sass.mining import pipe_neighbours
from warploom.sass.operand_slots import slot_registers
from warploom.sass.scoreboard import waited_scoreboards
from warploom.sass.verdict import Finding, Verdict
from warploom.sass.words import ControlFields, Words, control_fields, instruction_words

Bools = npt.NDArray[np.bool_]
_CLEAR: Final = np.uint64(~CONTROL_MASK & (1 << 64) - 1)
_SLOTS: Final = 3
_BANKS: Final = 2
_NO_REGISTER: Final = 255


class Verifier:
    """Checks candidates against one kernel of one original cubin."""

    def __init__(
        self,
        original: Cubin,
        kernel: str | None = None,
        mode: AliasMode = AliasMode.STRICT,
        table: LatencyTable | None = None,
    ) -> None:
        code = original.kernel(kernel)
        # Parsed again from the bytes: what the caller decoded is not trusted.
        self.original = parse(original.data, original.origin)
        self.mode = mode
        self.kernel: Kernel = build_kernel(
            self.original, self.original.kernels[code.name], disassemble(self.original)[code.name]
        )
        self.table = table or table_for(self.kernel.sm)
        self.constraints: Constraints = derive(self.kernel, mode, self.table)
        self._prepare()

    def _prepare(self) -> None:
        kernel = self.kernel
        words = instruction_words(self.original, kernel.name)
        self._low = words[:, 0].copy()
        self._high = words[:, 1].copy()
        self._identity_high = self._high & _CLEAR
        self._before = control_fields(self._high)
        count = len(kernel.instructions)
        self._count = count
        self._block_start = np.array([block.start for block in kernel.blocks], np.int64)
        self._block_end = np.array([block.end for block in kernel.blocks], np.int64)
        self._block_of = np.array(kernel.block_of, np.int64)
        pairs = np.stack([self._low, self._identity_high], axis=1)
        unique, inverse = np.unique(pairs, axis=0, return_inverse=True)
        self._unique = unique
        self._ids = inverse.reshape(-1).astype(np.int64)
        self._id_of = {(int(low), int(high)): number for number, (low, high) in enumerate(unique)}
        self._sorted = np.argsort(self._block_of * (len(unique) + 1) + self._ids, kind="stable")
        self._pinned = np.array(
            [item.index for item in kernel.instructions if item.pinned], np.int64
        )
        self._own = np.array([self.table.own_stall(item) for item in kernel.instructions], np.int64)
        depbar = [waited_scoreboards(item) & ~item.control.wait for item in kernel.instructions]
        self._depbar = np.array(depbar, np.int64)
        self._sources = np.array(
            [
                [slot_registers(item).get(slot, _NO_REGISTER) for slot in range(_SLOTS)]
                for item in kernel.instructions
            ],
            np.int64,
        ).reshape(count, _SLOTS)
        self._sync_wait = np.array(
            [item.control.wait if is_sync(item) else 0 for item in kernel.instructions], np.int64
        )
        self._prepare_spacing()
        # Reuse pairs the compiler itself left unconsumed are not held against a candidate.
        identity = np.arange(count)
        reuse = self.constraints.reuse
        broken = self._stale_reuse(identity, identity, self._before.reuse)
        self._reuse_rows = reuse[~broken] if len(reuse) else reuse

    @cached_property
    def _other_bytes(self) -> tuple[tuple[int, int], ...]:
        """Byte ranges of the file that no edit may touch."""
        code = self.original.kernels[self.kernel.name]
        holes = [(code.text.offset, code.text.size)]
        if code.info is not None:
            holes.append((code.info.offset, code.info.size))
        ranges: list[tuple[int, int]] = []
        position = 0
        for offset, size in sorted(holes):
            ranges.append((position, offset))
            position = offset + size
        ranges.append((position, len(self.original.data)))
        return tuple(ranges)

    def check_file(self, candidate: Cubin) -> Verdict:
        """Verdict on a whole file: every byte outside the kernel's code must be the original's."""
        finding = self._check_container(candidate)
        if finding is not None:
            return Verdict(False, self.mode, (finding,), 0, 0)
        words = instruction_words(candidate, self.kernel.name)
        code = candidate.kernels[self.kernel.name]
        return self.check_words(
            words, candidate.section_bytes(code.info) if code.info else b"", every=True
        )

    def _check_container(self, candidate: Cubin) -> Finding | None:
        name = self.kernel.name
        if len(candidate.data) != len(self.original.data):
            reason = f"the file has {len(candidate.data)} bytes, not {len(self.original.data)}"
            return Finding("CONTAINER", 0, name, reason)
        for start, end in self._other_bytes:
            if candidate.data[start:end] != self.original.data[start:end]:
                where = next(
                    position
                    for position in range(start, end)
                    if candidate.data[position] != self.original.data[position]
                )
                return Finding("CONTAINER", 0, name, f"byte {where:#x} outside the code changed")
        return None

    def check_words(self, words: Words, info: bytes | None = None, every: bool = False) -> Verdict:
        """Verdict on instruction words [n, 2] and the kernel's `.nv.info` bytes.

        `every` lists all findings; without it the first one ends the check.
        """
        low, high = words[:, 0], words[:, 1]
        if len(low) != self._count:
            reason = f"{len(low)} instructions, not {self._count}"
            return self._verdict([Finding("MULTISET", 0, self.kernel.name, reason)], None, None)
        mapped = self._positions(low, high & _CLEAR)
        if isinstance(mapped, Finding):
            return self._verdict([mapped], None, None)
        position, order = mapped
        fields = control_fields(high)
        findings: list[Finding] = []
        for check in (
            self._check_control,
            self._check_order,
            self._check_gaps,
            self._check_spacing,
            self._check_cross,
            self._check_waits,
        ):
            findings.extend(check(position, order, fields))
            if findings and not every:
                break
        if info is not None and (every or not findings):
            findings.extend(self._check_info(position, info))
        return self._verdict(findings, position, fields)

    def _verdict(
        self, findings: list[Finding], position: Ints | None, fields: ControlFields | None
    ) -> Verdict:
        moved = edits = 0
        if position is not None and fields is not None:
            moved = int(np.count_nonzero(position != np.arange(self._count)))
            edits = sum(
                int(
                    np.count_nonzero(getattr(fields, name)[position] != getattr(self._before, name))
                )
                for name in ("stall", "stay", "wait", "reuse")
            )
        return Verdict(not findings, self.mode, tuple(findings), moved, edits)

    def _positions(self, low: Words, high: Words) -> tuple[Ints, Ints] | Finding:
        """(new position of each original instruction, original instruction at each position)."""
        ids = self._ids.copy()
        changed = np.flatnonzero((low != self._low) | (high != self._identity_high))
        for index in changed.tolist():
            number = self._id_of.get((int(low[index]), int(high[index])))
            if number is None:
                reason = "no such instruction in the original"
                return Finding("MULTISET", index * WORD_BYTES, f"word {index}", reason)
            ids[index] = number
        order = np.arange(self._count)
        position = order.copy()
        if len(changed):
            arranged = np.argsort(self._block_of * (len(self._unique) + 1) + ids, kind="stable")
            if not np.array_equal(ids[arranged], self._ids[self._sorted]):
                where = int(changed[0])
                return self._finding(
                    "MULTISET", where, "its block does not hold the same instructions any more"
                )
            position[self._sorted] = arranged
            order[arranged] = self._sorted
        return position, order

    def _finding(self, rule: str, index: int, reason: str) -> Finding:
        item = self.kernel.instructions[index]
        return Finding(rule, item.offset, item.line.text, reason)

    def _name(self, index: int) -> str:
        return str(self.kernel.instructions[index]) if index >= 0 else "the block's edge"

    # --- the rules -------------------------------------------------------------------------

    def _check_control(self, position: Ints, order: Ints, fields: ControlFields) -> list[Finding]:
        found: list[Finding] = []

        def report(rule: str, bad: Bools, reason: str) -> None:
            found.extend(
                self._finding(rule, int(order[where]), reason)
                for where in np.flatnonzero(bad).tolist()
            )

        stall, stay = fields.stall, fields.stay == 1
        changed = (
            (stall != self._before.stall[order])
            | (fields.stay != self._before.stay[order])
            | (fields.reuse != self._before.reuse[order])
        )
        report(
            "CONTROL_L1",
            changed & stay & ((stall < 1) | (stall > MAX_STALL_STAYING)),
            f"stay needs a stall of 1 to {MAX_STALL_STAYING}",
        )
        report("CONTROL_L2", changed & (fields.reuse != 0) & ~stay, "reuse without stay")
        report("OWN_STALL", stall < self._own[order], "stall below the least seen for this opcode")
        # A barrier, fence or arrival may wait for what no register shows (an earlier fence).
        report("WAIT", self._sync_wait[order] & ~fields.wait != 0, "a sync lost a wait it had")
        for name in ("write_sb", "read_sb"):
            now, before = getattr(fields, name), getattr(self._before, name)[order]
            report("SCOREBOARD", now != before, f"{name} changed")
        registers = self._sources[order]
        for slot in range(_SLOTS):
            added = (fields.reuse >> slot & 1 == 1) & (self._before.reuse[order] >> slot & 1 == 0)
            report(
                "REUSE", added & (registers[:, slot] == _NO_REGISTER), "reuse of no register source"
            )
        added = (fields.reuse != 0) & (self._before.reuse[order] == 0)
        report("REUSE", added & ~self._arithmetic[order], "reuse on an opcode that takes none")
        bad_pins = self._pinned[position[self._pinned] != self._pinned]
        found.extend(
            self._finding("PINNED", int(index), self.kernel.instructions[int(index)].pinned)
            for index in bad_pins
        )
        stale = self._stale_reuse(position, order, fields.reuse, self._reuse_rows)
        found.extend(
            self._finding(
                "REUSE", int(row[0]), f"kept R{row[2]} is rewritten by {self._name(int(row[3]))}"
            )
            for row in self._reuse_rows[stale]
        )
        # A scoreboard's increment shows one cycle after issue.
        sets = np.zeros(self._count, np.int64)
        for name in ("write_sb", "read_sb"):
            number = getattr(fields, name)
            sets |= np.where(number != NO_SCOREBOARD, 1 << number, 0)
        early = (sets[:-1] & fields.wait[1:] != 0) & (stall[:-1] < 2)
        found.extend(
            self._finding("SCOREBOARD_VISIBLE", int(order[where]), "waited for in the next cycle")
            for where in np.flatnonzero(early).tolist()
            if (int(order[where]), int(order[where + 1])) not in self._early_pairs
        )
        return found

    @cached_property
    def _arithmetic(self) -> Bools:
        return np.array(
            [item.effects.info.pipe in ARITHMETIC for item in self.kernel.instructions], bool
        )

    @cached_property
    def _early_pairs(self) -> set[tuple[int, int]]:
        pairs: set[tuple[int, int]] = set()
        items = self.kernel.instructions
        for first, second in itertools.pairwise(items):
            numbers = {first.control.write_sb, first.control.read_sb} - {NO_SCOREBOARD}
            if first.control.stall < 2 and any(second.control.wait >> k & 1 for k in numbers):
                pairs.add((first.index, second.index))
        return pairs

    def _stale_reuse(
        self, position: Ints, order: Ints, reuse: Ints, rows: Ints | None = None
    ) -> Bools:
        """Rows of `reuse` whose kept operand is neither read again nor displaced in time."""
        rows = self.constraints.reuse if rows is None else rows
        if not len(rows):
            return np.zeros(0, bool)
        holder, slot, register, writer = rows.T
        where = np.arange(self._count)
        sources = self._sources[order]
        last = np.empty((_SLOTS, _BANKS, self._count), np.int64)
        for number in range(_SLOTS):
            column = sources[:, number]
            for bank in range(_BANKS):
                reads = (column != _NO_REGISTER) & (column % _BANKS == bank)
                last[number, bank] = np.maximum.accumulate(np.where(reads, where, -1))
        kept = reuse[position[holder]] >> slot & 1 == 1
        refreshed = last[slot, register % _BANKS, position[writer]] > position[holder]
        return kept & ~refreshed

    def _check_order(self, position: Ints, order: Ints, fields: ControlFields) -> list[Finding]:
        rows = self.constraints.order
        bad = position[rows[:, 0]] >= position[rows[:, 1]]
        return [
            self._finding(
                Rule(int(rule)).name,
                int(later),
                f"must stay after {self._name(int(earlier))}"
                + (f" ({resource_name(int(resource))})" if rule == Rule.REGISTER_ORDER else ""),
            )
            for earlier, later, rule, resource in rows[bad]
        ]

    def _times(self, fields: ControlFields) -> tuple[Ints, Ints]:
        """(issue time at each position from the kernel's start, duration of each block)."""
        ends = np.cumsum(fields.stall)
        times = ends - fields.stall
        duration = ends[self._block_end - 1] - times[self._block_start]
        return times, duration

    def _check_gaps(self, position: Ints, order: Ints, fields: ControlFields) -> list[Finding]:
        times, duration = self._times(fields)
        found: list[Finding] = []
        rows = self.constraints.gaps
        distance = times[position[rows[:, 1]]] - times[position[rows[:, 0]]]
        for row, now in zip(
            rows[distance < rows[:, 2]], distance[distance < rows[:, 2]], strict=True
        ):
            found.append(
                self._finding(
                    Rule(int(row[3])).name,
                    int(row[1]),
                    f"{int(now)} cycles after {self._name(int(row[0]))}, needs {int(row[2])} "
                    f"({resource_name(int(row[4]))})",
                )
            )
        edge = self.constraints.edge_gaps
        if len(edge):
            inside = times[position[edge[:, 0]]] - times[self._block_start[edge[:, 1]]]
            away = np.where(edge[:, 3] == 1, duration[edge[:, 1]] - inside, inside)
            found.extend(
                self._finding(
                    "BLOCK_EDGE",
                    int(row[0]),
                    f"needs {int(row[2])} cycles to the block's {'end' if row[3] else 'start'}",
                )
                for row in edge[away < edge[:, 2]]
            )
        return found

    def _check_spacing(self, position: Ints, order: Ints, fields: ControlFields) -> list[Finding]:
        """Neighbours in one pipe are as far apart as the compiler always puts them."""
        pipes = self._pipe[order]
        arranged = np.argsort(pipes, kind="stable")
        first, second = arranged[:-1], arranged[1:]
        same = (pipes[first] == pipes[second]) & (pipes[first] >= 0)
        first, second = first[same], second[same]
        times, _ = self._times(fields)
        distance = times[second] - times[first]
        earlier, later = order[first], order[second]
        need = self._spacing[self._family[earlier], self._family[later]]
        found: list[Finding] = []
        for row in np.flatnonzero(distance < need).tolist():
            pair = (int(earlier[row]), int(later[row]))
            if int(distance[row]) >= self._close_pairs.get(pair, 1 << 30):
                continue  # as compiled
            found.append(
                self._finding(
                    "PIPE_SPACING",
                    pair[1],
                    f"{int(distance[row])} cycles after {self._name(pair[0])} in the same pipe, "
                    f"the compiler keeps {int(need[row])}",
                )
            )
        return found

    def _prepare_spacing(self) -> None:
        items = self.kernel.instructions
        pipes = {pipe: number for number, pipe in enumerate(sorted(SPACED, key=lambda p: p.value))}
        self._pipe = np.array([pipes.get(item.effects.info.pipe, -1) for item in items], np.int64)
        families: dict[str, int] = {}
        example: list[Instruction] = []
        for item in items:
            if spacing_key(item, item) not in families:
                families[spacing_key(item, item)] = len(example)
                example.append(item)
        self._family = np.array([families[spacing_key(item, item)] for item in items], np.int64)
        self._spacing = np.array(
            [[self.table.spacing(one, other) for other in example] for one in example], np.int64
        )
        times, _ = self._times(self._before)
        self._close_pairs: dict[tuple[int, int], int] = {}
        for one, other in pipe_neighbours(items):
            distance = int(times[other.index] - times[one.index])
            if distance < self.table.spacing(one, other):
                self._close_pairs[one.index, other.index] = distance

    def _check_cross(self, position: Ints, order: Ints, fields: ControlFields) -> list[Finding]:
        rows = self.constraints.cross
        if not len(rows):
            return []
        times, duration = self._times(fields)
        producer, consumer = rows[:, 0], rows[:, 1]
        home, away = self._block_of[producer], self._block_of[consumer]
        tail = duration[home] - (times[position[producer]] - times[self._block_start[home]])
        head = times[position[consumer]] - times[self._block_start[away]]
        distance = tail + head
        bad = distance < rows[:, 2]
        return [
            self._finding(
                "LATENCY_ACROSS_BLOCKS",
                int(row[1]),
                f"{int(now)} cycles of {self._name(int(row[0]))} and of its own block's start, "
                f"needs {int(row[2])}",
            )
            for row, now in zip(rows[bad], distance[bad], strict=True)
        ] + [
            self._finding(
                "BLOCK_DURATION",
                int(self._block_start[row[0]]),
                f"its block must last {int(row[1])} cycles for a result that passes through it",
            )
            for row in self.constraints.durations
            if duration[row[0]] < row[1]
        ]

    def _check_waits(self, position: Ints, order: Ints, fields: ControlFields) -> list[Finding]:
        rows = self.constraints.waits
        if not len(rows):
            return []
        where = np.arange(self._count)
        mask = fields.wait | self._depbar[order]
        last = np.stack(
            [
                np.maximum.accumulate(np.where(mask >> number & 1 == 1, where, -1))
                for number in range(SCOREBOARDS)
            ]
        )
        holder, consumer, scoreboard, block = rows[:, 0], rows[:, 1], rows[:, 2], rows[:, 3]
        floor = np.where(
            holder == BLOCK_EDGE, self._block_start[block] - 1, position[np.maximum(holder, 0)]
        )
        until = np.where(
            consumer == BLOCK_EDGE, self._block_end[block] - 1, position[np.maximum(consumer, 0)]
        )
        bad = last[scoreboard, until] <= floor
        return [
            self._finding(
                Rule(int(row[4])).name,
                int(row[1]) if row[1] != BLOCK_EDGE else int(self._block_end[row[3]]) - 1,
                f"no wait for scoreboard {int(row[2])} after {self._name(int(row[0]))}",
            )
            for row in rows[bad]
        ]

    def _check_info(self, position: Ints, info: bytes) -> list[Finding]:
        def moved(offset: int) -> int:
            index = offset // WORD_BYTES
            if offset % WORD_BYTES or index >= self._count:
                return offset
            return int(position[index]) * WORD_BYTES

        expected = nvinfo.rewrite(self.kernel.info, moved)
        if info == expected:
            return []
        stale = nvinfo.rewritten_offsets(self.kernel.info)
        named = next((index // WORD_BYTES for index in stale if moved(index) != index), 0)
        return [self._finding("NV_INFO", named, "the .nv.info offsets do not follow the code")]


def verify(
    original: Cubin,
    candidate: Cubin,
    kernel: str | None = None,
    mode: AliasMode = AliasMode.STRICT,
) -> Verdict:
    """Static verdict on `candidate` as a reordering of `original`.

    Raises `InputError` when the two are not for the same architecture.
    """
    if original.sm != candidate.sm:
        raise InputError(
            f"{candidate.origin} is for {candidate.arch}, the original is for {original.arch}"
        )
    return Verifier(original, kernel, mode).check_file(candidate)
