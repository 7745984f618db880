"""A mask written over the matmul's result that it is of, which the emitter tests a tile at a time.

Most blocks of a masked loop have no masked element. A choice that is written over the tile it
chooses from changes nothing there, so that a group leaves it out after one comparison
(`codegen.analysis.uniform`); one that makes another tile is done for every element.
"""

from __future__ import annotations

from collections.abc import Iterator

from warploom.rewrites.replay import NotApplicable, Replay
from warploom.tile.ir import Loop, Op, Program
from warploom.tile.language import where


def mask_in_place(program: Program) -> Program:
    """Choose into the tile that is chosen from, in place of making another one.

    *requires*  `where` of a matmul's result that nothing else writes, and nothing reads after it
    *before -> after*  `s = where(seen, x, y)` -> `x[:] = where(seen, x, y)`, and x for s after it
    *keeps*  every bit
    *cost*  one comparison where all of a tile is seen, in place of a choice an element; the
            registers of one tile less
    """
    found = {op.id for body in _bodies(program) for op in _choices(program, body)}
    if not found:
        raise NotApplicable(f"{program.name}: no mask is alone in reading a matmul's result")
    return _InPlace(program, found).run()


def _bodies(program: Program) -> Iterator[list[Op]]:
    """The ops of the program's own body, then those of each loop's."""
    for items in (program.body, *(loop.body for loop in program.loops())):
        yield [item for item in items if not isinstance(item, Loop)]


def _choices(program: Program, body: list[Op]) -> Iterator[Op]:
    """Choices that may be written over what they choose from."""
    ops = list(program.ops())
    for op in body:
        if op.kind != "where" or op.dst is None or op.dst == op.srcs[1]:
            continue
        var = op.srcs[1]
        written = [one for one in ops if one.dst == var]
        product = len(written) == 1 and written[0].kind == "mma" and written[0] in body
        once = sum(one.dst == op.dst for one in ops) == 1
        last = not any(var in one.srcs and one.id > op.id for one in ops)
        if product and once and last and op.dst.type == var.type and var not in op.srcs[2:]:
            yield op


class _InPlace(Replay):
    def __init__(self, program: Program, found: set[int]) -> None:
        super().__init__(program)
        self.found = found

    def op(self, op: Op) -> None:
        if op.id not in self.found or op.dst is None:
            return self.copy(op)
        condition, x, y = (self.tile(src) for src in op.srcs)
        x[:] = where(condition, x, y)
        self.tiles[op.dst.name] = x
        return None
