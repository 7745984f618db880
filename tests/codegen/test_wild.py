"""Wild random programs, with and without matmuls: interpreted, simulated and run as emitted.

`wild_program`, `wild_schedule` and `wild_simt` draw them; more seeds are a longer campaign.
"""

import random
import re
from dataclasses import replace

import pytest
from tests.codegen import emulate
from tests.codegen.wild_program import wild_case
from tests.codegen.wild_schedule import wild_plan, wild_schedule
from tests.codegen.wild_simt import wild_layout, wild_threads
from tests.gpu.cases import distance

from warploom import tile as t
from warploom.codegen.cuda.emit import emit
from warploom.codegen.cuda.emit_sm80 import emit_sm80
from warploom.codegen.cuda.simt.emit import emit_simt
from warploom.codegen.oracle.simulate import simulate
from warploom.codegen.passes.lower import lower
from warploom.errors import InputError

MATMULS = (*range(300, 316), 346, 390, 401)  # the last ones read pages
THREADS = range(400, 406)


def scheduled(seed):
    """(program, block program, arrays, source), or None for a schedule that does not fit."""
    case, draw = wild_case(seed), random.Random(seed)
    older = seed % 4 == 0
    try:
        plan = wild_plan(case.program, draw, older)
        block = lower(case.program, wild_schedule(case.program, plan, draw, solve=False))
        return case.program, block, case.arrays, emit_sm80(block) if older else emit(block)
    except InputError:
        return None


@pytest.fixture(scope="module")
def matmuls(tmp_path_factory):
    made = [one for one in map(scheduled, MATMULS) if one is not None]
    return emulate.compile_all([one[3] for one in made], tmp_path_factory.mktemp("wild")), made


def same(got, want):
    return [name for name in want if distance(got[name], want[name]) != 0]


def test_programs_with_matmuls_agree_everywhere(matmuls):
    library, made = matmuls
    assert len(made) >= len(MATMULS) // 3
    reading = [loop for one in made for loop in one[0].loops() if loop.reads]
    assert {1, 2} <= {len(loop.reads) for loop in reading}
    for number, (program, block, arrays, source) in enumerate(made):
        want = t.interpret(program, arrays)
        assert not same(simulate(block, arrays, seed=number), want), program.name
        for blocks in (1, 3):
            got = emulate.run(library, number, source, program, arrays, None, blocks, number)
            assert not same(got, want), program.name


def test_programs_on_threads_agree(tmp_path):
    made = []
    for seed in THREADS:
        program, arrays = wild_threads(seed)
        schedule = wild_layout(program, random.Random(seed))
        made.append((program, arrays, emit_simt(program, schedule, "sm_90")))
    library = emulate.compile_all([one[2] for one in made], tmp_path)
    for number, (program, arrays, source) in enumerate(made):
        got = emulate.run(library, number, source, program, arrays, blocks=3)
        assert not same(got, t.interpret(program, arrays)), program.name


def test_matmuls_that_nobody_waits_for_are_noticed_in_most_programs(matmuls, tmp_path):
    _, made = matmuls
    hopper = [one for one in made if "wgmma_wait" in one[3].text][:3]
    broken = []
    for *_, source in hopper:
        body = source.text.index('extern "C"')
        text = re.sub(r"wgmma_wait<\d>\(\);", ";", source.text[body:])
        broken.append(replace(source, text=source.text[:body] + text))
    library = emulate.compile_all(broken, tmp_path)
    noticed = 0
    for number, (program, _, arrays, _) in enumerate(hopper):
        want = t.interpret(program, arrays)
        try:
            got = emulate.run(library, number, broken[number], program, arrays, None, 2, number)
            noticed += bool(same(got, want))
        except emulate.Fault:
            noticed += 1
    assert noticed >= len(hopper) - 1
