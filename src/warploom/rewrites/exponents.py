"""An online softmax in the units of the machine: powers of 2, scores scaled inside of the exponent.

A GPU has an instruction for 2 ** x and one for x * y + z. A textbook takes e ** x of scores that it
scaled before.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from warploom.rewrites.online_softmax import OnlineSoftmax, find
from warploom.rewrites.replay import NotApplicable, Replay
from warploom.tile.ir import Loop, Op, Program, Var
from warploom.tile.language import exp2, max_along, maximum, sum_along, where
from warploom.tile.tiles import Tile

LOG2E = math.log2(math.e)


def in_powers_of_two(program: Program) -> Program:
    """Rewrite online softmaxes with exp, or with scores scaled before their maximum.

    *requires*  an online softmax with exp, or whose scores are `x * c`, masked or not, with a
                number c above 0 that nothing else reads
    *before -> after*  `s = x * c; highest = max(base, max_along(s)); exp(s - highest)` ->
                       `highest = max(base, max_along(x) * f); exp2(x * f - highest)`, f = c log2 e
    *keeps*  every result to rounding; in the loop the base is log2 e times what it was: it is
             multiplied before, unless it is -inf, and what reads it after gets it divided by that
    *cost*  one multiplication an element less, or two
    """
    found = [one for one in find(program) if _can_change(program, one)]
    if not found:
        raise NotApplicable(f"{program.name}: no online softmax with exp or scores scaled before")
    return _InPowers(program, {one.loop.index: one for one in found}).run()


def _can_change(program: Program, softmax: OnlineSoftmax) -> bool:
    return softmax.exponent == "exp" or bool(_scaling(program, softmax))


def _scaling(program: Program, softmax: OnlineSoftmax) -> tuple[Op, float] | None:
    """(op, c) of `x * c`, the only thing that the scores are made of, or the mask on them."""
    constants = {
        op.dst.name: float(op.value)
        for op in program.ops()
        if op.kind == "fill" and op.dst is not None and op.value is not None
    }
    ops = [item for item in softmax.loop.body if isinstance(item, Op)]
    var = softmax.scores
    for op in reversed([one for one in ops if one.id < softmax.own[0].id]):
        if op.dst != var:
            continue
        if op.kind == "where" and constants.get(op.srcs[2].name) == -math.inf:
            var = op.srcs[1]
        elif op.kind == "mul" and constants.get(op.srcs[1].name, 0.0) > 0.0:
            readers = [o for o in program.ops() if op.dst in o.srcs and o not in softmax.own]
            alone = all(o.kind == "where" and o.dst in (softmax.scores, op.dst) for o in readers)
            return (op, constants[op.srcs[1].name]) if alone else None
        else:
            return None
    return None


class _InPowers(Replay):
    def __init__(self, program: Program, found: Mapping[str, OnlineSoftmax]) -> None:
        super().__init__(program)
        self.found = found
        self.open: OnlineSoftmax | None = None
        self.scaling: tuple[Op, float] | None = None

    def loop(self, item: Loop) -> None:
        softmax = self.found.get(item.index)
        if softmax is None:
            return self.copy_loop(item)
        self.open, self.scaling = softmax, _scaling(self.program, softmax)
        base, natural = softmax.base.name, softmax.exponent == "exp"
        if natural and not self._begins_empty(softmax):
            self.tiles[base] = self.tile(softmax.base) * LOG2E
        self.copy_loop(item)
        self.open = None
        if natural and self._read_after(softmax.base, item):
            self.tiles[base] = self.tile(softmax.base) * (1.0 / LOG2E)
        return None

    def _begins_empty(self, softmax: OnlineSoftmax) -> bool:
        """Whether the base is -inf in every row when its loop begins."""
        first, var = softmax.own[0].id, softmax.base
        writers = [op for op in self.program.ops() if op.dst == var and op.id < first]
        return [(op.kind, op.value) for op in writers] == [("fill", -math.inf)]

    def _read_after(self, var: Var, loop: Loop) -> bool:
        place = self.program.body.index(loop)
        after = [item for item in self.program.body[place + 1 :] if isinstance(item, Op)]
        return any(var in op.srcs for op in after)

    def op(self, op: Op) -> None:
        softmax = self.open
        if softmax is None or (
            op not in softmax.own and not (self.scaling and op is self.scaling[0])
        ):
            self.copy(op)
        elif op is softmax.own[0]:
            self._weigh(softmax)
        elif self.scaling and op is self.scaling[0]:
            assert op.dst is not None
            self.tiles[op.dst.name] = self.tile(op.srcs[0])

    def _weigh(self, softmax: OnlineSoftmax) -> None:
        base, total, scores = (self.tile(v) for v in (softmax.base, softmax.total, softmax.scores))
        assert softmax.packed.dst is not None
        factor = LOG2E if softmax.exponent == "exp" else 1.0
        factor *= self.scaling[1] if self.scaling else 1.0
        lift = softmax.lift * (LOG2E if softmax.exponent == "exp" else 1.0)

        def scaled(tile: Tile) -> Tile:
            if isinstance(softmax.scale, Var):
                return tile * (self.tile(softmax.scale) * factor)
            number = factor * (1.0 if softmax.scale is None else softmax.scale)
            return tile if number == 1.0 else tile * number

        block = scaled(max_along(scores, softmax.axis))
        highest = maximum(base, block - lift if lift else block)
        under = where(highest.equals(-math.inf), 0.0, highest) if softmax.masked else highest
        rescale = exp2(base - under)
        weights = exp2(scaled(scores) - under)
        total[:] = total * rescale + sum_along(weights, softmax.axis)
        base[:] = highest
        packed = weights.cast(softmax.packed.dst.type.dtype)
        for var in softmax.sums:
            if var != softmax.total:
                acc = self.tile(var)
                acc[:] = acc * rescale
        self.tiles[softmax.packed.dst.name] = packed
