"""Rows of tokens to experts and back, as emitted, against numpy."""

import numpy as np

from warploom.codegen.cuda.simt.emit import emit_simt
from warploom.emulate.kernel import Library
from warploom.kernels.gemm.experts import combine_rows, gather_rows, rows_schedule

COLUMNS = 1048  # a whole piece and a part of one
TAKEN = 3


def test_rows_go_to_experts_and_back():
    programs = [gather_rows(), combine_rows(TAKEN)]
    library = Library([emit_simt(one, rows_schedule(), "sm_90a") for one in programs])
    random = np.random.default_rng(0)
    x = random.integers(-4, 5, (5, COLUMNS)) * 0.25
    tokens = np.array([3, 0, 4, 4, 1, 2, 0], np.int32)
    arrays = {"x": x, "tokens": tokens, "sorted": np.full((len(tokens), COLUMNS), np.nan)}
    found = library.run(0, programs[0], arrays, blocks=14)["sorted"]
    assert np.array_equal(found, x[tokens])
    places = random.integers(0, len(tokens), (4, TAKEN)).astype(np.int32)
    weights = random.integers(1, 5, (4, TAKEN)) * 0.5
    arrays = {"rows": found, "places": places, "weights": weights}
    arrays["y"] = np.full((4, COLUMNS), np.nan)
    got = library.run(1, programs[1], arrays, blocks=8)["y"]
    assert np.allclose(got, (found[places] * weights[..., None]).sum(1), rtol=2**-8)
