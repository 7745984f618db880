"""Sums along the columns that are one element each: where(column equals a number of the row, x, 0).

Where x was loaded, no element is compared or added: every thread of the row reads the one element
from memory, and before any thread of its block stores over it. The condition and the choice have no
code where nothing else reads them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from warploom.codegen.simt.forms import COL, ROW, TILE
from warploom.tile import FP32, Index, Op, Program, Var


@dataclass(frozen=True)
class Pick:
    """An element of each row of what `load` reads: of the column `place`, a number a row, less
    `start`."""

    load: Op
    place: Var
    start: Index


def picks(
    program: Program, forms: Mapping[str, str], blocks: int
) -> tuple[dict[int, Pick], frozenset[int]]:
    """The sums that are picks, by op, and the ops that then have no code; of rows that so many
    blocks have in common."""
    writers = Counter(op.dst.name for op in program.ops() if op.dst is not None)
    readers = Counter(src.name for op in program.ops() for src in op.srcs)
    made = {op.dst.name: op for op in program.ops() if op.dst and writers[op.dst.name] == 1}
    found: dict[int, Pick] = {}
    idle = set[int]()
    for op in program.ops():
        chosen = made.get(op.srcs[0].name) if op.kind == "reduce_sum" else None
        if chosen is None or chosen.kind != "where" or forms[op.srcs[0].name] != TILE:
            continue
        own, tile, other = chosen.srcs
        test, zero = made.get(own.name), made.get(other.name)
        if test is None or zero is None or (zero.kind, zero.value) != ("fill", 0.0):
            continue
        pick = _pick(op, test, tile, made, forms)
        if pick is None or readers[op.srcs[0].name] != 1:
            continue
        if not _as_loaded(program, op, pick.load, blocks):
            continue
        found[op.id] = pick
        idle.add(chosen.id)
        if readers[own.name] == 1:
            idle.add(test.id)
    return found, frozenset(idle)


def _as_loaded(program: Program, op: Op, load: Op, blocks: int) -> bool:
    """Whether memory still has what was loaded where `op` reads it again: the array is not stored
    to, or behind it and by the threads of this block, which a barrier holds back until then."""
    stores = [one for one in program.ops() if one.array == load.array and one.kind != "load"]
    if not stores:
        return True
    if blocks > 1 or op not in program.body:
        return False
    behind = program.body[program.body.index(op) :]
    return all(one in behind and one.spans == load.spans for one in stores)


def _pick(
    op: Op, test: Op, tile: Var, made: Mapping[str, Op], forms: Mapping[str, str]
) -> Pick | None:
    if test.kind != "eq" or forms[tile.name] != TILE or op.axis != tile.type.names[1]:
        return None
    load = made.get(tile.name)
    while load is not None and load.kind == "cast" and tile.type.dtype is FP32:
        load = made.get(load.srcs[0].name)
    if load is None or load.kind != "load":
        return None
    for place, column in (test.srcs, reversed(test.srcs)):
        at = made.get(column.name)
        if at is None or at.kind != "coordinate" or at.start is None:
            continue
        if forms[column.name] == COL and forms[place.name] == ROW and place.name in made:
            return Pick(load, place, at.start)
    return None
