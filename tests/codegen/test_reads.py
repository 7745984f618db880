"""Numbers that iterations read beside matmuls: simulated, emitted, faulty, refused."""

from dataclasses import replace

import numpy as np
import pytest
from tests.codegen import emulate
from tests.gpu.cases import distance
from tests.lowering import lowered

from warploom import tile as t
from warploom.autosched.schedules import Policy, schedule_for
from warploom.codegen.cuda.emit import emit
from warploom.codegen.cuda.emit_sm80 import emit_sm80
from warploom.codegen.ir.plan import LaunchPlan
from warploom.codegen.ir.source import CudaSource
from warploom.codegen.oracle.simulate import Simulator, simulate
from warploom.codegen.passes.lower import lower, verified
from warploom.errors import InputError

PAGE, BLOCK = 8, 32
PAGES = 7
ARRAYS = {
    "a": t.array(t.BF16, "m k"),
    "b": t.array(t.BF16, "pages page n"),
    "table": t.array(t.INT32, "m_blocks columns"),
    "lengths": t.array(t.INT32, "m_blocks"),
    "c": t.array(t.FP32, "m n"),
}


def paged(a, b, table, lengths, c, page=PAGE, shift=0):
    """c = a times the pages that the table names for these rows, as many as `lengths` says."""
    (i,) = t.grid(m=t.cdiv(t.size("m"), 64))
    rows, cols = t.span(i * 64, 64), t.span(0, 64)
    length, count = t.read(lengths, i), BLOCK // page
    acc = t.zeros(m=64, n=64)
    for j in t.loop(t.cdiv(length, BLOCK)):
        last = t.cdiv(length, page) - 1
        places = [t.minimum_index(j * count + n + shift, last) for n in range(count)]
        pages = [t.read(table, i, place) for place in places]
        weights = t.load(a, rows, t.span(j * BLOCK, BLOCK))
        acc += weights @ t.load(b, pages, t.span(0, page, "k"), cols)
    t.store(c, rows, cols, tile=acc)


def case(plan=None, depth=2, **options):
    program = t.trace(paged, ARRAYS, **options)
    draw = np.random.default_rng(0)
    lengths = np.array([3 * PAGE, 70, 0], np.int32)
    arrays = {
        "a": draw.integers(-2, 3, (150, 96)).astype(np.float32),
        "b": draw.integers(-2, 3, (PAGES, options.get("page", PAGE), 64)).astype(np.float32),
        "table": draw.integers(0, PAGES, (3, 9)).astype(np.int32),
        "lengths": lengths,
        "c": np.full((150, 64), np.nan, np.float32),
    }
    for i, length in enumerate(lengths):
        arrays["a"][64 * i : 64 * i + 64, length:] = 0  # of pages beyond a length nothing is left
    schedule = schedule_for(
        program, Policy("inflight", plan or LaunchPlan(store="direct"), groups=1, depth=depth)
    )
    return program, schedule, arrays


def want(arrays):
    out = np.zeros_like(arrays["c"])
    for i, length in enumerate(arrays["lengths"]):
        rows = slice(64 * i, 64 * i + 64)
        pages = arrays["b"][arrays["table"][i]].reshape(-1, 64)[:length]
        out[rows] = arrays["a"][rows, :length] @ pages
    return out


PLANS = {
    "plain": LaunchPlan(store="direct"),
    "dynamic": LaunchPlan(tile_scheduler="dynamic"),
    "cluster": LaunchPlan(cluster=("m_tile", 2), store="direct"),
}


# The number of the iteration before, of another part, and none.
FAULTS = (
    ("+ ::min((i_ * 4), ", "+ ::min((i_ * 4 - 4), "),
    ("+ ::min(((i_ * 4) + 3), ", "+ ::min(((i_ * 4) + 2), "),
    (", 0, table_read_2)", ", 0, 0)"),
)


@pytest.mark.parametrize("name", PLANS)
def test_pages_are_multiplied_under_any_interleaving(name):
    program, schedule, arrays = case(PLANS[name])
    expected = t.interpret(program, arrays)["c"]
    assert np.array_equal(expected, want(arrays))
    block = lower(program, schedule, verified)
    for seed in range(2):
        assert np.array_equal(simulate(block, arrays, seed=seed)["c"], expected)


