"""Rules on cycles: how far apart pairs issue inside a block, in one pipe and over block edges."""

from __future__ import annotations

import numpy as np

from warploom.sass.decode.kernel import Instruction
from warploom.sass.decode.resources import resource_name
from warploom.sass.flow.distances import pipe_neighbours
from warploom.sass.flow.latency import SPACED, spacing_key, takes_carry
from warploom.sass.rules.original import Original, State
from warploom.sass.rules.rules import Rule
from warploom.sass.rules.verdict import Finding


def check_gaps(original: Original, state: State) -> list[Finding]:
    """Pairs inside a block, and instructions and block edges, that must be so far apart."""
    position, fields = state.position, state.fields
    times, duration = original.times(fields)
    found: list[Finding] = []
    rows = original.constraints.gaps
    distance = times[position[rows[:, 1]]] - times[position[rows[:, 0]]]
    for row, now in zip(rows[distance < rows[:, 2]], distance[distance < rows[:, 2]], strict=True):
        found.append(
            original.finding(
                Rule(int(row[3])).name,
                int(row[1]),
                f"{int(now)} cycles after {original.name(int(row[0]))}, needs {int(row[2])} "
                f"({resource_name(int(row[4]))})",
                int(row[0]),
                _more(int(row[2] - now)),
            )
        )
    edge = original.constraints.edge_gaps
    if len(edge):
        inside = times[position[edge[:, 0]]] - times[original.block_start[edge[:, 1]]]
        away = np.where(edge[:, 3] == 1, duration[edge[:, 1]] - inside, inside)
        bad = away < edge[:, 2]
        found.extend(
            original.finding(
                "BLOCK_EDGE",
                int(row[0]),
                f"needs {int(row[2])} cycles to the block's {'end' if row[3] else 'start'}",
                remedy=f"{int(row[2] - now)} more cycles of stall between it and that edge",
            )
            for row, now in zip(edge[bad], away[bad], strict=True)
        )
    return found


def check_across(original: Original, state: State) -> list[Finding]:
    """Fixed-latency results used in a later block, and blocks that must last so long."""
    position, fields = state.position, state.fields
    rows = original.constraints.cross
    if not len(rows):
        return []
    times, duration = original.times(fields)
    producer, consumer = rows[:, 0], rows[:, 1]
    home, away = original.block_of[producer], original.block_of[consumer]
    tail = duration[home] - (times[position[producer]] - times[original.block_start[home]])
    head = times[position[consumer]] - times[original.block_start[away]]
    distance = tail + head
    bad = distance < rows[:, 2]
    return [
        original.finding(
            "LATENCY_ACROSS_BLOCKS",
            int(row[1]),
            f"{int(now)} cycles of {original.name(int(row[0]))} and of its own block's start, "
            f"needs {int(row[2])}",
            int(row[0]),
            f"{int(row[2] - now)} more cycles of stall from the first to its block's end, or from "
            "the second's block's start to the second",
        )
        for row, now in zip(rows[bad], distance[bad], strict=True)
    ] + [
        original.finding(
            "BLOCK_DURATION",
            int(original.block_start[row[0]]),
            f"its block must last {int(row[1])} cycles for a result that passes through it",
            remedy=f"stalls in the block that are {int(row[1] - duration[row[0]])} cycles longer",
        )
        for row in original.constraints.durations
        if duration[row[0]] < row[1]
    ]


def _more(cycles: int) -> str:
    return (
        f"{cycles} more cycle{'' if cycles == 1 else 's'} of stall between the first and the second"
    )


class PipeSpacing:
    """The pipe [n] and family [n] of every instruction of one original, the cycles between two
    families in one pipe, and the pairs that the compiler itself put closer."""

    def __init__(self, original: Original) -> None:
        items = original.kernel.instructions
        pipes = {pipe: number for number, pipe in enumerate(sorted(SPACED, key=lambda p: p.value))}
        self.pipes = len(pipes)
        self.pipe = np.array([pipes.get(item.effects.info.pipe, -1) for item in items], np.int64)
        example: dict[tuple[str, bool], Instruction] = {}
        families = [(spacing_key(item, item), takes_carry(item)) for item in items]
        for key, item in zip(families, items, strict=True):
            example.setdefault(key, item)
        number = {key: place for place, key in enumerate(example)}
        self.family = np.array([number[key] for key in families], np.int64)
        spacing, each = original.table.spacing, example.values()
        self.spacing = np.array([[spacing(one, other) for other in each] for one in each], np.int64)
        times, _ = original.times(original.before)
        self.close: dict[tuple[int, int], int] = {}
        for one, other in pipe_neighbours(items):
            distance = int(times[other.index] - times[one.index])
            if distance < original.table.spacing(one, other):
                self.close[one.index, other.index] = distance


class SpacingRules:
    """Neighbours in one pipe, for states of one original."""

    def __init__(self, original: Original, facts: PipeSpacing | None = None) -> None:
        self.original, self._facts = original, facts or PipeSpacing(original)

    def check(self, state: State) -> list[Finding]:
        """Neighbours in one pipe are as far apart as the compiler always puts them."""
        order, fields = state.order, state.fields
        facts = self._facts
        pipes = facts.pipe[order]
        arranged = np.argsort(pipes, kind="stable")
        first, second = arranged[:-1], arranged[1:]
        same = (pipes[first] == pipes[second]) & (pipes[first] >= 0)
        first, second = first[same], second[same]
        times, _ = self.original.times(fields)
        distance = times[second] - times[first]
        earlier, later = order[first], order[second]
        need = facts.spacing[facts.family[earlier], facts.family[later]]
        found: list[Finding] = []
        for row in np.flatnonzero(distance < need).tolist():
            pair = (int(earlier[row]), int(later[row]))
            if int(distance[row]) >= facts.close.get(pair, 1 << 30):
                continue  # as compiled
            found.append(
                self.original.finding(
                    "PIPE_SPACING",
                    pair[1],
                    f"{int(distance[row])} cycles after {self.original.name(pair[0])} in the "
                    f"same pipe, the compiler keeps {int(need[row])}",
                    pair[0],
                    _more(int(need[row] - distance[row])),
                )
            )
        return found
