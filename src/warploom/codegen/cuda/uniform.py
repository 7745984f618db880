"""Conditions on coordinates that hold for a whole tile, as one comparison of numbers.

A mask such as `key < keys & key <= row` is true everywhere in most tiles. Coordinates of a tile lie
between two index expressions, so the condition has a sufficient one that is the same for all
threads of a group: `last key < keys && last key <= first row`.

*requires*  conditions made of comparisons, `&` and `|` of coordinates and constants
*before -> after*  `where(c, x, y)` into x -> `if (!(everywhere c)) where(c, x, y)` into x
*keeps*  every value: where the condition holds everywhere, the op writes x to itself
"""

from __future__ import annotations

from warploom.codegen.cuda.values import Values, c_index
from warploom.tile import Op, Var

Names = dict[str, str]
Bounds = tuple[str, str]
# comparison -> (which bound of the left operand, C operator, which bound of the right one)
EVERYWHERE = {"lt": (1, "<", 0), "le": (1, "<=", 0), "gt": (0, ">", 1), "ge": (0, ">=", 1)}
JOINS = {"and": "&&", "or": "||"}


def everywhere(values: Values, condition: Var, names: Names) -> str | None:
    """A C++ condition, equal in all threads, under which `condition` holds everywhere; or None."""
    op = values.placement.fusion.inlined.get(condition.name)
    if op is None:
        return None
    if op.kind in JOINS:
        parts = [everywhere(values, src, names) for src in op.srcs]
        known = [part for part in parts if part is not None]
        if len(known) < len(parts):
            return None
        return f"({f' {JOINS[op.kind]} '.join(known)})"
    if op.kind not in EVERYWHERE:
        return None
    left, right = (bounds(values, src, names) for src in op.srcs)
    if left is None or right is None:
        return None
    first, sign, second = EVERYWHERE[op.kind]
    return f"{left[first]} {sign} {right[second]}"


def bounds(values: Values, var: Var, names: Names) -> Bounds | None:
    """The least and the greatest element of an integer tile in this group's part, as C++."""
    writers = [op for op in values.placement.program.ops() if op.dst == var]
    if len(writers) != 1 or var.type.dtype.name != "int32":
        return None
    (op,) = writers
    if op.kind == "coordinate":
        return _coordinate(values, op, names)
    if op.kind == "fill":
        return str(int(op.value or 0)), str(int(op.value or 0))
    inner = [bounds(values, src, names) for src in op.srcs]
    known = [pair for pair in inner if pair is not None]
    if len(known) != len(inner):
        return None
    if op.kind in ("min", "max"):
        (low, high), (low2, high2) = known
        return f"::{op.kind}({low}, {low2})", f"::{op.kind}({high}, {high2})"
    if op.kind in ("add", "sub"):
        (low, high), (low2, high2) = known
        if op.kind == "add":
            return f"({low} + {low2})", f"({high} + {high2})"
        return f"({low} - {high2})", f"({high} - {low2})"
    return None


def _coordinate(values: Values, op: Op, names: Names) -> Bounds | None:
    assert op.start is not None and op.dst is not None
    start = c_index(op.start, names)
    if not op.axis:
        return start, start
    size, first = op.dst.type.size(op.axis), "0"
    if op.axis in values.placement.rows:
        first = values.first_row(op.axis, size)
        size = values.placement.local(op.dst.type).size(op.axis)
    low = start if first == "0" else f"({start} + {first})"
    return low, f"({low} + {size - 1})"
