"""What one compute group makes for all.

An op whose result has no part of the split axis, and that depends on a matmul, would be done by
every group again. Where columns are split, the first group alone does it, and hands what the others
need on through shared memory: first operands of matmuls, and vectors along rows. Where rows are
split, groups may divide such work: what depends on each other in registers is one group's, and it
hands on operands that lie in shared memory and vectors along rows.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from math import prod

from warploom.codegen.ir.fuse import Fusion
from warploom.errors import InputError
from warploom.tile import Op, TileType, Var


@dataclass(frozen=True)
class Led:
    """ops       that one group alone does, by number, and the number of the group
    operands  tiles that it hands on as operands, each with a matmul that reads it
    vectors   that it hands on, by name
    """

    ops: dict[int, int]
    operands: dict[str, tuple[Op, Var]]
    vectors: frozenset[str]


def led_by_one(
    ops: Sequence[Op], fusion: Fusion, is_split: Callable[[TileType], bool], rows: frozenset[str]
) -> Led:
    """What the first group makes for all, of the ops that groups do on registers; `rows` are the
    row axes. Raises `InputError` for a tile that cannot be handed on."""
    cut = [op for op in ops if is_split(_result(op))]
    rest = [op for op in ops if not is_split(_result(op))]
    made = _of_matmuls(fusion, rest)
    led = _depending(fusion, rest, made)
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
    return Led(dict.fromkeys((op.id for op in led), 0), operands, frozenset(vectors))


def divided_work(
    ops: Sequence[Op],
    fusion: Fusion,
    is_split: Callable[[TileType], bool],
    rows: frozenset[str],
    parts: int,
) -> Led:
    """What each of `parts` groups makes for all. Vectors that nothing but split tiles depends on,
    every group makes from those that it takes. Raises as `led_by_one` does."""
    cut = [op for op in ops if is_split(_result(op))]
    rest = [op for op in ops if not is_split(_result(op))]
    made = _of_matmuls(fusion, rest)
    own = _depending(fusion, rest, made)
    everywhere = list(cut)
    for op in reversed(own):
        small = op.dst is not None and all(
            len(var.type.axes) <= 1 for var in (op.dst, *fusion.sources(op))
        )
        readers = [one for one in ops if op.dst and _reads(fusion, one, {op.dst.name})]
        if small and all(one in everywhere or one is op for one in readers):
            everywhere.append(op)
    led = [op for op in own if op not in everywhere]
    made = {op.dst.name for op in led if op.dst is not None}
    operands: dict[str, tuple[Op, Var]] = {}
    vectors = set[str]()
    for op in everywhere:
        for var in (one for one in fusion.sources(op) if one.name in made):
            if op.kind == "mma" and var in op.srcs[:2] and _in_shared(op, var):
                operands[var.name] = op, var
            elif len(var.type.axes) == 1 and var.type.names[0] in rows:
                vectors.add(var.name)
            else:
                raise InputError(
                    f"{op.where}: {op.kind} reads {var.name}: {var.type}, which one group makes "
                    "for all; it hands on operands that lie in shared memory and vectors along rows"
                )
    return Led(_divide(led, fusion, operands, parts), operands, frozenset(vectors))


def _in_shared(op: Op, var: Var) -> bool:
    """Whether a matmul reads a tile that was made in registers from shared memory."""
    return var != op.srcs[0] or var.type.names[1] not in op.srcs[1].type.names


def _divide(
    led: Sequence[Op], fusion: Fusion, operands: Collection[str], parts: int
) -> dict[int, int]:
    """By op the group that does it: ops that depend on each other in registers are one piece, and
    the largest piece goes to the group that has least so far, by elements that ops make."""
    pieces: list[tuple[set[str], list[Op]]] = []
    for op in led:
        names = {var.name for var in fusion.sources(op)} - set(operands)
        names = {name for name in names if any(x.dst and x.dst.name == name for x in led)}
        names |= {op.dst.name} if op.dst is not None else set()
        joined = [piece for piece in pieces if piece[0] & names]
        pieces = [piece for piece in pieces if not piece[0] & names]
        every = [one for piece in joined for one in piece[1]]
        pieces.append((names.union(*(piece[0] for piece in joined)), [*every, op]))

    def weight(piece: Sequence[Op]) -> int:
        return sum(prod(_result(op).shape) for op in piece if op.kind != "mma")

    loads, found = [0] * parts, dict[int, int]()
    for _, piece in sorted(pieces, key=lambda one: (-weight(one[1]), min(op.id for op in one[1]))):
        part = loads.index(min(loads))
        loads[part] += weight(piece)
        found |= dict.fromkeys((op.id for op in piece), part)
    return found


def _of_matmuls(fusion: Fusion, ops: Sequence[Op]) -> set[str]:
    """The tiles that matmuls make of these ops, and all that depends on them."""
    made, before = {op.dst.name for op in ops if op.kind == "mma" and op.dst}, set[str]()
    while made != before:
        before = set(made)
        made |= {op.dst.name for op in ops if op.dst is not None and _reads(fusion, op, before)}
    return made


def _depending(fusion: Fusion, ops: Sequence[Op], made: set[str]) -> list[Op]:
    """The ops that make these tiles, and those without a result that read them."""
    return [
        op for op in ops if (_reads(fusion, op, made) if op.dst is None else op.dst.name in made)
    ]


def _reads(fusion: Fusion, op: Op, names: set[str]) -> bool:
    return any(var.name in names for var in fusion.sources(op))


def _result(op: Op) -> TileType:
    """The type of what an op gives or stores."""
    return op.srcs[0].type if op.dst is None else op.dst.type
