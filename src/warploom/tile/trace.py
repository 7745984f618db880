"""Tracing: a Python function runs once on proxies and leaves a `Program`.

The tracer is a stack of open bodies; every operation of the language appends an `Op` to the
innermost one. `loop` is a generator that opens a body when it yields its index and closes it when
Python asks for the next one, so the body of a `for` is traced exactly once.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Any

from warploom.errors import InputError
from warploom.tile.blame import a_name, refuse, shown, user_line
from warploom.tile.dtypes import INT32, DType
from warploom.tile.index import Index, IndexLike, as_index, symbol
from warploom.tile.ir import Array, Loop, Op, Program, Read, TileType, Var
from warploom.tile.tidy import tidy
from warploom.tile.verify import verify


@dataclass
class Tracer:
    """The program under construction."""

    name: str
    arrays: dict[str, Array] = field(default_factory=dict[str, Array])
    scalars: list[Var] = field(default_factory=list[Var])
    grid: list[tuple[str, Index]] = field(default_factory=list[tuple[str, Index]])
    reads: list[list[Read]] = field(default_factory=lambda: [[]])  # of the task, of open loops
    stack: list[list[Op | Loop]] = field(default_factory=lambda: [[]])
    names: dict[str, int] = field(default_factory=dict[str, int])
    indices: list[str] = field(default_factory=list[str])  # of the loops that are open
    count: int = 0
    # The depth of the loop nest at which each variable was made: it dies with that body.
    depth_of: dict[str, int] = field(default_factory=dict[str, int])
    ended: set[str] = field(default_factory=set[str])
    open: list[str] = field(default_factory=list[str])  # the lines of the loops that are open
    line: str = ""  # of what is traced now, where it is not the caller's

    def fresh(self, stem: str) -> str:
        """A name not used before: `stem`, `stem_1`, `stem_2`, ..."""
        stem = re.sub(r"_\d+$", "", stem)
        seen = self.names.get(stem, 0)
        self.names[stem] = seen + 1
        return f"{stem}_{seen}" if seen else stem

    def variable(self, stem: str, kind: TileType) -> Var:
        """A new tile variable that lives in the innermost open body."""
        var = Var(self.fresh(stem), kind)
        self.depth_of[var.name] = len(self.stack)
        return var

    def append(self, kind: str, dst: Var | None, srcs: tuple[Var, ...] = (), **rest: Any) -> Op:
        """Add an op at the end of the innermost open body."""
        for src in srcs:
            if src.name in self.ended:
                raise refuse(
                    f"tile {src.name} was made inside a loop that has ended, so it has no value "
                    "here; make it before the loop and assign to it inside"
                )
        op = Op(self.count, kind, dst, srcs, where=self.line or user_line(), **rest)
        self.count += 1
        self.stack[-1].append(op)
        return op

    def finish(self) -> Program:
        """The traced program, tidied and verified."""
        program = Program(
            self.name,
            tuple(self.arrays.values()),
            tuple(self.grid),
            tuple(self.stack[0]),
            tuple(self.scalars),
            tuple(self.reads[0]),
        )
        program = tidy(program)
        verify(program)
        return program


_CURRENT: ContextVar[Tracer | None] = ContextVar("warploom_tracer", default=None)


def current() -> Tracer:
    """The tracer of the running `trace`; raises `InputError` outside of one."""
    tracer = _CURRENT.get()
    if tracer is None:
        raise refuse("tile operations work only inside trace(...)")
    return tracer


def trace(
    function: Callable[..., object], arrays: Mapping[str, Array], *, name: str = "", **static: Any
) -> Program:
    """Run `function` once on the array parameters it names and give the program it described.

    `arrays` maps parameter names to `array(...)` specifications; `static` are ordinary Python
    values (tile sizes, flags) that are decided now. Raises `InputError` at the user's line.
    """
    if not callable(function):
        raise refuse(f"trace of {shown(function)}: expected a function of the arrays")
    if name:
        a_name(name, "program")
    # A lambda has a name that is none.
    tracer = Tracer(name or re.sub(r"\W", "", function.__name__))
    bound: dict[str, Array] = {}
    for key, spec in _arrays_of(arrays).items():
        bound[key] = replace(spec, name=key)
        tracer.arrays[key] = bound[key]
        tracer.names.update(dict.fromkeys(spec.dims, 1))
    with _tracing(tracer):
        function(**bound, **static)
    if len(tracer.stack) != 1:
        raise InputError(
            f"{tracer.open[-1]}: {tracer.name}: a loop was left by break or return; a loop of a "
            "tile program runs all its iterations, shorten its range instead"
        )
    return tracer.finish()


@contextmanager
def _tracing(tracer: Tracer) -> Generator[Tracer]:
    token = _CURRENT.set(tracer)
    try:
        yield tracer
    finally:
        _CURRENT.reset(token)


def retrace(program: Program, body: Callable[[Tracer], object]) -> Program:
    """A program with the arrays, scalars, grid and reads of another, and the body that `body`
    traces: it is called once with the tracer."""
    tracer = Tracer(
        program.name,
        {array.name: array for array in program.arrays},
        list(program.scalars),
        list(program.grid),
        [list(program.reads)],
    )
    taken = [*program.dims, *(var.name for var in program.scalars)]
    taken += [name for name, _ in program.grid] + [read.name for read in program.reads]
    for name in taken:
        tracer.fresh(name)
    with _tracing(tracer):
        body(tracer)
    return tracer.finish()


def _arrays_of(arrays: Mapping[str, Any]) -> Mapping[str, Array]:
    for key, spec in arrays.items():
        a_name(key, "array")
        if not isinstance(spec, Array):
            raise refuse(f"array {key!r} is {shown(spec)}, expected array(BF16, 'm k')")
    return arrays


def array(dtype: DType, dims: str, fragments: bool = False) -> Array:
    """An array parameter: its element type and the names of its dimensions, `"m k"`; `fragments`:
    the order of its elements in memory is that of a matmul's registers (`Array`)."""
    given: Any = dtype
    if not isinstance(given, DType):
        raise refuse(f"array of {shown(given)}: expected an element type, such as BF16")
    text: Any = dims
    names = tuple(text.split()) if isinstance(text, str) else ()
    if not names or len(set(names)) != len(names):
        raise refuse(f"array dimensions {dims!r}: expected distinct names, such as 'm k'")
    for name in names:
        a_name(name, "array dimension")
    if fragments and dtype.name != "fp32":
        raise refuse(f"array of {dtype}[{dims}] in fragments: expected fp32")
    return Array("", dtype, names, fragments)


