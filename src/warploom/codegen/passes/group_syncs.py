"""The warps of a group wait for one another around what they leave in its shared memory.

A warp writes its rows of a staged tile, and a matmul of the group reads all of them. So all warps
have ended the matmuls that read the tile before one of them writes it again, and all have written
and fenced theirs before a matmul reads it. One such step does for all tiles that it comes between:
where one stood before and one behind every write, kernels with several such tiles took 2 to 6 %
longer (the delta rule of 64 channels 282 us, 271 so; GLA 313 and 304; one H200).

The panels of a late store are such a tile, too, that the copy engine reads: the group meets before
it writes them, and the first fence behind them does for both.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from warploom.codegen.analysis.stores import STORES, store_paths
from warploom.codegen.ir.block import (
    BlockProgram,
    Pipeline,
    Role,
    Scheduled,
    Section,
    Straight,
)
from warploom.codegen.ir.place import Placement
from warploom.codegen.ir.steps import (
    FencedGroupSync,
    GroupSync,
    Issue,
    Join,
    Meet,
    Run,
    Send,
    Step,
    Wait,
)


def group_syncs(block: BlockProgram) -> BlockProgram:
    """What a group writes into its own shared memory is kept from the matmuls that read it.

    *requires*  joins: a tile is written when the matmuls that read it have ended
    *before -> after*  `Run f(u); Run g(v); Issue h(u)` ->
                       `GroupSync; Run f(u); Run g(v); FencedGroupSync; Issue h(u)`: the first one
                       only where none lies between the join of the matmuls that read the tile and
                       the write
                       with late stores `Run store; Run f(u); FencedGroupSync; Issue h(u)` ->
                       `Run store; Run f(u); FencedGroupSync; Send store; Issue h(u)`
    *keeps*  every other step and its order; nothing is unseen where a run of steps ends
    """
    own = block.placement.staged.keys() - block.placement.common
    paths = store_paths(block.placement, block.launch, block.rings)
    late = {number for number, path in paths.items() if path.late}
    syncs = _Syncs(block.placement, own, late)

    def changed(role: Role, section: Section) -> list[Section]:
        match section:
            case Straight() if role.computes:
                return [Straight(syncs(section.steps))]
            case Pipeline() if role.computes:
                return [syncs.loop(section)]
            case Straight() | Pipeline() | Scheduled():
                return [section]

    return block.rewritten(changed) if own or late else block


class _Syncs:
    """Changes a run of steps, of which it is not known what came before: a tile's readers may not
    have ended, and if they have, there was no meeting since."""

    def __init__(self, placement: Placement, own: set[str], late: set[int]) -> None:
        self.placement, self.own, self.late = placement, own, late

    def loop(self, section: Pipeline) -> Pipeline:
        """All runs of steps of a loop.

        Where an iteration ends with its only store, in a loop with no iteration ahead, the first
        fence of the next iteration does for the store too, and one behind the loop.
        """
        stores = [one for one in section.steady if isinstance(one, Run) and one.op.kind in STORES]
        changed = section.with_iterations(self)
        last = [one.at(1) for one in stores if one.op.id in self.late]
        if section.depth or len(stores) != 1 or not last or section.skip:
            return changed
        fenced, send = self(section.steady, last), Send(last[0].op, 1)
        if [one for one in fenced if isinstance(one, Send)] != [send]:
            return changed
        before = section.epilogue[0] if section.epilogue else ()
        return replace(changed, steady=fenced, epilogue=((*before, FencedGroupSync(), send),))

    def __call__(self, steps: Sequence[Step], last: Sequence[Run] = ()) -> tuple[Step, ...]:
        """The steps with those that are missing; `last` is the store of the iteration before, whose
        panels are not copied yet, as those of this one will not be."""
        result: list[Step] = []
        started: list[set[str]] = []  # by matmul of this run that may be unfinished: what it reads
        reading, free, unseen = set(self.own), set[str](), set[str]()
        before = True  # there may be unfinished matmuls from before this run
        written = list(last)  # a store whose panels are written and not yet copied
        fenced: list[Send] = []  # the copies of one that a fence is behind: matmuls begin first

        def meet(step: Step) -> None:
            nonlocal free
            result.append(step)
            free = self.own - reading
            if isinstance(step, FencedGroupSync):
                unseen.clear()
                fenced.extend(Send(one.op, one.stage) for one in written)
                written.clear()

        for step in steps:
            if not isinstance(step, Issue | Wait):
                result += fenced
                fenced.clear()
            if isinstance(step, Issue):
                read = self._read(step)
                if read & unseen:
                    meet(FencedGroupSync())
                started.append(read)
                reading |= read
                free -= read
            elif isinstance(step, Join):
                if step.count <= len(started):
                    before = False
                    del started[: len(started) - step.count]
                flying = set[str]().union(*started, self.own if before else ())
                reading &= flying
            elif isinstance(step, Run) and step.op.dst and step.op.dst.name in self.own:
                # What is joined by now was joined before this run, or above.
                name = step.op.dst.name
                reading.discard(name)
                if name not in free:
                    meet(GroupSync())
                unseen.add(name)
            elif isinstance(step, Run) and step.op.kind in STORES and written:
                meet(FencedGroupSync())  # all stores have one room for their panels
                result += fenced
                fenced.clear()
            if isinstance(step, Run) and step.op.id in self.late:
                meet(step)
                written.append(step)
                continue
            result.append(step)
            if isinstance(step, Meet):
                free = self.own - reading
        if unseen or (written and not last):
            meet(FencedGroupSync())
        return (*result, *fenced)

    def _read(self, step: Issue) -> set[str]:
        """The staged tiles that a matmul reads from shared memory."""
        first = 1 if self.placement.from_registers(step.op) else 0
        return {var.name for var in step.op.srcs[first:2]} & self.own
