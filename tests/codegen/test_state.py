"""A register tile as a matmul's operand in shared memory: linear attention in chunks."""

import re
from dataclasses import replace

import pytest
from tests.codegen import emulate
from tests.codegen.state_program import attended, state_case
from tests.gpu.cases import distance
from tests.lowering import lowered

from warploom import tile as t
from warploom.autosched.schedules import Policy, compiled, fitting_name, schedule_for
from warploom.autosched.solve import Search
from warploom.codegen.cuda.emit_sm80 import emit_sm80
from warploom.codegen.ir.plan import LaunchPlan
from warploom.codegen.oracle.simulate import simulate
from warploom.codegen.passes.lower import lower
from warploom.errors import InputError


@pytest.mark.parametrize("rows", [64, 128])
def test_interpreter_and_simulator_give_linear_attention(rows):
    program, values = state_case(rows=rows)
    want = t.interpret(program, values)["o"]
    assert distance(want, attended(values)) == 0
    schedule = schedule_for(program, Policy(fitting_name(program)))
    assert len(schedule.compute) == rows // 64, "rows are shared out, every group keeps the state"
    for seed in range(2):
        assert distance(simulate(lower(program, schedule), values, seed=seed)["o"], want) == 0


def test_the_emitted_code_agrees_and_a_missing_meeting_does_not(tmp_path):
    cases = [state_case(m, rows) for m, rows in ((0, 64), (40, 64), (200, 64), (300, 128))]
    sources = [
        emit_sm80(lowered(program, Policy("multistage"), arch="sm_80")) for program, _ in cases
    ]
    # Planted fault: nobody waits for the others around the copy of the state.
    alone = replace(sources[2], text=sources[2].text.replace("named_sync<1, 128>();", ""))
    library = emulate.compile_all([*sources, alone], tmp_path)
    for number, (program, values) in enumerate(cases):
        got = emulate.run(library, number, sources[number], program, values)["o"]
        assert distance(got, attended(values)) == 0
    program, values = cases[2]
    with pytest.raises(emulate.Fault, match=r"unwritten: ldmatrix|race: the read by ldmatrix"):
        emulate.run(library, 4, alone, program, values)


@pytest.mark.parametrize("rows", [64, 128])
def test_it_compiles_for_hopper(rows):
    program, _ = state_case(rows=rows)
    built = compiled(program, Policy("lcsf"))
    assert built.resources.spill_bytes == 0 and "fence_async();" in built.source.text
    base = re.search(r"_room = shared \+ (\d+)", built.source.text)
    assert base is not None and int(base[1]) % 1024 == 0


def test_two_blocks_on_an_sm_share_what_rings_may_have():
    program, _ = state_case()
    depths = [
        max(
            schedule_for(program, Policy("lcsf", LaunchPlan(resident=n)))
            .loops["i"]
            .ring_depth.values()
        )
        for n in (1, 2)
    ]
    assert 2 <= depths[1] < depths[0]


def test_the_solved_schedule_gives_the_same():
    """A loop that stores, with four products, one of a tile made in registers."""
    program, values = state_case()
    solved = schedule_for(program, Policy("solve", search=Search(seconds=2.0)))
    got = simulate(lower(program, solved), values, seed=1)["o"]
    assert distance(got, attended(values)) == 0


def _refused(operand, split="", groups=1, rows=64):
    def body(a, b, c):
        acc = t.zeros(m=128, n=64)
        for _ in t.loop(2):
            acc += t.load(a, t.span(0, 128), t.span(0, 16)) @ t.load(
                b, t.span(0, 16), t.span(0, 64)
            )
        left = t.load(a, t.span(0, rows, "q"), t.span(0, 128, "m"))
        t.store(c, t.span(0, rows, "q"), t.span(0, 64), tile=left @ operand(acc))

    arrays = {"a": t.array(t.BF16, "m k"), "b": t.array(t.BF16, "k n"), "c": t.array(t.FP32, "m n")}
    program = t.trace(body, arrays)
    plan = LaunchPlan(split=split, store="direct")
    return lowered(program, Policy("inflight", plan, groups=groups, depth=2))


def test_what_cannot_be_staged_is_refused_at_the_line():
    assert _refused(lambda acc: acc.cast(t.BF16))
    # The groups make the rows of the product, from what each has left of its part.
    assert _refused(lambda acc: acc.cast(t.BF16), "m", 2, rows=128)
    with pytest.raises(InputError, match=r"test_state\.py.*'q' of a_t_1 is 64 long; over 2 groups"):
        _refused(lambda acc: acc.cast(t.BF16), "m", 2)
    with pytest.raises(InputError, match=r"test_state\.py.*both must be one of bf16"):
        _refused(lambda acc: acc)
