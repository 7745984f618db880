"""Values of tiles that are known before a loop's first iteration, and ops that are useless there.

Sums begin at zero, so conditions on them are known in the iteration that starts ahead of a loop:
`total > 0` is false, and the true side of a `where` is not needed. The compiler cannot find that
out, because the vote that skips rare corrections hides it.

*requires*  straight code after constant fills, in which every `where` on a fact comes before the
            fact changes; the emitter forgets all at a loop or a branch
*before -> after*  `x = f(..); y = where(false, x, z)` -> `y = where(false, x, z)`
*keeps*  every value that is read
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence

from warploom.codegen.ir.fuse import Fusion
from warploom.tile import Loop, Op, Program, Var

Known = Mapping[str, float]  # tiles whose elements are all this number, by name
COMPARE: dict[str, Callable[[float, float], bool]] = {
    "lt": operator.lt,
    "le": operator.le,
    "gt": operator.gt,
    "ge": operator.ge,
    "eq": operator.eq,
    "ne": operator.ne,
}


def truth(fusion: Fusion, known: Known, condition: Var) -> bool | None:
    """Whether a condition holds in all places or in none; None when that is not known."""
    op = fusion.inlined.get(condition.name)
    if op is None:
        return None
    if op.kind in COMPARE:
        left, right = (_number(fusion, known, src) for src in op.srcs)
        if left is None or right is None:
            return None
        return COMPARE[op.kind](left, right)
    parts = [truth(fusion, known, src) for src in op.srcs]
    if op.kind == "not":
        return None if parts[0] is None else not parts[0]
    if op.kind not in ("and", "or"):
        return None
    decides = op.kind == "or"
    if decides in parts:
        return decides
    return None if None in parts else not decides


def _number(fusion: Fusion, known: Known, var: Var) -> float | None:
    op = fusion.inlined.get(var.name)
    if op is None:
        return known.get(var.name)
    return float(op.value or 0) if op.kind == "fill" else None


def lasting(
    program: Program, fusion: Fusion, known: Known, straight: Sequence[int], op: Op
) -> Known:
    """The facts that hold where `op` runs and at every `where` on them from there on; `straight`
    are the ids of the ops of the code at hand, in order."""
    place = {number: at for at, number in enumerate(straight)}
    body = _body(program, op)
    if op.id not in place or body is None:
        return {}
    found: dict[str, float] = {}
    for name, value in known.items():
        changed = [
            place[other.id]
            for other in program.ops()
            if other.dst is not None and other.dst.name == name and other.id in place
        ]
        first = min((at for at in changed if at > place[op.id]), default=len(straight))
        users = [
            root
            for other in body
            if other.kind == "where" and _rests_on(fusion, other.srcs[0], name)
            for root in _roots(program, fusion, other)
        ]
        if all(place.get(root, len(straight) + 1) <= first for root in users):
            found[name] = value
    return found


def _rests_on(fusion: Fusion, condition: Var, name: str) -> bool:
    op = fusion.inlined.get(condition.name)
    return op is not None and name in {var.name for var in fusion.sources(op)}


def _roots(program: Program, fusion: Fusion, op: Op) -> list[int]:
    """The ops with a place of their own that an op's value is computed in."""
    if op.dst is None or op.dst.name not in fusion.inlined:
        return [op.id]
    readers = [other for other in program.ops() if op.dst in other.srcs]
    return [root for reader in readers for root in _roots(program, fusion, reader)]


def needed(program: Program, fusion: Fusion, known: Known, op: Op) -> bool:
    """Whether something reads what an op writes, given what is known."""
    assert op.dst is not None
    body = _body(program, op)
    if body is None:
        return True
    writers = [other.id for other in body if other.dst == op.dst and other.id > op.id]
    last = min(writers, default=None)
    if last is None and any(o.dst == op.dst and o.id != op.id for o in program.ops()):
        return True  # the next iteration's
    for reader in program.ops():
        if op.dst not in reader.srcs or (last is not None and not op.id < reader.id <= last):
            continue
        if _reads(program, fusion, known, reader, op.dst):
            return True
    return False


def _body(program: Program, op: Op) -> list[Op] | None:
    for loop in program.loops():
        inside = [item for item in loop.body if isinstance(item, Op)]
        if any(isinstance(item, Loop) for item in loop.body):
            continue
        if any(item.id == op.id for item in inside):
            return inside
    return None


def _reads(program: Program, fusion: Fusion, known: Known, reader: Op, var: Var) -> bool:
    if reader.dst is not None and truth(fusion, known, reader.dst) is not None:
        return False
    if reader.kind == "where":
        chosen = truth(fusion, known, reader.srcs[0])
        if chosen is not None and var not in (reader.srcs[0], reader.srcs[1 if chosen else 2]):
            return False
    if reader.dst is None or reader.dst in reader.srcs:
        return True
    inner = reader.dst.name in fusion.inlined
    return needed(program, fusion, known, reader) if inner or _once(program, reader) else True


def _once(program: Program, op: Op) -> bool:
    return sum(other.dst == op.dst for other in program.ops()) == 1
