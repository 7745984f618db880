"""What one compute group makes for all, where the columns of tiles are split over the groups.

An op whose result has no part of the split axis, and that depends on a matmul, would be done by
every group again. The first group alone does it, and hands what the others need on through shared
memory: first operands of matmuls, and vectors along rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from warploom.codegen.ir.fuse import Fusion
from warploom.errors import InputError
from warploom.tile import Op, TileType, Var


@dataclass(frozen=True)
class Led:
    """ops       that the first group alone does, by number
    operands  tiles that it hands on as first operands, each with a matmul that reads it
    vectors   that it hands on, by name
    """

    ops: frozenset[int]
    operands: dict[str, tuple[Op, Var]]
    vectors: frozenset[str]


def led_by_one(
    ops: Sequence[Op], fusion: Fusion, is_split: Callable[[TileType], bool], rows: frozenset[str]
) -> Led:
    """What the first group makes for all, of the ops that groups do on registers; `rows` are the
    row axes. Raises `InputError` for a tile that cannot be handed on."""
    cut = [op for op in ops if is_split(_result(op))]
    rest = [op for op in ops if not is_split(_result(op))]
    made, before = {op.dst.name for op in rest if op.kind == "mma" and op.dst}, set[str]()
    while made != before:
        before = set(made)
        made |= {op.dst.name for op in rest if op.dst is not None and _reads(fusion, op, before)}
    led = frozenset(
        op.id
        for op in rest
        if (_reads(fusion, op, made) if op.dst is None else op.dst.name in made)
    )
    operands: dict[str, tuple[Op, Var]] = {}
    vectors = set[str]()
    for op in cut:
        for var in (one for one in fusion.sources(op) if one.name in made):
            if (
                op.kind == "mma"
                and var == op.srcs[0]
                and var.type.names[1] in op.srcs[1].type.names
            ):
                operands[var.name] = op, var
            elif len(var.type.axes) == 1 and var.type.names[0] in rows:
                vectors.add(var.name)
            else:
                raise InputError(
                    f"{op.where}: {op.kind} reads {var.name}: {var.type}, which one group makes "
                    "for all, as the schedule splits columns; it hands on first operands of "
                    "matmuls and vectors along rows"
                )
    return Led(led, operands, frozenset(vectors))


def _reads(fusion: Fusion, op: Op, names: set[str]) -> bool:
    return any(var.name in names for var in fusion.sources(op))


def _result(op: Op) -> TileType:
    """The type of what an op gives or stores."""
    return op.srcs[0].type if op.dst is None else op.dst.type
