"""The sequential interpreter: the meaning of a tile program, at any size, on a CPU.

Tasks run one after the other, in any order; only tasks of a `reduce_scatter` run side by
side, from one such op to the next.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np

from warploom.errors import InputError
from warploom.tile.dtypes import round_to, storage_of
from warploom.tile.evaluate import Disturbance, Value, compute, read_tile, write_tile
from warploom.tile.ir import Loop, Op, Program, Read, Turn
from warploom.tile.ops import CLUSTER_REDUCE


def interpret(
    program: Program,
    arrays: Mapping[str, Value],
    scalars: Mapping[str, float] | None = None,
    tasks: Iterable[dict[str, int]] | None = None,
    disturb: Disturbance | None = None,
) -> dict[str, Value]:
    """Run `program` and give every array as it is afterwards; the arguments stay unchanged.

    `arrays[name]` has the dimensions the program declares; its values are rounded to the declared
    element type first. Only `tasks` run, points of the grid (None: all). Raises `InputError` for a
    missing array or sizes that do not agree.
    """
    memory = bind(program, arrays)
    symbols = sizes(program, memory)
    values = dict(scalars or {})
    chosen = points(program, symbols) if tasks is None else tasks
    for company in companies(program, chosen):
        states = [scalar_state(program, values) for _ in company]
        known = [task_symbols(program, memory, {**symbols, **point}) for point in company]
        for body, reduction in _until_reductions(program):
            for state, own in zip(states, known, strict=True):
                _run(body, state, memory, own, disturb)
            if reduction is not None and reduction.dst is not None:
                shares = share_sum(reduction, [state[reduction.srcs[0].name] for state in states])
                for state, share in zip(states, shares, strict=True):
                    state[reduction.dst.name] = (
                        disturb.result(reduction, share) if disturb else share
                    )
    return memory


def cluster_reductions(program: Program) -> list[Op]:
    """The ops that add up tiles of a cluster's tasks."""
    return [op for op in program.ops() if op.kind in CLUSTER_REDUCE]


def companies(
    program: Program, tasks: Iterable[dict[str, int]]
) -> Iterator[tuple[dict[str, int], ...]]:
    """The tasks that run side by side, in the order of the axis that they reduce over."""
    found = cluster_reductions(program)
    if not found:
        yield from ((task,) for task in tasks)
        return
    axis = str(found[0].start)
    together: dict[tuple[int, ...], list[dict[str, int]]] = {}
    for task in tasks:
        rest = tuple(at for name, at in task.items() if name != axis)
        together.setdefault(rest, []).append(task)
    for company in together.values():
        yield tuple(sorted(company, key=lambda task: task[axis]))


