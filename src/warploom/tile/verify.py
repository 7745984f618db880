"""The verifier: re-checks every invariant of a program from the op table, trusting no tracer.

Invariants:
1. every variable is written before it is read, and not read outside the body it was made in
   unless it was made there (a loop may run zero times);
2. every op of the table has the operands and the result type its group's rule gives;
3. index expressions use only dimensions, grid indices, the counters of enclosing loops and numbers
   read from int32 arrays, by the task or the iteration, to which the program stores nothing;
4. loads and stores name a declared array with one range a dimension; stored types match;
5. op ids are 0, 1, 2, ... in program order;
6. tasks reduce in a cluster outside of loops, all of one grid axis whose extent the program states.
"""

from __future__ import annotations

from collections.abc import Sequence

from warploom.errors import InputError
from warploom.tile import typing as rules
from warploom.tile.dtypes import INT8, INT32
from warploom.tile.index import Index
from warploom.tile.ir import Loop, Op, Program, Read, TileType, Var, walk
from warploom.tile.ops import CLUSTER_REDUCE, OPS, TAKEN_OFF


def verify(program: Program) -> None:
    """Raise `InputError` at the user's line for the first invariant that does not hold."""
    symbols = set(program.dims) | {name for name, _ in program.grid}
    _reads(program, program.reads, symbols)
    for name, extent in program.grid:
        _check_symbols(f"grid extent of {name}", extent, set(program.dims))
    ids = [op.id for op in program.ops()]
    if ids != list(range(len(ids))):
        raise InputError(f"program {program.name}: op ids are {ids}, expected 0, 1, 2, ...")
    types: dict[str, TileType] = {var.name: var.type for var in program.scalars}
    _body(program, program.body, types, symbols)


def _reads(program: Program, reads: Sequence[Read], symbols: set[str]) -> None:
    """Check the numbers that a task or an iteration reads, and add their names to `symbols`."""
    stored = {op.array.name: op.where for op in program.ops() if op.array and op.dst is None}
    for read in reads:
        for place in read.at:
            _check_symbols(f"place of {read.name}", place, symbols)
        if read.array != program.array(read.array.name) or read.array.dtype is not INT32:
            raise InputError(f"{read.name} reads {read.array}, which is no int32 parameter")
        if read.array.name in stored:
            raise InputError(
                f"{stored[read.array.name]}: store to {read.array.name}, from which {read.name} is "
                "read as an index: the order of the two is not defined"
            )
        if read.name in symbols:
            raise InputError(f"{read.name} is read twice or hides another index")
        symbols.add(read.name)


def _body(
    program: Program, body: Sequence[Op | Loop], types: dict[str, TileType], symbols: set[str]
) -> None:
    for item in body:
        if isinstance(item, Loop):
            for bound in (item.start, item.stop):
                _check_symbols(f"{item.where}: bound of loop {item.index}", bound, symbols)
            if item.until is not None:
                parts = {n for n in item.until.symbols() if n.endswith((".begin", ".end"))}
                what = f"{item.where}: until of loop {item.index}"
                _check_symbols(what, item.until, symbols | parts)
            if inner := [op for op in walk(item.body) if op.kind in CLUSTER_REDUCE]:
                raise InputError(f"{inner[0].where}: {inner[0].kind} inside of a loop")
            inside = symbols | {item.index}
            _reads(program, item.reads, inside)
            _check_stores(item)
            _body(program, item.body, dict(types), inside)
            continue
        try:
            _op(program, item, types, symbols)
        except InputError as error:
            text = str(error)
            raise InputError(
                text if text.startswith(item.where) else f"{item.where}: op {item.label}: {text}"
            ) from None


def _check_stores(loop: Loop) -> None:
    """Refuse stores at places that the iterations of a loop read."""
    names = {read.name for read in loop.reads}
    for op in walk(loop.body):
        if op.dst is None and names & {n for span in op.spans for n in span.start.symbols()}:
            raise InputError(
                f"{op.where}: {op.kind} at a number that an iteration of loop {loop.index} reads: "
                "two iterations may name one place, and stores have no order; store after the "
                "loop, or give every place a task that reads its number"
            )


def _op(program: Program, op: Op, types: dict[str, TileType], symbols: set[str]) -> None:
    if op.kind not in OPS:
        raise InputError(f"{op.kind!r} is not an op of the table")
    if len(op.srcs) not in OPS[op.kind].arity:
        raise InputError(f"takes {OPS[op.kind].arity} operands, has {len(op.srcs)}")
    for src in op.srcs:
        if src.name not in types:
            raise InputError(f"reads {src.name} before anything wrote it")
        if types[src.name] != src.type:
            raise InputError(f"reads {src.name} as {src.type}, it is {types[src.name]}")
    _ranges(op, symbols)
    if op.start is not None:
        _check_symbols("coordinate", op.start, symbols)
    if op.turn is not None:
        for place in (*op.turn.at, op.turn.number):
            _check_symbols("turn", place, symbols)
    expected = result_type(program, op)
    if (expected is None) != (op.dst is None):
        raise InputError("an op has a destination exactly when it gives a tile")
    if op.dst is None or expected is None:
        return
    if op.dst.type != expected:
        raise InputError(f"writes {op.dst.type}, the operands give {expected}")
    if types.setdefault(op.dst.name, expected) != expected:
        raise InputError(f"writes {expected} to {op.dst.name}, made as {types[op.dst.name]}")