def test_emitted_kernels_read_the_numbers_of_their_iteration(tmp_path):
    blocks = [lower(*case(plan)[:2]) for plan in PLANS.values()]
    sources = [emit(block) for block in blocks]
    arrays = case()[2]
    planted: list[CudaSource] = []
    for text, other in FAULTS:
        broken = sources[0].text.replace(text, other)
        assert broken != sources[0].text, text
        planted.append(replace(sources[0], text=broken))
    library = emulate.compile_all([*sources, *planted], tmp_path)
    for number, source in enumerate(sources):
        program = blocks[number].placement.program
        got = emulate.run(library, number, source, program, arrays, blocks=2)
        assert distance(got["c"], want(arrays)) == 0
    for number, source in enumerate(planted, len(sources)):
        got = emulate.run(library, number, source, blocks[0].placement.program, arrays)
        assert distance(got["c"], want(arrays)) != 0, FAULTS[number - len(sources)]


def test_a_copy_of_another_iteration_is_noticed():
    """The simulator's own fault: what the producer reads one iteration late."""
    program, schedule, arrays = case()
    late = t.trace(paged, ARRAYS, shift=1)
    block = lower(program, schedule)
    other = lowered(late, Policy("inflight", schedule.launch, groups=1, depth=2))
    mixed = replace(block, roles=(other.roles[0], *block.roles[1:]))
    got = Simulator(mixed, arrays).run()["c"]
    assert not np.array_equal(got, want(arrays))


def _mask(a, b, table, lengths, c):
    """What the consumer would have to read."""
    (i,) = t.grid(m=t.cdiv(t.size("m"), 64))
    acc = t.zeros(m=64, n=64)
    for j in t.loop(t.size("columns")):
        page = t.read(table, i, j)
        acc += t.load(a, t.span(i * 64, 64), t.span(j * 32, 32)) @ t.load(
            b, page, t.span(0, 32, "k"), t.span(0, 64)
        )
        acc[:] = t.where(t.coordinate("n", 64) < page, acc, 0.0)
    t.store(c, t.span(i * 64, 64), t.span(0, 64), tile=acc)


def _registers(a, b, table, lengths, c):
    """Stacked parts of a tile that stays in registers."""
    (i,) = t.grid(m=t.cdiv(t.size("m"), 64))
    acc = t.zeros(m=64, n=64)
    for j in t.loop(2):
        acc += t.load(a, t.span(i * 64, 64), t.span(j * 32, 32)) @ t.load(
            b, j, t.span(0, 32, "k"), t.span(0, 64)
        )
    acc += t.load(b, [0, 1], t.span(0, 32, "m"), t.span(0, 64)).cast(t.FP32)
    t.store(c, t.span(i * 64, 64), t.span(0, 64), tile=acc)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (_mask, "at table_read, which an iteration reads: beside matmuls only loads"),
        (_registers, "load of stacked parts into registers"),
    ],
)
def test_what_has_no_code_is_refused_at_its_line(body, message):
    program = t.trace(body, ARRAYS)
    with pytest.raises(InputError, match=f"{__file__}:.*{message}") as caught:
        schedule_for(program, Policy("inflight", LaunchPlan(store="direct"), groups=1, depth=2))
    assert "\n" not in str(caught.value)


def test_parts_of_few_rows_and_other_copies_are_refused():
    program, schedule, _ = case(page=4)
    with pytest.raises(InputError, match=r"load of 8 parts of 4 rows.*multiple of 8 rows"):
        emit(lower(program, schedule))
    program, schedule, _ = case()
    with pytest.raises(InputError, match=r"stacked parts: only TMA \(sm_90a\) has code"):
        emit_sm80(lower(program, schedule))


def test_numbers_are_read_without_tma_too(tmp_path):
    program, schedule, arrays = case(page=BLOCK)
    arrays["b"] = np.random.default_rng(1).integers(-2, 3, (PAGES, BLOCK, 64)).astype(np.float32)
    block = lower(program, schedule, verified)
    source = emit_sm80(block)
    library = emulate.compile_all([source], tmp_path)
    got = emulate.run(library, 0, source, program, arrays)
    assert distance(got["c"], want(arrays)) == 0
