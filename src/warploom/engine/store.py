"""Every point that was tried, kept: one SQLite file, a row a point, never thrown away.

A row is keyed by what the outcome depends on: the program's text, the point, the sizes, the GPU and
the compiler. A second search begins with what the first one found.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from warploom.errors import InputError

VERSION = 1
COLUMNS = "program, point, sizes, gpu, compiler"
TABLE = f"""
create table if not exists points (
    program text, point text, sizes text, gpu text, compiler text,
    predicted real, measured real, refused text, told text, date text default current_timestamp,
    primary key ({COLUMNS})
) without rowid
"""


@dataclass(frozen=True)
class Row:
    """The outcome of a point: microseconds predicted and measured, or why it is of no use.

    `told` is what the model said besides: cycles by loop and what limits the launch.
    """

    predicted: float | None = None
    measured: float | None = None
    refused: str = ""
    told: dict[str, Any] | None = None


class PointStore:
    """The rows of one file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = sqlite3.connect(path, timeout=30.0)
            self._file.execute("pragma journal_mode=wal")
            version = int(self._file.execute("pragma user_version").fetchone()[0])
            if version not in (0, VERSION):
                raise InputError(f"{path}: points of version {version}, expected {VERSION}")
            self._file.execute(TABLE)
            self._file.execute(f"pragma user_version={VERSION}")
            self._file.commit()
        except (sqlite3.DatabaseError, OSError) as error:
            raise InputError(f"{path}: no store of points ({error})") from None

    def find(self, key: tuple[str, ...]) -> Row | None:
        """The row under a key: program, point, sizes, gpu, compiler."""
        where = " and ".join(f"{name} = ?" for name in COLUMNS.split(", "))
        query = f"select predicted, measured, refused, told from points where {where}"
        with closing(self._file.execute(query, key)) as found:
            row = found.fetchone()
        return None if row is None else _row(*row)

    def useful(self, program: str, gpu: str, compiler: str) -> Iterator[tuple[str, str, Row]]:
        """(sizes, point, row) of a program at any sizes, of those that were predicted."""
        query = (
            "select sizes, point, predicted, measured, refused, told from points "
            "where program = ? and gpu = ? and compiler = ? and predicted is not null"
        )
        for sizes, point, *row in self._file.execute(query, (program, gpu, compiler)).fetchall():
            if (found := _row(*row)) is not None:
                yield sizes, point, found

    def put(self, key: tuple[str, ...], row: Row) -> None:
        """Write a row; one that was there under the key gives way."""
        values = (row.predicted, row.measured, row.refused, json.dumps(row.told))
        with self._file:
            self._file.execute(
                f"insert or replace into points ({COLUMNS}, predicted, measured, refused, told) "
                "values (?, ?, ?, ?, ?, ?, ?, ?, ?)",
                (*key, *values),
            )

    def __iter__(self) -> Iterator[tuple[str, ...]]:
        """The keys of all rows."""
        yield from self._file.execute(f"select {COLUMNS} from points")

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def _row(predicted: Any, measured: Any, refused: Any, told: Any) -> Row | None:
    """A row as it was written; None for one that is no row, whose point is tried again."""
    try:
        return Row(predicted, measured, refused, json.loads(told))
    except (TypeError, ValueError):
        return None
