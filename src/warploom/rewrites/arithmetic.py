"""Cheaper arithmetic with the same meaning to rounding."""

from __future__ import annotations

from warploom.rewrites.replay import NotApplicable, Replay
from warploom.tile.ir import Op, Program
from warploom.tile.language import reciprocal


def divide_once_a_row(program: Program) -> Program:
    """Multiply a tile by the reciprocals of a vector in place of dividing every element.

    *requires*  a division of a tile by a tile with fewer axes
    *before -> after*  `x / y` -> `x * reciprocal(y)`
    *keeps*  every result to two more roundings
    *cost*  one reciprocal a row in place of one an element
    """
    if not any(_divides_rows(op) for op in program.ops()):
        raise NotApplicable(f"{program.name}: no tile is divided by one with fewer axes")
    return _DivideOnce(program).run()


def _divides_rows(op: Op) -> bool:
    return op.kind == "div" and 0 < len(op.srcs[1].type.axes) < len(op.srcs[0].type.axes)


class _DivideOnce(Replay):
    def op(self, op: Op) -> None:
        if not _divides_rows(op) or op.dst is None:
            return self.copy(op)
        result = self.tile(op.srcs[0]) * reciprocal(self.tile(op.srcs[1]))
        known = self.tiles.get(op.dst.name)
        if known is None:
            self.tiles[op.dst.name] = result
        else:
            known.assign(result)
        return None
