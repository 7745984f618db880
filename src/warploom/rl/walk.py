"""Deriving the control fields of one version place by place."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from warploom.rl.rules import BlockRules

SHOWN: Final = 2  # cycles until a scoreboard set by the instruction before can be waited for


class Walk:
    """A derivation under way: `now` is when `before`, the last instruction, was issued.

    It may begin in the middle of a version: `stood` and `times` then say where each instruction
    stood and when each of the places before `first` was issued. `wish`: an instruction whose least
    stall is wished for beside those of `wishes`.
    """

    def __init__(
        self,
        rules: BlockRules,
        wishes: Sequence[int],
        stood: Sequence[int] = (),
        times: Sequence[int] = (),
        first: int = 0,
        wish: tuple[int, int] = (-1, 0),
    ) -> None:
        self.rules, self.wishes, self.wish = rules, wishes, wish
        self.stood, self.times, self.first = stood, times, first
        self.now, self.before = 0, -1
        self.out = rules.every_pair
        self.pipes = [-1] * rules.pipes
        self.issued: dict[int, int] = {}

    def step(self, mine: int) -> tuple[int, int]:
        """Issue the next instruction: (the stall of the one before, its own wait mask)."""
        rules, issued, before, now = self.rules, self.issued, self.before, self.now
        wait, out = rules.waiting(mine, self.out)
        earliest = now
        if before >= 0:  # what comes first is issued as the block begins
            floor = self.floor(mine)
            if floor < SHOWN and rules.shows(before, mine, wait):
                floor = SHOWN
            earliest = max(now + floor, rules.head[mine])
        for producer, need in rules.producers[mine]:
            when = issued.get(producer)
            if when is None:
                if not self.first or self.stood[producer] >= self.first:
                    continue
                when = self.times[self.stood[producer]]
            earliest = max(earliest, when + need)
        pipe = rules.pipe[mine]
        if pipe >= 0:
            other = self.pipes[pipe]
            if other >= 0:
                when = issued[other] if other in issued else self.times[self.stood[other]]
                earliest = max(earliest, when + rules.apart(other, mine))
            self.pipes[pipe] = mine
        self.now, self.before = earliest, mine
        issued[mine] = earliest
        self.out = out | rules.raises[mine]
        return earliest - now, wait

    def floor(self, following: int) -> int:
        """The least stall of the last instruction issued."""
        before = self.before
        asked = self.wish[1] if before == self.wish[0] else self.wishes[before]
        return self.rules.floor(before, following, asked)


class Settling:
    """When a walk has converged with the version it departs from.

    From place `since` on the instructions are the same and all are shifted alike; what differs
    before it holds something up until `theirs` in the walk and until `ours` in the version.
    """

    def __init__(self, first: int) -> None:
        self.first = self.since = first
        self.delta = self.theirs = self.ours = self._latest = self._earlier = 0

    def note(self, place: int, high: int, expires: int, expired: int, shift: int) -> None:
        """An instruction was issued at a place, `shift` later than what stood there; both hold up
        nothing any more after `expires` and `expired`. Places up to `high` differ."""
        if place > high and (shift != self.delta or place == self.first):
            self.since, self.theirs, self.ours = place, self._latest, self._earlier
        self._latest = max(self._latest, expires)
        self._earlier = max(self._earlier, expired)
        if place <= high:
            self.since, self.theirs, self.ours = place + 1, self._latest, self._earlier
        self.delta = shift
