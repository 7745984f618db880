"""Which tiles exist: temporaries of elementwise chains are computed where they are used.

An op is *inlined* when its value is cheap to compute again (a coordinate, a constant, a condition)
or when it ends up in one op of the same shape that works element by element (a store is one). A
load from an array that the program does not write is inlined too, in a loop only where its readers
have its shape. What is left are the ops that a
schedule places; the emitter expands inlined ops into their reader's expression.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property

from warploom.errors import InputError
from warploom.tile import BOOL, Loop, Op, Program, Var
from warploom.tile.dtypes import FP8, INT8
from warploom.tile.ir import Derived
from warploom.tile.ops import NIBBLES, OPS

ELEMENTWISE = ("unary", "binary", "compare", "select")
FREE = ("fill", "coordinate")
LINES = 16  # rows and columns that come from a slot into registers at a time
MOST_USES = 3  # the C++ compiler finds the common subexpressions again


@dataclass(frozen=True)
class Fusion(Derived):
    """The ops that are inlined, by the variable each defines, and the ops that remain."""

    inlined: dict[str, Op]
    kept: frozenset[int]

    @cached_property
    def _known(self) -> dict[int, tuple[Op, tuple[Var, ...]]]:
        """What ops read, by their identity, as for `localiser`."""
        return {}

    def keeping(self, ops: Iterable[Op]) -> Fusion:
        """The same, but these are not inlined."""
        kept = {op.dst.name: op.id for op in ops if op.dst is not None}
        inlined = {name: op for name, op in self.inlined.items() if name not in kept}
        return Fusion(inlined, self.kept | frozenset(kept.values()))

    def sources(self, op: Op) -> tuple[Var, ...]:
        """The variables `op` reads once inlined sources are expanded, each once."""
        if id(op) not in self._known:
            found: dict[str, Var] = {}
            for src in op.srcs:
                inner = self.inlined.get(src.name)
                for var in (src,) if inner is None else self.sources(inner):
                    found[var.name] = var
            self._known[id(op)] = op, tuple(found.values())
        return self._known[id(op)][1]


def fuse(program: Program) -> Fusion:
    """Decide what is inlined (rules above); raises when a condition cannot be."""
    writers: dict[str, list[Op]] = defaultdict(list)
    readers: dict[str, list[Op]] = defaultdict(list)
    body_of: dict[int, int] = {}
    _index(program.body, body_of)
    for op in program.ops():
        if op.dst is not None:
            writers[op.dst.name].append(op)
        for src in op.srcs:
            readers[src.name].append(op)
    inlined: dict[str, Op] = {}
    by_id = {op.id: op for op in program.ops()}
    slots, turned = slot_loads(program), turned_operands(program)
    stored = {op.array for op in program.ops() if OPS[op.kind].group == "sink"}
    # Readers first: whether an op is inlined depends on the op its value ends up in.
    root: dict[int, set[int]] = {}
    for op in reversed(tuple(program.ops())):
        uses = [] if op.dst is None else readers[op.dst.name]
        root[op.id] = {op.id}
        if op.dst is None or len(writers[op.dst.name]) != 1:
            continue
        if op.kind == "load" and (op.array in stored or op.dst.name in slots):
            continue
        if op.kind == "transpose" and op.srcs[0].name in turned.values():
            inlined[op.dst.name] = op
            continue
        roots = set[int]().union(*(root[use.id] for use in uses))
        fits = _inlinable(op, uses, roots, body_of, program.body)
        # What lies in a matmul's slot comes into registers by an op that works on its elements.
        fits &= all(works_on_elements(by_id[number]) for number in roots) or not any(
            src.name in slots for src in op.srcs
        )
        if fits and _stable(op, max(roots, default=op.id), writers):
            inlined[op.dst.name] = op
            root[op.id] = roots
        elif op.dst.type.dtype is BOOL:
            raise InputError(
                f"{op.where}: condition {op.dst.name} is used after its operands changed or by an "
                f"op that needs it in registers ({', '.join(u.kind for u in uses)}); compute it "
                "where it is used"
            )
    dropped = {op.id for op in inlined.values()}
    kept = frozenset(op.id for op in program.ops() if op.id not in dropped)
    return Fusion(inlined, kept)


def turned_operands(program: Program) -> dict[str, str]:
    """The operands that are turned in shared memory, with the loads that they are made of: 8-bit
    matmuls contract the last axis of their second operand, and a tile that is loaded with the other
    one last is transposed and put into the order of quads in the loop of both. Other matmuls may
    read the loaded tile as it is."""
    found: dict[str, str] = {}
    for loop in program.loops():
        ops = [op for op in loop.body if isinstance(op, Op)]
        writer = {op.dst.name: op for op in ops if op.dst is not None}
        uses = Counter(src.name for op in program.ops() for src in op.srcs)
        products = Counter(src.name for op in ops if op.kind == "mma" for src in op.srcs[:2])
        for op in ops:
            chain = [op.srcs[1].name] if op.kind == "mma" else []
            for kind in ("quad_order", "transpose", "load") if chain else ():
                step, name = writer.get(chain[-1]), chain[-1]
                beside = products[name] if kind == "load" else 0
                if step is None or step.kind != kind or uses[name] - beside > 1:
                    break
                chain += [src.name for src in step.srcs]
            else:
                if chain and op.srcs[1].type.dtype.bits == 8:
                    found[chain[0]] = chain[-1]
    return found


def slot_loads(program: Program) -> frozenset[str]:
    """The loads that rings of shared memory hold, by their tiles: what matmuls read or is turned
    for them, and in a loop around a matmul 16-bit tiles that several ops, or one that transposes
    them, read element by element and nothing else does, and 8-bit tiles that only casts to a
    matmul's first operand read, of an element or of its nibbles."""
    readers: dict[str, list[Op]] = defaultdict(list)
    for op in program.ops():
        for src in op.srcs:
            readers[src.name].append(op)
    loads = {op.dst.name for op in program.ops() if op.kind == "load" and op.dst is not None}
    found = {v.name for op in program.ops() if op.kind == "mma" for v in op.srcs[:2]} & loads
    found |= set(turned_operands(program).values())
    for loop in program.loops():
        ops = [op for op in loop.body if isinstance(op, Op)]
        if not any(op.kind == "mma" for op in ops):
            continue
        for var in (op.dst for op in ops if op.kind == "load" and op.dst is not None):
            name, kind, uses = var.name, var.type, readers[var.name]
            fits = len(kind.axes) == 2 and kind.dtype.bytes == 2 and not min(kind.shape) % LINES
            plain = all(
                works_on_elements(use) and _shape_of(use) == set(kind.names) for use in uses
            )
            # One that is read across comes by rows, and is turned on its way into registers.
            asked = len(uses) > 1 or any(use.kind == "transpose" for use in uses)
            if fits and plain and asked and not any(use.kind == "copy" for use in uses):
                found.add(name)
            narrow = len(kind.axes) == 2 and kind.dtype.name in (*FP8, INT8.name)
            if narrow and _widened(uses, readers):
                found.add(name)
    return frozenset(found)


