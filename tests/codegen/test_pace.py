"""The walk of a block program that predicts its pace."""

import importlib.util
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from warploom.autosched.named import multistage
from warploom.codegen.ir.block import Pipeline
from warploom.codegen.ir.plan import LaunchPlan
from warploom.codegen.ir.steps import Join, Publish, Release, Run, TurnPass
from warploom.codegen.passes.lower import lower
from warploom.errors import CheckFailed
from warploom.kernels.gemm.program import GemmConfig, gemm
from warploom.perf.extract import extract
from warploom.perf.pace import as_compiled, pace
from warploom.schedule.model.costs import costs

_SPEC = importlib.util.spec_from_file_location("programs", Path(__file__).parent / "programs.py")
assert _SPEC is not None and _SPEC.loader is not None
programs = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(programs)

TABLE = costs("h200")
GEMM = gemm(GemmConfig())
PLAIN = LaunchPlan(split="m")


def walked(block, table=TABLE, iterations=48):
    (loop,) = block.placement.program.loops()
    problem = extract(block.placement, loop, table)
    return pace(block, loop.index, problem.graph, table, iterations)


def test_one_slot_costs_every_latency_in_turn():
    """Two matmuls, drain, release, issue, transfer, arrival: by hand from the table."""
    block = lower(GEMM, multistage(GEMM, 1, PLAIN, 2, in_flight=0))
    kib = block.rings[0].slot_bytes / 1024
    copies = 1 + 4  # boxes 128 bytes wide: a tile of 64 columns, one of 256
    chain = (
        2 * 512  # the tensor core, one group after the other
        + TABLE.value("mma.latency")
        + TABLE.value("mma.issue")
        + TABLE.value("barrier.wait")
        + copies * TABLE.value("load.issue")
        + kib * TABLE.value("load.per_kib_all")
        + TABLE.value("load.latency")
    )
    # The second tile's copies are issued while the first one is under way.
    overlap = 4 * TABLE.value("load.issue")
    assert chain - overlap - 64 <= walked(block) <= chain


def test_deep_rings_leave_the_tensor_core_busy_all_the_time():
    block = lower(GEMM, multistage(GEMM, 4, LaunchPlan(split="m", cluster=("m_tile", 2)), 2))
    assert walked(block) == pytest.approx(1024, abs=1)


@given(depth=st.integers(1, 3), slower=st.floats(1.0, 3.0))
@settings(max_examples=10, deadline=None)
def test_more_slots_and_cheaper_loads_never_slow_a_loop_down(depth, slower):
    one, two = (lower(GEMM, multistage(GEMM, d, PLAIN, 2, 0)) for d in (depth, depth + 1))
    dear = TABLE.override("test", load_latency=slower * TABLE.value("load.latency"))
    assert walked(two) <= walked(one) + 1e-6 <= walked(one, dear) + 2e-6
    assert walked(one) >= 1024


def without(block, kind):
    """A planted fault: every step of one type left out of the steady state."""

    def cut(section):
        if not isinstance(section, Pipeline):
            return section
        return replace(section, steady=tuple(s for s in section.steady if not isinstance(s, kind)))

    roles = tuple(replace(r, sections=tuple(map(cut, r.sections))) for r in block.roles)
    return replace(block, roles=roles)


@pytest.mark.parametrize("kind", [TurnPass, Release, Publish])
def test_a_signal_left_out_halts_the_walk(kind):
    program, schedule, _ = programs.attention_case(64, 64)
    block = lower(program, schedule)
    assert walked(block) > 0
    with pytest.raises(CheckFailed, match="halts"):
        walked(without(block, kind))


def test_ptxas_puts_a_wait_and_its_release_above_the_arithmetic():
    program, schedule, _ = programs.attention_case(64, 64)
    block = lower(program, schedule)
    steady = next(s for s in block.roles[1].sections if isinstance(s, Pipeline)).steady
    moved = as_compiled(steady)
    assert sorted(map(str, moved)) == sorted(map(str, steady))
    last = max(i for i, step in enumerate(moved) if isinstance(step, Join | Release))
    assert not any(isinstance(step, Run) for step in moved[:last])
    kept = [step for step in moved if not isinstance(step, Run)]
    assert kept == [step for step in steady if not isinstance(step, Run)]
