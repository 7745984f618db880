"""Blocks that a mask hides are left out, and blocks that it leaves alone get a loop of their own.

In an online softmax a masked score is -inf and its weight 0. A textbook goes over every block of
keys and masks each; which blocks a row tile sees of follows from the mask's condition
(`rewrites.ranges`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from warploom.rewrites.online_softmax import OnlineSoftmax, find
from warploom.rewrites.ranges import Positions, greatest, least
from warploom.rewrites.replay import NotApplicable, Replay
from warploom.tile.index import Index, maximum_index, minimum_index, symbol
from warploom.tile.ir import Loop, Op, Program, Var
from warploom.tile.trace import part_begin


@dataclass(frozen=True)
class Masked:
    """A loop over blocks of scores, some of which a mask hides: `mask` is
    `scores = where(condition, x, -inf)`."""

    softmax: OnlineSoftmax
    mask: Op

    @property
    def loop(self) -> Loop:
        """The loop."""
        return self.softmax.loop

    @property
    def condition(self) -> Var:
        """What holds where a score counts."""
        return self.mask.srcs[0]


def masked_loops(program: Program) -> dict[str, Masked]:
    """The loops in which a block whose scores are all masked changes nothing, by loop index.

    That is: the scores of an online softmax are the result of the mask, the loop stores nothing,
    and what it carries from one iteration to the next is the softmax' base and its sums, to which
    products with the weights are added. Then the highest score stays, weights are 0, and sums are
    multiplied by 1, or are still 0. (A textbook that does not allow for rows without any score
    gives no number for them, and may give one without such a block.)
    """
    fills = {
        op.dst.name: op.value for op in program.ops() if op.kind == "fill" and op.dst is not None
    }
    found: dict[str, Masked] = {}
    for softmax in find(program):
        ops = [item for item in softmax.loop.body if isinstance(item, Op)]
        writers = [op for op in ops if op.dst == softmax.scores]
        last = writers[-1] if writers else None
        if last is None or last.kind != "where":
            continue
        if fills.get(last.srcs[2].name) != float("-inf") or not _only_sums(softmax, ops):
            continue
        found[softmax.loop.index] = Masked(softmax, last)
    return found


def _only_sums(softmax: OnlineSoftmax, ops: list[Op]) -> bool:
    """Whether the loop carries nothing but the base and sums of products with the weights."""
    if len(ops) != len(softmax.loop.body) or any(op.dst is None for op in ops):
        return False
    written: set[str] = set()
    carried: set[str] = set()
    for op in ops:
        carried |= {src.name for src in op.srcs if src.name not in written}
        assert op.dst is not None
        written.add(op.dst.name)
    sums = {var.name for var in softmax.sums}
    if carried & written != sums | {softmax.base.name}:
        return False
    packed = softmax.packed.dst
    written_to = [op for op in ops if op.dst in (*softmax.sums, softmax.base)]
    return all(
        op in softmax.own or (op.kind == "mma" and packed in op.srcs[:2]) for op in written_to
    )


def _definitions(program: Program) -> Mapping[str, Op]:
    found: dict[str, Op] = {}
    again: set[str] = set()
    for op in program.ops():
        if op.dst is None:
            continue
        if op.dst.name in found:
            again.add(op.dst.name)
        found[op.dst.name] = op
    return {name: op for name, op in found.items() if name not in again}


class _Bounded(Replay):
    """Loops with other bounds."""

    def __init__(self, program: Program, bounds: Mapping[str, Loop]) -> None:
        super().__init__(program)
        self.bounds = bounds

    def loop(self, item: Loop) -> None:
        self.copy_loop(self.bounds.get(item.index, item))


def skip_masked_blocks(program: Program) -> Program:
    """Leave out iterations whose scores the mask hides all.

    *requires*  a loop of `masked_loops` whose mask compares positions
    *before -> after*  `for j in [a, b)` -> `for j in [max(a, start), min(b, stop))`, and a part of
                       the rows may end at its own bound (`Loop.until`), or at once where none of
                       its rows is in the array
    *keeps*  every result that is a number
    *cost*  saves whole iterations: half of them under a causal mask
    """
    found = masked_loops(program)
    if not found:
        raise NotApplicable(
            f"{program.name}: no loop has blocks that a mask hides and that change nothing"
        )
    bounds = {index: _bounded(program, one) for index, one in found.items()}
    return _Bounded(program, bounds).run()


def _bounded(program: Program, masked: Masked) -> Loop:
    loop, scores = masked.loop, masked.softmax.scores.type
    (rows,) = [name for name in scores.names if name != masked.softmax.axis]
    known = _definitions(program)
    seen = Positions(known).somewhere(masked.condition, loop.index)
    part = Positions(known, rows).somewhere(masked.condition, loop.index)
    exists = _rows_left(program, rows)
    end = loop.stop if exists is None else exists * loop.stop
    stops = tuple(stop for stop in part.stops if f"{rows}.end" in stop.symbols())
    until = least(stops, end)
    return replace(
        loop,
        start=greatest(seen.starts, loop.start),
        stop=least(seen.stops, loop.stop),
        until=None if until == loop.stop else until,
    )


def _rows_left(program: Program, axis: str) -> Index | None:
    """1 where a part of the rows has any that is stored, 0 where all lie beyond the array."""
    left: set[Index] = set()
    for op in program.ops():
        if op.array is None or not op.kind.startswith("store"):
            continue
        spans = [
            (span, dim)
            for span, dim in zip(op.spans, op.array.dims, strict=True)
            if span.size is not None and span.axis == axis
        ]
        if len(spans) != 1:
            return None
        span, dim = spans[0]
        limit = symbol(dim) if span.stop is None else span.stop
        left.add(limit - span.start - part_begin(axis))
    if len(left) != 1:
        return None
    return minimum_index(maximum_index(left.pop(), 0), 1)


def split_mask_loop(program: Program) -> Program:
    """Run blocks that the mask leaves alone in a loop of their own, which has no mask.

    *requires*  a loop of `masked_loops` whose mask, by comparing positions, hides nothing up to
                some iteration; finite scores
    *before -> after*  `for j in [a, b): masked` -> `for j in [a, clear): not masked;
                       for j in [max(a, clear), b): masked`
    *keeps*  every result
    *cost*  saves comparisons and selections of the inner blocks; the pipeline drains between the
            loops, so that short rows lose
    """
    positions = Positions(_definitions(program))
    clear: dict[str, Index] = {}
    found = masked_loops(program)
    for index, one in found.items():
        bounds = positions.everywhere(one.condition, index)
        if bounds is not None and bounds.stops and not bounds.starts:
            first, *others = sorted(bounds.stops, key=lambda one: len(str(one)))
            clear[index] = least(tuple(others), first)
    if not clear:
        raise NotApplicable(
            f"{program.name}: no loop has blocks that its mask leaves alone from its beginning"
        )
    return _Split(program, found, clear).run()


class _Split(Replay):
    """Loops in two, the first one without its mask."""

    def __init__(
        self, program: Program, masked: Mapping[str, Masked], clear: Mapping[str, Index]
    ) -> None:
        super().__init__(program)
        self.masked, self.clear = masked, clear
        self.open: Masked | None = None

    def loop(self, item: Loop) -> None:
        clear = self.clear.get(item.index)
        if clear is None:
            return self.copy_loop(item)
        self.open = self.masked[item.index]
        self.copy_loop(replace(item, stop=clear, until=None))
        self.open = None
        return self.copy_loop(replace(item, start=greatest((clear,), item.start)))

    def op(self, op: Op) -> None:
        if self.open is not None and op is self.open.mask:
            self._same(op, op.srcs[1])
        elif self.open is not None and op is self.open.softmax.under:
            self._same(op, op.srcs[2])
        else:
            self.copy(op)

    def _same(self, op: Op, src: Var) -> None:
        assert op.dst is not None
        self.tiles[op.dst.name] = self.tile(src)
