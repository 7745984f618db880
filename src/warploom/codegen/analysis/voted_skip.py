"""Ops that a warp leaves out when a condition on rows holds in all of its rows.

Programs write rare corrections as `x[:] = where(right, x, corrected)` with one `right` a row. If it
holds in all 16 rows of a warp, the op changes nothing, and an op that only feeds `corrected`
computes nothing that is read.

*requires*  a condition made of comparisons of row vectors, `&` and `|`; where an op runs, what the
            condition reads has the value it has at the `where`; a row of the result counts for the
            same row of the `where` only
*before -> after*  `op` -> `if (!(all rows of the warp: right)) op`
*keeps*  every value that is read
"""

from __future__ import annotations

from collections.abc import Sequence

from warploom.codegen.analysis.exchanges import crosses_rows, exchanges
from warploom.codegen.analysis.guards import Always, Place, Vote
from warploom.codegen.analysis.known import lasting, needed, truth
from warploom.codegen.analysis.register_tiles import RegisterTiles
from warploom.tile import Loop, Op, Var
from warploom.tile.ops import OPS

LEFT_OUT = ("reduce", "unary", "binary", "select")
CONDITIONS = ("lt", "le", "gt", "ge", "eq", "ne", "and", "or", "not")


def skip_guard(tiles: RegisterTiles, op: Op, at: Place) -> Vote | Always | None:
    """The condition under which a warp can leave `op` out at that place."""
    program, fusion = tiles.placement.program, tiles.placement.fusion
    if at.known and op.dst is not None and OPS[op.kind].group in LEFT_OUT:
        known = lasting(program, fusion, at.known, at.straight, op)
        if known and not needed(program, fusion, known, op):
            return Always(True)
    if op.kind == "where" and op.srcs[1] == op.dst:
        return _all_rows(tiles, op.srcs[0].name, at)
    if op.dst is None or OPS[op.kind].group not in LEFT_OUT or not _once(tiles, op.dst):
        return None
    for name, users in sorted(_unread(tiles, op.dst).items()):
        condition = _all_rows(tiles, name, at)
        if condition is not None and _in_time(tiles, op, name, users, at):
            return condition
    return None


def _once(tiles: RegisterTiles, var: Var) -> bool:
    return sum(op.dst == var for op in tiles.placement.program.ops()) == 1


def _unread(tiles: RegisterTiles, var: Var) -> dict[str, frozenset[int]]:
    """The conditions, by name, each of which by itself means that nothing counts on `var`, with
    the ops that choose by them."""
    found: list[dict[str, frozenset[int]]] = []
    for reader in tiles.placement.program.ops():
        if var not in reader.srcs:
            continue
        own: dict[str, frozenset[int]] = {}
        if reader.kind == "where" and reader.srcs[2] == var and var not in reader.srcs[:2]:
            own[reader.srcs[0].name] = frozenset((reader.id,))
        if (
            reader.dst is not None
            and reader.dst not in reader.srcs
            and _once(tiles, reader.dst)
            and _row_by_row(tiles, reader, var)
        ):
            for name, users in _unread(tiles, reader.dst).items():
                own[name] = own.get(name, frozenset()) | users
        found.append(own)
    if not found:
        return {}
    common = set(found[0]).intersection(*found[1:])
    return {name: frozenset[int]().union(*(own[name] for own in found)) for name in common}


def _row_by_row(tiles: RegisterTiles, reader: Op, var: Var) -> bool:
    """Whether a row of what an op gives depends on the same row of `var` alone."""
    placement = tiles.placement
    if crosses_rows(placement, reader) or exchanges(placement, reader):
        return False
    if reader.kind == "mma":
        return (
            var == reader.srcs[0]
            and var not in reader.srcs[1:]
            and placement.from_registers(reader)
        )
    return OPS[reader.kind].group not in ("cluster", "sink")


def _in_time(
    tiles: RegisterTiles, op: Op, condition: str, users: frozenset[int], at: Place
) -> bool:
    """Whether a condition has the value where `op` runs that it has where its users choose."""
    body = _body(tiles.placement.program.body, op)
    ids = {other.id for other in body}
    if not users <= ids or op.id >= min(users):
        return False
    inner = tiles.placement.fusion.inlined[condition]
    read = {var.name for var in tiles.placement.fusion.sources(inner)}

    def moment(one: Op) -> tuple[int, int]:
        return at.order.get(one.id, (0, one.id))

    for writer in body:
        if writer.dst is None or writer.dst.name not in read:
            continue
        if op.id <= writer.id < max(users):
            return False
        first, second = (writer, op) if writer.id < op.id else (op, writer)
        stage, place = moment(first)
        if not (stage, place) < moment(second) < (stage + 1, place):
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


def _all_rows(tiles: RegisterTiles, condition: str, at: Place) -> Vote | Always | None:
    op = tiles.placement.fusion.inlined.get(condition)
    if op is None or op.dst is None or not _of_rows(tiles, op):
        return None
    always = truth(tiles.placement.fusion, at.known, op.dst)
    return Vote(condition) if always is None else Always(always)


def _of_rows(tiles: RegisterTiles, op: Op) -> bool:
    if op.dst is None or op.kind not in CONDITIONS or tiles.form(op.dst.type) != "row":
        return False
    inner = tiles.placement.fusion.inlined
    compares = OPS[op.kind].group == "compare"
    for src in op.srcs:
        source = inner.get(src.name)
        if source is None or source.kind == "fill":
            continue
        if not (_row_number(tiles, source) if compares else _of_rows(tiles, source)):
            return False
    return True


def _row_number(tiles: RegisterTiles, op: Op) -> bool:
    """Whether an inlined op's value is one number a row, made of such numbers."""
    if op.kind == "fill":
        return True
    if op.dst is None or tiles.form(op.dst.type) != "row":
        return False
    if OPS[op.kind].group not in ("unary", "binary"):
        return False
    inner = tiles.placement.fusion.inlined
    return all(_row_number(tiles, inner[src.name]) for src in op.srcs if src.name in inner)
