"""Code for loads and stores: lines of neighbouring elements, with bounds."""

from __future__ import annotations

from warploom.codegen.cuda.lines import indent
from warploom.codegen.cuda.names import c_name
from warploom.codegen.cuda.prelude_simt import memory_type
from warploom.codegen.cuda.simt.places import row
from warploom.codegen.cuda.values import c_index, literal
from warploom.codegen.simt.forms import COL, ROW, SCALAR, TILE, Layout
from warploom.tile import Op, TileType
from warploom.tile.dtypes import dtype


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

    def __init__(self, op: Op, kind: TileType, form: str) -> None:
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


def access_lines(
    layout: Layout, op: Op, kind: TileType, form: str, name: str, write: str = ""
) -> list[str]:
    """A load into `name`, or with `write` ("write" or "add") a store from it."""
    place = Place(op, kind, form)
    call = _Call(layout, place, kind, write)
    groups, vector = layout.extents(kind, form), layout.schedule.vector
    if form == SCALAR:
        only = ["threadIdx.x == 0"] if write else []
        return call.single(f"&{name}", place.base, [*place.checks, *only])
    if form == ROW:
        assert place.row is not None
        line = f"{place.base} + {place.offset(place.row[0], call.place_of(place.row, row(layout)))}"
        only = ["thread_col == 0"] if write else []
        checks = [*place.checks, *call.bounds(place.row, row(layout), layout.ragged_rows), *only]
        return unroll("i", groups[0], call.single(f"&{name}[i]", line, checks))
    assert place.col is not None
    if form == COL:
        only = ["thread_row == 0"] if write and layout.schedule.rows > 1 else []
        inner = call.columns(f"{name}", place.base, [*place.checks, *only])
        return unroll("s", groups[0] // vector, inner)
    assert place.row is not None
    at = call.place_of(place.row, row(layout))
    checks = [*place.checks, *call.bounds(place.row, row(layout), layout.ragged_rows)]
    line = f"{place.base} + {place.offset(place.row[0], at)}"
    inner = call.columns(f"{name}[i]", line, checks)
    return unroll("i", groups[0], unroll("s", groups[1] // vector, inner))


class _Call:
    """One call of read_line, write_line or add_line."""

    def __init__(self, layout: Layout, place: Place, kind: TileType, write: str) -> None:
        self.layout, self.place, self.kind, self.write = layout, place, kind, write

    def place_of(self, span: tuple[int, str, int], inner: str) -> str:
        return f"{span[1]} + {inner}"

    def bounds(self, span: tuple[int, str, int], inner: str, ragged: object) -> list[str]:
        dim, _, size = span
        checks = [self.place.inside(dim, self.place_of(span, inner))]
        if callable(ragged) and ragged(size):
            checks.insert(0, f"{inner} < {size}")
        return checks

    def single(self, at: str, line: str, checks: list[str]) -> list[str]:
        return [self._line(1, at, line, "0", "1", checks)]

    def columns(self, name: str, line: str, checks: list[str]) -> list[str]:
        assert self.place.col is not None
        dim, start, size = self.place.col
        vector, lanes = self.layout.schedule.vector, self.layout.schedule.lanes
        first = f"(s * {lanes} + thread_col) * {vector}"
        length = self.place.length(dim)
        if self.layout.ragged_cols(size):
            length = f"::min({length}, {start} + {size})"
        if not self.place.stride(dim):
            at = f"&{name}[s * {vector}]"
            return [self._line(vector, at, line, f"{start} + {first}", length, checks)]
        # The columns are not neighbours in memory: one element at a time.
        place = f"{start} + {first} + h"
        inside = [*checks, f"{place} >= 0", f"{place} < {length}"]
        where = f"{line} + {self.place.offset(dim, place)}"
        return unroll("h", vector, self.single(f"&{name}[s * {vector} + h]", where, inside))

    def _line(
        self, count: int, at: str, line: str, place: str, length: str, checks: list[str]
    ) -> str:
        inside = " && ".join(checks) or "true"
        if self.write:
            return f"{self.write}_line<{count}>({at}, {line}, {place}, {length}, {inside});"
        value = float(self.place.op.value or 0)
        kind = self.kind.dtype
        edge = "false" if kind.kind == "bool" else literal(value, kind.name)
        return f"read_line<{count}>({at}, {line}, {place}, {length}, {inside}, {edge});"


def pointer_type(name: str, written: bool) -> str:
    """The C type of an array parameter."""
    return f"{'' if written else 'const '}{memory_type(dtype(name))}* __restrict__"
