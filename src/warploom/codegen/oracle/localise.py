"""An op as one compute group runs it: on its part of the split axis."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from warploom.codegen.ir.place import Placement
from warploom.tile import Op, Span, Var


def localise(placement: Placement, op: Op, part: int) -> Op:
    """`op` with every register tile cut to the group's part.

    Types shrink along the axes that are cut; coordinates and array ranges along them start at the
    part.
    Shared operands keep their whole type: the group reads its rows of them.
    """
    if not placement.splits or placement.parts == 1:
        return op
    spans = tuple(_span(placement, span, part) for span in op.spans)
    start = op.start
    if start is not None and op.axis in placement.splits and op.dst is not None:
        start = start + part * (op.dst.type.size(op.axis) // placement.parts)
    local = op.on(lambda var: Var(var.name, placement.local(var.type)))
    return replace(local, spans=spans, start=start)


def localiser(placement: Placement) -> Callable[[Op, int], Op]:
    """`localise` for ops that come again and again, each worked out once."""
    # By identity, since an op's hash is that of all it holds; the op is kept, so that its id is.
    known: dict[tuple[int, int], tuple[Op, Op]] = {}

    def local(op: Op, part: int) -> Op:
        key = id(op), part
        if key not in known:
            known[key] = op, localise(placement, op, part)
        return known[key][1]

    return local


def _span(placement: Placement, span: Span, part: int) -> Span:
    if span.axis not in placement.splits or span.size is None:
        return span
    size = span.size // placement.parts
    return replace(span, start=span.start + part * size, size=size)
