"""Sums over the parts of dq and dk: the program and its code against numpy."""

import numpy as np
import pytest
from tests.codegen import emulate
from tests.gpu.cases import distance

from warploom import tile as t
from warploom.codegen.compile.build import emitted
from warploom.kernels.recurrent.slots import AT_ONCE, slot_schedule, slot_sums


@pytest.mark.parametrize("parts, d", [(2, 128), (3, 40), (AT_ONCE + 1, 64)])
def test_all_parts_are_added(parts, d):
    program, random = slot_sums(parts, d), np.random.default_rng(1)
    values = {"parts": t.round_to(t.BF16, random.normal(size=(70, parts, d)))}
    values["sums"] = np.full((70, d), np.nan)
    want = np.asarray(values["parts"], float).sum(1)
    meant = t.interpret(program, values, {})["sums"]
    assert distance(meant, want) < 3e-3
    source = emitted(program, slot_schedule(program))
    library = emulate.compile_all([source], None)
    got = emulate.run(library, 0, source, program, values, {}, blocks=3)["sums"]
    assert distance(got, meant) == 0
