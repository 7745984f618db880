"""KDA's two programs against the loop over rows in float64, and as they are emitted."""

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
from warploom.kernels.recurrent import kda
from warploom.kernels.recurrent.program import RecurrentConfig, recurrent
from warploom.kernels.recurrent.reference import reference

CONFIG = RecurrentConfig(
    "channel", delta=True, gates=t.BF16, key_dim=48, value_dim=72, initial=True, final=True
)


def inputs(config, rows=150, decay=0.1):
    """The arrays of both programs; what is written is NaN."""
    values = case(config, rows, decay=decay)
    square = np.full((1, -(-rows // 64), 2, 64, 64), np.nan)
    return values | dict.fromkeys(kda.SQUARES, square)


def of(program, values):
    return {one.name: values[one.name] for one in program.arrays}


@pytest.mark.parametrize("decay", [0.0, 0.1, 3.0])
def test_both_programs_are_the_loop_over_rows(decay):
    values = inputs(CONFIG, decay=decay)
    want = reference(CONFIG, values, 0.5)
    for program, _ in kda.kernels(CONFIG):
        values |= t.interpret(program, of(program, values), SCALE)
    assert all(distance(values[name], one) < ROUNDING for name, one in want.items())


def test_their_emitted_code_gives_the_same():
    made = [(program, schedule_for(program, one)) for program, one in kda.kernels(CONFIG)]
    blocks = [lower(*one) for one in made]
    sources = [emit(block) for block in blocks]
    library, values = emulate.compile_all(sources, None), inputs(CONFIG, 70)
    for number, (program, _) in enumerate(made):
        given = of(program, values)
        meant = t.interpret(program, given, SCALE)
        ran = simulate(blocks[number], given, SCALE, seed=number)
        got = emulate.run(library, number, sources[number], program, given, SCALE, blocks=4)
        for name, one in meant.items():
            assert distance(ran[name], one) == 0, name
            assert distance(got[name], one) < 1e-3, name
        values |= meant


def test_it_is_two_programs_without_gradients():
    with pytest.raises(InputError, match="two programs"):
        recurrent(CONFIG)
    with pytest.raises(InputError, match="expected none or token, and at most 64"):
        replace(CONFIG, states=True)
    with pytest.raises(InputError, match="key_dim=128: expected a multiple of 8, at most 64"):
        replace(CONFIG, key_dim=128)


def test_the_chunks_keep_all_in_registers():
    (solve, chunks) = (compiled(*one, allow=kda.FEW) for one in kda.kernels(CONFIG))
    assert chunks.resources.spill_bytes == 0
    assert solve.resources.spill_bytes < 256
