"""Ops that a warp leaves out when a condition on rows holds in all of its rows.

Corrections that are seldom needed are written as `x[:] = where(right, x, corrected)` with one
`right` a row. Where it holds in all 16 rows of a warp, the op changes nothing, and an op whose
result is only read by the other side of such a `where` computes nothing that is read.

*requires*  a condition made of comparisons of row vectors, `&` and `|`
*before -> after*  `op` -> `if (!(all rows of the warp: right)) op`
*keeps*  every value that is read
"""

from __future__ import annotations

from warploom.codegen.known import needed, truth
from warploom.codegen.values import At, Values
from warploom.tile import Op, Var
from warploom.tile.ops import OPS

LEFT_OUT = ("reduce", "unary", "binary", "select", "cast")
CONDITIONS = ("lt", "le", "gt", "ge", "eq", "ne", "and", "or", "not")


def settled(values: Values, op: Op) -> str | None:
    """The C++ condition, equal in all threads of a warp, under which `op` can be left out."""
    program, fusion = values.placement.program, values.placement.fusion
    known = values.known if op.dst is not None and OPS[op.kind].group in LEFT_OUT else None
    if known and not needed(program, fusion, known, op):
        return "true"
    if op.kind == "where" and op.srcs[1] == op.dst:
        return _all_rows(values, op.srcs[0].name)
    if op.dst is None or OPS[op.kind].group not in LEFT_OUT or not _once(values, op.dst):
        return None
    for name in sorted(_unread(values, op.dst)):
        if (condition := _all_rows(values, name)) is not None:
            return condition
    return None


def _once(values: Values, var: Var) -> bool:
    return sum(op.dst == var for op in values.placement.program.ops()) == 1


def _unread(values: Values, var: Var) -> set[str]:
    """The conditions, by name, each of which by itself means that nothing counts on `var`."""
    found: list[set[str]] = []
    for reader in values.placement.program.ops():
        if var not in reader.srcs:
            continue
        own = set[str]()
        if reader.kind == "where" and reader.srcs[2] == var and var not in reader.srcs[:2]:
            own.add(reader.srcs[0].name)
        if reader.dst is not None and reader.dst not in reader.srcs and _once(values, reader.dst):
            own |= _unread(values, reader.dst)
        found.append(own)
    return set[str].intersection(*found) if found else set()


def _all_rows(values: Values, condition: str) -> str | None:
    op = values.placement.fusion.inlined.get(condition)
    if op is None or op.dst is None or not _of_rows(values, op):
        return None
    if (always := truth(values.placement.fusion, values.known, op.dst)) is not None:
        return str(always).lower()
    blocks = values.extents(op.dst.type)[0]
    each = [
        values.expression(op, At("row", str(t), str(h)), {}) for t in range(blocks) for h in (0, 1)
    ]
    return f"__all_sync(0xffffffffu, {' && '.join(each)})"


def _of_rows(values: Values, op: Op) -> bool:
    if op.dst is None or op.kind not in CONDITIONS or values.form(op.dst.type) != "row":
        return False
    inner = values.placement.fusion.inlined
    for src in op.srcs:
        source = inner.get(src.name)
        if source is None or source.kind == "fill":
            continue
        if not _of_rows(values, source):
            return False
    return True
