"""SIMT kernels: the emitted text, run on a CPU with threads in random order, gives the meaning."""

import pytest
from tests.codegen import emulate
from tests.codegen.simt_programs import PROGRAMS, make
from tests.gpu.cases import distance

from warploom import tile as t
from warploom.codegen.simt.emit import emit_simt
from warploom.codegen.simt.schedule import SimtSchedule, simt
from warploom.errors import InputError

SHAPES = {"chosen": None, "warp": (32, 4), "wide": (128, 128), "tall": (64, 1), "square": (128, 8)}


def schedule(program, shape):
    if SHAPES[shape] is None:
        return simt(program)
    threads, lanes = SHAPES[shape]
    return SimtSchedule(shape, threads, lanes, {"warp": 2, "tall": 4}.get(shape, 1))


def fits(program, shape):
    try:
        return emit_simt(program, schedule(program, shape), "sm_90a")
    except InputError as error:
        assert "registers of each" in str(error)
        return None


@pytest.fixture(scope="module")
def kernels(tmp_path_factory):
    """Every program under every schedule that it fits, compiled as one library."""
    cases = []
    for name in PROGRAMS:
        program = make(name)[0]
        cases += [(name, shape, fits(program, shape)) for shape in SHAPES]
    cases = [case for case in cases if case[2] is not None]
    library = emulate.compile_all([case[2] for case in cases], tmp_path_factory.mktemp("simt"))
    return library, {(name, shape): (number, source) for number, (name, shape, source)
                     in enumerate(cases)}  # fmt: skip


@pytest.mark.parametrize("name", PROGRAMS)
def test_the_emitted_code_means_what_the_program_means(kernels, name):
    library, known = kernels
    program, arrays, scalars, bound = make(name)
    want = t.interpret(program, arrays, scalars)
    ran = 0
    for shape in SHAPES:
        if (name, shape) not in known:
            continue
        number, source = known[name, shape]
        got = emulate.run(library, number, source, program, arrays, scalars)
        for key, value in want.items():
            assert distance(got[key], value) <= bound, (shape, key)
        ran += 1
    assert ran >= 3
