"""What patches of one block mean for the others, and for the block's edges.

Whether a patch is legal inside the block says `BlockBatch.inside` of the version it leads to. What
depends on the block's duration or on other blocks is checked for all patches at once, here by
`timed` and by `coupling.Coupling`. Tests compare both with `BlockBatch.check` on whole versions.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from warploom.rl.patches import Move, Patch
from warploom.rl.trace import Trace
from warploom.sass.decode.control import MAX_STALL
from warploom.sass.rules.versions import Timed

Bools = npt.NDArray[np.bool_]


class Judge:
    """What patches of one trace, which is legal, change for the block's edges and other blocks."""

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