def _ranges(op: Op, symbols: set[str]) -> None:
    for span in op.spans:
        for start in span.starts:
            _check_symbols("array range", start, symbols)
        if span.others and op.kind != "load":
            raise InputError("a store of stacked parts; only loads stack what they take")
        if span.stop is not None:
            _check_symbols("stop of an array range", span.stop, symbols)
            if op.kind == "load":
                raise InputError("a load with a stop; only stores drop elements")


def result_type(program: Program, op: Op) -> TileType | None:
    """The type of what an op writes, from the types of what it reads; None for a store."""
    spec = OPS[op.kind]
    sources = [src.type for src in op.srcs]
    if spec.group in ("unary", "binary", "compare", "select"):
        return rules.elementwise_type(spec, sources)
    if spec.group == "reduce":
        return rules.reduce_type(op.kind, sources[0], op.axis)
    if spec.group == "scan":
        return rules.scan_type(op.kind, sources[0], op.axis)
    if spec.group == "inverse":
        return rules.inverse_type(op.kind, sources[0])
    if spec.group == "matmul":
        return _matmul(op, sources)
    if spec.group == "sink":
        return _store(program, op)
    if spec.group == "cluster":
        return _cluster_reduce(program, op, sources[0])
    return _shape(program, op, sources)


def _matmul(op: Op, sources: list[TileType]) -> TileType:
    if op.value not in ((None, TAKEN_OFF) if len(sources) == 3 else (None,)):
        raise InputError(f"a product by {op.value}: it is added, or taken off a sum")
    product = rules.matmul_type(sources[0], sources[1])
    if len(sources) == 3 and sources[2] != product:
        raise InputError(f"adds a product {product} to {sources[2]}")
    return product


def _cluster_reduce(program: Program, op: Op, source: TileType) -> TileType:
    axis, parts = str(op.start), int(op.value or 0)
    extents = {str(extent) for name, extent in program.grid if name == axis}
    others = {str(other.start) for other in program.ops() if other.kind in CLUSTER_REDUCE}
    if extents != {str(parts)} or others != {axis}:
        raise InputError(
            f"{parts} tasks along {axis} add up tiles: expected one grid axis of that extent in "
            f"all of the program, it has {[f'{name} < {extent}' for name, extent in program.grid]}"
        )
    width = None if op.dst is None else op.dst.type.size(op.axis)
    return rules.reduce_scatter_type(source, op.axis, parts, width)


def _store(program: Program, op: Op) -> None:
    if op.array is None or op.array != program.array(op.array.name):
        raise InputError(f"stores to {op.array}, which is no parameter")
    if op.array.dtype is INT8:
        raise InputError(f"stores to {op.array}: int8 is loaded and cast, nothing stores it")
    target = rules.span_type(op.array, op.spans)
    if op.srcs[0].type != target:
        raise InputError(f"stores {op.srcs[0].type} to a range of {op.array} that is {target}")


def _shape(program: Program, op: Op, sources: list[TileType]) -> TileType:
    written = _written(op)
    if op.kind == "load":
        if op.array is None or op.array != program.array(op.array.name):
            raise InputError(f"loads from {op.array}, which is no parameter")
        return rules.span_type(op.array, op.spans)
    if op.kind == "fill":
        if op.value is None:
            raise InputError("fill has no value")
        return written.type
    if op.kind == "coordinate":
        axes = ((op.axis, written.type.size(op.axis)),) if op.axis else ()
        return TileType(INT32, axes)
    if op.kind == "cast":
        return rules.cast_type(sources[0], written.type.dtype)
    if op.kind == "copy":
        return sources[0]
    if op.kind == "transpose":
        return TileType(sources[0].dtype, tuple(reversed(sources[0].axes)))
    if op.kind == "rename":
        (name,) = [own for own in written.type.names if own not in sources[0].names] or [op.axis]
        return rules.rename_type(sources[0], op.axis, name)
    if op.kind == "quad_order":
        return rules.quad_order_type(sources[0], op.axis)
    if op.kind == "slice":
        start = int(op.value or 0)
        return rules.slice_type(sources[0], op.axis, start, written.type.size(op.axis))
    return rules.gather_type(sources[0], sources[1], op.axis)


def _written(op: Op) -> Var:
    if op.dst is None:
        raise InputError("has no destination")
    return op.dst


def _check_symbols(what: str, expression: Index, known: set[str]) -> None:
    if unknown := expression.symbols() - known:
        raise InputError(
            f"{what} {expression} uses {', '.join(sorted(unknown))}, which has no value there"
        )
