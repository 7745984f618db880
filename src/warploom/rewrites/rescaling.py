"""Lazy rescaling: the sums of an online softmax keep their base until it no longer serves.

A textbook rescales its sums in every block, by the growth of the running maximum. The sums are the
same under any base from which weights neither overflow nor vanish, so most rescalings can be left
out. Both rules replace a textbook online softmax (`rewrites.online_softmax`).
"""

from __future__ import annotations

import math

from warploom.rewrites.online_softmax import OnlineSoftmax, find
from warploom.rewrites.replay import NotApplicable, Replay
from warploom.tile.dtypes import BF16, FP32, DType
from warploom.tile.ir import Op, Program, Var
from warploom.tile.language import exp2, full, log2, max_along, maximum, sum_along, where
from warploom.tile.tiles import Tile

MOST_NARROW = 8.0  # powers of 2 that 8-bit weights may reach
MOST = 15.0  # the same of fp16 ones
USES_OF_A_FACTOR = ("reciprocal", "eq", "div")  # of a sum that only normalises


def _softmaxes(program: Program) -> dict[str, OnlineSoftmax]:
    found = {one.loop.index: one for one in find(program) if one.exponent == "exp2"}
    if not found:
        raise NotApplicable(f"{program.name}: no loop is an online softmax in powers of 2")
    return found


def lazy_rescale(program: Program, threshold: float) -> Program:
    """Rescale only where the maximum has grown by more than `threshold` powers of 2.

    *requires*  an online softmax; `threshold` above 0, at most 15
    *before -> after*  `highest = max(base, block)` -> `highest = max(base, block)`,
                       `highest = where(highest - base <= threshold, base, highest)`
    *keeps*  every result to rounding: weights lie up to 2 ** threshold times as high, those of bf16
             begin so much lower; 8-bit ones saturate, so that less is allowed
    *cost*  one comparison a row and block; a warp none of whose rows rescales can skip the product
    Source: FlashAttention-4 (rescaling where the maximum grew by more than 8 powers of 2).
    """
    if not 0 < threshold <= MOST:
        raise NotApplicable(f"lazy_rescale by {threshold}: expected above 0, at most {MOST}")
    return _Lazy(program, threshold).run()


class _Lazy(Replay):
    def __init__(self, program: Program, threshold: float) -> None:
        super().__init__(program)
        self.threshold = threshold
        self.at = {id(one.highest): one for one in _softmaxes(program).values()}

    def op(self, op: Op) -> None:
        softmax = self.at.get(id(op))
        if softmax is None:
            return self.copy(op)
        assert op.dst is not None and softmax.packed.dst is not None
        base, block = (self.tile(src) for src in op.srcs)
        kind = softmax.packed.dst.type.dtype
        threshold = self.threshold
        if kind.bits == 8:
            threshold = min(threshold, MOST_NARROW - softmax.lift)
        highest = maximum(base, block - -threshold if kind is BF16 else block)
        self.tiles[op.dst.name] = where(highest - base <= threshold, base, highest)
        return None


def optimistic_rescale(program: Program, powers: float) -> Program:
    """Weigh a block under the base that the blocks before it gave, without looking for a maximum.

    Where the sums of a row have grown beyond 2 ** powers its base is raised, by as much as brings
    them back to half of that; only where a block's weights then add up to more than their element
    type bears, are no numbers, or nothing was seen before, is its maximum found and the block
    weighed again. Of 8-bit weights the base is the maximum of a block before, less what lets a
    whole block of such weights add up to the largest number of their type; it is raised where a
    block is weighed again.

    *requires*  an online softmax; 0 < `powers` <= 15
    *before -> after*  maximum, rescaling, weights -> weights under the old base, checked by their
                       sum; maximum and second weighing where the check fails, which is seldom
    *keeps*  every result to rounding: weights of bf16 begin at 2 ** -(2 powers + 1), so that they
             never add up to more than 1 before a rescaling. Where a key outweighs all before it,
             the rounded weights are summed, whose rounding cancels; where the sum is itself a
             result, as of a log-sum-exp, such a block is weighed again, and its weight is exact
    *cost*  no maximum and no rescaling in most blocks; two exponentials an element where the scores
            rise
    """
    if not 0 < powers <= MOST:
        raise NotApplicable(f"optimistic_rescale by {powers}: expected above 0, at most {MOST}")
    return _Optimistic(program, powers).run()


def bearable(kind: DType) -> float:
    """What 8-bit weights may add up to so that none is above the largest number of their type."""
    return kind.largest


def packed_like(softmax: OnlineSoftmax, weights: Tile) -> Tile:
    """Weights in the element type, and the order, that the program gives its own."""
    assert softmax.packed.dst is not None
    ordered = weights.quad_order(softmax.axis) if softmax.ordered else weights
    return ordered.cast(softmax.packed.dst.type.dtype)


