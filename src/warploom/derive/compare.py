"""One formula over many GPUs and element types: bound, binding resource, sizes, as one table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from warploom.derive.derive import Derivation, derive_on
from warploom.derive.formula.graph import Diagram
from warploom.errors import InputError


@dataclass(frozen=True)
class Row:
    """One GPU and element type; `skipped` says why there are no numbers."""

    gpu: str
    dtype: str
    kernels: int = 0
    tiles: str = ""
    microseconds: float = 0.0
    binding: str = ""
    traffic: int = 0
    percent_of_bound: float = 0.0
    bound: str = ""
    millijoules: float = 0.0
    skipped: str = ""

    def to_json(self) -> dict[str, Any]:
        """Plain JSON data."""
        return asdict(self)


def compare_gpus(
    diagram: Diagram, gpus: Sequence[str], dtypes: Sequence[str], lemmas: bool = True
) -> tuple[Row, ...]:
    """A row for each pair. A type a GPU lacks is a row that says so; an unknown GPU raises."""
    rows: list[Row] = []
    for name in gpus:
        for dtype in dtypes:
            try:
                rows.append(row_of(derive_on(diagram, name, dtype, lemmas=lemmas)))
            except InputError as error:
                if "tensor core" not in str(error):
                    raise
                rows.append(Row(name, dtype, skipped=str(error)))
    return tuple(rows)


def row_of(found: Derivation) -> Row:
    """A derivation as a table row."""
    tiles = "; ".join(
        ",".join(f"{symbol}={size}" for symbol, size in kernel.tiles) for kernel in found.kernels
    )
    return Row(
        found.gpu,
        found.dtype,
        len(found.kernels),
        tiles,
        1e6 * found.seconds,
        found.binding,
        found.traffic,
        found.percent_of_bound,
        found.bound.name,
        1e3 * sum(estimate.joules for estimate in found.estimates),
    )


def table(rows: Sequence[Row]) -> str:
    """The rows as aligned text."""
    head = (
        "gpu",
        "dtype",
        "kernels",
        "tiles",
        "time us",
        "binds",
        "values",
        "% of bound",
        "bound",
        "mJ moved",
    )
    body = [
        (r.gpu, r.dtype, r.skipped, "", "", "", "", "", "", "")
        if r.skipped
        else (
            r.gpu,
            r.dtype,
            str(r.kernels),
            r.tiles,
            f"{r.microseconds:.1f}",
            r.binding,
            f"{r.traffic:.4g}",
            f"{r.percent_of_bound:.1f}",
            r.bound,
            f"{r.millijoules:.3g}",
        )
        for r in rows
    ]
    full = [line for line, r in zip(body, rows, strict=True) if not r.skipped]
    widths = [max(len(line[i]) for line in (head, *full)) for i in range(len(head))]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(head, widths, strict=True)).rstrip()
    ]
    for line, r in zip(body, rows, strict=True):
        if r.skipped:
            lines.append(f"{line[0]:{widths[0]}}  {line[1]:{widths[1]}}  {r.skipped}")
        else:
            lines.append("  ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)).rstrip())
    return "\n".join(lines)
