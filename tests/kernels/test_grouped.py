"""Grouped and scaled GEMM against float64: interpreted, under random interleavings, as emitted."""

import re
from functools import partial

import numpy as np
import pytest
from tests.codegen import emulate
from tests.kernels.grouped_case import grouped_case, listed
from tests.lowering import lowered

from warploom import tile as t
from warploom.autosched.schedules import Policy, schedule_for
from warploom.codegen.analysis.kernel_facts import kernel_facts
from warploom.codegen.compile.build import emitted
from warploom.codegen.cuda.emit import emit
from warploom.codegen.ir.block import BlockProgram
from warploom.codegen.ir.plan import LaunchPlan
from warploom.codegen.oracle.simulate import simulate
from warploom.codegen.passes.lower import lower, verified
from warploom.errors import CheckFailed, InputError
from warploom.kernels.gemm.grouped import (
    GroupedConfig,
    grouped,
    grouped_policy,
    work_list,
    work_schedule,
)

BLOCKS = {"dtype": t.E4M3, "scales": "blocks"}
RAGGED = (70, 0, 1, 130)
# name -> (config, rows of the experts, n, k)
CASES = {
    "blocks": (GroupedConfig(**BLOCKS, brought=True), (140,), 200, 300),
    "blocks, wide": (GroupedConfig(**BLOCKS, tile=(64, 256)), (100,), 200, 300),
    "blocks, three parts": (GroupedConfig(**BLOCKS, tile=(128, 192)), (140,), 264, 300),
    "blocks, two in flight": (GroupedConfig(**BLOCKS, products_in_flight=2), (140,), 136, 300),
    "promoted rows": (
        GroupedConfig(dtype=t.E4M3, scales="rows", promote=True), (140,), 136, 300,
    ),
    "blocks, 64 rows": (GroupedConfig(**BLOCKS, tile=(64, 64)), (100,), 136, 256),
    "rows of experts": (GroupedConfig(groups="rows"), RAGGED, 136, 72),
    "rows of experts, kn": (GroupedConfig(groups="rows", b="kn"), RAGGED, 72, 136),
    "rows of experts, blocks": (GroupedConfig(groups="rows", **BLOCKS), RAGGED, 136, 300),
    "rows of experts, two in flight": (
        GroupedConfig(groups="rows", products_in_flight=2, **BLOCKS), RAGGED, 136, 600,
    ),
    "rows of experts, rows": (
        GroupedConfig(groups="rows", dtype=t.E4M3, scales="rows", tile=(64, 128)), RAGGED, 136, 144,
    ),
    "turned": (GroupedConfig(groups="rows", tile=(96, 128), widths=(16, 64, 96)), RAGGED, 136, 72),
    "turned, rows": (
        GroupedConfig(
            groups="rows", dtype=t.E4M3, scales="rows", tile=(64, 64), widths=(8, 64)
        ), RAGGED, 136, 144,
    ),
    "turned, kn": (
        GroupedConfig(groups="rows", b="kn", tile=(64, 64), widths=(24, 64)), RAGGED, 136, 72,
    ),
    "turned, swiglu": (
        GroupedConfig(groups="rows", swiglu=True, tile=(64, 64), widths=(16, 64)), RAGGED, 72, 72,
    ),
    "masked, turned": (
        GroupedConfig(groups="masked", tile=(64, 128), widths=(32, 64)), RAGGED, 136, 72,
    ),
    "masked": (GroupedConfig(groups="masked", tile=(64, 128)), RAGGED, 136, 72),
    "masked, blocks": (GroupedConfig(groups="masked", **BLOCKS, brought=True), RAGGED, 136, 300),
    "swiglu": (GroupedConfig(groups="rows", swiglu=True, tile=(64, 64)), RAGGED, 72, 72),
    "swiglu, blocks": (
        GroupedConfig(groups="rows", swiglu=True, **BLOCKS, tile=(64, 128)), RAGGED, 128, 272,
    ),
}  # fmt: skip
BOUND = 6e-3


def close(got, want):
    """Near float64 where rows count, and nothing written elsewhere."""
    found, own = np.asarray(got["c"], np.float64), ~np.isnan(want)
    gap = np.abs(found - want)[own].max() / np.abs(want[own]).max()
    return gap < BOUND and np.isnan(found[~own]).all()


@pytest.mark.parametrize("name", CASES)
def test_interpreter_and_simulator_give_the_product(name):
    config, counts, n, k = CASES[name]
    arrays, want = grouped_case(config, counts, n, k)
    program, schedule = grouped(config), schedule_for(grouped(config), grouped_policy(config, 2))
    expected = t.interpret(program, arrays)
    assert close(expected, want)
    got = simulate(lower(program, schedule, verified), arrays, seed=1)
    assert np.array_equal(got["c"], expected["c"], equal_nan=True)


def turned():
    """(block program, arrays, result) of a product in three widths."""
    config, counts, n, k = CASES["turned"]
    arrays, want = grouped_case(config, counts, n, k)
    return lowered(grouped(config), grouped_policy(config, 2)), arrays, want


