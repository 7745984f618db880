"""Register tiles as C++: how each is declared, and the expression of one element.

Which thread holds which element is `analysis.register_tiles`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from warploom.codegen.analysis.register_tiles import LANES, PACKED, RegisterTiles
from warploom.codegen.cuda.lines import unrolled
from warploom.codegen.cuda.names import c_name
from warploom.codegen.cuda.operators import ANY_OPS, FLOAT_OPS, INT_OPS, literal, rounded
from warploom.codegen.ir.place import Placement
from warploom.errors import InputError
from warploom.tile import BOOL, INT8, Index, Op, Span, TileType, Var

GROUP = 128  # threads of a compute group
PASSED_ON = ("where", "copy", "transpose")


def c_index(value: Index, names: dict[str, str] | None = None) -> str:
    """An index expression in C++; `names` replaces symbols (a counter by its stage's value)."""
    if value.op == "const":
        return str(value.value)
    if value.op == "symbol":
        return (names or {}).get(value.name) or c_name(value.name)
    left, right = (c_index(arg, names) for arg in value.args)
    if value.op in ("min", "max"):
        return f"::{value.op}({left}, {right})"
    if value.op in ("//", "%") and value.args[0].signed:
        return f"floor_{'div' if value.op == '//' else 'mod'}({left}, {right})"
    return f"({left} {'/' if value.op == '//' else value.op} {right})"


def _digit(spans: Sequence[Span], number: int, place: str) -> str:
    """The place in one range of a place on its axis, which several ranges may be together."""
    span = spans[number]
    behind = math.prod(s.size or 1 for s in spans[number + 1 :] if s.axis == span.axis)
    before = any(s.size is not None and s.axis == span.axis for s in spans[:number])
    text = place if behind == 1 else f"({place}) / {behind}"
    return f"({text}) % {span.size}" if before else text


@dataclass(frozen=True)
class At:
    """Which element: `kind` is tile, row, col, lane, scalar, or spread, where `i` is the column;
    the others are C++ index expressions.

    Elements whose `half` of the rows and `column` in the tile are known apart from `i` have the
    elements of vectors in common: `reads` collects what they read of those, by its expression.
    """

    kind: str
    t: str = "t"
    i: str = "i"
    half: str = ""
    column: str = ""
    reads: dict[str, str] | None = None

    @property
    def h(self) -> str:
        """The row half."""
        if self.half:
            return self.half
        return self.i if self.kind == "row" else f"(({self.i}) >> 1 & 1)"

    @property
    def c(self) -> str:
        """The column's position among those the thread holds."""
        return self.i if self.kind == "col" else f"((({self.i}) >> 2) * 2 + (({self.i}) & 1))"


MOVED = ("copy", "transpose", "rename")  # ops that leave elements as they are


class Values(RegisterTiles):
    """Declares and reads the register tiles of a kernel; `keep_masks` and `lower_rows` as in its
    launch plan."""

    def __init__(
        self, placement: Placement, keep_masks: bool = False, lower_rows: bool = False
    ) -> None:
        super().__init__(placement)
        self.keep_masks = keep_masks
        self.halves = 1 if lower_rows else 2  # of 16 rows, 8 each

    def each(self, count: int, together: int = 1) -> list[str]:
        """The head of a loop over a thread's elements of a tile, `together` in a word: those of
        rows that are there."""
        head, line = unrolled("i", count)
        some = f" if (!(i & {2 // together}))" if self.halves == 1 else ""
        return [head, line + some]

    def declare(self, var: Var) -> str:
        """The declaration of a variable."""
        kind = var.type
        if kind.dtype in (BOOL, INT8):
            raise InputError(f"tile {var.name}: {kind} cannot be a register tile on this target")
        word, extents = kind.dtype.kind, self.extents(kind)
        if var.name in self.placement.spread:
            extents = (self.pieces(kind),)
        if self.form(kind) == "tile" and kind.dtype.name in PACKED:
            word = "unsigned"
        if self.is_fragment(var):
            word, extents = "unsigned", (self.blocks(kind), self.columns(kind) // 8)
        # Matmuls read the words of all rows.
        begin = " = {}" if self.halves == 1 and word == "unsigned" else ""
        return f"{word} {c_name(var.name)}{''.join(f'[{n}]' for n in extents)}{begin};"

    def reads_at_once(self, var: Var) -> bool:
        """Whether a thread's rows of a vector in a slot are read as soon as it is there, before the
        join that their reader waits for: one group has none beside it that runs meanwhile."""
        return self.form(var.type) == "row" and self.placement.parts == 1

    def element(self, var: Var, at: At, names: dict[str, str], rounds: bool = True) -> str:
        """The expression of one element of a variable, inlined ops expanded. Of a tile in a slot
        the words of 16 columns are at hand (`emit_staged.from_slots_lines`).

        Without `rounds` an inlined result of a narrow type is left as it was computed, for a reader
        that rounds it (a pack or a store).
        """
        inner = self.placement.fusion.inlined.get(var.name)
        if inner is not None:
            text = self.expression(inner, at, names, rounds)
            return rounded(inner, text) if rounds else text
        form, name = self.form(var.type), c_name(var.name)
        if self.placement.is_shared(var) and len(var.type.axes) == 1:
            axis, array = var.type.names[0], self.placement.shared[var.name][0].array
            if array is not None and array.fragments:
                return self._of_quad(var, at)
            if self.reads_at_once(var):
                return f"{var.name}_own[{at.t}][{at.h}]"
            return f"{var.name}_slot[{self.place(axis, var.type.size(axis), at)}]"
        if self.placement.is_shared(var):
            return f"half_{var.type.dtype}({name}_words[({at.i}) >> 1 & 3], ({at.i}) & 1)"
        if form == "scalar":
            return name
        if form == "row":
            return f"{name}[{at.t}][{at.h}]"
        if var.name in self.placement.spread:
            return f"{var.name}_shared[{self.col(at)}]"
        if form == "col":
            return f"{name}[{at.c}]"
        if form == "lane":
            return f"{name}[{at.i}]"
        if var.type.dtype.name in PACKED:
            return f"half_{var.type.dtype}({name}[{at.t}][({at.i}) >> 1], ({at.i}) & 1)"
        if self.is_fragment(var):
            raise InputError(
                f"tile {var.name}: {var.type} is a matmul's first operand, in the order of its "
                "fragment; cast a second tile for other ops"
            )
        return f"{name}[{at.t}][{at.i}]"

    def expression(self, op: Op, at: At, names: dict[str, str], rounds: bool = True) -> str:
        """The expression of one element of an elementwise op's result.

        Without `rounds`, for a reader that rounds it, what is only chosen or passed on is not
        rounded before either.
        """
        assert op.dst is not None
        kind = op.dst.type
        if op.kind == "fill":
            return literal(float(op.value or 0), kind.dtype.name)
        if op.kind == "coordinate":
            return self.coordinate(op, at, names)
        if op.kind == "load":
            return self.load(op, at, names)
        loose = not rounds and op.kind in PASSED_ON
        parts = [
            self.element(src, at, names, rounds=not (loose and src.type.dtype is kind.dtype))
            for src in op.srcs
        ]
        if op.kind == "cast":
            return self._cast(op, parts[0])
        if op.kind == "sub" and self._narrow and (product := self._product(op.srcs[0])) is not None:
            factors = [self.element(src, at, names) for src in product.srcs]
            return f"__fmaf_rn({', '.join(factors)}, -{parts[1]})"
        table = INT_OPS if op.srcs[-1].type.dtype.kind == "int" else FLOAT_OPS
        template = ANY_OPS.get(op.kind) or table.get(op.kind)
        if template is None:
            raise InputError(f"{op.where}: {op.kind} of {op.srcs[-1].type} has no code on sm_90a")
        return template.format(*parts)

    @cached_property
    def _narrow(self) -> bool:
        """Whether a matmul takes 8-bit weights from registers."""
        return any(
            op.kind == "mma"
            and op.srcs[0].type.dtype.bits == 8
            and self.placement.from_registers(op)
            for op in self.placement.program.ops()
        )

    def _product(self, var: Var) -> Op | None:
        """The inlined product of a tile that a variable is. Where a block is weighed twice the
        compiler would keep these of the first time for the second, a register each, if it saw
        them apart from the sum."""
        op = self.placement.fusion.inlined.get(var.name)
        fits = op is not None and op.kind == "mul" and len(var.type.axes) == 2
        return op if fits and var.type.dtype.name == "fp32" else None

    def _cast(self, op: Op, value: str) -> str:
        assert op.dst is not None
        source, target = op.srcs[0].type.dtype.kind, op.dst.type.dtype.kind
        if op.srcs[0].type.dtype is INT8:
            value, source = f"number({value})", "float"
        if target == "bool":
            return f"({value} != 0)"
        if target == "int":
            return f"int({value})" if source in ("bool", "int") else f"__float2int_rz({value})"
        if source == "bool":
            return f"({value} ? 1.0f : 0.0f)"
        return f"__int2float_rn({value})" if source == "int" else value

    def coordinate(self, op: Op, at: At, names: dict[str, str]) -> str:
        """The position along an axis (or the number) that a coordinate op gives."""
        assert op.start is not None and op.dst is not None
        start = c_index(op.start, names)
        if not op.axis:
            return start
        return f"({start} + {self.place(op.axis, op.dst.type.size(op.axis), at)})"

    def load(self, op: Op, at: At, names: dict[str, str]) -> str:
        """An element read from global memory; outside of the array: the edge value."""
        assert op.dst is not None and op.array is not None
        offset, inside = self.address(op, op.dst.type, at, names)
        dtype = op.array.dtype.name
        pointer = f"{op.array.name}_data + {offset}"
        plain = dtype in ("fp32", "int32")
        read = f"GIVEN({pointer})" if plain else f"read_{dtype}({pointer})"
        edge = literal(float(op.value or 0), dtype if dtype in ("int32", "bool") else "fp32")
        text = f"({inside} ? {read} : {edge})"
        if at.reads is None or len(op.dst.type.axes) != 1:
            return text
        return at.reads.setdefault(text, f"read_{len(at.reads)}")

    def address(self, op: Op, kind: TileType, at: At, names: dict[str, str]) -> tuple[str, str]:
        """(element offset, in-bounds condition) of a direct access to global memory."""
        offset, *checks = self.bounds(op, kind, at, names)
        return offset, " && ".join(one for one in checks if one)

    def bounds(self, op: Op, kind: TileType, at: At, names: dict[str, str]) -> tuple[str, str, str]:
        """The element offset of a direct access to global memory, and when it is in bounds: in all
        dimensions but the last, and in that."""
        assert op.array is not None
        inner = {axis: self.place(axis, kind.size(axis), at) for axis in kind.names}
        terms: list[str] = []
        last = len(op.spans) - 1
        before, along = list[str](), list[str]()
        for number, (span, dim) in enumerate(zip(op.spans, op.array.dims, strict=True)):
            start = c_index(span.start, names)
            place = start
            if span.size is not None:
                place = f"({start} + {_digit(op.spans, number, inner[span.axis])})"
            # As an unsigned number what is negative is past every end.
            below = span.start.signed
            checks = along if number == last else before
            checks.append(
                f"static_cast<unsigned>({place}) < static_cast<unsigned>({c_name(dim)})"
                if below
                else f"{place} < {c_name(dim)}"
            )
            if span.stop is not None:
                checks.append(f"{place} < {c_index(span.stop)}")
            stride = "" if number == last else f" * {op.array.name}_stride{number}"
            terms.append(f"static_cast<long long>({place}){stride}")
        return " + ".join(terms), " && ".join(before), " && ".join(along)

    def word(self, var: Var, t: str, i: str, names: dict[str, str]) -> str:
        """Packed word `i` of a 16-bit tile: two neighbouring columns."""
        inner = self.placement.fusion.inlined.get(var.name)
        if inner is None:
            return f"{c_name(var.name)}[{t}][{i}]"
        low, high = At("tile", t, f"2 * ({i})"), At("tile", t, f"2 * ({i}) + 1")
        product = self.product_word(inner, t, i, names)
        return product or self._packed(var, low, high, names)

    def masked(self, op: Op) -> tuple[Var, Var] | None:
        """(condition, what is left where it holds) of a cast to a packed tile that is 0 elsewhere,
        where the condition is on places alone and masks are kept."""
        inner = self.placement.fusion.inlined.get(op.srcs[0].name) if op.srcs else None
        kind = op.dst.type if op.dst is not None else None
        if not self.keep_masks or kind is None or op.kind != "cast" or inner is None:
            return None
        if inner.kind != "where" or self.form(kind) != "tile" or kind.dtype.name not in PACKED:
            return None
        condition, value, rest = inner.srcs
        nothing = self.placement.fusion.inlined.get(rest.name)
        if nothing is None or nothing.kind != "fill" or float(nothing.value or 0):
            return None
        return (condition, value) if self._of_places(condition) else None

    def _of_places(self, var: Var) -> bool:
        """Whether a variable follows from places in a tile alone."""
        op = self.placement.fusion.inlined.get(var.name)
        if op is None:
            return False
        if op.kind == "coordinate":
            return op.start is not None and not op.start.symbols()
        return op.kind == "fill" or (bool(op.srcs) and all(self._of_places(x) for x in op.srcs))

    def masks(self, op: Op, names: dict[str, str]) -> list[str]:
        """The words of the mask of an op, before the loops."""
        found = self.masked(op)
        if found is None or op.dst is None:
            return []
        blocks, count = self.extents(op.dst.type)
        low, high = (
            self.element(found[0], At("tile", "t", f"(2 * i + {n})"), names) for n in (0, 1)
        )
        name = f"{op.dst.name}_mask"
        return [
            f"unsigned {name}[{blocks}][{count}];",
            *unrolled("t", blocks),
            *unrolled("i", count),
            # Hidden from the compiler, which would make them where they are used.
            f"    {name}[t][i] = at_use(({low} ? 0xffffu : 0u) | ({high} ? 0xffff0000u : 0u));",
        ]

    def product_word(
        self, op: Op, t: str, i: str, names: dict[str, str], read: Mapping[str, str] | None = None
    ) -> str:
        """Packed word `i` of a product of narrow elements: both in one instruction, each rounded
        once. Of tiles in slots the words are in `read`, by variable. "" for other ops."""
        kind = op.dst.type if op.dst is not None else None
        if op.kind != "mul" or kind is None or kind.dtype.name not in PACKED:
            return ""
        if self.form(kind) != "tile" or any(src.type.dtype is not kind.dtype for src in op.srcs):
            return ""
        low, high = At("tile", t, f"2 * ({i})"), At("tile", t, f"2 * ({i}) + 1")
        words = list[str]()
        for src in op.srcs:
            if read and (origin := self._moved(src).name) in read:
                words.append(read[origin])
            elif self.placement.is_shared(src) or self._reads_vectors(src):
                return ""
            elif len(src.type.axes) == 2:
                words.append(self.word(src, t, i, names))
            else:
                words.append(self._packed(src, low, high, names))
        return f"product_{kind.dtype}({', '.join(words)})"

    def _moved(self, var: Var) -> Var:
        """What inlined ops that leave elements as they are take a variable from."""
        inner = self.placement.fusion.inlined.get(var.name)
        moves = inner is not None and inner.kind in MOVED
        return self._moved(inner.srcs[0]) if inner is not None and moves else var

    def words(
        self, var: Var, t: str, first: str, group: str, count: int, names: dict[str, str]
    ) -> tuple[list[str], dict[str, str]]:
        """`count` packed words of a 16-bit tile from word `first`, which begins a group of 8
        columns of that number: both halves of its rows, then of the next. And what they read of
        vectors, by its expression, under names of which each is read once."""
        if not self._reads_vectors(var):
            return [self.word(var, t, f"{first} + {n}", names) for n in range(count)], {}
        found: list[str] = []
        reads: dict[str, str] = {}
        for n in range(count):
            place = f"({group} + {n // 2}) * 8 + thread_col"
            low = At("tile", t, f"2 * ({first} + {n})", f"{n % 2}", f"({place})", reads)
            high = At("tile", t, f"2 * ({first} + {n}) + 1", f"{n % 2}", f"({place} + 1)", reads)
            found.append(self._packed(var, low, high, names))
        return found, reads

    def _packed(self, var: Var, low: At, high: At, names: dict[str, str]) -> str:
        pair = (self.element(var, at, names, rounds=False) for at in (low, high))
        return f"pack_{var.type.dtype}({', '.join(pair)})"

    def _reads_vectors(self, var: Var) -> bool:
        """Whether an element of a tile needs elements of vectors in global memory."""
        op = self.placement.fusion.inlined.get(var.name)
        if op is None or op.dst is None:
            return False
        own = op.kind == "load" and len(op.dst.type.axes) == 1
        return own or any(self._reads_vectors(src) for src in op.srcs)

    def place(self, axis: str, size: int, at: At) -> str:
        """The place of an element along an axis of the whole tile."""
        lies = self.placement.lies(axis)
        if lies == "lanes":
            return f"(int(lane) * {-(-size // LANES)} + ({at.i}))"
        if lies == "rows":
            return self.row(axis, size, at)
        columns = self.part_size(axis, size)
        return f"(part * {columns} + {self.col(at)})" if columns else self.col(at)

    def row(self, axis: str, size: int, at: At) -> str:
        """The row in the whole tile of an element: axis length `size` before the split."""
        first = self.first_row(axis, size)
        return f"({first} + ({at.t}) * 64 + thread_row + ({at.h}) * 8)"

    def pieces(self, kind: TileType) -> int:
        """Elements that a thread of a group holds of a vector that the group shares."""
        return -(-kind.shape[0] // GROUP)

    def col(self, at: At) -> str:
        """The column in the tile of an element."""
        if at.column:
            return at.column
        if at.kind == "spread":
            return at.i
        if at.kind == "col":
            return f"((({at.i}) >> 1) * 8 + thread_col + (({at.i}) & 1))"
        return f"((({at.i}) >> 2) * 8 + thread_col + (({at.i}) & 1))"

    def fragments_of(self, op: Op) -> list[Var]:
        """The vectors in fragments that an op reads in their slots."""
        shared = self.placement.shared
        found = [var for var in self.placement.fusion.sources(op) if len(var.type.axes) == 1]
        arrays = {var: shared[var.name][0].array for var in found if var.name in shared}
        return [var for var, array in arrays.items() if array is not None and array.fragments]

    @staticmethod
    def _of_quad(var: Var, at: At) -> str:
        """An element of a vector in fragments, of which each thread has its columns at hand
        (`emit_ops.elementwise_lines`)."""
        if at.kind != "tile" or at.column:
            raise InputError(f"{var} of an array in fragments: expected elements of a tile")
        i = f"({at.i})"
        return f"{var.name}_own[({i} >> 3) * 4 + ({i} >> 1 & 2 | {i} & 1)]"

    def first_row(self, axis: str, size: int) -> str:
        """The first row of this group's part."""
        rows = self.part_size(axis, size)
        return f"part * {rows}" if rows else "0"
