"""Give the six scoreboards out anew, so that fewer waits are for more than they need.

Where more results are open than there are scoreboards, some share one, and who waits for one of
them waits for all. Here a block's setters get numbers in order: each takes the scoreboard whose
sharers cost it, and it them, the fewest cycles of needless waiting by the latencies of the timing
model. Waits are then put where the checker says that something relies on an event that is still
open, at the first place along each path, and nowhere else. The timing model judges each change.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import Final

from warploom.sass.decode.control import SCOREBOARDS
from warploom.sass.decode.cubin import Cubin
from warploom.sass.decode.kernel import Block, Instruction, Kernel, decode
from warploom.sass.flow.distances import issue_times
from warploom.sass.flow.loops import depths, natural_loops
from warploom.sass.flow.scoreboard import takes_no_wait
from warploom.sass.scoreboards.verify import (
    ALL_BOARDS,
    Relation,
    events,
    lates,
    named_scoreboards,
    number_of,
    verify_scoreboards,
)
from warploom.sass.timing.slots import slot_of
from warploom.sass.timing.timing_model import TimingModel

WHOLE_BLOCK: Final = 0.3  # share of tries that give out a whole block's scoreboards
ROUNDS: Final = 12  # of putting waits where they are missing; two or three are usual
BEYOND: Final = 1 << 20  # cycles: an event that nothing in its block relies on


@dataclass(frozen=True)
class _Open:
    """An event of a block: when it is set, expected over, and first relied on."""

    event: int
    over: float
    needed: int


class Renumberer:
    """Gives out the scoreboards of one kernel."""

    def __init__(self, original: Cubin, name: str) -> None:
        self.original, self.name = original, name
        self.kernel: Kernel = decode(original, name)
        self.relation = Relation(self.kernel)
        self.named = named_scoreboards(self.kernel)
        self.free = [n for n in range(SCOREBOARDS) if not self.named >> n & 1]
        self._model = TimingModel(self.kernel)
        depth = depths(self.kernel, natural_loops(self.kernel))
        setting = {self.kernel.block_of[event // 2] for event in self.relation.settles}
        self._playable = [
            block
            for block in self.kernel.blocks
            if block.index in setting and self._sets_free(block)
        ]
        self._weights = [4.0 ** depth[block.index] for block in self._playable]

    def _sets_free(self, block: Block) -> bool:
        items = self.kernel.items(block)
        return any(
            number_of(self.kernel, event) in self.free for item in items for event in events(item)
        )

    def renumbered(self, rng: random.Random, tries: int) -> tuple[Cubin, int] | None:
        """(the cubin with some scoreboards given out anew, how many events got another number).

        `tries` changes are kept or taken back by the timing model, which is asked after each. None
        when nothing was kept or the checker refuses the whole.
        """
        if len(self.free) < 2 or not self._playable:
            return None
        numbers = {event: number_of(self.kernel, event) for event in self.relation.settles}
        best, here = self.kernel, self._cycles(self.kernel)
        for _ in range(tries):
            tried = dict(numbers)
            block = rng.choices(self._playable, self._weights)[0]
            if rng.random() < WHOLE_BLOCK:
                self._give_out(block, tried, rng)
            else:
                self._swap(block, tried, rng)
            kernel = self._with_waits(tried) if tried != numbers else None
            if kernel is None:
                continue
            cycles = self._cycles(kernel)
            if cycles <= here:
                numbers, best, here = tried, kernel, cycles
        changed = sum(number_of(self.kernel, event) != n for event, n in numbers.items())
        words = [(item.low, item.control.encode(item.high)) for item in best.instructions]
        image = self.original.replace(self.original.kernel(self.name), words)
        if not changed or verify_scoreboards(self.original, image, self.name):
            return None
        return image, changed

    def _cycles(self, kernel: Kernel) -> float:
        return self._model.kernel_cycles(
            [
                (
                    tuple(range(block.start, block.end)),
                    tuple(item.control for item in kernel.items(block)),
                )
                for block in kernel.blocks
            ]
        )

    # --- numbers ---------------------------------------------------------------------------

    def _swap(self, block: Block, numbers: dict[int, int], rng: random.Random) -> None:
        """One event of a block takes another number, or two events change theirs."""
        mine = [
            event
            for item in self.kernel.items(block)
            for event in events(item)
            if numbers[event] in self.free
        ]
        event, other = rng.choice(mine), rng.choice(mine)
        if rng.random() < 0.5:
            numbers[event], numbers[other] = numbers[other], numbers[event]
        else:
            numbers[event] = rng.choice(self.free)

    def _give_out(self, block: Block, numbers: dict[int, int], rng: random.Random) -> None:
        """New numbers for all events of a block, by least needless waiting."""
        items = self.kernel.items(block)
        times = issue_times(items)
        open_now: dict[int, list[_Open]] = {number: [] for number in self.free}
        for place, item in enumerate(items):
            now = times[place]
            for event in events(item):
                if numbers[event] not in open_now:
                    continue  # a scoreboard that a DEPBAR names
                slot = slot_of(item)
                over = now + (slot.sources if event & 1 else slot.result)
                mine = _Open(event, over, self._needed(items, times, place, event))
                prices = {
                    number: sum(_price(mine, other) for other in others if other.needed > now)
                    for number, others in open_now.items()
                }
                least = min(prices.values())
                numbers[event] = rng.choice([n for n, price in prices.items() if price == least])
                open_now[numbers[event]].append(mine)

    def _needed(
        self, items: tuple[Instruction, ...], times: list[int], place: int, event: int
    ) -> int:
        """When the block first relies on an event."""
        for later in range(place + 1, len(items)):
            if self.relation.relies(items[later], event):
                return times[later]
        return BEYOND

    # --- waits -----------------------------------------------------------------------------

    def _with_waits(self, numbers: dict[int, int]) -> Kernel | None:
        """The kernel with these numbers and the waits they need; None when they do not settle."""
        items = list(self.kernel.instructions)
        for index, item in enumerate(items):
            control = replace(item.control, wait=item.control.wait & self.named)
            for event in events(item):
                part = "read_sb" if event & 1 else "write_sb"
                control = replace(control, **{part: numbers[event]})
            items[index] = replace(item, control=control)
        for _ in range(ROUNDS):
            kernel = replace(self.kernel, instructions=tuple(items))
            missing = lates(self.kernel, kernel, self.relation)
            if not missing:
                return self._visible(kernel)
            for late in missing:
                number = numbers[2 * late.setter + (not late.result)]
                place = self._can_wait(late.item)
                if place is None:
                    return None
                control = items[place].control
                control = replace(control, wait=(control.wait | 1 << number) & ALL_BOARDS)
                items[place] = replace(items[place], control=control)
        return None

    def _can_wait(self, index: int) -> int | None:
        """The instruction itself, or the last before it in its block that can wait."""
        first = self.kernel.blocks[self.kernel.block_of[index]].start
        places = range(index, first - 1, -1)
        items = self.kernel.instructions
        return next((place for place in places if not takes_no_wait(items[place])), None)

    def _visible(self, kernel: Kernel) -> Kernel:
        """Stalls of 2 where an increment would be awaited in the cycle after it."""
        items = list(kernel.instructions)
        for place in range(1, len(items)):
            setter, waiter = items[place - 1], items[place]
            mask = sum(1 << number_of(kernel, event) for event in set(events(setter)))
            if setter.control.stall < 2 and waiter.control.wait & mask:
                control = replace(setter.control, stall=2)
                items[place - 1] = replace(setter, control=control)
        return replace(kernel, instructions=tuple(items))


def _price(one: _Open, other: _Open) -> float:
    """Cycles that the earlier needed of two sharers waits for the other."""
    first, second = sorted((one, other), key=lambda entry: entry.needed)
    return max(0, second.over - max(first.needed, first.over)) if first.needed < BEYOND else 0