class _Optimistic(Replay):
    def __init__(self, program: Program, powers: float) -> None:
        super().__init__(program)
        self.powers = powers
        self.replaced: dict[int, OnlineSoftmax] = {}
        self.first: dict[int, OnlineSoftmax] = {}
        for softmax in _softmaxes(program).values():
            assert softmax.packed.dst is not None
            readers = [op for op in program.ops() if softmax.scores in op.srcs]
            if other := [
                op for op in readers if op.id > softmax.own[0].id and op not in softmax.own
            ]:
                raise NotApplicable(
                    f"{other[0].where}: reads the scores, which are weighed in place"
                )
            self.first[softmax.own[0].id] = softmax
            self.replaced |= {op.id: softmax for op in softmax.own}

    def op(self, op: Op) -> None:
        if op.id in self.first:
            softmax = self.first[op.id]
            assert softmax.packed.dst is not None
            narrow = softmax.packed.dst.type.dtype.bits == 8
            (self._weigh_narrow if narrow else self._weigh)(softmax)
        elif op.id not in self.replaced:
            self.copy(op)

    def _weigh(self, softmax: OnlineSoftmax) -> None:
        base, total, scores = (self.tile(v) for v in (softmax.base, softmax.total, softmax.scores))
        packed_to = softmax.packed.dst
        assert packed_to is not None
        narrow = packed_to.type.dtype
        lift = -2.0 * self.powers - 1.0 if narrow is BF16 else softmax.lift
        widest = 2.0 * self.powers + lift if narrow is BF16 else MOST

        def scaled(tile: Tile) -> Tile:
            return self._scaled(softmax, tile)

        # Sums keep half of the powers: fp16 weights far below 1 would lose bits.
        calm, kept = total <= 2.0 ** (self.powers + lift), self.powers / 2 + lift
        rescale = full(1.0, FP32, **dict(total.type.axes))
        raised = base + (log2(total) - kept)
        rescale[:] = where(calm, rescale, exp2(base - raised))
        base[:] = where(calm, base, raised)
        weights = exp2(scaled(scores) - base)
        part, packed = sum_along(weights, softmax.axis), weights.cast(narrow)
        # In the first block nothing was seen: the compiler knows, and leaves the first try out.
        right = (total > 0.0) & (part <= 2.0**widest)
        whole = self._is_a_result(softmax)
        if whole:
            # The weight of a key that outweighs all before it is a power of 2 under the maximum
            # alone; what rounding did to it would stay in the quotient of both sums.
            right = right & (part * 0.5 <= total)
        block = scaled(max_along(scores, softmax.axis))
        after = maximum(base, block - lift if lift else block)
        under = where(after.equals(-math.inf), 0.0, after) if softmax.masked else after
        rescale[:] = where(right, rescale, rescale * exp2(base - under))
        scores[:] = where(right, scores, exp2(scaled(scores) - under))
        packed[:] = where(right, packed, scores.cast(narrow))
        base[:] = where(right, base, after)
        if whole:
            again = sum_along(scores, softmax.axis)
            total[:] = total * rescale + where(right, part, again)
        else:
            # There, the sum of rounded weights cancels what rounding did to it.
            minor = right & (part * 0.5 <= total)
            part[:] = where(minor, part, sum_along(packed.cast(FP32), softmax.axis))
            total[:] = total * rescale + part
        for var in softmax.sums:
            if var != softmax.total:
                acc = self.tile(var)
                acc[:] = acc * rescale
        self.tiles[packed_to.name] = packed

    def _weigh_narrow(self, softmax: OnlineSoftmax) -> None:
        """8-bit weights have few powers of 2, so the base never lies far from the maximum: a block
        under whose base no weight saturates needs nothing else."""
        base, total, scores = (self.tile(v) for v in (softmax.base, softmax.total, softmax.scores))
        packed_to = softmax.packed.dst
        assert packed_to is not None
        narrow, count = packed_to.type.dtype, softmax.scores.type.size(softmax.axis)
        # Under the maximum so many weights of 2 ** lift add up to a number that a weight may be.
        lift = float(math.floor(math.log2(narrow.largest / count)))
        weights = exp2(self._scaled(softmax, scores) - base)
        part, packed = sum_along(weights, softmax.axis), packed_like(softmax, weights)
        # The weight of a key that outweighs all before it is a power of 2 under the maximum alone.
        right = (total > 0.0) & (part <= bearable(narrow)) & (part * 0.5 <= total)
        block = self._scaled(softmax, max_along(scores, softmax.axis))
        after = maximum(base, block - lift)
        under = where(after.equals(-math.inf), 0.0, after) if softmax.masked else after
        rescale = full(1.0, FP32, **dict(total.type.axes))
        rescale[:] = where(right, rescale, exp2(base - under))
        scores[:] = where(right, scores, exp2(self._scaled(softmax, scores) - under))
        packed[:] = where(right, packed, packed_like(softmax, scores))
        base[:] = where(right, base, after)
        part[:] = where(right, part, sum_along(scores, softmax.axis))
        total[:] = total * rescale + part
        for var in softmax.sums:
            if var != softmax.total:
                acc = self.tile(var)
                acc[:] = acc * rescale
        # A tile of its own: the matmul of the block before may still read the other one.
        self.tiles[packed_to.name] = packed.copy()

    def _scaled(self, softmax: OnlineSoftmax, tile: Tile) -> Tile:
        scale = softmax.scale
        if scale is None:
            return tile
        return tile * (self.tile(scale) if isinstance(scale, Var) else scale)

    def _is_a_result(self, softmax: OnlineSoftmax) -> bool:
        """Whether the sum of weights does more than normalise."""
        inside = {op.id for op in softmax.loop.body if isinstance(op, Op)}
        others = [op for op in self.program.ops() if softmax.total in op.srcs]
        matched = {one.loop.index for one in self.first.values()}
        for loop in self.program.loops():
            if loop.index in matched:
                inside |= {op.id for op in loop.body if isinstance(op, Op)}
        return any(op.kind not in USES_OF_A_FACTOR for op in others if op.id not in inside)