def size(dim: str) -> Index:
    """The length of the array dimension of that name, known at launch."""
    known = {d for a in current().arrays.values() for d in a.dims}
    if dim not in known:
        raise refuse(f"no array has a dimension {dim!r}; there are {', '.join(sorted(known))}")
    return symbol(dim)


def grid(**extents: IndexLike) -> tuple[Index, ...]:
    """Declare the grid: one index for each named extent, outermost (slowest) first."""
    tracer = current()
    if tracer.grid:
        raise refuse("grid(...) was called before; a program has one grid")
    result: list[Index] = []
    for axis, extent in extents.items():
        name = tracer.fresh(f"{axis}_tile")
        length = as_index(extent)
        if length.op == "const" and length.value < 0:
            raise refuse(f"grid {axis}={length}: expected at least 0")
        tracer.grid.append((name, length))
        result.append(symbol(name))
    return tuple(result)


def read(source: Array, *at: IndexLike) -> Index:
    """One element of an int32 array, as a number for ranges and bounds.

    Read once a task, or within a loop once an iteration: its place then depends on the loop. The
    program may not store to the array.
    """
    tracer = current()
    given: Any = source
    if not isinstance(given, Array):
        raise refuse(f"read of {shown(given)}: expected an array parameter of the program")
    if source.dtype is not INT32 or len(at) != len(source.dims):
        raise refuse(f"read of {source} at {len(at)} positions: expected int32, one a dimension")
    places = tuple(as_index(place) for place in at)
    used = frozenset[str]().union(*(place.symbols() for place in places))
    if tracer.indices and not used & {tracer.indices[-1], *(r.name for r in tracer.reads[-1])}:
        raise refuse(
            f"read of {source.name} inside of loop {tracer.indices[-1]}, on which its place does "
            "not depend: read it before the loop"
        )
    name = tracer.fresh(f"{source.name}_read")
    tracer.reads[-1].append(Read(name, source, places))
    return symbol(name, signed=True)


def part_begin(axis: str) -> Index:
    """In `until` of a loop: the first position along `axis` of the part of a tile that runs."""
    return symbol(f"{axis}.begin")


def part_end(axis: str) -> Index:
    """In `until` of a loop: the position after the last along `axis` of the part that runs."""
    return symbol(f"{axis}.end")


def loop(
    start: IndexLike, stop: IndexLike | None = None, *, until: Index | None = None
) -> Iterator[Index]:
    """`for j in loop(n)` or `for j in loop(start, stop)`: traced once, run any number of times.

    `until`, written with `part_begin` and `part_end`, promises from which iteration on a part of
    the tiles does not change any more (masked out); a warp group that holds that part skips them.
    """
    tracer = current()
    where = user_line()
    first, last = (0, start) if stop is None else (start, stop)
    index = tracer.fresh("ijkpq"[min(len(tracer.stack) - 1, 4)])
    body: list[Op | Loop] = []
    depth = len(tracer.stack)
    tracer.stack.append(body)
    tracer.reads.append([])
    tracer.indices.append(index)
    tracer.open.append(where)
    yield symbol(index, signed=as_index(first).signed)
    if len(tracer.stack) != depth + 1 or tracer.stack[-1] is not body:
        raise InputError(f"{where}: loops closed out of order; use one plain for for each loop")
    tracer.stack.pop()
    reads = tuple(tracer.reads.pop())
    tracer.indices.pop()
    tracer.open.pop()
    tracer.ended |= {name for name, made in tracer.depth_of.items() if made > depth}
    for name in tracer.ended:
        tracer.depth_of.pop(name, None)
    done = Loop(index, as_index(first), as_index(last), tuple(body), where, until, reads)
    tracer.stack[-1].append(done)
