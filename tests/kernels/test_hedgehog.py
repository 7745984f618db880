"""Hedgehog with a window: the program against weights in float64, and as it is emitted."""

import numpy as np
import pytest
from tests.codegen import emulate
from tests.gpu.cases import distance

from warploom import tile as t
from warploom.autosched.schedules import compiled, schedule_for
from warploom.codegen.cuda.emit import emit
from warploom.codegen.oracle.simulate import simulate
from warploom.codegen.passes.lower import lower
from warploom.errors import InputError
from warploom.kernels.recurrent.hedgehog import HedgehogConfig, default_policy, hedgehog, reference

ROUNDING = 4e-3  # of weights, features, states and results to bf16


def case(config, rows=300, e=128, seed=1):
    """Inputs in their element types; what is written is NaN."""
    random, d = np.random.default_rng(seed), config.key_dim
    values = {
        name: t.round_to(t.BF16, random.normal(size=(1, rows, 2, size)))
        for name, size in (("q", d), ("k", d), ("v", e))
    }
    for name in ("q_map", "k_map"):
        values[name] = t.round_to(t.BF16, random.normal(size=(2, d, 64)) / d**0.5)
    values["window"] = np.array([0.5, 1.0], np.float32)
    values["linear"] = np.array([1.0, 0.7], np.float32)
    return values | {"o": np.full((1, rows, 2, e), np.nan)}


@pytest.mark.parametrize("rows", [1, 64, 65, 300])
def test_it_is_a_softmax_in_a_window_and_features_before_it(rows):
    config = HedgehogConfig()
    values = case(config, rows)
    got = t.interpret(hedgehog(config), values, {"scale": 0.1})["o"]
    assert distance(got, reference(values, 0.1)) < ROUNDING


@pytest.mark.parametrize("fault", ["window", "linear", "q_map", "k_map"])
def test_every_input_counts(fault):
    config = HedgehogConfig()
    values = case(config)
    wrong = values | {fault: values[fault] * 3.0}
    got = t.interpret(hedgehog(config), wrong, {"scale": 0.1})["o"]
    assert distance(got, reference(values, 0.1)) > 2 * ROUNDING


def test_the_emitted_code_gives_the_same():
    config = HedgehogConfig(72)
    program = hedgehog(config)
    values, scale = case(config, 150, 136), {"scale": 0.1}
    block = lower(program, schedule_for(program, default_policy()))
    source = emit(block)
    library = emulate.compile_all([source], None)
    meant = t.interpret(program, values, scale)["o"]
    assert distance(meant, reference(values, 0.1)) < ROUNDING
    assert distance(simulate(block, values, scale, seed=3)["o"], meant) == 0
    got = emulate.run(library, 0, source, program, values, scale, blocks=4)["o"]
    assert distance(got, meant) < 1e-3


def test_two_groups_make_about_as_much_and_nothing_spills():
    program, policy = hedgehog(HedgehogConfig()), default_policy()
    assert not compiled(program, policy).resources.spill_bytes
    placement = lower(program, schedule_for(program, policy)).placement
    made = [op for op in placement.program.ops() if op.id in placement.led and op.kind == "exp2"]
    assert sorted(placement.led[op.id] for op in made) == [0] * 3 + [1] * 3


def test_keys_that_no_tile_holds_are_refused():
    with pytest.raises(InputError, match="key_dim=136: expected a multiple of 8, at most 128"):
        HedgehogConfig(136)