def test_loops_of_several_widths_take_turns_with_one_ring():
    block, *_ = turned()
    (ring,) = block.rings
    rows, weights = ring.buffers
    assert (weights.tile.rows, rows.tile.rows, len(rows.loads)) == (128, 96, 3)
    loops = [loop.index for loop in block.placement.program.loops()]
    copied = [block.copied_bytes(ring, index) for index in loops]
    assert copied == [(128 + width) * 64 * 2 for width in (16, 64, 96)]


def test_a_barrier_that_expects_the_bytes_of_another_loop_is_found(monkeypatch):
    block, arrays, _ = turned()
    highest = (128 + 96) * 64 * 2
    monkeypatch.setattr(BlockProgram, "copied_bytes", lambda self, ring, index: highest)
    with pytest.raises(CheckFailed):
        simulate(block, arrays, seed=1)


def test_what_no_row_needs_is_left_out_by_every_role():
    """The loops of the widths that a task does not have, with the code that zeroes their sums."""
    block, *_ = turned()
    facts = kernel_facts(block)
    loops = [loop.index for loop in block.placement.program.loops()]
    assert [*facts.endings] == loops
    guards = re.findall(r"if \(rows_begin < rows_end\) \{", emit(block).text)
    assert len(guards) == (1 + 2) * len(loops)  # the producer's, the groups' with the store in it
    # A store whose rows do not end, or a second one that takes the sums, needs the loop.
    plain = CASES["blocks"][0]
    assert not kernel_facts(lowered(grouped(plain), grouped_policy(plain, 2))).endings


def test_a_group_without_columns_leaves_its_loop():
    """Of 136 columns the second tile has 8: its other group is not to take the tensor core."""
    block, *_ = turned()
    for loop in block.placement.program.loops():
        until = block.placement.until(loop)
        assert until is not None
        for first, runs in ((0, True), (64, False)):
            known = {"n.begin": first, "n_tile": 1, "n": 136, "k": 72, "tasks_read_1": 0}
            rows = max(until.evaluate(known | {"tasks_read_2": rows}) for rows in (8, 40, 80))
            assert (rows == 2) == runs


def test_a_result_that_two_stores_take_is_made_for_both():
    def both(a, b, c, d, ends):
        (i,) = t.grid(m=t.cdiv(t.size("m"), 64))
        acc = t.zeros(n=64, m=64)
        rows = t.span(i * 64, 64, "m")
        for j in t.loop(t.cdiv(t.size("k"), 64)):
            depth = t.span(j * 64, 64)
            acc += t.load(b, t.span(0, 64, "n"), depth) @ t.load(a, rows, depth)
        kept = t.span(i * 64, 64, "m", stop=t.read(ends, 0))
        t.store(c, kept, t.span(0, 64, "n"), tile=acc.T.cast(t.BF16))
        t.store(d, rows, t.span(0, 64, "n"), tile=acc.T.cast(t.BF16))

    arrays = {"a": "m k", "b": "n k", "c": "m n", "d": "m n"}
    kinds = {name: t.array(t.BF16, dims) for name, dims in arrays.items()}
    program = t.trace(both, {**kinds, "ends": t.array(t.INT32, "one")}, name="both")
    block = lowered(program, Policy("inflight", LaunchPlan(store_panels=1), 1, 2))
    assert not kernel_facts(block).endings
    assert all(one.ends_in_panels == (op == 0) for op, one in enumerate(
        kernel_facts(block).stores.values()
    ))  # fmt: skip


EMITTED = (
    "blocks", "rows of experts", "rows of experts, blocks", "masked, blocks", "swiglu", "turned",
    "turned, rows", "turned, swiglu", "masked, turned",
)  # fmt: skip


def test_emitted_kernels_give_the_product():
    cluster = LaunchPlan(store_panels=1, cluster=("n_tile", 2), supergroup=8)
    plans = dict.fromkeys(EMITTED) | {"rows of experts": cluster, "blocks": cluster}
    chosen = {name: CASES[name][0] for name in EMITTED}
    blocks = [lowered(grouped(c), grouped_policy(c, 2, plans[name])) for name, c in chosen.items()]
    sources = [emit(block) for block in blocks]
    library = emulate.compile_all(sources, None)
    for number, (name, block) in enumerate(zip(EMITTED, blocks, strict=True)):
        config, counts, n, k = CASES[name]
        arrays, want = grouped_case(config, counts, n, k)
        program = block.placement.program
        got = emulate.run(library, number, sources[number], program, arrays, blocks=2)
        assert close(got, want), name


@pytest.mark.parametrize("counts", [RAGGED, (0,) * 8, (1,) * 256, (300,), (0, 64, 128, 0, 65)])
def test_the_list_of_tasks_has_every_row_once(counts):
    want = listed(counts, 64)
    tasks = np.full((len(want) + 70, 3), -1, np.int32)
    program = work_list(len(counts), 64)
    arrays = {"ends": np.cumsum(counts).astype(np.int32), "tasks": tasks}
    found = t.interpret(program, arrays)["tasks"]
    live = found[found[:, 1] < found[:, 2]]
    assert np.array_equal(live, want[want[:, 1] < want[:, 2]])
    assert not found[len(live) :].any()


