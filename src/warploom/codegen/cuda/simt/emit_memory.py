"""Code for loads and stores: lines of neighbouring elements, with bounds."""

from __future__ import annotations

import re
from collections.abc import Callable

from warploom.codegen.cuda.lines import indent
from warploom.codegen.cuda.names import c_name
from warploom.codegen.cuda.operators import literal
from warploom.codegen.cuda.prelude import memory_type
from warploom.codegen.cuda.simt.places import row
from warploom.codegen.cuda.values import c_index
from warploom.codegen.simt.ahead import Slot
from warploom.codegen.simt.forms import COL, ROW, SCALAR, TILE, Layout
from warploom.codegen.simt.schedule import WIDEST_BYTES
from warploom.errors import InputError
from warploom.tile import Op, TileType


def unroll(name: str, count: int, body: list[str]) -> list[str]:
    """A loop over 0 ... count - 1 that the compiler unrolls."""
    return [
        "#pragma unroll",
        f"for (int {name} = 0; {name} < {count}; ++{name}) {{",
        *indent(body),
        "}",
    ]


class Place:
    """Where a load or store meets its array: base offset, the row's and the column's part.

    `row` and `col` are (dimension, start, size) of the spans the tile's axes come from; a vector
    has only the one of its form.
    """

    def __init__(self, op: Op, form: str) -> None:
        assert op.array is not None
        self.op, self.array = op, op.array
        self.row: tuple[int, str, int] | None = None
        self.col: tuple[int, str, int] | None = None
        fixed: list[str] = []
        self.checks: list[str] = []
        roles = {TILE: ("row", "col"), ROW: ("row",), COL: ("col",), SCALAR: ()}[form]
        spanned = iter(roles)
        for dim, span in enumerate(op.spans):
            start = c_index(span.start)
            if span.size is not None:
                setattr(self, next(spanned), (dim, start, span.size))
                continue
            fixed.append(self.offset(dim, start))
            self.checks.append(self.inside(dim, start))
        self.base = " + ".join([f"{self.array.name}_data", *fixed])

    def length(self, dim: int) -> str:
        """The length of a dimension; for a store with a `stop`, no further than that."""
        whole, stop = c_name(self.array.dims[dim]), self.op.spans[dim].stop
        return whole if stop is None else f"::min({whole}, ::max({c_index(stop)}, 0))"

    def stride(self, dim: int) -> str:
        """Elements from one index of a dimension to the next; empty for the innermost."""
        return "" if dim == len(self.array.dims) - 1 else f"{self.array.name}_stride{dim}"

    def offset(self, dim: int, place: str) -> str:
        """The offset of an index in elements."""
        stride = self.stride(dim)
        return f"static_cast<long long>({place}) * {stride}" if stride else f"({place})"

    def inside(self, dim: int, place: str) -> str:
        """Whether an index is one of the dimension's; negative ones are not."""
        return f"static_cast<unsigned>({place}) < static_cast<unsigned>({self.length(dim)})"


