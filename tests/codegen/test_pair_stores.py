"""Sums of fp32 leave registers two at a time where an array's pitches allow it, else one by one."""

import numpy as np
import pytest

from warploom import tile as t
from warploom.autosched.schedules import Policy, schedule_for
from warploom.codegen.cuda.emit import emit
from warploom.codegen.ir.plan import LaunchPlan
from warploom.codegen.passes.lower import lower
from warploom.emulate.kernel import Library
from warploom.tile import interpret

PAIR = "store_pair(c_data"
ARRAYS = {
    "a": t.array(t.BF16, "m k"),
    "b": t.array(t.BF16, "k n"),
    "c": t.array(t.FP32, "m columns"),
}


def _product(a, b, c, first=0):
    (i,) = t.grid(m=t.cdiv(t.size("m"), 64))
    acc = t.zeros(m=64, n=64)
    for j in t.loop(t.cdiv(t.size("k"), 32)):
        rows, depth = t.span(i * 64, 64), t.span(j * 32, 32)
        acc += t.load(a, rows, depth) @ t.load(b, depth, t.span(0, 64))
    t.store(c, t.span(i * 64, 64), t.span(first, 64, "n"), tile=acc)


def _source(first=0):
    program = t.trace(_product, ARRAYS, first=first)
    policy = Policy("inflight", LaunchPlan(store="direct"), groups=1, depth=2)
    return program, emit(lower(program, schedule_for(program, policy)))


# An odd pitch, so that every second row begins between two pairs; columns beyond the array.
@pytest.mark.parametrize("columns", [64, 63, 50])
def test_pairs_and_single_elements_give_the_same(columns):
    program, source = _source()
    assert PAIR in source.text
    random = np.random.default_rng(0)
    given = {
        "a": random.integers(-3, 4, (100, 64)).astype(np.float32),
        "b": random.integers(-3, 4, (64, 64)).astype(np.float32),
        "c": np.full((100, columns), 7.0, np.float32),
    }
    found = Library([source]).run(0, program, given)["c"]
    assert np.array_equal(found, interpret(program, given)["c"])
    assert np.array_equal(found, (given["a"] @ given["b"])[:, :columns])


def test_columns_from_an_odd_one_on_are_single():
    assert PAIR not in _source(first=1)[1].text
