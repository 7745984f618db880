"""Corrections left out under a vote: only where the vote says at that time what it says later."""

from dataclasses import replace

import numpy as np
import pytest
from tests.codegen import emulate

from warploom import tile as t
from warploom.autosched.schedules import Policy, schedule_for
from warploom.codegen.analysis.guards import Place
from warploom.codegen.analysis.register_tiles import RegisterTiles
from warploom.codegen.analysis.role_code import Skips, guard_of
from warploom.codegen.cuda.emit import emit
from warploom.codegen.ir.plan import LaunchPlan
from warploom.codegen.passes.lower import lower

PLAN = LaunchPlan(skip_voted=True)


def body_of(form):
    """A program whose sums are halved where a row's maximum rises."""

    def body(a, b, c):
        (i,) = t.grid(m=t.cdiv(t.size("m"), 64))
        rows = t.span(i * 64, 64)
        o, best = t.zeros(m=64, n=32), t.full(-100.0, m=64)
        for k in t.loop(t.cdiv(t.size("k"), 16)):
            part = t.span(k * 16, 16)
            s = t.load(a, rows, part) @ t.load(b, part, t.span(0, 32))
            if form == "early":  # before the maximum that the condition reads is known
                half = o * 0.5 + t.sum_along(o, "n") * 0.125
            new = t.maximum(best, t.max_along(s, "n"))
            right = best >= new
            if form == "late":
                half = o * 0.5 + t.sum_along(o, "n") * 0.125
            if form == "crossing":  # of all rows, for rows of any warp
                of_row = t.min_along(o, "n")
                half = o * 0.5 + t.sum_along(o + of_row, "m") * 0.125
            o[:] = t.where(right, o, half)
            best[:] = new
            o += s
        t.store(c, rows, t.span(0, 32), tile=o)

    arrays = {"a": t.array(t.BF16, "m k"), "b": t.array(t.BF16, "k n"), "c": t.array(t.FP32, "m n")}
    program = t.trace(body, arrays, name=form)
    draw = np.random.default_rng(3)
    values = {"a": draw.integers(-2, 3, (64, 96)), "b": draw.integers(-2, 3, (96, 32))}
    # Most warps see their maxima rise at other times than their neighbours do.
    values["a"][:, 16:] *= (np.arange(64) // 16 == 1)[:, None]
    return (
        program,
        schedule_for(program, Policy("multistage", PLAN, groups=1)),
        {**values, "c": np.zeros((64, 32))},
    )


FORMS = ("early", "late", "crossing")


@pytest.fixture(scope="module")
def kernels(tmp_path_factory):
    made = [body_of(form) for form in FORMS]
    sources = [emit(lower(program, schedule)) for program, schedule, _ in made]
    return emulate.compile_all(sources, tmp_path_factory.mktemp("voted_skip")), made, sources


@pytest.mark.parametrize("number", range(len(FORMS)), ids=FORMS)
def test_what_is_left_out_was_not_needed(kernels, number):
    library, made, sources = kernels
    program, _, arrays = made[number]
    got = emulate.run(library, number, sources[number], program, arrays)
    assert np.array_equal(got["c"], t.interpret(program, arrays)["c"])


def tiles_of(form):
    program, schedule, _ = body_of(form)
    return program, RegisterTiles(lower(program, schedule).placement)


def left_out(form, order=None):
    """Kinds of the ops that stand under the vote."""
    program, tiles = tiles_of(form)
    at, voted = Place(order=order or {}), Skips(voted=True)
    return {
        op.kind
        for op in program.ops()
        if op.kind != "load" and guard_of(tiles, op, voted, at) is not None
    }


def test_votes_come_after_what_they_read():
    assert "reduce_sum" in left_out("late") and "reduce_sum" not in left_out("early")
    assert "reduce_min" not in left_out("crossing") and "where" in left_out("crossing")


def test_a_schedule_that_runs_a_correction_first_has_no_vote_for_it():
    program, _ = tiles_of("late")
    ops = {op.id: (0, op.id) for op in program.ops()}
    correction = next(op for op in program.ops() if op.kind == "reduce_sum")
    assert "reduce_sum" in left_out("late", ops)
    assert "reduce_sum" not in left_out("late", {**ops, correction.id: (0, -1)})
    assert "reduce_sum" not in left_out("late", {**ops, correction.id: (1, correction.id + 100)})


def test_a_vote_on_old_values_is_noticed(tmp_path):
    """The planted fault: the early correction under the vote after all."""
    program, schedule, arrays = body_of("early")
    source = emit(lower(program, schedule))
    vote = source.text[source.text.index("if (!(__all_sync(") :].split("\n")[0]
    label = next(op.label for op in program.ops() if op.kind == "reduce_sum")
    head, tail = source.text.split(f"// Run {label} ", 1)
    first, rest = tail.split("\n", 1)
    end = rest.index("\n    // ") if "\n    // " in rest else rest.index("// Run")
    block = f"{vote}\n{rest[:end]}\n}}"
    text = f"{head}// Run {label} {first}\n{block}{rest[end:]}"
    library = emulate.compile_all([replace(source, text=text)], tmp_path)
    got = emulate.run(library, 0, source, program, arrays)
    assert not np.array_equal(got["c"], t.interpret(program, arrays)["c"])
