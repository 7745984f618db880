"""Conditions on coordinates that hold for a whole tile, as one comparison of numbers.

A mask such as `key < keys & key <= row` is true everywhere in most tiles. Coordinates of a tile lie
between two index expressions, so the condition has a sufficient one that is the same for all
threads of a group: `last key < keys && last key <= first row`.

*requires*  conditions made of comparisons, `&` and `|` of coordinates and constants
*before -> after*  `where(c, x, y)` into x -> `if (!(everywhere c)) where(c, x, y)` into x
*keeps*  every value: where the condition holds everywhere, the op writes x to itself
"""

from __future__ import annotations

from warploom.codegen.analysis.guards import Combined, Compared, Edge, Joined, Position, Test
from warploom.codegen.analysis.register_tiles import RegisterTiles
from warploom.tile import Op, Var

Bounds = tuple[Edge, Edge]
# comparison -> (which bound of the left operand, C operator, which bound of the right one)
EVERYWHERE = {"lt": (1, "<", 0), "le": (1, "<=", 0), "gt": (0, ">", 1), "ge": (0, ">=", 1)}
JOINS = {"and": "&&", "or": "||"}
SIGNS = {"add": "+", "sub": "-", "mul": "*", "min": "min", "max": "max"}


def everywhere(tiles: RegisterTiles, condition: Var) -> Test | None:
    """A test, equal in all threads of a group, under which `condition` holds everywhere."""
    op = tiles.placement.fusion.inlined.get(condition.name)
    if op is None:
        return None
    if op.kind in JOINS:
        parts = [everywhere(tiles, src) for src in op.srcs]
        known = [part for part in parts if part is not None]
        if len(known) < len(parts):
            return None
        return Joined(JOINS[op.kind], tuple(known))
    if op.kind not in EVERYWHERE:
        return None
    left, right = (bounds(tiles, src) for src in op.srcs)
    if left is None or right is None:
        return None
    first, sign, second = EVERYWHERE[op.kind]
    return Compared(left[first], sign, right[second])


def bounds(tiles: RegisterTiles, var: Var) -> Bounds | None:
    """The least and the greatest element of an integer tile in this group's part."""
    writers = [op for op in tiles.placement.program.ops() if op.dst == var]
    if len(writers) != 1 or var.type.dtype.name != "int32":
        return None
    (op,) = writers
    if op.kind == "coordinate":
        return _coordinate(tiles, op)
    if op.kind == "fill":
        return int(op.value or 0), int(op.value or 0)
    inner = [bounds(tiles, src) for src in op.srcs]
    known = [pair for pair in inner if pair is not None]
    if len(known) != len(inner) or op.kind not in SIGNS:
        return None
    (low, high), (low2, high2) = known
    sign = SIGNS[op.kind]
    if op.kind == "mul" and not (isinstance(low2, int) and low2 == high2 and low2 >= 0):
        return None
    if op.kind == "sub":
        return Combined(sign, low, high2), Combined(sign, high, low2)
    return Combined(sign, low, low2), Combined(sign, high, high2)


def _coordinate(tiles: RegisterTiles, op: Op) -> Bounds:
    assert op.start is not None and op.dst is not None
    if not op.axis:
        return Position(op.start), Position(op.start)
    first = tiles.part_size(op.axis, op.dst.type.size(op.axis))
    size = tiles.placement.local(op.dst.type).size(op.axis)
    return Position(op.start, first), Position(op.start, first, size - 1)
