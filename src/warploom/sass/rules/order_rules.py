"""Rules on places: what stays before what, and which wait stands before which instruction."""

from __future__ import annotations

import numpy as np

from warploom.sass.decode.control import SCOREBOARDS
from warploom.sass.decode.resources import resource_name
from warploom.sass.rules.original import Original, State
from warploom.sass.rules.rules import BLOCK_EDGE, Rule
from warploom.sass.rules.verdict import Finding


def check_order(original: Original, state: State) -> list[Finding]:
    """Pairs that must keep their order: registers, memory, syncs, scoreboard setters."""
    position = state.position
    rows = original.constraints.order
    bad = position[rows[:, 0]] >= position[rows[:, 1]]
    return [
        original.finding(
            Rule(int(rule)).name,
            int(later),
            f"must stay after {original.name(int(earlier))}"
            + (f" ({resource_name(int(resource))})" if rule == Rule.REGISTER_ORDER else ""),
            int(earlier),
            "the first before the second again",
        )
        for earlier, later, rule, resource in rows[bad]
    ]


def check_waits(original: Original, state: State) -> list[Finding]:
    """Every instruction that relied on a wait, its own or an earlier one's, still does."""
    position, order, fields = state.position, state.order, state.fields
    rows = original.constraints.waits
    if not len(rows):
        return []
    where = np.arange(original.count)
    mask = fields.wait | original.depbar[order]
    last = np.stack(
        [
            np.maximum.accumulate(np.where(mask >> number & 1 == 1, where, -1))
            for number in range(SCOREBOARDS)
        ]
    )
    holder, consumer, scoreboard, block = rows[:, 0], rows[:, 1], rows[:, 2], rows[:, 3]
    floor = np.where(
        holder == BLOCK_EDGE, original.block_start[block] - 1, position[np.maximum(holder, 0)]
    )
    until = np.where(
        consumer == BLOCK_EDGE, original.block_end[block] - 1, position[np.maximum(consumer, 0)]
    )
    bad = last[scoreboard, until] <= floor
    return [
        original.finding(
            Rule(int(row[4])).name,
            int(row[1]) if row[1] != BLOCK_EDGE else int(original.block_end[row[3]]) - 1,
            f"no wait for scoreboard {int(row[2])} after {original.name(int(row[0]))}",
            int(row[0]),
            f"a wait for scoreboard {int(row[2])} on the second, or on an instruction between",
        )
        for row in rows[bad]
    ]
