"""Axes that are rows in one register tile and columns in another get two names.

A register tile has the layout of wgmma's accumulator, so that each of its axes is a row or a column
axis. Which of the two follows from the matmuls that the tile takes part in, through every op
between: it belongs to the tile, not to the name. Where tiles that never meet in registers have one
axis name and different layouts, the columns get a name of their own, or the rows where a matmul
contracts the columns; tiles in shared memory keep theirs, as a matmul takes them either way.

*requires*  nothing
*before -> after*  `y[m, n] = a @ b; z[n, k] = c @ d` -> `y[m, n_columns] = a @ b; z[n, k] = c @ d`
*keeps*  every op, its number, its order and its value
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Set
from dataclasses import dataclass, field, replace

from warploom.codegen.ir.fuse import in_shared
from warploom.tile import Loop, Op, Program, TileType, Var

Axis = tuple[str, str]  # of a variable
ROWS, COLUMNS = "rows", "columns"
Names = Mapping[Axis, str]


def one_slot(program: Program) -> Program:
    """The program whose matmuls take a loaded tile that was renamed from the slot of the load.

    *requires*  nothing but matmuls, and transposes that are put into the order of quads, read the
                renamed tile
    *before -> after*  `k = load(...); r = k.rename("n", "r"); x = r @ k` ->
    `k = load(...); x = k(r, d) @ k(n, d)`, one variable under two types
    *keeps*  every other op, its number, its order and its value
    """
    ops = tuple(program.ops())
    loads = {op.dst.name for op in ops if op.kind == "load" and op.dst is not None}
    found = {op.dst.name: op for op in ops if op.kind == "rename" and op.dst is not None
             and op.srcs[0].name in loads and len(op.dst.type.axes) == 2}  # fmt: skip
    ordered = {src.name for op in ops if op.kind == "quad_order" for src in op.srcs}
    for op in ops:
        turned = op.kind == "transpose" and op.dst is not None and op.dst.name in ordered
        for place, src in enumerate(op.srcs):
            narrow = src.type.dtype.bits == 8 and turned
            if (op.kind != "mma" or place == 2) and not narrow:
                found.pop(src.name, None)
    if not found:
        return program
    views = {name: Var(op.srcs[0].name, op.dst.type) for name, op in found.items() if op.dst}
    return replace(program, body=_seen(program.body, views))


def _seen(body: tuple[Op | Loop, ...], views: Mapping[str, Var]) -> tuple[Op | Loop, ...]:
    result: list[Op | Loop] = []
    for item in body:
        if isinstance(item, Loop):
            result.append(replace(item, body=_seen(item.body, views)))
        elif item.dst is None or item.dst.name not in views:
            srcs = tuple(views.get(src.name, src) for src in item.srcs)
            result.append(replace(item, srcs=srcs))
    return tuple(result)


def separate_axes(program: Program) -> Program:
    """The program whose axes are either row or column axes; itself where they are already.

    An axis that keeps its name although it would have to be both is refused by `place`.
    """
    found = _Layouts()
    slots = in_shared(program)
    for op in program.ops():
        found.add(op, slots)
    names = found.renamed()
    return program if not names else replace(program, body=_body(program.body, names))


@dataclass
class _Layouts:
    """Axes of variables that have one layout, and what matmuls say it is."""

    above: dict[Axis, Axis] = field(default_factory=dict[Axis, Axis])
    said: list[tuple[Axis, str]] = field(default_factory=list[tuple[Axis, str]])
    contracted: set[Axis] = field(default_factory=set[Axis])

    def add(self, op: Op, shared: Set[str]) -> None:
        """What an op says of the tiles it touches."""
        if op.kind == "mma":
            self._matmul(op, shared)
            return
        if op.kind == "rename":
            self._rename(op, shared)
            return
        names = [v for v in (*op.srcs, *((op.dst,) if op.dst else ())) if v.name not in shared]
        for var in names:
            for axis in var.type.names:
                for other in names:
                    if axis in other.type.names:
                        self._join((var.name, axis), (other.name, axis))

    def _rename(self, op: Op, shared: Set[str]) -> None:
        """A tile keeps its layout; a vector gets the one that its other ops say."""
        assert op.dst is not None
        (src,) = op.srcs
        if len(src.type.axes) == 2 and src.name not in shared:
            for before, after in zip(src.type.names, op.dst.type.names, strict=True):
                self._join((src.name, before), (op.dst.name, after))

    def _matmul(self, op: Op, shared: Set[str]) -> None:
        assert op.dst is not None
        left = op.srcs[0]
        row, column = ((op.dst.name, axis) for axis in op.dst.type.names)
        self.said += [(row, ROWS), (column, COLUMNS)]
        axes = op.srcs[1].type.names
        for src in op.srcs[:2]:
            other = op.srcs[1 if src is op.srcs[0] else 0]
            if src is left and left.name not in shared and other.name in shared:
                continue  # the loaded one is called as this one is
            if src.name not in shared and (src is not left or left.type.names[1] not in axes):
                continue  # its copy in shared memory is called as the other operand is
            for axis in src.type.names:
                if axis in other.type.names:
                    self._root((src.name, axis))
                    self.contracted.add((src.name, axis))
        if left.name not in shared and left.type.names[1] in op.srcs[1].type.names:
            self._join((left.name, left.type.names[0]), row)
            self.said.append(((left.name, left.type.names[1]), COLUMNS))
            staged = op.srcs[1:2]
        else:
            staged = op.srcs[:2]
        for var in (one for one in staged if one.name not in shared):  # through shared memory
            names = zip(var.type.names, (ROWS, COLUMNS), strict=True)
            self.said += [((var.name, axis), layout) for axis, layout in names]

    def renamed(self) -> dict[Axis, str]:
        """The axes that get another name."""
        layouts: dict[Axis, set[str]] = defaultdict(set)
        for axis, layout in self.said:
            layouts[self._root(axis)].add(layout)
        kinds: dict[str, set[str]] = defaultdict(set)
        for axis in tuple(self.above):
            kinds[axis[1]] |= layouts[self._root(axis)]
        fixed = {(self._root(axis), axis[1]) for axis in self.contracted}
        result: dict[Axis, str] = {}
        for name in (name for name, found in kinds.items() if len(found) > 1):
            own = [axis for axis in self.above if axis[1] == name]
            for layout in (COLUMNS, ROWS):
                of = [axis for axis in own if layouts[self._root(axis)] == {layout}]
                if all((self._root(axis), name) not in fixed for axis in of):
                    result |= dict.fromkeys(of, f"{name}_{layout}")
                    break
        return result

    def _root(self, axis: Axis) -> Axis:
        self.above.setdefault(axis, axis)
        while self.above[axis] != axis:
            axis = self.above[axis]
        return axis

    def _join(self, one: Axis, other: Axis) -> None:
        self.above[self._root(one)] = self._root(other)


def _body(body: tuple[Op | Loop, ...], names: Names) -> tuple[Op | Loop, ...]:
    return tuple(
        replace(item, body=_body(item.body, names)) if isinstance(item, Loop) else _op(item, names)
        for item in body
    )


def _op(op: Op, names: Names) -> Op:
    # The axis of a reduction or a range is one of the tile that is read or, of a load, made.
    tile = op.srcs[0] if op.srcs else op.dst
    own = {axis: name for (var, axis), name in names.items() if tile and var == tile.name}
    return replace(
        op,
        dst=None if op.dst is None else _var(op.dst, names),
        srcs=_sources(op, names),
        axis=own.get(op.axis, op.axis),
        spans=tuple(replace(span, axis=own.get(span.axis, span.axis)) for span in op.spans),
    )


def _sources(op: Op, names: Names) -> tuple[Var, ...]:
    """What an op reads. A tile in shared memory, which has no layout, is called as it is used: by
    a matmul like the axis of the operand in registers, by other ops like their result."""
    srcs = tuple(_var(src, names) for src in op.srcs)
    if op.kind == "mma":
        left, right = op.srcs[:2]
        (axis,) = [name for name in left.type.names if name in right.type.names]
        now = names.get((left.name, axis), axis)
        place = right.type.names.index(axis)
        own = list(srcs[1].type.axes)
        own[place] = (now, right.type.size(axis))
        return (srcs[0], Var(right.name, TileType(right.type.dtype, tuple(own))), *srcs[2:])
    if op.dst is None:
        return srcs
    result = {axis: name for (var, axis), name in names.items() if var == op.dst.name}
    return tuple(_var(src, {(src.name, a): n for a, n in result.items()}) for src in srcs)


def _var(var: Var, names: Names) -> Var:
    axes = tuple((names.get((var.name, axis), axis), size) for axis, size in var.type.axes)
    return Var(var.name, TileType(var.type.dtype, axes))
