"""The C++ that names an element of a tile: the row and the column of what a thread holds."""

from __future__ import annotations

from warploom.codegen.simt.forms import COL, Layout


def row(layout: Layout, i: str = "i") -> str:
    """The row of group i."""
    if layout.schedule.rows == 1:
        return f"({i})"
    return f"(({i}) * {layout.schedule.rows} + thread_row)"


def col(layout: Layout, j: str = "j") -> str:
    """The column of held element j."""
    lanes, vector = layout.lanes, layout.schedule.vector
    if vector == 1:
        return f"(({j}) * {lanes} + thread_col)"
    return f"((({j}) / {vector} * {lanes} + thread_col) * {vector} + ({j}) % {vector})"


def peers(layout: Layout, form: str) -> str:
    """Template arguments of the threads that share the columns (COL) or rows (ROW)."""
    lanes, rows = layout.schedule.lanes, layout.schedule.rows
    return f"{lanes}, 1" if form == COL else f"{rows}, {lanes}"


def inside_col(layout: Layout, size: int, name: str = "j") -> str:
    """Whether a tile of so many columns has column `name` of a thread; "" where it has all.

    Of chunks that are whole nothing is asked, and of whole lines the same for all their columns.
    """
    if not layout.ragged_cols(size):
        return ""
    vector = layout.schedule.vector
    place = col(layout, name)
    if size % vector == 0:
        place = f"({name} / {vector} * {layout.lanes} + thread_col) * {vector}"
    whole = size // (layout.lanes * vector) * vector
    return f"({name} < {whole} || {place} < {size})"
