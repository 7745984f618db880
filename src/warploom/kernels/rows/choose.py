"""How a row operation is laid over the threads."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from warploom.codegen.compile.build import Built, build
from warploom.codegen.ir.plan import MOST_BLOCKS
from warploom.codegen.simt.choose import MOST_LANES, simt
from warploom.codegen.simt.schedule import SimtSchedule
from warploom.errors import Spills
from warploom.kernels.rows.plans import plan_of
from warploom.kernels.rows.program import (
    OPS,
    RowConfig,
    column_sums,
    rotary,
    row_program,
    scaled,
    width_of,
)
from warploom.tile import DType, Program

THREADS = 64  # of a block, where a row needs fewer: it takes several rows
AT_LEAST = 128  # of one that adds up over rows, or has a piece of a row
ROTATED = 8  # heads of a task of `rotary`, twice as many of pairs
HELD = 8192  # columns whose backward pass holds its rows in registers: others load them again


def row_kernel(config: RowConfig, beyond_l2: bool = True) -> tuple[Program, SimtSchedule, int]:
    """Program and schedule of an operation, and how many rows a task takes: of the plan that was
    measured to be the fastest nearby, or else as many rows as fill a small block. Its arrays are to
    be aligned to lines. Rows are not `beyond_l2` where it holds them: then they have no priority
    there over results, which the next kernel may read."""
    if config.op == "rotary":
        return _rotary(config)
    if (plan := plan_of(config)) is not None:
        plan = replace(plan, last=plan.last and beyond_l2)
        return *plan.kernel(config), plan.rows
    sums = config.op.endswith("norm_backward")
    if sums and config.columns > HELD:
        config = replace(config, options=config.options | {"again"})
    schedule = simt(row_program(config))
    if OPS[config.op].pointwise and schedule.vector > 1:
        most = 1 << (width_of(config) // schedule.vector - 1).bit_length()
        lanes = max(schedule.lanes, min(AT_LEAST, most))
        schedule = replace(schedule, lanes=lanes, threads=max(lanes, schedule.threads))
    threads = AT_LEAST if sums else THREADS
    config = replace(config, rows=max(1, threads // schedule.lanes))
    program = row_program(config)
    if config.rows > 1:
        schedule = simt(program)
    return program, replace(schedule, aligned=True), config.rows


def built_rows(config: RowConfig, arch: str = "sm_90a", beyond_l2: bool = True) -> Built:
    """The kernel of an operation compiled: where registers do not do, with more of them a thread,
    then with more threads. Raises `Spills` when none of that is enough."""
    program, schedule, _ = row_kernel(config, beyond_l2)
    kept: Spills | None = None
    for one in (schedule, *_roomier(schedule)):
        try:
            return build(program, one, arch)
        except Spills as spills:
            kept = kept or spills
    assert kept is not None
    raise kept


def _roomier(schedule: SimtSchedule) -> Iterator[SimtSchedule]:
    """The schedule with more registers for a column, step by step."""
    for resident in range(schedule.launch.resident - 1, 0, -1):
        yield replace(schedule, launch=replace(schedule.launch, resident=resident))
    alone = replace(schedule, launch=replace(schedule.launch, resident=1))
    if schedule.threads == schedule.lanes < MOST_LANES:
        yield replace(alone, threads=2 * schedule.threads, lanes=2 * schedule.lanes)
    elif schedule.lanes == MOST_LANES and schedule.cluster < MOST_BLOCKS:
        yield replace(alone, cluster=2 * schedule.cluster)


def _rotary(config: RowConfig) -> tuple[Program, SimtSchedule, int]:
    pairs = "pairs" in config.options
    config = replace(config, rows=ROTATED * (2 if pairs else 1))
    schedule = simt(program := rotary(config))
    if pairs:  # a line has both of each
        vector = max(1, schedule.vector // 2)
        lanes = min(THREADS, schedule.lanes * schedule.vector // vector)
        schedule = replace(schedule, lanes=lanes, vector=vector)
    return program, replace(schedule, aligned=schedule.vector > 1), config.rows


def sums_kernel(kind: DType) -> tuple[Program, SimtSchedule]:
    """Program and schedule that add up the parts of sums over rows: few rows at a time, many ahead,
    as a task has few of them."""
    return column_sums(kind), SimtSchedule("sums", 128, 8, 4, stages=8)


def scaled_kernel(kind: DType) -> tuple[Program, SimtSchedule]:
    """Program and schedule that multiply an array in place: several lines of a thread under way."""
    program = scaled(kind)
    return program, replace(simt(program), aligned=True)
