"""The passes over staged tiles: which ops of a kernel are done line by line of columns.

A reduction along the columns and a store are what needs a tile at all. A pass reads staged tiles
line by line, computes what its reductions and stores need and forgets it: a later pass computes it
again, exponentials too. A thread then needs about 40 registers, however many columns it has.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from warploom.codegen.analysis.stores import STORES
from warploom.codegen.simt.ahead import Ahead
from warploom.codegen.simt.exchanges import EXCHANGES, converts
from warploom.codegen.simt.forms import COL, ROW, TILE, Layout, wanted_form
from warploom.tile import FP32, Loop, Op, Program, Var
from warploom.tile.ops import OPS

ALONG_COLUMNS = ("reduce_sum", "reduce_max", "reduce_min", "reduce_prod")


@dataclass(frozen=True)
class Pass:
    """Ops that are done line by line, in order: maps, loads by column, reductions and stores."""

    ops: tuple[Op, ...]


def staged_tiles(program: Program, ahead: Ahead) -> dict[str, Op]:
    """The variables that are staged tiles as they were loaded, or in fp32, with their loads."""
    found: dict[str, Op] = {}
    writers = Counter(op.dst.name for op in program.ops() if op.dst is not None)
    for op in program.ops():
        if op.dst is None or writers[op.dst.name] > 1:
            continue
        load = op if op.id in ahead.slots else None
        if op.kind == "cast" and op.dst.type.dtype is FP32 and op.srcs[0].type.dtype.is_float:
            load = found.get(op.srcs[0].name)
        if load is not None:
            found[op.dst.name] = load
    return found


def passes(
    program: Program,
    layout: Layout,
    forms: Mapping[str, str],
    tiles: Mapping[str, Op],
    apart: Collection[int],
    idle: Collection[int],
    changing: Collection[Var],
) -> list[Op | Loop | Pass]:
    """The body of a program in passes and what stands between them; ops of `apart` have code of
    their own, those of `idle` none. Variables of `changing` are not what they were in a later pass.
    """
    order = _Order(program, layout, forms, apart, changing)
    for item in program.body:
        if isinstance(item, Loop):
            order.close()
            order.done.append(item)
        elif item.id not in idle and (item.dst is None or item.dst.name not in tiles):
            order.take(item)
    order.close()
    return order.done


class _Order:
    """Ops in program order: those that are put off until a pass needs them, the pass at hand."""

    def __init__(
        self,
        program: Program,
        layout: Layout,
        forms: Mapping[str, str],
        apart: Collection[int],
        changing: Collection[Var],
    ) -> None:
        self.layout, self.forms, self.apart, self.changing = layout, forms, apart, changing
        self.writers = Counter(op.dst.name for op in program.ops() if op.dst is not None)
        self.stored = {op.array.name for op in program.ops() if op.array and op.kind in STORES}
        self.later: dict[str, Op] = {}
        self.ends: list[Op] = []
        self.done: list[Op | Loop | Pass] = []

    def take(self, op: Op) -> None:
        """The next op of the program."""
        if self._ends(op):
            needed = [*self._needed([op]), op]
            sums = {one.dst for one in self.ends if one.dst is not None}
            waits = any(src in sums for one in needed for src in one.srcs)
            if waits or (self.ends and self._extents(op) != self._extents(self.ends[0])):
                self.close()
            self.ends.append(op)
        elif self._put_off(op):
            assert op.dst is not None
            self.later[op.dst.name] = op
        else:
            self._apart(op)

    def close(self, *more: Op) -> None:
        """The pass at hand as it is, with other ops that are needed now."""
        if ops := [*self._needed([*self.ends, *more]), *self.ends]:
            self.done.append(Pass(tuple(sorted(ops, key=lambda op: op.id))))
        for op in ops if more else ():
            if op.dst is not None:
                self.later.pop(op.dst.name, None)
        self.ends = []

    def _apart(self, op: Op) -> None:
        """An op outside of passes stands before the pass at hand, unless it waits for it."""
        arrays = {one.array for one in self.ends if one.array is not None}
        sums = {one.dst for one in self.ends if one.dst is not None}
        if any(src.name in self.later for src in op.srcs):
            self.close(*(self.later[src.name] for src in op.srcs if src.name in self.later))
        else:
            again = op.dst is not None and self.writers[op.dst.name] > 1
            if again or op.array in arrays or any(src in sums for src in op.srcs):
                self.close()
        self.done.append(op)

    def _needed(self, ends: list[Op]) -> list[Op]:
        """What was put off and is needed for others, and those themselves where put off."""
        found: dict[int, Op] = {}
        todo = [*ends]
        while todo:
            op = todo.pop()
            if op.dst is not None and self.later.get(op.dst.name) is op:
                found[op.id] = op
            todo += [self.later[s.name] for s in op.srcs if s.name in self.later]
        return list(found.values())

    def _whole_lines(self) -> bool:
        return self.layout.schedule.aligned or self.layout.schedule.vector == 1

    def _extents(self, op: Op) -> tuple[int, ...]:
        return self.layout.extents(op.srcs[0].type, TILE)

    def _ends(self, op: Op) -> bool:
        if op.id in self.apart or not op.srcs or self.forms[op.srcs[0].name] != TILE:
            return False
        if op.kind == "store":
            return self._whole_lines()
        if op.kind not in ALONG_COLUMNS or op.dst is None or self.forms[op.dst.name] != ROW:
            return False
        return op.axis == op.srcs[0].type.names[1]

    def _put_off(self, op: Op) -> bool:
        if op.dst is None or op.id in self.apart or self.writers[op.dst.name] > 1:
            return False
        if any(src in self.changing for src in op.srcs):
            return False
        form, kind = self.forms[op.dst.name], op.dst.type
        if form == COL:
            if op.kind == "load":
                assert op.array is not None
                return self._whole_lines() and op.array.name not in self.stored
        elif form != TILE or op.kind == "load":
            return False
        if op.kind in EXCHANGES or OPS[op.kind].group in ("reduce", "scan", "blocks"):
            return False
        return not any(
            converts(self.forms[src.name], wanted_form(kind, form, src.type)) for src in op.srcs
        )
