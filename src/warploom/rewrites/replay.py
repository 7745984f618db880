"""Going through a tile program again, op by op: what every rewrite is made of.

A rule is a `Replay` that writes other ops, in the tile language itself, in place of some; it copies
all others. Types follow from what an op reads now, so that a rule may give a tile other axes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from warploom.errors import InputError
from warploom.tile.index import Index, substituted
from warploom.tile.ir import Loop, Op, Program, Span, TileType, Turn, Var
from warploom.tile.tiles import Tile
from warploom.tile.trace import Tracer, loop, read, retrace
from warploom.tile.verify import result_type


class NotApplicable(InputError):
    """The program has no place for a rule, or not what it requires; the message says which."""


class Replay:
    """A copy of a program, made by `run`; subclasses override `op` and `loop`.

    `tiles` has the present tile of every variable of the old program, `indices` what replaces a
    symbol of its index expressions.
    """

    def __init__(self, program: Program) -> None:
        self.program = program
        self.tiles: dict[str, Tile] = {var.name: Tile(var) for var in program.scalars}
        self.indices: dict[str, Index] = {}
        self.tracer: Tracer = Tracer(program.name)

    def run(self) -> Program:
        """The rewritten program, tidied and verified."""

        def traced(tracer: Tracer) -> None:
            self.tracer = tracer
            self.body(self.program.body)

        return retrace(self.program, traced)

    def body(self, items: Sequence[Op | Loop]) -> None:
        """Go through the items of a body."""
        for item in items:
            if isinstance(item, Loop):
                self.loop(item)
            else:
                self.tracer.line = item.where
                self.op(item)

    def op(self, op: Op) -> None:
        """Go through an op."""
        self.copy(op)

    def loop(self, item: Loop) -> None:
        """Go through a loop."""
        self.copy_loop(item)

    def copy_loop(self, item: Loop) -> None:
        """Copy a loop; a rule gives it other bounds before, in the symbols of the old program."""
        known = set(self.tiles)
        until = None if item.until is None else self.index(item.until)
        self.tracer.line = item.where
        for index in loop(self.index(item.start), self.index(item.stop), until=until):
            self.indices[item.index] = index
            for one in item.reads:
                self.indices[one.name] = read(one.array, *map(self.index, one.at))
            self.body(item.body)
        for name in self.tiles.keys() - known:
            del self.tiles[name]

    def copy(
        self, op: Op, dst: TileType | None = None, spans: Sequence[Span] | None = None
    ) -> None:
        """Copy an op on the present tiles of its sources; `dst` where nothing it reads says what
        type it writes, `spans` for other places of its array."""
        moved = replace(
            op,
            srcs=tuple(self.tile(src).var for src in op.srcs),
            spans=tuple(self.span(span) for span in op.spans) if spans is None else tuple(spans),
            start=None if op.start is None else self.index(op.start),
            turn=None if op.turn is None else self.turn(op.turn),
            dst=None if op.dst is None else Var(op.dst.name, dst or op.dst.type),
        )
        kind = result_type(self.program, moved)
        var = None
        if op.dst is not None:
            assert kind is not None
            known = self.tiles.get(op.dst.name)
            var = known.var if known is not None else self.tracer.variable(op.dst.name, kind)
            self.tiles[op.dst.name] = Tile(var)
        self.tracer.append(
            op.kind,
            var,
            moved.srcs,
            array=op.array,
            spans=moved.spans,
            axis=op.axis,
            start=moved.start,
            value=op.value,
            turn=moved.turn,
        )

    def turn(self, turn: Turn) -> Turn:
        """A turn in the present indices."""
        return replace(turn, at=tuple(map(self.index, turn.at)), number=self.index(turn.number))

    def tile(self, var: Var) -> Tile:
        """The present tile of a variable of the old program."""
        return self.tiles[var.name]

    def span(self, span: Span) -> Span:
        """A range with the present symbols."""
        stop = None if span.stop is None else self.index(span.stop)
        others = tuple(map(self.index, span.others))
        return replace(span, start=self.index(span.start), stop=stop, others=others)

    def index(self, expression: Index) -> Index:
        """An index expression with the present symbols."""
        return substituted(expression, self.indices)
