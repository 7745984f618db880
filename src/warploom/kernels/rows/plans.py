"""Plans of row operations, and the table of those that were measured.

`tuned.toml` is what `python -m bench.row_plans record` writes: plans by name, and for operations
and lengths of rows the microseconds of each plan that was timed there. `optimize --record` writes
no such table: it tries what the model puts first, and by the rate of DRAM all plans are alike.

A configuration gets the fastest plan of the row that is nearest to it: the same operation, as many
of its options as may be, and the next length from above, or from below, less than twice away.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from warploom.codegen.ir.plan import LaunchPlan
from warploom.codegen.simt.choose import simt
from warploom.codegen.simt.schedule import SimtSchedule
from warploom.errors import InputError
from warploom.kernels.rows.program import RowConfig, row_program
from warploom.tables import read_toml
from warploom.tile import BF16, Program

TABLE = Path(__file__).with_name("tuned.toml")
MEASURED = BF16.bytes  # of an element of the rows that were timed


@dataclass(frozen=True)
class RowPlan:
    """How the rows of a task lie over threads (`SimtSchedule`), and what its program is.

    rows    of a task
    again   rows are loaded again where they are needed again (`RowConfig`)
    last    what is loaded leaves L2 after what is written
    """

    threads: int
    lanes: int
    cluster: int = 1
    rows: int = 1
    stages: int = 1
    resident: int = 1
    persistent: bool = False
    staged: bool = False
    again: bool = False
    last: bool = False

    def kernel(self, config: RowConfig) -> tuple[Program, SimtSchedule]:
        """The program and the schedule of a configuration; lines are to be aligned."""
        more = frozenset({"again"}) if self.again else frozenset[str]()
        program = row_program(replace(config, rows=self.rows, options=config.options | more))
        launch = LaunchPlan(persistent=self.persistent, resident=self.resident)
        vector = simt(program).vector
        schedule = SimtSchedule(
            "rows", self.threads, self.lanes, vector, launch, self.cluster, self.stages, True,
            self.staged and vector > 1, self.last,
        )  # fmt: skip
        return program, schedule


@dataclass(frozen=True)
class PlanRow:
    """Microseconds of plans for an operation with options, of rows of so many columns."""

    op: str
    options: Sequence[str]
    columns: int
    measured: Mapping[str, float]
    source: str

    def away(self, config: RowConfig) -> tuple[int, float] | None:
        """How far a configuration is; None where this row says nothing of it."""
        line = 16 // config.dtype.bytes
        whole = config.columns % line == 0
        if self.op != config.op or whole != (self.columns * MEASURED % 16 == 0):
            return None
        factor = self.columns * MEASURED / (config.columns * config.dtype.bytes)
        if not 0.5 < factor < 2:
            return None
        options = len(config.options ^ frozenset(self.options))
        return options, factor if factor >= 1 else 2 / factor


def read_plans(path: Path = TABLE) -> tuple[dict[str, RowPlan], list[PlanRow]]:
    """The plans and rows of a table; raises `InputError` for a plan that no row tells of, a row of
    unknown plans and one without its source."""
    data = read_toml(path)
    plans = {name: RowPlan(**one) for name, one in data.get("plans", {}).items()}
    rows = [PlanRow(**row) for row in data.get("rows", [])]
    told = {name for row in rows for name in row.measured}
    if unjustified := plans.keys() - told:
        raise InputError(f"{path}: no row tells why {min(unjustified)} is here")
    if unknown := told - plans.keys():
        raise InputError(f"{path}: a row tells of {min(unknown)}, which is none of its plans")
    for row in rows:
        if not row.measured or not row.source:
            raise InputError(f"{path}: {row.op} {row.columns}: no measurement, or of no source")
    return plans, rows


@cache
def _table() -> tuple[dict[str, RowPlan], list[PlanRow]]:
    return read_plans() if TABLE.exists() else ({}, [])


def plan_of(config: RowConfig) -> RowPlan | None:
    """The plan of the nearest row, or None where there is none near."""
    plans, rows = _table()
    near = [(away, row) for row in rows if (away := row.away(config)) is not None]
    if not near:
        return None
    measured = min(near, key=lambda one: one[0])[1].measured
    return plans[min(measured, key=lambda name: measured[name])]


def as_toml(plans: Mapping[str, RowPlan], rows: Sequence[PlanRow]) -> str:
    """A table as the text of its file."""
    lines = ["# Written by `python -m bench.row_plans record`, not by hand.", "", "[plans]"]
    for name, plan in plans.items():
        told = {key: value for key, value in vars(plan).items() if value != _DEFAULTS.get(key)}
        lines.append(f'"{name}" = {{ {", ".join(f"{k} = {_text(v)}" for k, v in told.items())} }}')
    for row in rows:
        times = ", ".join(f'"{name}" = {time:.2f}' for name, time in row.measured.items())
        options = ", ".join(f'"{one}"' for one in row.options)
        lines += [
            "", "[[rows]]", f'op = "{row.op}"', f"options = [{options}]",
            f"columns = {row.columns}", f"measured = {{ {times} }}", f'source = "{row.source}"',
        ]  # fmt: skip
    return "\n".join(lines) + "\n"


_DEFAULTS: dict[str, Any] = vars(RowPlan(0, 0)) | {"threads": None, "lanes": None}


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
