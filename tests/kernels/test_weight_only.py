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
    pack_nibbles,
    plan_weight_only,
    weight_only,
    weight_only_policy,
)

# name -> (config, m, n, k)
CASES = {
    "few rows": (WeightOnlyConfig(), 5, 130, 300),
    "two groups": (WeightOnlyConfig(tile=(128, 32), weights=t.E5M2, dtype=t.FP16), 37, 200, 272),
    "slices": (WeightOnlyConfig(slices=2), 16, 72, 400),
    "slices, one of which has the sum": (WeightOnlyConfig(tile=(64, 8), slices=2), 12, 72, 600),
    "integers": (WeightOnlyConfig(weights=t.INT8), 5, 72, 272),
    "integers in fp16": (WeightOnlyConfig(weights=t.INT8, dtype=t.FP16), 3, 72, 384),
    "integers of groups": (WeightOnlyConfig(weights=t.INT8, grouped=True, slices=2), 3, 72, 384),
    "nibbles": (WeightOnlyConfig(weights=t.INT8, bits=4), 7, 72, 512),
    "nibbles in fp16": (WeightOnlyConfig(weights=t.INT8, bits=4, dtype=t.FP16), 7, 72, 256),
    "nibbles of groups": (WeightOnlyConfig(weights=t.INT8, bits=4, grouped=True), 9, 136, 512),
}


def case(config, m, n, k):
    """(arrays, result in float64): every column of x and w is different."""
    random = np.random.default_rng(0)
    x = random.integers(-4, 5, (m, k)) * 0.25
    most = 128 if config.weights is t.INT8 and config.bits == 8 else 8
    w = random.integers(-most, most, (n, k)).astype(np.int8)
    scale = random.uniform(0.5, 2, (k // 128, n) if config.grouped else n).astype(np.float32)
    wide = np.repeat(scale, 128, 0).T if config.grouped else scale[:, None]
    stored = pack_nibbles(w) if config.bits == 4 else w
    arrays = {"x": x, "w": stored, "scale": scale, "y": np.full((m, n), np.nan)}
    return arrays, x @ (w * wide.astype(np.float64)).T


def close(got, want):
    return np.abs(got["y"] - want).max() < 6e-3 * np.abs(want).max()


@pytest.mark.parametrize("name", CASES)
def test_interpreter_and_simulator_give_the_product(name):
    config, *sizes = CASES[name]
    arrays, want = case(config, *sizes)
    expected = t.interpret(weight_only(config), arrays)
    assert close(expected, want)
    block = lower(
        weight_only(config), schedule_for(weight_only(config), weight_only_policy(config)), verified
    )
    assert np.array_equal(simulate(block, arrays, seed=1)["y"], expected["y"])


def test_blocks_without_a_part_of_the_sum_store_nothing():
    """Whatever runs last: the rows of a tile's second half are those of the next tile."""
    config, *sizes = CASES["slices, one of which has the sum"]
    arrays, want = case(config, *sizes)
    program = weight_only(config)
    names = [name for name, _ in program.grid]
    places = [(part, n, m) for m in (1, 0) for n in (0, 1) for part in (0, 1)]
    tasks = [dict(zip(names, place, strict=True)) for place in places]
    assert close(t.interpret(program, arrays, tasks=tasks), want)


def test_emitted_kernels_give_the_product():
    blocks = [lowered(weight_only(c), weight_only_policy(c)) for c, *_ in CASES.values()]
    sources = [emit(block) for block in blocks]
    library = emulate.compile_all(sources, None)
    for number, (name, (config, *sizes)) in enumerate(CASES.items()):
        arrays, want = case(config, *sizes)
        program = blocks[number].placement.program
        got = emulate.run(library, number, sources[number], program, arrays, blocks=2)
        assert close(got, want), name


def test_weights_come_through_shared_memory():
    config = WeightOnlyConfig()
    text = emit(lowered(weight_only(config), weight_only_policy(config))).text
    assert "w_map" in text and "w_data" not in text and "read_bytes<" in text


def test_tiles_have_room_for_the_rows():
    base = WeightOnlyConfig()
    found = [plan_weight_only(base, m, 4096, 4096) for m in (1, 16, 17, 64, 100, 300)]
    assert [one.tile[1] for one in found] == [8, 16, 32, 64, 128, 128]
    assert [one.slices for one in found] == [2, 2, 2, 2, 2, 1]


def test_tiles_are_as_high_as_leaves_every_sm_one():
    base = WeightOnlyConfig()
    found = [plan_weight_only(base, 1, n, 4096).tile for n in (4096, 8192, 14336, 28672)]
    assert found == [(64, 8), (64, 8), (128, 8), (256, 8)]


def test_bytes_hold_numbers_128_apart():
    weights = np.arange(-8, 8, dtype=np.int8).repeat(32)[None]
    packed = pack_nibbles(weights)
    assert packed.shape == (1, 256)
    low, high = ((packed & 15) ^ 8) - 8, packed >> 4
    for begin in (0, 128):
        assert np.array_equal(low[:, begin:][:, :128], weights[:, 2 * begin :][:, :128])
        assert np.array_equal(high[:, begin:][:, :128], weights[:, 2 * begin + 128 :][:, :128])


@pytest.mark.parametrize(
    "weights", [np.full((2, 256), 8), np.full((2, 256), -9), np.zeros((2, 128))]
)
def test_numbers_that_no_nibble_holds_are_refused(weights):
    with pytest.raises(InputError, match="from -8 to 7"):
        pack_nibbles(weights.astype(np.int8))


@pytest.mark.parametrize(
    "options",
    [
        {"bits": 4},
        {"bits": 2, "weights": t.INT8},
        {"dtype": t.FP32},
        {"weights": t.BF16},
        {"tile": (32, 16)},
        {"slices": 0},
    ],
)
def test_what_no_kernel_is_for_is_refused(options):
    with pytest.raises(InputError, match="weight-only gemm"):
        WeightOnlyConfig(**options)
