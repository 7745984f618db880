"""Delta rules in two programs against the loop over rows in float64, and as they are emitted."""

from dataclasses import replace

import numpy as np
import pytest
from tests.codegen import emulate
from tests.gpu.cases import distance
from tests.kernels.test_recurrent import ROUNDING, SCALE, case

from warploom import tile as t
from warploom.autosched.schedules import compiled, schedule_for
from warploom.codegen.cuda.emit import emit
from warploom.codegen.oracle.simulate import simulate
from warploom.codegen.passes.lower import lower
from warploom.errors import InputError
from warploom.kernels.recurrent import solved
from warploom.kernels.recurrent.program import RecurrentConfig, recurrent
from warploom.kernels.recurrent.reference import reference

KDA = RecurrentConfig(
    "channel", delta=True, gates=t.BF16, key_dim=48, value_dim=72, initial=True, final=True
)
CASES = {
    "kda": KDA,
    "gated-delta": RecurrentConfig("token", delta=True, key_dim=128, value_dim=72, initial=True),
    "delta": RecurrentConfig("none", True, gates=t.BF16, key_dim=96, value_dim=64, final=True),
}


def inputs(config, rows=150, decay=0.1):
    """The arrays of both programs; what is written is NaN."""
    values = case(config, rows, decay=decay)
    square = np.full((1, -(-rows // 64), 2, 64, 64), np.nan)
    return values | dict.fromkeys(solved.SQUARES, square)


def of(program, values):
    return {one.name: values[one.name] for one in program.arrays}


@pytest.mark.parametrize("decay", [0.0, 0.1, 3.0])
@pytest.mark.parametrize("name", CASES)
def test_both_programs_are_the_loop_over_rows(name, decay):
    config = CASES[name]
    values = inputs(config, decay=decay)
    want = reference(config, values, 0.5)
    for program, _ in solved.kernels(config):
        values |= t.interpret(program, of(program, values), SCALE)
    assert all(distance(values[name], one) < ROUNDING for name, one in want.items())


def test_chunks_of_several_tasks_are_those_of_one():
    """A task of the first program has a few chunks of a head: here the heads have two tasks."""
    config = CASES["gated-delta"]
    rows = 64 * solved.AT_ONCE + 70
    values = inputs(config, rows)
    want = reference(config, values, 0.5)
    for program, _ in solved.kernels(config):
        values |= t.interpret(program, of(program, values), SCALE)
    assert all(distance(values[name], one) < ROUNDING for name, one in want.items())


@pytest.mark.parametrize("name", ["kda", "gated-delta"])
def test_their_emitted_code_gives_the_same(name):
    config = CASES[name]
    made = [(program, schedule_for(program, one)) for program, one in solved.kernels(config)]
    blocks = [lower(*one) for one in made]
    sources = [emit(block) for block in blocks]
    library, values = emulate.compile_all(sources, None), inputs(config, 70)
    for number, (program, _) in enumerate(made):
        given = of(program, values)
        meant = t.interpret(program, given, SCALE)
        ran = simulate(blocks[number], given, SCALE, seed=number)
        got = emulate.run(library, number, sources[number], program, given, SCALE, blocks=4)
        for array, one in meant.items():
            assert distance(ran[array], one) == 0, array
            assert distance(got[array], one) < 1e-3, array
        values |= meant


def test_kda_is_two_programs_without_gradients():
    with pytest.raises(InputError, match="two programs"):
        recurrent(KDA)
    with pytest.raises(InputError, match="expected none or token, and at most 64"):
        replace(KDA, states=True)
    with pytest.raises(InputError, match="key_dim=128: expected a multiple of 8, at most 64"):
        replace(KDA, key_dim=128)


@pytest.mark.parametrize("name", CASES)
def test_the_chunks_keep_all_in_registers(name):
    (solve, chunks) = (compiled(*one, allow=solved.FEW) for one in solved.kernels(CASES[name]))
    assert chunks.resources.spill_bytes == 0
    assert solve.resources.spill_bytes < (256 if name == "kda" else 1)


def test_few_tasks_have_an_sm_each_and_a_schedule_of_their_own():
    config = CASES["gated-delta"]  # values of 72: two tasks a head
    assert solved.few_tasks(config, 1, 66, 132) and not solved.few_tasks(config, 1, 67, 132)
    assert not solved.few_tasks(KDA, 1, 1, 132)
    (_, usual), (_, few) = (list(solved.kernels(config, alone))[1] for alone in (False, True))
    assert (usual.launch.resident, few.launch.resident) == (2, 1)
    program = solved.chunks(config)
    values = inputs(config, 70)
    values |= t.interpret(solved.solve(config), of(solved.solve(config), values), SCALE)
    given = of(program, values)
    ran = simulate(lower(program, schedule_for(program, few)), given, SCALE, seed=2)
    meant = t.interpret(program, given, SCALE)
    assert all(distance(ran[name], one) == 0 for name, one in meant.items())
