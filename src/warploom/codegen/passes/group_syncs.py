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
from warploom.codegen.ir.block import BlockProgram, Pipeline, Role, Scheduled, Section, Straight
from warploom.codegen.ir.place import Placement
from warploom.codegen.ir.steps import (
    FencedGroupSync,
    GroupSync,
    Issue,
    Join,
    Meet,
    PanelSync,
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
                       `PanelSync; Run store; Run f(u); FencedGroupSync; Issue h(u); Send store`
    *keeps*  every other step and its order; nothing is unseen where a run of steps ends
    """
    own = block.placement.staged.keys() - block.placement.common
    paths = store_paths(block.placement, block.launch, block.rings)
    late = {n for n, path in paths.items() if path.late}
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

        Where no fence follows an iteration's stores, in a loop with no iteration ahead, the first
        one of the next iteration does for them too, and one behind the loop.
        """
        stores = [one for one in section.steady if isinstance(one, Run) and one.op.kind in STORES]
        changed = section.with_iterations(self)
        last = [one.at(1) for one in stores if one.op.id in self.late]
        if section.depth or not last or len(last) < len(stores) or section.skip:
            return changed
        fenced, sends = self(section.steady, last), [Send(one.op, 1) for one in last]
        if [one for one in fenced if isinstance(one, Send)] != sends:
            return changed
        before = section.epilogue[0] if section.epilogue else ()
        return replace(changed, steady=fenced, epilogue=((*before, FencedGroupSync(), *sends),))

    def __call__(self, steps: Sequence[Step], last: Sequence[Run] = ()) -> tuple[Step, ...]:
        """The steps with those that are missing; `last` are the stores of the iteration before,
        whose panels are not copied yet, as those of this one will not be."""
        return _Sequence(self, last).changed(steps)

    def read(self, step: Issue) -> set[str]:
        """The staged tiles that a matmul reads from shared memory."""
        first = 1 if self.placement.from_registers(step.op) else 0
        return {var.name for var in step.op.srcs[first:2]} & self.own


class _Sequence:
    """One run of steps, as it is written."""

    def __init__(self, syncs: _Syncs, last: Sequence[Run]) -> None:
        self.syncs, self.last = syncs, last
        self.result: list[Step] = []
        self.started: list[set[str]] = []  # by matmul of this run that may be unfinished: its tiles
        self.reading, self.free, self.unseen = set(syncs.own), set[str](), set[str]()
        self.before = True  # there may be unfinished matmuls from before this run
        self.written = list(last)  # stores whose panels are written and not yet copied
        self.fenced: list[Send] = []  # copies that a fence is behind: matmuls begin first
        self.busy = True  # copies may not have read the panels

    def changed(self, steps: Sequence[Step]) -> tuple[Step, ...]:
        """The steps with those that are missing."""
        for step in steps:
            if not isinstance(step, Issue | Wait):
                self._send()
            match step:
                case Issue():
                    self._issue(self.syncs.read(step))
                case Join():
                    self._join(step)
                case Run(op) if op.dst and op.dst.name in self.syncs.own:
                    self._write(op.dst.name)
                case Run(op) if op.kind in STORES:
                    self._store(step)
                case _:
                    pass
            self.result.append(step)
            if isinstance(step, Meet):
                self.free = self.syncs.own - self.reading
        if self.unseen or (self.written and not self.last):
            self._meet(FencedGroupSync())
        return (*self.result, *self.fenced)

    def _meet(self, step: Step) -> None:
        self.result.append(step)
        self.free = self.syncs.own - self.reading
        if isinstance(step, FencedGroupSync):
            self.unseen.clear()
            self.fenced += [Send(one.op, one.stage) for one in self.written]
            self.written.clear()
        if isinstance(step, PanelSync):
            self.busy = False

    def _send(self) -> None:
        for one in self.fenced:
            self.result.append(one)
            self.busy = True
        self.fenced.clear()

    def _issue(self, read: set[str]) -> None:
        if read & self.unseen:
            self._meet(FencedGroupSync())
        self.started.append(read)
        self.reading |= read
        self.free -= read

    def _join(self, step: Join) -> None:
        if step.count <= len(self.started):
            self.before = False
            del self.started[: len(self.started) - step.count]
        own = self.syncs.own if self.before else set[str]()
        self.reading &= own.union(*self.started)

    def _write(self, name: str) -> None:
        # What is joined by now was joined before this run, or above.
        self.reading.discard(name)
        if name not in self.free:
            self._meet(GroupSync())
        self.unseen.add(name)

    def _store(self, step: Run) -> None:
        if self.written:
            self._meet(FencedGroupSync())
            self._send()
        if step.op.id in self.syncs.late:
            if self.busy:
                self._meet(PanelSync())
            self.written.append(step)
