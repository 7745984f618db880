"""Modulo variable expansion: register tiles with several copies, one iteration each in turn.

Registers cannot be indexed, so a tile that lives longer than the initiation interval, because the
next iteration writes it before this one has read it, gets `copies[name]` names; iteration i of a
loop (counted from its first) uses copy i mod copies. The emitted steady state is unrolled so many
times that every copy is known by name.

Source: Lam, "Software Pipelining: An Effective Scheduling Technique for VLIW Machines",
PLDI 1988, section 2.3.

*requires*  tiles that every iteration writes before it reads them, untouched outside of the loop
*before -> after*  an op of iteration i -> the same op on the names of its copies
*keeps*  what is read and written, up to the names
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

from warploom.codegen.ir.fuse import Fusion
from warploom.codegen.ir.place import Placement
from warploom.tile import Loop, Op, Program, Var

Copies = Mapping[str, int]


def copy_name(name: str, copy: int) -> str:
    """The name of one copy; copy 0 keeps the tile's own."""
    return name if copy == 0 else f"{name}_copy{copy}"


def expandable(placement: Placement, loop: Loop) -> tuple[str, ...]:
    """Register tiles that every iteration writes before it reads them, so that copies may exist."""
    own = [op for op in loop.body if isinstance(op, Op) and op.id in placement.fusion.kept]
    outside = {
        var.name
        for op in placement.program.ops()
        if op.id not in {o.id for o in loop.body if isinstance(o, Op)}
        for var in (*op.srcs, *((op.dst,) if op.dst else ()))
    }
    found: list[str] = []
    for op in own:
        if op.dst is None or op.dst.name in found:
            continue
        name = op.dst.name
        if name in placement.shared or name in placement.staged or name in placement.spread:
            continue
        first = next(o for o in own if touches(placement, o, name))
        fresh = first is op and name not in {v.name for v in placement.fusion.sources(op)}
        if fresh and name not in outside:
            found.append(name)
    return tuple(found)


def touches(placement: Placement, op: Op, name: str) -> bool:
    """Whether an op reads or writes a register tile, through what is inlined into it too."""
    reads = {var.name for var in placement.fusion.sources(op)}
    return name in reads or (op.dst is not None and op.dst.name == name)


def unroll_of(copies: Copies) -> int:
    """How many iterations of code name every copy: the least common multiple."""
    return math.lcm(*copies.values()) if copies else 1


def names_at(copies: Copies, iteration: int) -> dict[str, str]:
    """The names of expanded tiles in an iteration counted from the loop's first."""
    return {name: copy_name(name, iteration % count) for name, count in copies.items()}


def rename(op: Op, names: Mapping[str, str]) -> Op:
    """The op with its tiles renamed."""
    return op.on(lambda old: Var(names.get(old.name, old.name), old.type)) if names else op


def renamed(placement: Placement, names: Mapping[str, str]) -> Placement:
    """The placement as ops of one iteration see it: inlined ops read that iteration's copies."""
    if not names:
        return placement
    inlined = {name: rename(op, names) for name, op in placement.fusion.inlined.items()}
    return replace(placement, fusion=Fusion(inlined, placement.fusion.kept))


def extra_tiles(program: Program, copies: Copies) -> list[Var]:
    """The copies beyond the first, to be declared beside the tiles themselves."""
    types = {op.dst.name: op.dst.type for op in program.ops() if op.dst is not None}
    return [
        Var(copy_name(name, copy), types[name])
        for name, count in sorted(copies.items())
        for copy in range(1, count)
    ]
