"""The meaning of a program in float64, without the rounding of its element types.

What is left of a difference between a run and this is rounding alone, so it judges a kernel that
has no reference of its own. It does not judge whether the program says what its author meant.
"""

from __future__ import annotations

from dataclasses import replace

from warploom.tile.dtypes import FP64
from warploom.tile.ir import Array, Loop, Op, Program, TileType, Var


def widened(program: Program) -> Program:
    """The same program with every floating type made fp64. For the interpreter only."""
    return replace(
        program,
        arrays=tuple(_array(array) for array in program.arrays),
        scalars=tuple(_var(var) for var in program.scalars),
        body=_body(program.body),
    )


def _body(body: tuple[Op | Loop, ...]) -> tuple[Op | Loop, ...]:
    return tuple(
        replace(item, body=_body(item.body)) if isinstance(item, Loop) else _op(item)
        for item in body
    )


def _op(op: Op) -> Op:
    return replace(op.on(_var), array=None if op.array is None else _array(op.array))


def _var(var: Var) -> Var:
    return replace(var, type=_type(var.type))


def _type(kind: TileType) -> TileType:
    return kind.with_dtype(FP64) if kind.dtype.is_float else kind


def _array(array: Array) -> Array:
    return replace(array, dtype=FP64) if array.dtype.is_float else array
