"""Contention in graphs, and several schedules to choose from, each against what it keeps."""

import importlib.util
from pathlib import Path

import pytest

from warploom.autosched.schedules import Policy, schedule_for
from warploom.codegen.compile.build import build
from warploom.codegen.ir.place import place
from warploom.codegen.ir.plan import LaunchPlan
from warploom.kernels.attention.program import AttentionConfig, attention
from warploom.perf.contend import busy_cycles, crowded, slowdown, stretch, tensor_cycles
from warploom.perf.extract import extract
from warploom.perf.replay import replay
from warploom.schedule.model.bounds import lower_bounds
from warploom.schedule.model.costs import costs

_SPEC = importlib.util.spec_from_file_location("programs", Path(__file__).parent / "programs.py")
assert _SPEC is not None and _SPEC.loader is not None
programs = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(programs)

TABLE = costs("h200")
PLAN = LaunchPlan(split="rows")


def problem_of(program, table=TABLE, parts=2, **options):
    return extract(place(program, "rows", parts), program.loops()[0], table, **options)


def test_matmuls_share_the_delay_of_the_iterations_arithmetic():
    program = attention(AttentionConfig())
    alone, beside = problem_of(program), problem_of(program, crowded=True)
    slots = sum(n.issue for n in alone.graph.nodes if not n.asynchronous)
    delay = TABLE.value("mma.beside") * slots
    busy = sum(map(tensor_cycles, beside.graph.nodes))
    assert 2048 + delay <= busy <= 2048 + delay + 4  # rounded up, a matmul each
    assert lower_bounds(beside.graph, beside.target).minimum == busy
    load = lower_bounds(alone.graph, alone.target).load
    crowd = lower_bounds(beside.graph, beside.target).load
    assert {k: v for k, v in load.items() if k != "TC"} == {
        k: v for k, v in crowd.items() if k != "TC"
    }


def test_what_leaves_a_matmul_moves_with_its_end():
    program = attention(AttentionConfig())
    alone, beside = problem_of(program), problem_of(program, crowded=True)
    for node in beside.graph.nodes:
        before = alone.graph.by_id[node.id]
        if node.variable_latency:
            assert node == before
        elif node.asynchronous:
            more = tensor_cycles(node) - tensor_cycles(before)
            assert more > 0 and node.latency == before.latency + more
        else:
            factor = slowdown(node, TABLE)
            assert factor in (TABLE.value("lanes.beside"), TABLE.value("mufu.beside"))
            slower = node.latency - before.latency
            assert slower == -(-busy_cycles(before) * (factor - 1) // 1)
    delays = {(e.src, e.dst, e.distance): e.delay for e in alone.graph.edges}
    for edge in beside.graph.edges:
        if beside.graph.by_id[edge.src].asynchronous and edge.kind == "data":
            assert edge.delay > delays[edge.src, edge.dst, edge.distance]


def test_a_family_without_these_costs_has_no_contention():
    a100 = costs("a100")
    nodes = problem_of(attention(AttentionConfig())).graph.nodes
    assert stretch(nodes, a100) == 1.0
    assert crowded(nodes, a100) == list(nodes)


@pytest.mark.parametrize(("tile", "parts"), [((128, 128), 2), ((64, 64), 1)])
def test_no_replay_is_faster_than_the_tensor_core_beside_arithmetic(tile, parts):
    """The bound of `contend`; 2 % for what the partition's delays are below the table's."""
    program = attention(AttentionConfig(tile=tile))
    beside = problem_of(program, parts=parts, crowded=True)
    bound = sum(map(tensor_cycles, beside.graph.nodes)) if parts > 1 else 512
    schedule = schedule_for(program, Policy("overlapped", PLAN))
    (found,) = replay(program, schedule, build(program, schedule).cubin).loops.values()
    assert found.cycles >= 0.98 * bound


def small():
    program, _, arrays = programs.attention_case(130, 200)
    return program, arrays
