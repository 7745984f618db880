"""What an epilogue loads beside its sums is on its way while they are made."""

from __future__ import annotations

from warploom.rewrites.accumulators import sum_loop
from warploom.rewrites.replay import Replay
from warploom.tile.ir import Loop, Op, Program


def load_factors_early(program: Program) -> Program:
    """Load the vectors and numbers that are read after the loop, a bias or a scale, before it.

    *requires*  a loop that only adds up products (`sum_loop`)
    *before -> after*  `for k: c += ..; v = load ..; f(c, v)` ->
                       `v = load ..; for k: c += ..; f(c, v)`
    *keeps*  every bit: places of loads after the loop say nothing of what the loop does
    *cost*  their registers while the loop runs
    """
    return _Early(program).run()


class _Early(Replay):
    def __init__(self, program: Program) -> None:
        super().__init__(program)
        place = program.body.index(sum_loop(program).loop)
        after = [item for item in program.body[place + 1 :] if isinstance(item, Op)]
        self.moved = {op.id for op in after if op.kind == "load" and _is_small(op)}
        self.early = [op for op in after if op.id in self.moved]

    def loop(self, item: Loop) -> None:
        for op in self.early:
            self.copy(op)
        self.copy_loop(item)

    def op(self, op: Op) -> None:
        if op.id not in self.moved:
            self.copy(op)


def _is_small(op: Op) -> bool:
    return op.dst is not None and len(op.dst.type.axes) < 2