@pytest.mark.parametrize("counts", [RAGGED, (0,) * 8, (1,) * 256, (300, 65), (127, 0, 128, 129)])
def test_an_even_list_shares_the_rows_of_an_expert_out(counts):
    tasks = np.full((len(listed(counts, 64)), 3), -1, np.int32)
    arrays = {"ends": np.cumsum(counts).astype(np.int32), "tasks": tasks}
    found = t.interpret(work_list(len(counts), 64, even=True), arrays)["tasks"]
    begin = 0
    for expert, count in enumerate(counts):
        own = found[(found[:, 0] == expert) & (found[:, 1] < found[:, 2])]
        assert [*own[:, 1], begin + count][:1] == [begin] or not count
        assert (own[1:, 1] == own[:-1, 2]).all() and own[:, 2].max(initial=begin) == begin + count
        sizes = own[:, 2] - own[:, 1]
        assert len(own) == -(-count // 64) and sizes.max(initial=0) <= 64
        assert (sizes[:-1] % 8 == 0).all() and len(set(sizes[:-1])) <= 1
        begin += count


def test_the_emitted_list_of_tasks():
    cases = [RAGGED, (1, 0, 65) * 30, (150, 0, 129, 8)]
    programs = [work_list(len(counts), 64, even=counts[0] == 150) for counts in cases]
    sources = [
        emitted(program, work_schedule(len(counts)))
        for program, counts in zip(programs, cases, strict=True)
    ]
    library = emulate.compile_all(sources, None)
    for number, counts in enumerate(cases):
        want = listed(counts, 64)
        if counts[0] == 150:
            places = [(0, 0, 56), (0, 56, 112), (0, 112, 150)]
            places += [(2, 150, 198), (2, 198, 246), (2, 246, 279), (3, 279, 287)]
            want[:] = [*places, *[(0, 0, 0)] * (len(want) - len(places))]
        ends = np.cumsum(counts).astype(np.int32)
        arrays = {"ends": ends, "tasks": np.full(want.shape, -1, np.int32)}
        got = emulate.run(library, number, sources[number], programs[number], arrays)
        assert np.array_equal(got["tasks"], want)


def test_vectors_along_rows_come_by_the_producer():
    texts = [
        emitted(grouped(one), schedule_for(grouped(one), grouped_policy(one))).text
        for one in (GroupedConfig(**BLOCKS, brought=True), GroupedConfig(**BLOCKS))
    ]
    assert "scale_a_map" in texts[0] and "scale_a_data" not in texts[0]
    assert "scale_a_map" not in texts[1] and "scale_a_data" in texts[1]


def test_a_vector_that_begins_at_any_row_is_not_copied():
    def body(a, b, scale, c, shift):
        (i,) = t.grid(m=t.cdiv(t.size("m"), 64))
        rows, acc = t.span(i * 64 + shift, 64), t.zeros(m=64, n=64)
        for j in t.loop(t.cdiv(t.size("k"), 64)):
            depth = t.span(j * 64, 64)
            product = t.load(a, rows, depth) @ t.load(b, t.span(0, 64), depth)
            acc[:] = acc + product * t.load(scale, j, rows)
        t.store(c, rows, t.span(0, 64), tile=acc)

    kinds = {"a": t.array(t.BF16, "m k"), "b": t.array(t.BF16, "n k")}
    kinds |= {"scale": t.array(t.FP32, "depth m"), "c": t.array(t.FP32, "m n")}
    for shift in (4, 1):
        program = t.trace(body, kinds, name="shifted", shift=shift)
        made = partial(schedule_for, program, Policy("multistage", groups=1, vectors=True))
        if shift == 4:
            assert made()
            continue
        with pytest.raises(InputError, match="begin at multiples of 16 B"):
            made()


@pytest.mark.parametrize(
    "options",
    [
        {"groups": "each"},
        {"scales": "blocks"},
        {**BLOCKS, "b": "kn"},
        {**BLOCKS, "tile": (64, 96)},
        {**BLOCKS, "groups": "rows", "brought": True},
        {"groups": "rows", "tile": (64, 64), "widths": (32, 24, 64)},
        {"groups": "rows", "tile": (64, 64), "widths": (12, 64)},
        {"groups": "rows", "tile": (64, 64), "widths": (32,)},
        {"groups": "rows", "tile": (64, 96), "widths": (64,)},
        {"groups": "none", "tile": (64, 64), "widths": (64,)},
        {"groups": "rows", "tile": (64, 64), "widths": (64,), "out": t.FP32},
        {**BLOCKS, "groups": "rows", "tile": (64, 64), "widths": (64,)},
    ],
)
def test_what_no_kernel_is_for_is_refused(options):
    with pytest.raises(InputError, match="grouped gemm"):
        GroupedConfig(**options)
