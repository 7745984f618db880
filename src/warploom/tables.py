"""Tables of variants: a TOML file with one row a variant, one column a field of a dataclass; and
tables for notebooks."""

from __future__ import annotations

import html
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from types import UnionType
from typing import Any, TypeVar, cast, get_args, get_origin, get_type_hints

from warploom.errors import InputError

Row = TypeVar("Row")


def read_toml(where: Path) -> dict[str, Any]:
    """What a file says; raises `InputError` for one that is no TOML."""
    try:
        return tomllib.loads(where.read_text())
    except tomllib.TOMLDecodeError as error:
        raise InputError(f"{where}: not TOML: {error}") from None


def read_variants(where: Path, rows: Mapping[str, Any], row: type[Row]) -> dict[str, Row]:
    """The variants of a file by name, in the file's order.

    A column that a row does not give has the default of its field. Raises `InputError` for an
    unknown column and a value of another type than the field's.
    """
    kinds = {name: kind for name, kind in get_type_hints(row).items() if name != "name"}
    found: dict[str, Row] = {}
    for name, columns in rows.items():
        values: dict[str, Any] = {"name": name}
        for column, given in columns.items():
            value = tuple(cast("list[Any]", given)) if isinstance(given, list) else given
            if column not in kinds:
                raise InputError(
                    f"{where}: {name}: no column {column!r}: expected one of {', '.join(kinds)}"
                )
            if not _is(value, kinds[column]):
                raise InputError(f"{where}: {name}: {column}={given!r}, expected {kinds[column]}")
            values[column] = value
        try:
            found[name] = row(**values)
        except TypeError as error:
            raise InputError(f"{where}: {name}: {error}") from None
    return found


def html_table(title: str, rows: Iterable[Sequence[str]]) -> str:
    """Rows of texts as an HTML table, for notebooks."""
    cells = ("".join(f"<td>{html.escape(cell)}</td>" for cell in row) for row in rows)
    lines = "".join(f"<tr>{line}</tr>" for line in cells)
    return f"<table><caption>{html.escape(title)}</caption>{lines}</table>"


def _is(value: object, kind: Any) -> bool:
    """Whether a value is of a field's type: a class, a union, or a tuple of those."""
    parts = get_args(kind)
    if isinstance(kind, UnionType):
        return any(_is(value, part) for part in parts)
    if get_origin(kind) is not tuple:
        return type(value) is kind
    if not isinstance(value, tuple):
        return False
    given = cast("tuple[object, ...]", value)
    if parts[-1] is Ellipsis:
        return all(_is(one, parts[0]) for one in given)
    return len(given) == len(parts) and all(map(_is, given, parts))


def as_text(variants: Mapping[str, Any]) -> str:
    """The table for people: a line a variant, a column a field; "." where it has its default."""
    first = next(iter(variants.values()))
    default = {field.name: field.default for field in fields(first)}
    table = [list(default)]
    for variant in variants.values():
        values = asdict(variant).items()
        table.append(["." if value == default[name] else _cell(value) for name, value in values])
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    lines = ("  ".join(map(str.ljust, line, widths)).rstrip() for line in table)
    return "\n".join(lines)


def _cell(value: object) -> str:
    parts = cast("tuple[object, ...]", value) if isinstance(value, tuple) else (value,)
    return "x".join(map(str, parts))
