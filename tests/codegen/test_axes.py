"""Reductions along rows, running sums, argmax and parts beside a matmul: run on a CPU, compiled."""

import pytest
from tests.codegen import emulate
from tests.codegen.axis_program import axis_case
from tests.gpu.cases import distance
from tests.lowering import lowered

from warploom import tile as t
from warploom.autosched.schedules import Policy, compiled
from warploom.codegen.compile.build import build
from warploom.codegen.cuda.emit_sm80 import emit_sm80
from warploom.codegen.ir.plan import LaunchPlan
from warploom.codegen.oracle.simulate import simulate
from warploom.codegen.passes.lower import lower
from warploom.errors import InputError


def test_the_emitted_code_means_what_the_program_means(tmp_path):
    program, schedule, arrays = axis_case()
    source = emit_sm80(lower(program, schedule))
    got = emulate.run(emulate.compile_all([source], tmp_path), 0, source, program, arrays)
    want = t.interpret(program, arrays)
    for name in want:
        assert distance(got[name], want[name]) < 1e-5, name
    assert want["where"].max() > 20 and want["counts"].any()


def test_the_scheduled_program_means_the_same_under_random_interleavings():
    program, schedule, arrays = axis_case()
    got = simulate(lower(program, schedule), arrays, seed=1)
    want = t.interpret(program, arrays)
    assert all(distance(got[name], want[name]) == 0 for name in want)


def test_it_compiles_for_hopper():
    program, schedule, _ = axis_case()
    built = build(program, schedule)
    assert built.resources.spill_bytes == 0 and "wgmma" in built.source.text


def _refused(op):
    def body(a, b, c):
        acc = t.load(a, t.span(0, 64), t.span(0, 16)) @ t.load(b, t.span(0, 16), t.span(0, 32))
        for _ in t.loop(1):
            acc += t.load(a, t.span(0, 64), t.span(0, 16)) @ t.load(b, t.span(0, 16), t.span(0, 32))
        t.store(c, t.span(0, 64), t.span(0, 32), tile=op(acc, a))

    arrays = {"a": t.array(t.BF16, "m k"), "b": t.array(t.BF16, "k n"), "c": t.array(t.FP32, "m n")}
    program = t.trace(body, arrays)
    return compiled(
        program, Policy("inflight", LaunchPlan(split="", store="direct"), groups=1, depth=2)
    )


REFUSED = {
    "a register tile cannot change its layout": lambda acc, a: (
        acc * t.sum_along(acc.T.cast(t.BF16) @ t.load(a, t.span(0, 64), t.span(0, 16)), "k")
    ),
    "contracts 'k' of 8 elements, expected a multiple of 16": lambda acc, a: (
        acc + t.load(a, t.span(0, 64), t.span(0, 8)) @ t.load(a, t.span(0, 32, "n"), t.span(0, 8))
    ),
    "rows of 16 B, expected a multiple of 32 B": lambda acc, a: (
        acc
        + t.sum_along(
            t.load(a, t.span(0, 16, "k"), t.span(0, 64, "m"))
            @ t.load(a, t.span(0, 16, "k"), t.span(0, 8, "q")),
            "q",
        )
    ),
    r"cumsum of bf16\[m=64, n=32\] along rows: cast to fp32": lambda acc, a: t.cumsum(
        acc.cast(t.BF16), "m"
    ).cast(t.FP32),
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_has_no_code_says_so_at_the_users_line(message):
    with pytest.raises(InputError, match=message) as caught:
        _refused(REFUSED[message])
    assert __file__ in str(caught.value)


def _transposed_operand(x_type, change):
    """A product with x^T, where x is loaded k by m."""

    def body(a, b, c):
        acc = change(t.zeros(m=64, n=32), None)
        for i in t.loop(t.cdiv(t.size("k"), 16)):
            at = t.span(i * 16, 16)
            acc += change(t.load(a, at, t.span(0, 64)), t.load(b, at, t.span(0, 32)))
        t.store(c, t.span(0, 64), t.span(0, 32), tile=change(acc, None))

    arrays = {"a": t.array(x_type, "k m"), "b": t.array(t.BF16, "k n"), "c": t.array(t.FP32, "m n")}
    program = t.trace(body, arrays)
    plan = LaunchPlan(split="", store="direct")
    return lowered(program, Policy("inflight", plan, groups=1, depth=2))


def test_the_remedies_for_a_transposed_register_operand_are_ones():
    with pytest.raises(InputError, match=r"take the loaded tile itself .* or swap"):
        _transposed_operand(t.FP32, lambda x, y: x if y is None else x.cast(t.BF16).T @ y)
    _transposed_operand(t.BF16, lambda x, y: x if y is None else x.T @ y)
    _transposed_operand(t.FP32, lambda x, y: x.T if y is None else y.T @ x.cast(t.BF16))
