"""Verdicts on patches: the verifier's rows that an action touches, and no others.

The version that stands is legal. An action can only break a row of which it changes an end, or a
distance or a wait between the two; `Judge.inside` checks those inside the block. What depends on
the block's duration or on other blocks is checked for all patches at once by `Judge.timed` and
`coupling.Coupling`. Tests compare both with `BlockBatch.check` on whole versions.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from warploom.rl.patches import Cell, Move, Patch
from warploom.rl.trace import Trace
from warploom.rl.walk import SHOWN
from warploom.sass.decode.control import MAX_STALL, MAX_STALL_STAYING, SCOREBOARDS
from warploom.sass.rules.constraints import BLOCK_EDGE
from warploom.sass.rules.original import SLOTS
from warploom.sass.rules.versions import Timed

Bools = npt.NDArray[np.bool_]


class Judge:
    """Judges patches of one trace, which is legal."""

    def __init__(self, trace: Trace, coupled: frozenset[int]) -> None:
        """`coupled`: instructions with rows to other blocks or to the block's edges."""
        self.trace, self.rules = trace, trace.rules
        ends = {n for n in (*trace.next_in_pipe[0], *trace.pipes[trace.size]) if n >= 0}
        self._ends_pipe = [number in ends for number in trace.order]
        self._coupled = [n in ends or trace.name[n] in coupled for n in trace.order]
        self._named_ends = (
            [trace.name[n] if n >= 0 else -1 for n in trace.next_in_pipe[0]],
            [trace.name[n] if n >= 0 else -1 for n in trace.pipes[trace.size]],
        )
        self._pipes = [[trace.name[n] if n >= 0 else -1 for n in side] for side in trace.pipes]
        self._waity = [
            bool(trace.waits[place] | trace.rules.depbar[trace.name[number]])
            or bool(trace.rules.wait_rows_of[trace.name[number]])
            for place, number in enumerate(trace.order)
        ]
        self._waited = [0] * SCOREBOARDS
        for place, number in enumerate(trace.order):
            mask = trace.waits[place] | trace.rules.depbar[trace.name[number]]
            for board in range(SCOREBOARDS) if mask else ():
                if mask >> board & 1:
                    self._waited[board] |= 1 << place

    def inside(self, patch: Patch) -> bool:
        """Whether a patch breaks no rule inside the block; the last place's fields are left out,
        because they change with the block's duration."""
        last = self.trace.size - 1
        return (
            all(self.fields(place, cell) for place, cell in patch.cells.items() if place != last)
            and self._visible(patch)
            and self._consumed(patch)
            and self._ordered(patch)
            and self._distant(patch)
            and self._awaited(patch)
        )

    def fields(self, place: int, cell: Cell) -> bool:
        """Control fields on their own, and what is pinned."""
        rules, base = self.rules, self.trace.order[place]
        if cell.number != base and (cell.number in rules.pinned or base in rules.pinned):
            return False
        name = self.trace.name[cell.number]
        stall, stay, reuse = cell.stall, cell.stay, cell.reuse
        if stall < rules.own[name] or stall > MAX_STALL:
            return False
        if rules.sync_wait[name] & ~cell.wait:
            return False
        if rules.no_wait[name] and cell.wait != rules.wait[name]:
            return False
        compiled = (rules.stall[name], rules.stay[name], rules.reuse[name])
        if (stall, stay, reuse) == compiled:
            return True
        if stay and not 1 <= stall <= MAX_STALL_STAYING:
            return False
        if not reuse:
            return True
        added = reuse & ~compiled[2]
        named = all(rules.bank[name][slot] >= 0 for slot in range(SLOTS) if added >> slot & 1)
        return bool(stay) and named and (bool(compiled[2]) or rules.keeps[name])

    def _visible(self, patch: Patch) -> bool:
        """No scoreboard awaited by the instruction after the one that sets it, too early."""
        cells, trace = patch.cells, self.trace
        for place in {*cells, *(place - 1 for place in cells)}:
            if not 0 <= place < trace.size - 1:
                continue
            one = cells.get(place) or trace.cells[place]
            other = cells.get(place + 1) or trace.cells[place + 1]
            pair = trace.name[one.number], trace.name[other.number]
            if one.stall < SHOWN and self.rules.shows(*pair, other.wait):
                return False
        return True

    def _consumed(self, patch: Patch) -> bool:
        """Every kept operand whose holder, readers or writers a patch touches is read again or
        displaced before its register is overwritten and before the block ends."""
        cells, trace = patch.cells, self.trace
        kept = [place for place, cell in cells.items() if cell.reuse]
        if isinstance(patch.action, Move):
            low = patch.action.span[0]
            kept += [place for place in trace.open[low] if place not in cells]
        if not kept:
            return True
        moved = {trace.name[cell.number]: place for place, cell in cells.items()}
        return all(self._consumes(place, cells, moved) for place in kept)

    def _consumes(self, place: int, cells: dict[int, Cell], moved: dict[int, int]) -> bool:
        """Whether the operands kept at one place are consumed in time."""
        trace, rules = self.trace, self.rules
        holder = cells.get(place) or trace.cells[place]
        for slot in range(SLOTS):
            row = rules.writers.get((trace.name[holder.number], slot))
            if row is None or not holder.reuse >> slot & 1:
                continue
            bank, writers, leaves = row
            reader = place + 1
            while reader < trace.size:
                cell = cells.get(reader) or trace.cells[reader]
                if rules.bank[trace.name[cell.number]][slot] == bank:
                    break
                reader += 1
            if leaves and reader == trace.size:
                return False
            if any(moved.get(name, trace.place_of[name]) < reader for name in writers):
                return False
        return True

    def _ordered(self, patch: Patch) -> bool:
        """No row crossed by a move."""
        action, trace = patch.action, self.trace
        if not isinstance(action, Move):
            return True
        low, high = action.span
        mine = trace.name[trace.order[action.here]]
        crossed = (trace.name[trace.order[p]] for p in range(low, high + 1) if p != action.here)
        after = self.rules.after
        if action.to < action.here:
            return not any(mine in after[other] for other in crossed)
        return not any(other in after[mine] for other in crossed)

    def _distant(self, patch: Patch) -> bool:
        """Gaps and pipe spacing of all that was issued at another time, from the stalls alone."""
        if not patch.issue:
            return True
        trace, rules, cells = self.trace, self.rules, patch.cells
        begin, end = max(patch.first - 1, 0), patch.end
        issue: dict[int, int] = {}  # by name
        when = trace.now[begin]
        pipes = list(self._pipes[begin])
        for place in range(begin, end):
            cell = cells.get(place, trace.cells[place])
            name = trace.name[cell.number]
            issue[name] = when
            pipe = rules.pipe[name]
            if pipe >= 0:
                if not self._spaced(pipes[pipe], name, when, issue):
                    return False
                pipes[pipe] = name
            when += cell.stall
        shift = when - trace.now[end] if end < trace.size else 0
        if end < trace.size and shift != patch.delta:
            return False
        for one, number in zip(pipes, trace.next_in_pipe[end], strict=True):
            if number >= 0:
                there = trace.now[trace.position[number]] + shift
                if not self._spaced(one, trace.name[number], there, issue):
                    return False
        return all(self._gaps_kept(name, when, issue, end, shift) for name, when in issue.items())

    def _spaced(self, one: int, other: int, when: int, issue: dict[int, int]) -> bool:
        """Whether `other`, issued at `when`, is far enough from `one` before it in its pipe."""
        if one < 0:
            return True
        then = issue.get(one, self.trace.now[self.trace.place_of[one]])
        return when - then >= self.rules.apart(one, other)

    def _gaps_kept(self, name: int, mine: int, issue: dict[int, int], end: int, shift: int) -> bool:
        """Whether an instruction keeps its distance from producers and consumers."""
        trace = self.trace
        for producer, need in self.rules.producers[name]:
            then = issue.get(producer)
            if then is None:
                place = trace.place_of[producer]
                then = trace.now[place] + (shift if place >= end else 0)
            if mine - then < need:
                return False
        for consumer, need in self.rules.consumers[name]:
            if consumer not in issue:
                place = trace.place_of[consumer]
                if trace.now[place] + (shift if place >= end else 0) - mine < need:
                    return False
        return True

    def _awaited(self, patch: Patch) -> bool:
        """Every wait row whose wait was moved or dropped, or whose ends were moved."""
        trace, rules, action = self.trace, self.rules, patch.action
        if not self._touches_waits(patch):
            return True
        rows: list[tuple[int, int, int]] = []
        begin, end = max(patch.first - 1, 0), patch.end
        moved: dict[int, int] = {}
        if isinstance(action, Move):
            low, high = action.span
            for place in range(low, high + 1):
                cell = patch.cells.get(place)
                name = trace.name[cell.number if cell else trace.order[place]]
                moved[name] = place
                rows += rules.wait_rows_of[name]
        places = [*range(begin, end)]
        if trace.size - 1 in patch.cells and end < trace.size:
            places.append(trace.size - 1)
        window = (1 << end) - (1 << begin) | 1 << places[-1] if places else 0
        waited = [mask & ~window for mask in self._waited]
        for place in places:
            cell = patch.cells.get(place) or trace.cells[place]
            mask = cell.wait | rules.depbar[trace.name[cell.number]]
            for board in range(SCOREBOARDS) if mask else ():
                if mask >> board & 1:
                    waited[board] |= 1 << place
        for board, (before, now) in enumerate(zip(self._waited, waited, strict=True)):
            if before & ~now:
                rows += rules.wait_rows_on[board]
        for holder, consumer, board in rows:
            after = 0 if holder == BLOCK_EDGE else moved.get(holder, trace.place_of[holder]) + 1
            until = trace.size
            if consumer != BLOCK_EDGE:
                until = moved.get(consumer, trace.place_of[consumer]) + 1
            if not waited[board] >> after & (1 << max(until - after, 0)) - 1:
                return False
        return True

    def _touches_waits(self, patch: Patch) -> bool:
        """Whether a patch moves or changes a wait, or moves what waits are for."""
        trace = self.trace
        if any(cell.wait != trace.waits[place] for place, cell in patch.cells.items()):
            return True
        if not isinstance(patch.action, Move):
            return False
        low, high = patch.action.span
        return any(self._waity[low : high + 1])

    # --- the block among the others ----------------------------------------------------------

    def couples(self, patch: Patch) -> bool:
        """Whether a patch can break a rule that ties the block to its edges or other blocks."""
        earlier, later = patch.shifts
        if min(earlier, patch.delta, patch.longer) < 0 or patch.longer < max(later, patch.delta):
            return True
        return 0 in patch.cells or self.trace.size - 1 in patch.cells

    def shifts(self, patch: Patch) -> tuple[int, int]:
        """The least and the greatest shift of anything that other blocks or the block's edges
        depend on; the first or last of a pipe that changes place counts as shifted both ways."""
        trace, origin = self.trace, self.trace.origin(patch.first)
        low, high = patch.action.span if isinstance(patch.action, Move) else (0, -1)
        if any(self._ends_pipe[low : high + 1]):
            return -1, MAX_STALL
        found = [
            when + origin - trace.now[trace.place_of[name]]
            for name, when in patch.issue.items()
            if self._coupled[trace.place_of[name]]
        ]
        return min(found, default=0), max(found, default=0)

    def timed(self, patches: Sequence[Patch]) -> tuple[Timed, Bools]:
        """(what `Coupling` needs of patches, which keep the distances to the block's edges)."""
        trace, batch = self.trace, self.rules.batch
        count, size = len(patches), trace.size
        names = [trace.name[number] for number in trace.order]
        facts: list[tuple[int, int, int, int, int]] = []
        first = np.empty((count, self.rules.pipes), np.int64)
        last = np.empty_like(first)
        ends = np.array([patch.end for patch in patches])[:, None]
        deltas = np.array([patch.delta for patch in patches])[:, None]
        by_place = np.array(trace.now)[None] + np.where(np.arange(size) >= ends, deltas, 0)
        issue = np.empty_like(by_place)
        issue[:, names] = by_place
        for row, patch in enumerate(patches):
            first[row], last[row] = self._ends(patch)
            begin = patch.cells.get(0) or trace.cells[0]
            final = patch.cells.get(size - 1) or trace.cells[size - 1]
            one, other = trace.name[begin.number], trace.name[final.number]
            facts.append((trace.duration + patch.longer, one, other, begin.wait, patch.last_stall))
        lengths = [len(patch.issue) for patch in patches]
        origins = [trace.origin(patch.first) for patch in patches]
        changed = np.concatenate([patch.names for patch in patches])
        times = np.concatenate([patch.times for patch in patches])
        issue[np.repeat(np.arange(count), lengths), changed] = times + np.repeat(origins, lengths)
        columns = np.array(facts, np.int64).reshape(count, 5).T
        timed = Timed(
            issue=issue,
            duration=columns[0],
            first=first,
            last=last,
            first_instruction=columns[1],
            last_instruction=columns[2],
            first_wait=columns[3],
            last_sets=batch.sets[columns[2]],
            last_stall=columns[4],
        )
        edges = batch.edge_rows
        inside = issue[:, edges[:, 0]]
        away = np.where(edges[:, 2] == 1, columns[0][:, None] - inside, inside)
        ok = (away >= edges[:, 1]).all(1) & (columns[0] >= batch.least_duration)
        return timed, ok

    def _ends(self, patch: Patch) -> tuple[list[int], list[int]]:
        """First and last instruction in each pipe."""
        trace, pipe_of = self.trace, self.rules.pipe
        low, high = patch.action.span if isinstance(patch.action, Move) else (0, -1)
        if not any(self._ends_pipe[low : high + 1]):
            return self._named_ends
        numbers = [
            patch.cells[place].number if place in patch.cells else trace.order[place]
            for place in range(low, high + 1)
        ]
        sides: list[list[int]] = []
        for ends, listed in (
            (trace.next_in_pipe[0], numbers),
            (trace.pipes[trace.size], numbers[::-1]),
        ):
            side = list(ends)
            for pipe, number in enumerate(side):
                if number >= 0 and low <= trace.position[number] <= high:
                    side[pipe] = next(n for n in listed if pipe_of[n] == pipe)
            sides.append([trace.name[n] if n >= 0 else -1 for n in side])
        return sides[0], sides[1]
