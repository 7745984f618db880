"""Gathers, scans and argmax along rows, odd parts beside a matmul: run on a CPU, compiled."""

from dataclasses import replace

import pytest
from tests.codegen import emulate
from tests.codegen.exchange_program import exchange_case
from tests.gpu.cases import distance
from tests.lowering import lowered

from warploom import tile as t
from warploom.autosched.schedules import Policy, schedule_for
from warploom.codegen.compile.build import build
from warploom.codegen.cuda.emit import emit
from warploom.codegen.cuda.emit_sm80 import emit_sm80
from warploom.codegen.ir.plan import LaunchPlan
from warploom.codegen.oracle.simulate import simulate
from warploom.codegen.passes.lower import lower
from warploom.errors import InputError


@pytest.fixture(scope="module")
def emitted(tmp_path_factory):
    """Both cases, and the first with its meetings left out (a planted fault), as one library."""
    cases = [exchange_case(1), exchange_case(2)]
    sources = [emit_sm80(lower(program, schedule)) for program, schedule, _ in cases]
    text = sources[0].text.replace("named_sync<1, 128>();", "")
    sources.append(replace(sources[0], text=text))
    library = emulate.compile_all(sources, tmp_path_factory.mktemp("exchange"))
    return library, [*cases, cases[0]], sources


def _gaps(emitted, number):
    library, cases, sources = emitted
    program, _, arrays = cases[number]
    got = emulate.run(library, number, sources[number], program, arrays)
    return {name: distance(got[name], v) for name, v in t.interpret(program, arrays).items()}


@pytest.mark.parametrize("number", [0, 1], ids=["one-group", "two-groups"])
def test_the_emitted_code_means_what_the_program_means(emitted, number):
    assert max(_gaps(emitted, number).values()) < 1e-6


def test_a_meeting_left_out_is_found(emitted):
    with pytest.raises(emulate.Fault, match=r"(unwritten|race): .*a plain access"):
        _gaps(emitted, 2)


def test_the_scheduled_program_agrees_bit_for_bit():
    for groups in (1, 2):
        program, schedule, arrays = exchange_case(groups)
        got, want = simulate(lower(program, schedule), arrays, seed=3), t.interpret(program, arrays)
        assert all(distance(got[name], want[name]) == 0 for name in want)


def test_it_compiles_for_hopper_without_spills():
    program, schedule, _ = exchange_case(2)
    built = build(program, schedule)
    assert built.resources.spill_bytes == 0 and built.resources.stack_bytes == 0
    assert "wgmma" in built.source.text


def test_exchanges_are_counted_in_shared_memory():
    """Rings are as deep as fits beside the exchange, which is no static array."""
    program, schedule, _ = exchange_case(1)
    with_exchange = emit(lower(program, schedule)).shared_bytes
    assert with_exchange - 128 * 33 * 4 >= 2 * 2 * (128 * 16 + 16 * 32)
    deepest = schedule_for(program, Policy("lcsf"))
    assert len(deepest.compute) == 1, "its rows cannot be shared out"
    text = emit(lower(program, deepest)).text
    assert "__shared__ float" not in text and "__shared__ int" not in text


def _small(op):
    def body(a, b, c):
        acc = t.zeros(m=128, n=32)
        for _ in t.loop(1):
            acc += t.load(a, t.span(0, 128), t.span(0, 16)) @ t.load(
                b, t.span(0, 16), t.span(0, 32)
            )
        t.store(c, t.span(0, 128), t.span(0, 32), tile=op(acc))

    arrays = {"a": t.array(t.BF16, "m k"), "b": t.array(t.BF16, "k n"), "c": t.array(t.FP32, "m n")}
    program = t.trace(body, arrays)
    plan = LaunchPlan(split="m", store="direct")
    return emit(lowered(program, Policy("multistage", plan, groups=2)))


REFUSED = {
    "gather along 'm', which the schedule splits": (
        lambda acc: t.gather(acc, 127 - t.coordinate("m", 128), "m")
    ),
    "4 columns beside matmuls, expected a multiple of 8": (
        lambda acc: acc + t.sum_along(acc.sub("n", 4, 4), "n")
    ),
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_has_no_code_says_so_at_the_users_line(message):
    with pytest.raises(InputError, match=message) as caught:
        _small(REFUSED[message])
    assert __file__ in str(caught.value)