def share_sum(op: Op, tiles: Sequence[Value]) -> list[Value]:
    """Each task's part of the sum of the tasks' fp32 tiles, added in order; zeros for tasks beyond
    its last part."""
    assert op.dst is not None
    source, axis = op.srcs[0].type, op.srcs[0].type.names.index(op.axis)
    total = tiles[0]
    for tile in tiles[1:]:
        total = total + tile
    shares = np.split(total, source.size(op.axis) // op.dst.type.size(op.axis), axis=axis)
    return shares + [np.zeros_like(shares[0])] * (len(tiles) - len(shares))


def _until_reductions(program: Program) -> Iterator[tuple[Sequence[Op | Loop], Op | None]]:
    start = 0
    for place, item in enumerate(program.body):
        if isinstance(item, Op) and item.kind in CLUSTER_REDUCE:
            yield program.body[start:place], item
            start = place + 1
    yield program.body[start:], None


def task_symbols(
    program: Program, memory: Mapping[str, Value], symbols: Mapping[str, int], real: bool = True
) -> dict[str, int]:
    """`symbols` and the numbers a task reads; raises when a place lies outside of its array.

    What is no `real` task (a block beyond the grid, beside those of its cluster) reads 0 there.
    """
    known = dict(symbols)
    for read in program.reads:
        known[read.name] = _number(read, memory, known, real)
    return known


def iteration_symbols(
    loop: Loop,
    memory: Mapping[str, Value],
    symbols: Mapping[str, int],
    position: int,
    real: bool = True,
) -> dict[str, int]:
    """`symbols`, the counter of a loop and the numbers that its iteration reads."""
    known = {**symbols, loop.index: position}
    for read in loop.reads:
        known[read.name] = _number(read, memory, known, real)
    return known


def _number(read: Read, memory: Mapping[str, Value], symbols: Mapping[str, int], real: bool) -> int:
    place = tuple(index.evaluate(symbols) for index in read.at)
    shape = memory[read.array.name].shape
    if all(0 <= at < extent for at, extent in zip(place, shape, strict=True)):
        return int(memory[read.array.name][place])
    if real:
        raise InputError(f"{read} reads element {list(place)} of shape {list(shape)}")
    return 0


def bind(program: Program, arrays: Mapping[str, Value]) -> dict[str, Value]:
    """Copies of the arrays in the element types the program declares."""
    memory: dict[str, Value] = {}
    for spec in program.arrays:
        if spec.name not in arrays:
            raise InputError(f"program {program.name} needs an array {spec}; it was not given")
        given = np.asarray(arrays[spec.name])
        if given.ndim != len(spec.dims):
            raise InputError(f"array {spec} was given with shape {given.shape}")
        memory[spec.name] = np.array(round_to(spec.dtype, given), dtype=storage_of(spec.dtype))
    return memory


def sizes(program: Program, memory: Mapping[str, Value]) -> dict[str, int]:
    """The value of every dimension name; raises when two arrays disagree."""
    known: dict[str, int] = {}
    for spec in program.arrays:
        for dim, length in zip(spec.dims, memory[spec.name].shape, strict=True):
            if known.setdefault(dim, length) != length:
                raise InputError(
                    f"dimension {dim!r} is {known[dim]} in one array and {length} in {spec.name}"
                )
    return known


def points(program: Program, symbols: Mapping[str, int]) -> Iterator[dict[str, int]]:
    """Every point of the grid, in row-major order."""
    names = [name for name, _ in program.grid]
    ranges = [range(max(0, extent.evaluate(symbols))) for _, extent in program.grid]
    for position in itertools.product(*ranges):
        yield dict(zip(names, position, strict=True))


def scalar_state(program: Program, values: Mapping[str, float]) -> dict[str, Value]:
    """The state a task begins with: the scalar parameters."""
    state: dict[str, Value] = {}
    for var in program.scalars:
        if var.name not in values:
            raise InputError(f"program {program.name} needs the scalar {var.name}")
        given: object = values[var.name]
        if np.ndim(values[var.name]) or not np.issubdtype(np.asarray(given).dtype, np.number):
            raise InputError(f"scalar {var.name}={given!r}: expected a number")
        number = round_to(var.type.dtype, np.asarray(given))
        state[var.name] = np.asarray(number, dtype=storage_of(var.type.dtype))
    return state


def _run(
    body: Sequence[Op | Loop],
    state: dict[str, Value],
    memory: dict[str, Value],
    symbols: dict[str, int],
    disturb: Disturbance | None = None,
) -> None:
    for item in body:
        if isinstance(item, Loop):
            start, stop = item.start.evaluate(symbols), item.stop.evaluate(symbols)
            for position in range(start, stop):
                inside = iteration_symbols(item, memory, symbols, position)
                _run(item.body, state, memory, inside, disturb)
            continue
        step(item, state, memory, symbols, disturb)


def begun(op: Op, turn: Turn, memory: Mapping[str, Value], symbols: Mapping[str, int]) -> Op:
    """The same store, which is counted; or the one that begins the sum, for the first."""
    counts, at = memory[turn.counts.name], tuple(index.evaluate(symbols) for index in turn.at)
    counts[at] += 1
    return replace(op, kind="store") if counts[at] == 1 else op


def step(
    op: Op,
    state: dict[str, Value],
    memory: dict[str, Value],
    symbols: Mapping[str, int],
    disturb: Disturbance | None = None,
) -> None:
    """Run one op: read its sources from `state` or `memory`, write its destination."""
    if op.kind in ("store", "store_add"):
        assert op.array is not None
        put = op if op.turn is None else begun(op, op.turn, memory, symbols)
        write_tile(put, state[op.srcs[0].name], memory[op.array.name], symbols, disturb)
        return
    assert op.dst is not None
    if op.kind == "load":
        assert op.array is not None
        state[op.dst.name] = read_tile(op, memory[op.array.name], symbols)
        return
    sources = [state[src.name] for src in op.srcs]
    if disturb is None:
        state[op.dst.name] = compute(op, sources, symbols)
        return
    state[op.dst.name] = disturb.result(op, compute(op, disturb.operands(op, sources), symbols))