def in_shared(program: Program) -> frozenset[str]:
    """The tiles that lie in shared memory and not in registers: `slot_loads`, and what they are
    turned into."""
    turned = turned_operands(program)
    between = {
        op.dst.name
        for op in program.ops()
        if op.kind == "transpose" and op.dst is not None and op.srcs[0].name in turned.values()
    }
    return slot_loads(program) | between | set(turned)


def _widened(uses: list[Op], readers: Mapping[str, list[Op]]) -> bool:
    """Whether all that reads a tile are casts to 16 bits whose results are first operands."""
    nibbles = [op.dst.name for op in uses if op.kind in NIBBLES and op.dst is not None]
    uses = [op for op in uses if op.kind not in NIBBLES]
    uses += [op for name in nibbles for op in readers[name]]
    return all(
        use.kind == "cast"
        and use.dst is not None
        and use.dst.type.dtype.bits == 16
        and not use.dst.type.shape[1] % LINES
        and all(
            op.kind == "mma" and op.srcs[0] == use.dst and op.srcs[1] != use.dst
            for op in readers[use.dst.name]
        )
        for use in uses
    )


def _index(body: tuple[Op | Loop, ...], body_of: dict[int, int]) -> None:
    for item in body:
        if isinstance(item, Loop):
            _index(item.body, body_of)
        else:
            body_of[item.id] = id(body)


def _inlinable(
    op: Op,
    uses: list[Op],
    roots: set[int],
    body_of: dict[int, int],
    program_body: tuple[Op | Loop, ...],
) -> bool:
    assert op.dst is not None
    if any(not _elementwise_reader(use) for use in uses):
        return False
    if op.kind in FREE:
        return True
    if op.kind == "quad_order":
        return all(use.kind == "cast" and use.dst and use.dst.type.dtype.bits == 8 for use in uses)
    if OPS[op.kind].group not in ELEMENTWISE and op.kind not in ("cast", "load", "transpose"):
        return False
    if any(body_of[number] != body_of[op.id] for number in roots):
        return False
    if op.dst.type.dtype is BOOL:
        return True
    if len(roots) != 1 or len(uses) > MOST_USES:
        return False
    # A load is read where it is used, so its shape does not matter; arithmetic is not repeated. In
    # a loop the schedule says when a vector that a tile needs is read, and one that stands before a
    # loop for an op behind it is on its way while the loop runs.
    if op.kind == "load" and body_of[op.id] == id(program_body):
        loops = (item for item in program_body if isinstance(item, Loop))
        inside = (one.id for loop in loops for one in loop.body if isinstance(one, Op))
        return len(op.dst.type.axes) > 1 or not any(op.id < one < min(roots) for one in inside)
    return all(_shape_of(u) == set(op.dst.type.names) for u in uses)


def _shape_of(op: Op) -> set[str]:
    widest: set[str] = set()
    for var in (*op.srcs, *((op.dst,) if op.dst is not None else ())):
        widest |= set(var.type.names)
    return widest


def works_on_elements(op: Op) -> bool:
    """Whether every element of an op's result comes from the elements in its place."""
    return OPS[op.kind].group in ELEMENTWISE or op.kind in ("cast", "copy", "transpose")


def _elementwise_reader(op: Op) -> bool:
    return works_on_elements(op) or OPS[op.kind].group in ("reduce", "sink")


def _stable(op: Op, last: int, writers: dict[str, list[Op]]) -> bool:
    # Nothing writes what the op reads between its place and the op its value ends up in. What its
    # inlined sources read was checked against the same last op.
    return not any(op.id < writer.id < last for src in op.srcs for writer in writers[src.name])
