"""Candidates that put instructions closer than the compiler does, one kind of pair at a time.

A *target* is a row of the mined table (`alu | alu`, `alu.d > fma.a`, ...) and the distance it is
lowered to. A patch holds control bits only: every pair of the target that can come so close while
all other rules still hold, judged by the verifier with that one row of its table lowered.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from warploom.sass.decode.control import MAX_STALL, MAX_STALL_STAYING, Control
from warploom.sass.decode.cubin import Cubin
from warploom.sass.flow.dependence import dependences
from warploom.sass.flow.distances import key_of, pipe_neighbours, stays_exclusive, sync_pairs
from warploom.sass.flow.latency import job, spacing_key, sync_key
from warploom.sass.rules.boundaries import pairs_across
from warploom.sass.rules.control_rules import ControlRules
from warploom.sass.rules.distance_rules import PipeSpacing, SpacingRules, check_across, check_gaps
from warploom.sass.rules.order_rules import check_waits
from warploom.sass.rules.original import State
from warploom.sass.rules.rules import Rule
from warploom.sass.rules.verify import Verifier

PAIRS: Final = 8  # so many pairs of a target at most in one patch
TRIES: Final = 24  # so many are tried
STEPS: Final = (1, 2, 3, 4, 8)

SPACING, SYNC, STALL, ACROSS, LATENCY = "spacing", "sync", "stall", "across", "latency"


@dataclass(frozen=True)
class Target:
    """A row of the table and the distance it is lowered to; `mined` is what the table asks."""

    kind: str
    key: str
    mined: int
    distance: int


@dataclass(frozen=True)
class Patch:
    """High words by instruction index, and the pairs that they bring closer."""

    target: Target
    words: Mapping[int, int]
    pairs: tuple[tuple[int, int], ...]


Pairs = dict[str, list[tuple[int, int]]]


class Closer:
    """Makes patches of one kernel."""

    def __init__(self, cubin: Cubin) -> None:
        self.verifier = Verifier(cubin)
        self.known = self.verifier.known
        self.kernel = self.verifier.kernel
        self.table = self.verifier.table
        items = self.kernel.instructions
        self.controls = [item.control for item in items]
        self.spacing, self.latency, self.sync, self.across, self.stall = self._pairs()
        self.facts = PipeSpacing(self.known)

    def _pairs(self) -> tuple[Pairs, Pairs, Pairs, Pairs, Pairs]:
        """The pairs of every row of the table, by kind."""
        spacing, latency, sync, across, stall = (Pairs() for _ in range(5))
        items = self.kernel.instructions
        for block in self.kernel.blocks:
            own = items[block.start : block.end]
            for one, two in pipe_neighbours(own):
                spacing.setdefault(spacing_key(one, two), []).append((one.index, two.index))
            for row in dependences(own):
                one, two = items[row.earlier], items[row.later]
                key = key_of(row, one, two)
                apart = stays_exclusive(own, one.index - block.start, two.index - block.start)
                if key is not None and not apart:
                    latency.setdefault(key, []).append((one.index, two.index))
            for one, two in sync_pairs(own):
                sync.setdefault(sync_key(one, two), []).append((one.index, two.index))
        for row, _ in pairs_across(self.kernel, self.table):
            one, two = items[row.earlier], items[row.later]
            key = key_of(row, one, two)
            if key is not None:
                across.setdefault(key, []).append((one.index, two.index))
        for item in items:
            stall.setdefault(job(item), []).append((item.index, item.index + 1))
        return spacing, latency, sync, across, stall

    def targets(self) -> Iterator[Target]:
        """Every target that this kernel has pairs of."""
        table = self.table
        for key, pairs in self.spacing.items():
            one, two = (self.kernel.instructions[index] for index in pairs[0])
            yield from _steps(SPACING, key, table.spacing(one, two))
        for key in self.sync:
            yield from _steps(SYNC, key, table.gaps.get(key, 48))
        for key in self.stall:
            if key in table.stalls:
                yield from _steps(STALL, key, table.stalls[key])
        for key in self.across:
            yield from _steps(ACROSS, key, table.gaps.get(key, 48))
        for key in self.latency:
            yield from _steps(LATENCY, key, table.gaps.get(key, 48))

    def patch(self, target: Target) -> Patch | None:
        """The pairs of a target brought to its distance; None where none can be."""
        pairs = getattr(self, target.kind)[target.key]
        rules = _Relaxed(self, target)
        controls = list(self.controls)
        done: list[tuple[int, int]] = []
        rows = list(dict.fromkeys(pairs))
        for one, two in rows[:: -(-len(rows) // TRIES)]:
            if len(done) == PAIRS:
                break
            tried = self._bring(rules, controls, one, two, target)
            if tried is not None:
                controls = tried
                done.append((one, two))
        if not done:
            return None
        items = self.kernel.instructions
        changed = {
            index: control.encode(items[index].high)
            for index, control in enumerate(controls)
            if control != items[index].control
        }
        return Patch(target, changed, tuple(done)) if changed else None

    def _bring(
        self, rules: _Relaxed, controls: list[Control], one: int, two: int, target: Target
    ) -> list[Control] | None:
        """`controls` with the pair exactly at the target's distance, where the rules allow it."""
        distance = self._distance(controls, one, two)
        if distance <= target.distance:
            return None
        if two - one > target.distance and target.kind != ACROSS:
            return None
        block_of = self.kernel.block_of
        inside = two > one and block_of[one] == block_of[min(two, len(block_of) - 1)]
        for _ in range(64):
            if distance == target.distance:
                return controls
            for shorter, longer in self._moves(one, two, inside, controls):
                tried = list(controls)
                tried[shorter] = _with_stall(tried[shorter], tried[shorter].stall - 1)
                if longer is not None:
                    tried[longer] = _with_stall(tried[longer], tried[longer].stall + 1)
                if rules.hold(tried):
                    controls, distance = tried, distance - 1
                    break
            else:
                return None
        return None

    def _moves(
        self, one: int, two: int, inside: bool, controls: list[Control]
    ) -> Iterator[tuple[int, int | None]]:
        """(instruction that stalls a cycle less, one that stalls a cycle more) between a pair."""
        blocks, block_of = self.kernel.blocks, self.kernel.block_of
        spans = (
            [range(two - 1, one - 1, -1)]
            if inside
            else [
                range(blocks[block_of[one]].end - 1, one - 1, -1),
                range(two - 1, blocks[block_of[two]].start - 1, -1),
            ]
        )
        for number, span in enumerate(spans):
            for shorter in span:
                if controls[shorter].stall < 2:
                    continue
                for longer in (two, one - 1) if inside else ((one - 1,), (two,))[number]:
                    room = 0 <= longer < len(controls) and controls[longer].stall < MAX_STALL
                    if room and longer != shorter:
                        yield shorter, longer
                yield shorter, None

    def _distance(self, controls: list[Control], one: int, two: int) -> int:
        """Cycles from one to the other; between blocks, to the block's end and from its start."""
        blocks, block_of = self.kernel.blocks, self.kernel.block_of
        if (two < len(block_of) and block_of[one] != block_of[two]) or two <= one:
            tail = sum(c.stall for c in controls[one : blocks[block_of[one]].end])
            return tail + sum(c.stall for c in controls[blocks[block_of[two]].start : two])
        return sum(control.stall for control in controls[one:two])


