"""A static model of a kernel's time: cycles of its trace on one scheduler partition. Not a clock.

The trace is the code in the order it stands, every loop twice, with what is outstanding carried
over block edges; each further pass of a loop adds the loop's steady state. One warp is walked
(`timing.partition`): against measured random schedules that ranks better than the warps a partition
really holds (`bench/results/timing_model.json`). The tensor core alone is shared: a matrix
instruction takes as long as all warp groups of the block together need it. It ranks schedules; it
does not know caches, other blocks or clocks.

A search asks for thousands of versions of one kernel that differ in a few lines. So the walk goes
from stretch to stretch, and what a stretch makes of a state of the warp is kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from warploom.sass.decode import nvinfo
from warploom.sass.decode.control import Control
from warploom.sass.decode.kernel import Kernel
from warploom.sass.flow.loops import depths, natural_loops
from warploom.sass.timing.partition import IDLE, Partition, State
from warploom.sass.timing.slots import Line, slot_of

LOOP_TRIPS: Final = 8
WARP_GROUP: Final = 128  # threads
STRETCH: Final = 16  # instructions
MOST_KEPT: Final = 500_000  # stretches walked

Block = tuple[tuple[int, ...], tuple[Control, ...]]
Blocks = Sequence[Block]


@dataclass(frozen=True)
class ModelSettings:
    """How often a loop body runs for each outer pass.

    `warp_groups` share the tensor core with the one walked, itself included; None reads from the
    file how many the block has, 1 where it does not say.
    """

    loop_trips: int = LOOP_TRIPS
    warp_groups: int | None = None


@dataclass(frozen=True)
class _Region:
    """Neighbouring blocks of one loop depth or deeper: what stands in it, in order."""

    depth: int
    parts: tuple[int | _Region, ...]

    def once(self) -> list[int]:
        """The blocks of one pass; an inner region is passed twice."""
        found: list[int] = []
        for part in self.parts:
            found += [part] if isinstance(part, int) else 2 * part.once()
        return found

    def regions(self) -> list[_Region]:
        """All regions inside this one."""
        inner = [part for part in self.parts if not isinstance(part, int)]
        return [*inner, *(deeper for part in inner for deeper in part.regions())]


def _region(blocks: Sequence[int], depth_of: Sequence[int], depth: int) -> _Region:
    parts: list[int | _Region] = []
    run: list[int] = []
    for block in (*blocks, None):
        if block is not None and depth_of[block] > depth:
            run.append(block)
            continue
        if run:
            parts.append(_region(run, depth_of, depth + 1))
            run = []
        if block is not None:
            parts.append(block)
    return _Region(depth, tuple(parts))


class TimingModel:
    """Estimates cycles for any order and control fields of a kernel's blocks."""

    def __init__(self, kernel: Kernel, settings: ModelSettings | None = None) -> None:
        self.kernel = kernel
        self.settings = settings or ModelSettings()
        sharing = self._sharing()
        slots = [slot_of(item) for item in kernel.instructions]
        self._slots = [replace(slot, matmul=slot.matmul * sharing) for slot in slots]
        depth = depths(kernel, natural_loops(kernel))
        self.weights = [float(self.settings.loop_trips**level) for level in depth]
        whole = _region(range(len(kernel.blocks)), depth, 0)
        self._trace = whole.once()
        self._steady = [
            # Negative for a loop that runs once: its second pass is taken off again.
            (
                region.once(),
                (self.settings.loop_trips - 2) * self.settings.loop_trips ** (region.depth - 1),
            )
            for region in whole.regions()
        ]
        self._forget()

    def _sharing(self) -> int:
        """How many times a matrix instruction occupies the tensor core before its warp's next."""
        groups = self.settings.warp_groups
        if groups is None:
            groups = (nvinfo.required_threads(self.kernel.info) or WARP_GROUP) // WARP_GROUP
        return max(1, groups)

    def _forget(self) -> None:
        self._states: dict[State, int] = {IDLE: 0}
        self._state_at: list[State] = [IDLE]
        self._numbers: dict[object, int] = {}  # of stretches
        self._stretches: list[list[Line]] = []
        self._split: dict[int, tuple[Block, list[int]]] = {}
        self._walked: dict[tuple[int, int], tuple[int, float]] = {}

    def kernel_cycles(self, blocks: Blocks) -> float:
        """Cycles of the kernel's trace; `blocks` as `Editor.signature` gives them."""
        if len(self._walked) > MOST_KEPT:
            self._forget()
        split = [self._stretches_of(number, block) for number, block in enumerate(blocks)]
        (total,) = self._marks(split, self._trace, 1)
        for once, passes in self._steady:
            _, second, third = self._marks(split, once, 3)
            total += passes * (third - second)
        return total

    def _marks(
        self, split: Sequence[Sequence[int]], sequence: Sequence[int], passes: int
    ) -> list[float]:
        """When the warp is through with each pass of the blocks."""
        walked, state, clock = self._walked, 0, 0.0
        marks: list[float] = []
        for _ in range(passes):
            for block in sequence:
                for stretch in split[block]:
                    found = walked.get((state, stretch))
                    if found is None:
                        found = self._walk(state, stretch)
                    state = found[0]
                    clock += found[1]
            marks.append(clock + self._state_at[state][0])
        return marks

    def _walk(self, state: int, stretch: int) -> tuple[int, float]:
        """(number of the state behind a stretch, cycles until then)."""
        walk = Partition.resumed(self._stretches[stretch], self._state_at[state])
        walk.run(1)
        after = walk.state()
        number = self._states.setdefault(after, len(self._state_at))
        if number == len(self._state_at):
            self._state_at.append(after)
        found = self._walked[state, stretch] = number, round(walk.clock, 6)
        return found

    def _stretches_of(self, number: int, block: Block) -> list[int]:
        """The numbers of a block's stretches; a block as it was last asked for is known."""
        before = self._split.get(number)
        if before is not None and before[0][0] is block[0] and before[0][1] is block[1]:
            return before[1]
        order, controls = block
        found: list[int] = []
        for place in range(0, len(order), STRETCH):
            end = place + STRETCH
            lines, fields = order[place:end], controls[place:end]
            if before is not None:
                (old, old_fields), numbers = before
                if lines == old[place:end] and fields == old_fields[place:end]:
                    found.append(numbers[place // STRETCH])
                    continue
            new = self._numbers.setdefault((lines, fields), len(self._stretches))
            if new == len(self._stretches):
                slots = self._slots
                self._stretches.append(
                    [(slots[line], each) for line, each in zip(lines, fields, strict=True)]
                )
            found.append(new)
        self._split[number] = block, found
        return found