class Access:
    """The code of one load or store: a thread's lines of neighbouring elements.

    A line is as it is in memory (`Line`). Where pointer, pitches, ranges and lengths are multiples
    of it, which is one question for the whole op, every line is one access or none at all;
    elsewhere each line is asked about, and its elements.
    """

    def __init__(self, layout: Layout, op: Op, kind: TileType, form: str) -> None:
        assert op.array is not None
        self.layout, self.op, self.kind, self.form = layout, op, kind, form
        self.place = place = Place(op, form)
        self.vector = layout.schedule.vector if form in (TILE, COL) else 1
        self.element = memory_type(op.array.dtype)
        self.type = f"{self.element}, {self.vector}"
        whole = self.vector * op.array.dtype.bytes % WIDEST_BYTES == 0
        self.last = layout.schedule.evict_last and whole
        self.checks, line, self.step = list(place.checks), place.base, ""
        if place.row is not None:
            dim, start, size = place.row
            inner = row(layout)
            number = f"{start} + {inner}"
            self.checks.append(place.inside(dim, number))
            if layout.ragged_rows(size):
                self.checks.insert(0, f"{inner} < {size}")
            if form == ROW and op.array.fragments:
                number = f"quad_place({number})"
            line += f" + {place.offset(dim, number)}"
        self.line, self.first, self.length = line, "0", "1"
        self.first_column = "0"
        self.fits = ["0"]
        if place.col is not None:
            dim, start, size = place.col
            self.first_column = start
            self.first = f"{start} + (s * {layout.lanes} + thread_col) * {self.vector}"
            self.length = place.length(dim)
            if layout.ragged_cols(size):
                self.length = f"::min({self.length}, {start} + {size})"
            self.step = place.stride(dim)
            strides = map(place.stride, range(len(op.spans)))
            self.fits = [start, self.length, *(one for one in strides if one)]

    @property
    def extents(self) -> tuple[int, ...]:
        """Lines of a thread: (groups of rows, chunks of columns), as far as the form has them."""
        held = self.layout.extents(self.kind, self.form)
        return (*held[:-1], held[-1] // self.vector) if self.form in (TILE, COL) else held

    @property
    def at(self) -> str:
        """The subscripts of a line."""
        return {TILE: "[i][s]", ROW: "[i]", COL: "[s]", SCALAR: ""}[self.form]

    def values(self, name: str) -> str:
        """Where the elements of a line lie in a tile."""
        at = {TILE: f"[i][s * {self.vector}]", ROW: "[i]", COL: f"[s * {self.vector}]", SCALAR: ""}
        return f"&{name}{at[self.form]}"

    def each(self, line: str) -> list[str]:
        """A statement for every line of a thread."""
        extents, body = self.extents, [line]
        if self.form in (TILE, COL):
            body = unroll("s", extents[-1], body)
        return unroll("i", extents[0], body) if self.form in (TILE, ROW) else body

    @staticmethod
    def of_line(lines: list[str]) -> list[str]:
        """The statement for one line, of those for every line of a tile."""
        return [one for line in lines if re.match(r"\w+(<[^;]*>)?\(", one := line.strip())][:1]

    def cases(self, make: Callable[[str], str]) -> list[str]:
        """`make("whole")` for every line where all lines are whole, else `make("any")`."""
        if (self.vector == 1 or self.layout.schedule.aligned) and not self.step:
            return self.each(make("whole"))
        if self.step:
            return self.each(make("any"))
        asked = f"{self.op.array.name}_data" if self.op.array else ""
        return [
            f"if (lines_fit<{self.type}>({asked}, {' | '.join(self.fits)})) {{",
            *indent(self.each(make("whole"))),
            "} else {",
            *indent(self.each(make("any"))),
            "}",
        ]

    def inside(self, *more: str) -> str:
        """The condition under which a line is one of the array's."""
        return " && ".join([*self.checks, *more]) or "true"

    def places(self, how: str, *more: str) -> str:
        """The arguments that say where a line is in memory."""
        step = f", {self.step or 1}" if how == "any" else ""
        return f"{self.line}, {self.first}, {self.length}{step}, {self.inside(*more)}"

    def edge(self) -> str:
        """What a load gives outside of its array."""
        if self.kind.dtype.kind == "bool":
            return "false"
        return literal(float(self.op.value or 0), self.kind.dtype.name)

    def declared(self, name: str) -> str:
        """A declaration of a thread's lines."""
        return f"Line<{self.type}> {name}{''.join(f'[{n}]' for n in self.extents)};"

    def load_lines(
        self, name: str, early: bool = False, once: bool = False, here: bool = False
    ) -> list[str]:
        """Lines `name` from memory; `early`: the loads stay where they are, `once`: nobody else
        reads them, and `here`: a barrier may stand before."""
        if self.place.array.fragments and self.form != ROW:
            return self.each(f"read_fragments({name}{self.at}, {self._fragments()});")
        if early and not self.step and (self.vector == 1 or self.layout.schedule.aligned):
            how = ("true" if once else "false") + ", true" * here
            last = self.last and not here
            return self._early_lines(name, "read_last" if last else f"read_early<{how}>")
        return self.cases(
            lambda how: f"read_{how}({name}{self.at}, {self.places(how)}, {self.edge()});"
        )

    def _early_lines(self, name: str, reading: str) -> list[str]:
        """The same, from the address of a thread's first line of a row on."""
        first, later, declared = "0", "0", f"from_{name}"
        if self.place.col is not None:
            first = f"{self.place.col[1]} + thread_col * {self.vector}"
            later = f"s * {self.layout.lanes * self.vector}"
        read = (
            f"{reading}({name}{self.at}, {declared} + {later}, "
            f"{self.first}, {self.length}, {self.inside()}, {self.edge()});"
        )
        lines = [read]
        if self.form in (TILE, COL):
            lines = unroll("s", self.extents[-1], lines)
        lines = [f"const {self.element}* const {declared} = pinned({self.line} + {first});", *lines]
        if self.form in (TILE, ROW):
            return unroll("i", self.extents[0], lines)
        return ["{", *indent(lines), "}"]

    def _fragments(self) -> str:
        """The arguments that say where a line is in an array in fragments."""
        place = self.place
        if place.row is None or place.col is None or self.vector % 2:
            raise InputError(
                f"{self.op.where}: load of {self.kind} from {self.op.array} by {self.vector}: "
                "expected a tile of its last two dimensions, an even number of elements at a time"
            )
        at = f"{place.row[1]} + {row(self.layout)}"
        return f"{place.base}, {at}, {self.first}, {self.length}, {self.inside()}, {self.edge()}"

    def value_lines(self, name: str, into: str) -> list[str]:
        """The tile `into` from lines."""
        return self.each(f"values_of({self.values(into)}, {name}{self.at});")

    def store_lines(self, name: str) -> list[str]:
        """The tile `name` to memory; what several threads hold is written by one."""
        only = {
            TILE: [],
            ROW: ["thread_col == 0"],
            COL: ["thread_row == 0"] if self.layout.schedule.rows > 1 else [],
            SCALAR: ["thread_col == 0 && thread_row == 0"],
        }[self.form]
        if self.place.array.fragments and self.form != ROW:
            raise InputError(
                f"{self.op.where}: store of {self.kind} to {self.op.array}: only matmul kernels "
                "store tiles in fragments"
            )
        if self.op.kind == "store_add":
            call = f"add_line<{self.vector}>({self.values(name)}, {self.places('any', *only)});"
            return self.each(call)
        return self.cases(
            lambda how: (
                f"write_{how}<{self.vector}>({self.values(name)}, {self.places(how, *only)});"
            )
        )

    # ---- through a ring

    def copy_lines(self, slot: Slot, stage: str) -> list[str]:
        """Copies of a thread's lines to its places in a stage, some iterations before their use."""
        number = self._number(slot)
        if self.place.array.fragments and self.form != ROW:
            raise InputError(
                f"{self.op.where}: load of {self.kind} from {self.op.array} runs ahead, and arrays "
                "in fragments have no code for it; give the schedule one stage"
            )
        return self.cases(
            lambda how: (
                f"copy_{'last' if self.last and how == 'whole' else how}"
                f"<{self.layout.schedule.threads}>({stage} + {slot.at}, {number}, "
                f"{self.places(how)}, {self.edge()}, Line<{self.type}>());"
            )
        )

    def take_lines(self, slot: Slot, stage: str, name: str) -> list[str]:
        """Lines `name` from a stage."""
        number = self._number(slot)
        return self.each(
            f"take_line<{self.layout.schedule.threads}>({name}{self.at}, {stage} + {slot.at}, "
            f"{number});"
        )

    def _number(self, slot: Slot) -> str:
        """The number of a line's first piece in its stage."""
        lines = 1
        for extent in self.extents:
            lines *= extent
        pieces = slot.pieces // lines
        last = self.extents[-1] if self.extents else 1
        number = {TILE: f"(i * {last} + s)", ROW: "i", COL: "s", SCALAR: "0"}
        return f"{number[self.form]} * {pieces}"


class PairAccess(Access):
    """The code of two loads, or stores, of neighbours (`simt.interleaved`): of lines of both."""

    def __init__(self, layout: Layout, op: Op, kind: TileType, form: str) -> None:
        super().__init__(layout, op, kind, form)
        assert op.array is not None
        whole = 2 * self.vector * op.array.dtype.bytes % WIDEST_BYTES == 0
        self.last = layout.schedule.evict_last and whole
        self.type = f"{self.element}, {2 * self.vector}"
        self.first, self.length, self.step = f"2 * ({self.first})", f"2 * ({self.length})", ""

    def pair_lines(self, name: str, here: bool) -> list[str]:
        """Lines `name` of both from memory; `here`: the kernel writes there, too."""
        reading = "read_last" if self.last and not here else "read_early<false>"
        reading = "read_early<false, true>" if here else reading
        where = f"{self.line} + {self.first}, {self.first}, {self.length}"
        return self.each(f"{reading}({name}{self.at}, {where}, {self.inside()}, {self.edge()});")

    def part_lines(self, name: str, into: str, part: int) -> list[str]:
        """The tile `into` from lines of both."""
        return self.each(f"values_of_part<{part}>({self.values(into)}, {name}{self.at});")

    def store_pair_lines(self, first: str, second: str) -> list[str]:
        """Both tiles to memory; what several threads hold is written by one."""
        one_row = self.form == COL and self.layout.schedule.rows > 1
        where = self.places("whole", *(["thread_row == 0"] if one_row else []))
        both = f"{self.values(first)}, {self.values(second)}"
        return self.each(f"write_pairs<{self.vector}>({both}, {where});")
