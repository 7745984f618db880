"""Ops that a warp leaves out when a condition on rows holds in all of its rows.

Corrections that are seldom needed are written as `x[:] = where(right, x, corrected)` with one
`right` a row. Where it holds in all 16 rows of a warp, the op changes nothing, and an op whose
result is only read by the other side of such a `where` computes nothing that is read.

*requires*  a condition made of comparisons of row vectors, `&` and `|`; where an op runs, what the
            condition reads has the value it has at the `where`; a row of the result counts for the
            same row of the `where` only
*before -> after*  `op` -> `if (!(all rows of the warp: right)) op`
*keeps*  every value that is read
"""

from __future__ import annotations

from collections.abc import Sequence

from warploom.codegen.analysis.exchanges import crosses_rows, exchanges
from warploom.codegen.analysis.known import lasting, needed, truth
from warploom.codegen.cuda.values import At, Values
from warploom.tile import Loop, Op, Var
from warploom.tile.ops import OPS

LEFT_OUT = ("reduce", "unary", "binary", "select", "cast")
CONDITIONS = ("lt", "le", "gt", "ge", "eq", "ne", "and", "or", "not")


def skip_condition(values: Values, op: Op) -> str | None:
    """The C++ condition, equal in all threads of a warp, under which `op` can be left out."""
    program, fusion = values.placement.program, values.placement.fusion
    if values.known and op.dst is not None and OPS[op.kind].group in LEFT_OUT:
        known = lasting(program, fusion, values.known, values.straight, op)
        if known and not needed(program, fusion, known, op):
            return "true"
    if op.kind == "where" and op.srcs[1] == op.dst:
        return _all_rows(values, op.srcs[0].name)
    if op.dst is None or OPS[op.kind].group not in LEFT_OUT or not _once(values, op.dst):
        return None
    for name, users in sorted(_unread(values, op.dst).items()):
        condition = _all_rows(values, name)
        if condition is not None and _in_time(values, op, name, users):
            return condition
    return None


def _once(values: Values, var: Var) -> bool:
    return sum(op.dst == var for op in values.placement.program.ops()) == 1


def _unread(values: Values, var: Var) -> dict[str, frozenset[int]]:
    """The conditions, by name, each of which by itself means that nothing counts on `var`, with
    the ops that choose by them."""
    found: list[dict[str, frozenset[int]]] = []
    for reader in values.placement.program.ops():
        if var not in reader.srcs:
            continue
        own: dict[str, frozenset[int]] = {}
        if reader.kind == "where" and reader.srcs[2] == var and var not in reader.srcs[:2]:
            own[reader.srcs[0].name] = frozenset((reader.id,))
        if (
            reader.dst is not None
            and reader.dst not in reader.srcs
            and _once(values, reader.dst)
            and _row_by_row(values, reader, var)
        ):
            for name, users in _unread(values, reader.dst).items():
                own[name] = own.get(name, frozenset()) | users
        found.append(own)
    if not found:
        return {}
    common = set(found[0]).intersection(*found[1:])
    return {name: frozenset[int]().union(*(own[name] for own in found)) for name in common}


def _row_by_row(values: Values, reader: Op, var: Var) -> bool:
    """Whether a row of what an op gives depends on the same row of `var` alone."""
    placement = values.placement
    if crosses_rows(placement, reader) or exchanges(placement, reader):
        return False
    if reader.kind == "mma":
        return (
            var == reader.srcs[0]
            and var not in reader.srcs[1:]
            and placement.from_registers(reader)
        )
    return OPS[reader.kind].group not in ("cluster", "sink")


def _in_time(values: Values, op: Op, condition: str, users: frozenset[int]) -> bool:
    """Whether a condition has the value where `op` runs that it has where its users choose."""
    body = _body(values.placement.program.body, op)
    ids = {other.id for other in body}
    if not users <= ids or op.id >= min(users):
        return False
    inner = values.placement.fusion.inlined[condition]
    read = {var.name for var in values.placement.fusion.sources(inner)}

    def at(one: Op) -> tuple[int, int]:
        return values.order.get(one.id, (0, one.id))

    for writer in body:
        if writer.dst is None or writer.dst.name not in read:
            continue
        if op.id <= writer.id < max(users):
            return False
        first, second = (writer, op) if writer.id < op.id else (op, writer)
        stage, place = at(first)
        if not (stage, place) < at(second) < (stage + 1, place):
            return False
    return True


def _body(body: Sequence[Op | Loop], op: Op) -> list[Op]:
    """The ops beside one: of its loop, or of no loop."""
    own = [item for item in body if isinstance(item, Op)]
    if any(item.id == op.id for item in own):
        return own
    for item in body:
        if isinstance(item, Loop) and (found := _body(item.body, op)):
            return found
    return []


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
    vote = f"__all_sync(0xffffffffu, {' && '.join(each)})"
    values.votes[vote] = condition
    return vote


def _of_rows(values: Values, op: Op) -> bool:
    if op.dst is None or op.kind not in CONDITIONS or values.form(op.dst.type) != "row":
        return False
    inner = values.placement.fusion.inlined
    compares = OPS[op.kind].group == "compare"
    for src in op.srcs:
        source = inner.get(src.name)
        if source is None or source.kind == "fill":
            continue
        if not (_row_number(values, source) if compares else _of_rows(values, source)):
            return False
    return True


def _row_number(values: Values, op: Op) -> bool:
    """Whether an inlined op's value is one number a row, made of such numbers."""
    if op.kind == "fill":
        return True
    if op.dst is None or values.form(op.dst.type) != "row":
        return False
    if OPS[op.kind].group not in ("unary", "binary"):
        return False
    inner = values.placement.fusion.inlined
    return all(_row_number(values, inner[src.name]) for src in op.srcs if src.name in inner)
