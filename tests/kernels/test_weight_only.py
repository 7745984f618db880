"""GEMM with 8-bit weights against float64: interpreted, under random interleavings, as emitted."""

import numpy as np
import pytest
from tests.codegen import emulate
from tests.lowering import lowered

from warploom import tile as t
from warploom.autosched.schedules import schedule_for
from warploom.codegen.cuda.emit import emit
from warploom.codegen.oracle.simulate import simulate
from warploom.codegen.passes.lower import lower, verified
from warploom.errors import InputError
from warploom.kernels.gemm.weight_only import (
    WeightOnlyConfig,
    plan_weight_only,
    weight_only,
    weight_only_policy,
)

# name -> (config, m, n, k)
CASES = {
    "few rows": (WeightOnlyConfig(), 5, 130, 300),
    "two groups": (WeightOnlyConfig(tile=(128, 32), weights=t.E5M2, dtype=t.FP16), 37, 200, 272),
    "slices": (WeightOnlyConfig(slices=2), 16, 72, 400),
}


def case(m, n, k):
    """(arrays, result in float64): every column of x and w is different."""
    random = np.random.default_rng(0)
    x = random.integers(-4, 5, (m, k)) * 0.25
    w = random.integers(-4, 5, (n, k)) * 0.5
    scale = random.uniform(0.5, 2, n).astype(np.float32)
    arrays = {"x": x, "w": w, "scale": scale, "y": np.full((m, n), np.nan)}
    return arrays, x @ w.T * scale.astype(np.float64)


def close(got, want):
    return np.abs(got["y"] - want).max() < 6e-3 * np.abs(want).max()


@pytest.mark.parametrize("name", CASES)
def test_interpreter_and_simulator_give_the_product(name):
    config, *sizes = CASES[name]
    arrays, want = case(*sizes)
    expected = t.interpret(weight_only(config), arrays)
    assert close(expected, want)
    block = lower(
        weight_only(config), schedule_for(weight_only(config), weight_only_policy(config)), verified
    )
    assert np.array_equal(simulate(block, arrays, seed=1)["y"], expected["y"])


def test_emitted_kernels_give_the_product():
    blocks = [lowered(weight_only(c), weight_only_policy(c)) for c, *_ in CASES.values()]
    sources = [emit(block) for block in blocks]
    library = emulate.compile_all(sources, None)
    for number, (name, (_, *sizes)) in enumerate(CASES.items()):
        arrays, want = case(*sizes)
        program = blocks[number].placement.program
        got = emulate.run(library, number, sources[number], program, arrays, blocks=2)
        assert close(got, want), name


def test_weights_come_through_shared_memory():
    config = WeightOnlyConfig()
    text = emit(lowered(weight_only(config), weight_only_policy(config))).text
    assert "w_map" in text and "w_data" not in text and "read_bytes<" in text


def test_tiles_have_room_for_the_rows():
    base = WeightOnlyConfig()
    found = [plan_weight_only(base, m, 4096) for m in (1, 16, 17, 64, 100, 300)]
    assert [one.tile[1] for one in found] == [16, 16, 32, 64, 128, 128]
    assert [one.slices for one in found] == [2, 2, 2, 2, 2, 1]


@pytest.mark.parametrize(
    "options", [{"dtype": t.FP32}, {"weights": t.BF16}, {"tile": (32, 16)}, {"slices": 0}]
)
def test_what_no_kernel_is_for_is_refused(options):
    with pytest.raises(InputError, match="weight-only gemm"):
        WeightOnlyConfig(**options)
