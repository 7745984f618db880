"""An op as one compute group runs it: on its part of the split axis."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from warploom.codegen.ir.place import Placement
from warploom.errors import InputError
from warploom.tile import Op, Span, Var
from warploom.tile.ir import joint_axis


def localise(placement: Placement, op: Op, part: int) -> Op:
    """`op` with every register tile cut to the group's part.

    Types shrink along the axes that are cut; coordinates and array ranges along them start at the
    part.
    Shared operands keep their whole type: the group reads its rows of them. Warps that turn
    operands have no part.
    """
    if not placement.splits or placement.parts == 1 or part < 0:
        return op
    spans = _spans(placement, op.spans, part)
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


def _spans(placement: Placement, spans: Sequence[Span], part: int) -> tuple[Span, ...]:
    """Ranges of a group's part; where several are one axis, the first that is longer than 1."""
    left, found = set(placement.splits), list(spans)
    joint = joint_axis(spans)
    for number, span in enumerate(spans):
        if span.axis not in left or span.size is None or (span.axis == joint and span.size == 1):
            continue
        left.remove(span.axis)
        size, rest = divmod(span.size, placement.parts)
        if rest and span.axis == joint:
            raise InputError(
                f"range {span} of axis {joint!r}, which several dimensions are: {placement.parts} "
                "groups share out whole elements of it"
            )
        found[number] = replace(span, start=span.start + part * size, size=size)
    return tuple(found)
