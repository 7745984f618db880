"""Tables: read from TOML, as text, and for notebooks."""

from __future__ import annotations

import html
import tomllib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from warploom.errors import InputError


def read_toml(where: Path) -> dict[str, Any]:
    """The data of a TOML file; raises `InputError` for one that is none."""
    try:
        return tomllib.loads(where.read_text())
    except tomllib.TOMLDecodeError as error:
        raise InputError(f"{where}: not TOML: {error}") from None


def html_table(title: str, rows: Iterable[Sequence[str]]) -> str:
    """Rows of texts as an HTML table, for notebooks."""
    cells = ("".join(f"<td>{html.escape(cell)}</td>" for cell in row) for row in rows)
    lines = "".join(f"<tr>{line}</tr>" for line in cells)
    return f"<table><caption>{html.escape(title)}</caption>{lines}</table>"


def as_text(rows: Sequence[Sequence[str]]) -> str:
    """A table for people: a line a row, in columns; "." where there is nothing."""
    table = [[cell or "." for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    lines = ("  ".join(map(str.ljust, line, widths)).rstrip() for line in table)
    return "\n".join(lines)
