"""A static model of a kernel's time: cycles of its trace on one scheduler partition. Not a clock.

The trace is the code in the order it stands, every loop twice, with what is outstanding carried
over block edges; each further pass of a loop adds the loop's steady state. One warp is followed:
against measured random schedules that ranks better than the warps a partition really holds
(`bench/results/timing_model.json`). The tensor core alone is shared: a matrix instruction takes
as long as all warp groups of the block together need it. It ranks schedules; it does not know
caches, other blocks or clocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from warploom.sass.decode import nvinfo
from warploom.sass.decode.control import Control
from warploom.sass.decode.kernel import Kernel
from warploom.sass.flow.loops import depths, natural_loops
from warploom.sass.timing.issue import Simulation, cost_of

LOOP_TRIPS: Final = 8
ROUNDS: Final = 3
MOST_KEPT: Final = 50_000
WARP_GROUP: Final = 128  # threads

Blocks = Sequence[tuple[tuple[int, ...], tuple[Control, ...]]]


@dataclass(frozen=True)
class ModelSettings:
    """How many warps are followed, and how often a loop body runs for each outer pass.

    `warp_groups` share the tensor core with the one followed, itself included; None reads from the
    file how many the block has, 1 where it does not say.
    """

    warps: int = 1
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
        costs = [cost_of(item) for item in kernel.instructions]
        self._costs = [
            replace(cost, result=cost.result * sharing) if cost.group else cost for cost in costs
        ]
        self._cache: dict[object, float] = {}
        loops = natural_loops(kernel)
        depth = depths(kernel, loops)
        self.weights = [float(self.settings.loop_trips**level) for level in depth]
        self._loops = {loop.header for loop in loops if loop.blocks == (loop.header,)}
        self._whole = _region(range(len(kernel.blocks)), depth, 0)

    def _sharing(self) -> int:
        """How many times a matrix instruction occupies the tensor core before its warp's next."""
        groups = self.settings.warp_groups
        if groups is None:
            groups = (nvinfo.required_threads(self.kernel.info) or WARP_GROUP) // WARP_GROUP
        return max(1, groups // self.settings.warps)

    def block_cycles(
        self, block: int, order: tuple[int, ...], controls: tuple[Control, ...]
    ) -> float:
        """Cycles of one pass through a block, all warps; a loop body's is its steady state."""
        key = (block, order, controls)
        found = self._cache.get(key)
        if found is None:
            rounds = ROUNDS if block in self._loops else 1
            found = self._kept(key, self._simulate(order, controls, rounds))
        return found

    def kernel_cycles(self, blocks: Blocks) -> float:
        """Cycles of the kernel's trace, all warps; `blocks` as `Editor.signature` gives them."""
        total = self._trace(blocks, self._whole.once())
        for region in self._whole.regions():
            # Negative for a loop that runs once: its second pass is taken off again.
            passes = (self.settings.loop_trips - 2) * self.settings.loop_trips ** (region.depth - 1)
            total += passes * self._steady(blocks, region)
        return total

    def _steady(self, blocks: Blocks, region: _Region) -> float:
        """Cycles one more pass of a loop adds."""
        once = region.once()
        key = tuple(blocks[block] for block in once)
        found = self._cache.get(key)
        if found is None:
            added = self._third_pass(blocks, once)
            found = self._kept(key, added)
        return found

    def _third_pass(self, blocks: Blocks, once: list[int]) -> float:
        """Cycles that a third pass adds to two."""
        if self.settings.warps > 1:
            return self._trace(blocks, 3 * once) - self._trace(blocks, 2 * once)
        # One warp does not look ahead: its first two passes end as if there were no third.
        order = tuple(index for block in once for index in blocks[block][0])
        controls = tuple(control for block in once for control in blocks[block][1])
        simulation = Simulation([self._costs[index] for index in order], controls, 3, 1)
        simulation.run()
        return float(simulation.marks[3] - simulation.marks[2])

    def _trace(self, blocks: Blocks, sequence: Sequence[int]) -> float:
        order = tuple(index for block in sequence for index in blocks[block][0])
        controls = tuple(control for block in sequence for control in blocks[block][1])
        return self._simulate(order, controls, 1)

    def _simulate(
        self, order: tuple[int, ...], controls: tuple[Control, ...], rounds: int
    ) -> float:
        costs = [self._costs[index] for index in order]
        return Simulation(costs, controls, rounds, self.settings.warps).run()

    def _kept(self, key: object, value: float) -> float:
        if len(self._cache) > MOST_KEPT:
            self._cache.clear()
        self._cache[key] = value
        return value
