"""`warploom variants`: the table of variants that a kernel of the library is chosen from."""

from __future__ import annotations

from typing import Annotated

import typer

from warploom.errors import InputError
from warploom.kernels.library import KERNELS
from warploom.tables import as_text

TABLES = {name: one.table for name, one in KERNELS.items() if one.table is not None}


def variants(
    name: Annotated[str, typer.Argument(metavar="NAME", help=" or ".join(TABLES))],
) -> None:
    """Print the tuned variants of a kernel, one a line; "." is an option not set."""
    if name not in TABLES:
        raise InputError(f"{name!r} has no table of variants: expected {' or '.join(TABLES)}")
    table = TABLES[name]
    rows: list[tuple[str, ...]] = [("name", "sizes", "rules", "order", "plan", "allow")]
    for one, variant in table.variants.items():
        point = variant.point
        sizes = " ".join(f"{field}={value}" for field, value in point.settings)
        told = (" ".join(words) for words in (point.rules, (point.order,), point.plan, point.allow))
        rows.append((one, sizes, *told))
    typer.echo(as_text(rows))