def _steps(kind: str, key: str, mined: int) -> Iterator[Target]:
    for distance in sorted({*STEPS, mined - 1, mined - 2}):
        if 1 <= distance < mined:
            yield Target(kind, key, mined, distance)


def _with_stall(control: Control, stall: int) -> Control:
    stay = stall <= MAX_STALL_STAYING
    reuse = control.reuse if stay and control.stay else 0
    return replace(control, stall=stall, stay=stay, reuse=reuse)


class _Relaxed:
    """The verifier's rules with one row of the table lowered; places never change."""

    def __init__(self, closer: Closer, target: Target) -> None:
        known = copy.copy(closer.known)
        rows = closer.known.constraints
        pairs = getattr(closer, target.kind)[target.key]
        wanted = set(pairs)
        if target.kind in (LATENCY, SYNC):
            rule = Rule.LATENCY if target.kind == LATENCY else Rule.SYNC_DISTANCE
            gaps = rows.gaps.copy()
            for row in gaps:
                if (int(row[0]), int(row[1])) in wanted and row[3] == rule:
                    row[2] = min(int(row[2]), target.distance)
            known.constraints = replace(rows, gaps=gaps)
        elif target.kind == ACROSS:
            cross = rows.cross.copy()
            for row in cross:
                if (int(row[0]), int(row[1])) in wanted:
                    row[2] = min(int(row[2]), target.distance)
            known.constraints = replace(rows, cross=cross)
        elif target.kind == STALL:
            known.own = known.own.copy()
            for index, _ in pairs:
                known.own[index] = min(int(known.own[index]), target.distance)
        facts = copy.copy(closer.facts)
        if target.kind == SPACING:
            one, two = pairs[0]
            facts.spacing = facts.spacing.copy()
            need = facts.spacing[facts.family[one], facts.family[two]]
            facts.spacing[facts.family[one], facts.family[two]] = min(need, target.distance)
        self.known, self.spacing = known, SpacingRules(known, facts)
        self.control = ControlRules(known)
        self.order = np.arange(known.count)

    def hold(self, controls: list[Control]) -> bool:
        """Whether all rules hold of these control fields, the original order kept."""
        before = self.known.before
        fields = replace(
            before,
            stall=np.array([c.stall for c in controls], np.int64),
            stay=np.array([c.stay for c in controls], np.int64),
            reuse=np.array([c.reuse for c in controls], np.int64),
        )
        state = State(self.order, self.order, fields)
        return not (
            check_gaps(self.known, state)
            or self.spacing.check(state)
            or check_across(self.known, state)
            or self.control.check(state)
            or check_waits(self.known, state)
        )
