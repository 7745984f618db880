"""How a row operation is laid over the threads, and how many tasks share its sums."""

from __future__ import annotations

from dataclasses import replace

from warploom.codegen.simt.choose import simt
from warploom.codegen.simt.schedule import SimtSchedule
from warploom.kernels.rows.program import RowConfig, row_program
from warploom.tile import Program

THREADS = 128  # of a block, where a row needs fewer: it takes several rows


def row_kernel(config: RowConfig) -> tuple[Program, SimtSchedule, RowConfig]:
    """Program and schedule of an operation, with as many rows a task as fill a small block."""
    program = row_program(config)
    schedule = simt(program)
    rows = max(1, THREADS // schedule.lanes)
    if rows == config.rows:
        return program, schedule, config
    config = replace(config, rows=rows)
    program = row_program(config)
    return program, simt(program), config
