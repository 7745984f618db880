"""Tests of a warp joined: one for neighbours, one within another where the outer implies it."""

import numpy as np
import pytest
from tests.codegen import emulate

from warploom import tile as t
from warploom.autosched.schedules import Policy, schedule_for
from warploom.codegen.cuda.emit import emit
from warploom.codegen.ir.plan import LaunchPlan
from warploom.codegen.passes.lower import lower


def body_of(form):
    """Corrections under two conditions, of which the second is about what the first one changed,
    holds with the first, or has nothing to do with it."""

    def body(a, b, c):
        (i,) = t.grid(m=t.cdiv(t.size("m"), 64))
        rows = t.span(i * 64, 64)
        o, best, other = t.zeros(m=64, n=32), t.full(-9.0, m=64), t.full(1.0, m=64)
        for k in t.loop(t.cdiv(t.size("k"), 16)):
            part = t.span(k * 16, 16)
            s = t.load(a, rows, part) @ t.load(b, part, t.span(0, 32))
            new = t.max_along(s, "n")
            first = best >= new * 0.5
            o[:] = t.where(first, o, o * 0.5)
            other[:] = t.where(first, other, other + new + 1.0)
            second = (new <= 99.0) if form == "apart" else first & (best >= new)
            if form == "changed":
                second = first & (other >= new)
            s[:] = t.where(second, s, s - new)
            best[:] = t.maximum(best, new)
            o += s
        t.store(c, rows, t.span(0, 32), tile=o + other)

    arrays = {"a": t.array(t.BF16, "m k"), "b": t.array(t.BF16, "k n"), "c": t.array(t.FP32, "m n")}
    program = t.trace(body, arrays, name=form)
    draw = np.random.default_rng(5)
    values = {"a": draw.integers(-2, 3, (64, 160)), "b": draw.integers(-2, 3, (160, 32))}
    # In some warps all rows are calm at times.
    values["a"] = values["a"] * (np.arange(160)[None, :] // 16 % 5 <= np.arange(64)[:, None] // 16)
    plan = LaunchPlan(skip_voted=True)
    schedule = schedule_for(program, Policy("multistage", plan, groups=1))
    return program, schedule, {**values, "c": np.zeros((64, 32))}


FORMS = {"within": [0, 2], "changed": [0, 0], "apart": [0, 0]}  # how deep the tests stand


@pytest.fixture(scope="module")
def kernels(tmp_path_factory):
    made = [body_of(form) for form in FORMS]
    sources = [emit(lower(program, schedule)) for program, schedule, _ in made]
    return emulate.compile_all(sources, tmp_path_factory.mktemp("votes")), made, sources


@pytest.mark.parametrize("number", range(len(FORMS)), ids=FORMS)
def test_joined_tests_keep_what_is_computed(kernels, number):
    library, made, sources = kernels
    program, _, arrays = made[number]
    got = emulate.run(library, number, sources[number], program, arrays)
    assert np.array_equal(got["c"], t.interpret(program, arrays)["c"])


@pytest.mark.parametrize("number", range(len(FORMS)), ids=FORMS)
def test_a_test_stands_within_another_only_where_that_implies_it(kernels, number):
    lines = [line for line in kernels[2][number].text.split("\n") if "if (!(__all_sync" in line]
    found = [line.index("if") for line in lines]
    assert [deep - found[0] for deep in found] == list(FORMS.values())[number]
