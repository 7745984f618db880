"""Blocks of a cluster beyond the grid, and tiles that all groups hold: nothing is stored twice."""

from dataclasses import replace

import numpy as np
import pytest
from tests.codegen import emulate

from warploom import tile as t
from warploom.autosched.schedules import Policy, schedule_for
from warploom.codegen.analysis.grid import stores_beyond
from warploom.codegen.cuda.emit import emit
from warploom.codegen.ir.plan import LaunchPlan
from warploom.codegen.oracle.simulate import simulate
from warploom.codegen.passes.lower import lower


def packed(a, b, lengths, c, total):
    """Products of as many blocks as a task reads, and their sums over all tasks."""
    (i,) = t.grid(m=t.cdiv(t.size("m"), 64))
    rows, cols = t.span(i * 64, 64), t.span(0, 32)
    acc = t.zeros(m=64, n=32)
    for k in t.loop(t.read(lengths, i)):
        part = t.span(k * 16, 16)
        acc += t.load(a, rows, part) @ t.load(b, part, cols)
    acc += 1.0
    t.store(c, rows, cols, tile=acc)
    t.store(total, cols, tile=t.sum_along(acc, "m"), add=True)


def kept(q, k, v, o, last):
    """A state that every group keeps, in shared memory too, and adds to the same array."""
    (i,) = t.grid(m=t.cdiv(t.size("m"), 128))
    rows = t.span(i * 128, 128)
    sums, state = t.zeros(d=64, e=16), t.zeros(t.BF16, d=64, e=16)
    out = t.zeros(m=128, e=16)
    for j in t.loop(t.cdiv(t.size("s"), 16)):
        part = t.span(j * 16, 16)
        out += t.load(q, rows, t.span(0, 64)) @ state
        sums += t.load(k, t.span(0, 64), part) @ t.load(v, part, t.span(0, 16))
        state[:] = sums.cast(t.BF16)
    t.store(o, rows, t.span(0, 16), tile=out)
    t.store(last, t.span(0, 64), t.span(0, 16), tile=sums, add=True)


def case(name):
    """(program, plan with a cluster, arrays)."""
    draw = np.random.default_rng(1)
    if name == "packed":
        kinds = {"a": (t.BF16, "m k"), "b": (t.BF16, "k n"), "lengths": (t.INT32, "blocks")}
        kinds |= {"c": (t.FP32, "m n"), "total": (t.FP32, "n")}
        sizes = {"m": 150, "n": 32, "k": 70, "blocks": 3}
        body, groups = packed, 1
    else:
        kinds = {"q": (t.BF16, "m d"), "k": (t.BF16, "d s"), "v": (t.BF16, "s e")}
        kinds |= {"o": (t.FP32, "m e"), "last": (t.FP32, "d e")}
        sizes = {"m": 300, "d": 64, "s": 40, "e": 16}
        body, groups = kept, 2
    program = t.trace(body, {n: t.array(kind, dims) for n, (kind, dims) in kinds.items()})
    arrays = {
        n: draw.integers(-2, 3, [sizes[d] for d in dims.split()]) for n, (_, dims) in kinds.items()
    }
    arrays["lengths"] = np.array([5, 0, 3])
    plan = LaunchPlan(split="m" if groups > 1 else "", cluster=("m_tile", 2))
    return program, schedule_for(program, Policy("multistage", plan, groups=groups)), arrays


CASES = ("packed", "kept")


@pytest.mark.parametrize("name", CASES)
def test_the_simulated_program_agrees(name):
    program, schedule, arrays = case(name)
    want = t.interpret(program, arrays)
    got = simulate(lower(program, schedule), arrays, seed=1)
    assert all(np.array_equal(got[n], want[n]) for n in want)


@pytest.fixture(scope="module")
def emitted(tmp_path_factory):
    """The kernels of both cases, and of the second without what this is about."""
    sources = [emit(lower(*case(name)[:2])) for name in CASES]
    everywhere = sources[1].text.replace("_room = shared", "_room = in_block(shared)")
    twice = sources[1].text.replace("if (m_tile < ((m + 127) / 128) && part == 0)", "if (true)")
    assert sources[1].text not in (everywhere, twice)
    sources += [replace(sources[1], text=everywhere), replace(sources[1], text=twice)]
    return emulate.compile_all(sources, tmp_path_factory.mktemp("edges")), sources


@pytest.mark.parametrize("number", range(2), ids=CASES)
def test_the_emitted_code_agrees(emitted, number):
    library, sources = emitted
    program, _, arrays = case(CASES[number])
    want = t.interpret(program, arrays)
    for seed in range(2):
        got = emulate.run(library, number, sources[number], program, arrays, None, 4, seed)
        assert all(np.array_equal(got[n], want[n]) for n in want)


@pytest.mark.parametrize("number", (2, 3), ids=("one-block's-memory", "stored-by-all"))
def test_what_this_is_about_is_noticed(emitted, number):
    library, sources = emitted
    program, _, arrays = case("kept")
    want = t.interpret(program, arrays)
    for seed in range(4):
        try:
            got = emulate.run(library, number, sources[number], program, arrays, None, 4, seed)
        except emulate.Fault:
            return
        if any(not np.array_equal(got[n], want[n]) for n in want):
            return
    raise AssertionError("not noticed")


def test_stores_that_end_with_the_array_have_no_condition():
    program, schedule, _ = case("packed")
    stores = [op for op in program.ops() if op.kind.startswith("store")]
    found = [stores_beyond(program, schedule.launch, op) for op in stores]
    assert found == [False, True]
    text = emit(lower(program, schedule)).text
    assert text.count("if (m_tile < ((m + 63) / 64)) {") == 1
