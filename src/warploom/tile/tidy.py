"""Tidying a traced program: a temporary that exists only to be assigned is not made, nor the
transpose of a load that only a matmul reads. Variables are then named again in program order, so
that equal programs are equal however they were made.

`m[:] = maximum(m, r)` traces as two ops, `t = max m, r` and `m = copy t`; `acc += a @ b` as
`t = mma a, b` and `acc = add acc, t`. When `t` has no other reader the pair becomes one op.

*requires*  the second op follows the first at once and is the only reader of `t`
*before -> after*  `t = f(...); m = copy t` -> `m = f(...)`;
                   `t = mma a, b; c = add c, t` -> `c = mma a, b, c`
*keeps*  the value of every variable that is still written, at every op

A matmul contracts the axis that both operands have, whichever way round they are, so it reads a
load as well as the load's transpose.

*requires*  the transpose and the load are the only writers of their variables
*before -> after*  `t = load x; u = transpose t; c = mma a, u` -> `t = load x; c = mma a, t`
*keeps*  the value of `c`
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace

from warploom.tile.ir import Loop, Op, Program, Var, walk
from warploom.tile.ops import TAKEN_OFF


def tidy(program: Program) -> Program:
    """Fold the pairs described above, then number the ops in program order."""
    reads = Counter(src.name for op in program.ops() for src in op.srcs)
    body = _fold(program.body, reads)
    body = _untransposed(body, _transposed_loads(body))
    body = _drop_dead(body)
    return replace(program, body=_renamed(program, body))


def _fold(body: tuple[Op | Loop, ...], reads: Counter[str]) -> tuple[Op | Loop, ...]:
    result: list[Op | Loop] = []
    for item in body:
        if isinstance(item, Loop):
            result.append(replace(item, body=_fold(item.body, reads)))
            continue
        before = result[-1] if result else None
        merged = _merge(before, item, reads) if isinstance(before, Op) else None
        if merged is None:
            result.append(item)
        else:
            result[-1] = merged
            _fold_tail(result, reads)
    return tuple(result)


def _fold_tail(result: list[Op | Loop], reads: Counter[str]) -> None:
    # A merged op may be the second of another pair.
    while len(result) > 1:
        first, second = result[-2], result[-1]
        if not isinstance(first, Op) or not isinstance(second, Op):
            return
        merged = _merge(first, second, reads)
        if merged is None:
            return
        result[-2:] = [merged]


def _merge(first: Op, second: Op, reads: Counter[str]) -> Op | None:
    made = first.dst
    if made is None or made not in second.srcs or reads[made.name] != 1 or second.dst is None:
        return None
    if second.kind == "copy":
        return replace(first, dst=second.dst, where=second.where)
    accumulates = second.kind in ("add", "sub") and second.srcs == (second.dst, made)
    if accumulates and first.kind == "mma" and len(first.srcs) == 2:
        sign = TAKEN_OFF if second.kind == "sub" else None
        sums = (*first.srcs, second.dst)
        return replace(first, dst=second.dst, srcs=sums, value=sign, where=second.where)
    return None


def _transposed_loads(body: tuple[Op | Loop, ...]) -> dict[str, Var]:
    """The variable of each load that is transposed, by the name of its transpose."""
    ops = list(walk(body))
    writers = Counter(op.dst.name for op in ops if op.dst is not None)
    loads = {op.dst.name for op in ops if op.kind == "load" and op.dst is not None}
    return {
        op.dst.name: op.srcs[0]
        for op in ops
        if op.kind == "transpose"
        and op.dst is not None
        and op.srcs[0].name in loads
        and writers[op.dst.name] == writers[op.srcs[0].name] == 1
    }


def _untransposed(body: tuple[Op | Loop, ...], loads: Mapping[str, Var]) -> tuple[Op | Loop, ...]:
    result: list[Op | Loop] = []
    for item in body:
        if isinstance(item, Loop):
            result.append(replace(item, body=_untransposed(item.body, loads)))
        elif item.kind == "mma":
            factors = tuple(loads.get(var.name, var) for var in item.srcs[:2])
            result.append(replace(item, srcs=(*factors, *item.srcs[2:])))
        else:
            result.append(item)
    return tuple(result)


def _drop_dead(body: tuple[Op | Loop, ...]) -> tuple[Op | Loop, ...]:
    # An op whose variable nothing reads has no effect; dropping one can leave others unread.
    while True:
        read = {src.name for op in walk(body) for src in op.srcs}
        kept = _keep(body, read)
        if kept == body:
            return body
        body = kept


def _keep(body: tuple[Op | Loop, ...], read: set[str]) -> tuple[Op | Loop, ...]:
    kept: list[Op | Loop] = []
    for item in body:
        if isinstance(item, Loop):
            inner = replace(item, body=_keep(item.body, read))
            if inner.body:
                kept.append(inner)
        elif item.dst is None or item.dst.name in read:
            kept.append(item)
    return tuple(kept)


def _renamed(program: Program, body: tuple[Op | Loop, ...]) -> tuple[Op | Loop, ...]:
    """The body with `stem, stem_1, stem_2, ...` for variables of a stem, and ops numbered, in
    program order."""
    taken = {*program.dims, *(array.name for array in program.arrays)}
    taken |= {name for name, _ in program.grid} | {read.name for read in program.every_read()}
    names = {var.name: var.name for var in program.scalars}
    taken |= names.keys()
    count: Counter[str] = Counter()
    for op in walk(body):
        if op.dst is None or op.dst.name in names:
            continue
        stem = re.sub(r"_\d+$", "", op.dst.name)
        name = stem
        while name in taken:
            count[stem] += 1
            name = f"{stem}_{count[stem]}"
        taken.add(name)
        names[op.dst.name] = name
    return _with_names(body, names, [0])


def _with_names(
    body: tuple[Op | Loop, ...], names: Mapping[str, str], count: list[int]
) -> tuple[Op | Loop, ...]:
    """With variables under other names and ops numbered; what stays as it is is not made again."""

    def named(var: Var) -> Var:
        name = names.get(var.name, var.name)
        return var if name == var.name else replace(var, name=name)

    result: list[Op | Loop] = []
    for item in body:
        if isinstance(item, Loop):
            result.append(replace(item, body=_with_names(item.body, names, count)))
            continue
        number, count[0] = count[0], count[0] + 1
        srcs = tuple(map(named, item.srcs))
        dst = None if item.dst is None else named(item.dst)
        same = item.id == number and dst is item.dst
        same = same and all(one is old for one, old in zip(srcs, item.srcs, strict=True))
        result.append(item if same else replace(item, id=number, srcs=srcs, dst=dst))
    return tuple(result)
