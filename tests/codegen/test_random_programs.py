"""Random programs: interpreted, simulated and emitted, all three give the same."""

from dataclasses import replace

import pytest
from tests.codegen import emulate
from tests.codegen.random_program import random_case
from tests.gpu.cases import distance

from warploom import tile as t
from warploom.codegen.cuda.emit_sm80 import emit_sm80
from warploom.codegen.oracle.simulate import simulate
from warploom.codegen.passes.lower import lower

SEEDS = range(8)


@pytest.fixture(scope="module")
def emitted(tmp_path_factory):
    """All cases, and all with a fault planted, as one library."""
    cases = [random_case(seed) for seed in SEEDS]
    sources = [emit_sm80(lower(program, schedule), "sm_90") for program, schedule, _ in cases]
    wrong = [
        replace(s, text=s.text.replace("threadIdx.x & 3) == 0", "threadIdx.x & 7) == 0"))
        for s in sources
    ]
    library = emulate.compile_all([*sources, *wrong], tmp_path_factory.mktemp("random"))
    return library, cases, sources


@pytest.mark.parametrize("seed", SEEDS)
def test_the_simulated_program_agrees_bit_for_bit(seed):
    program, schedule, arrays = random_case(seed)
    got, want = simulate(lower(program, schedule), arrays, seed=seed), t.interpret(program, arrays)
    assert all(distance(got[name], want[name]) == 0 for name in want)


@pytest.mark.parametrize("seed", SEEDS)
def test_the_emitted_code_agrees_bit_for_bit(emitted, seed):
    library, cases, sources = emitted
    program, _, arrays = cases[seed]
    got = emulate.run(library, seed, sources[seed], program, arrays)
    for name, want in t.interpret(program, arrays).items():
        assert distance(got[name], want) == 0, name


def test_rows_that_half_of_the_lanes_forget_are_noticed(emitted):
    library, cases, sources = emitted
    seen = 0
    for seed in SEEDS:
        program, _, arrays = cases[seed]
        got = emulate.run(library, len(cases) + seed, sources[seed], program, arrays)
        want = t.interpret(program, arrays)
        seen += distance(got["row_sums"], want["row_sums"]) > 1e-3
    assert seen >= len(cases) - 1
