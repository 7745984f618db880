"""One row of recurrent attention: program, emulation and operators against the loop over rows."""

from dataclasses import replace

import numpy as np
import pytest
from tests.codegen import emulate
from tests.gpu.cases import distance
from tests.kernels.test_recurrent import CASES, SCALE, case

from warploom import tile as t
from warploom.autosched.schedules import schedule_for
from warploom.codegen.compile.build import emitted
from warploom.errors import InputError
from warploom.kernels.recurrent.config import RecurrentConfig
from warploom.kernels.recurrent.reference import reference
from warploom.kernels.recurrent.step import recurrent_step

STEPS = {
    name: replace(config, initial=True, final=True)
    for name, config in CASES.items()
    if not config.taylor
}
STEPS["kda"] = replace(STEPS["gla"], delta=True)
EMULATED = ("retention", "mamba", "gla", "gated-delta")


def one_row(config, seed=3):
    """(arrays of a step, o and the state after it in float64) of two batches."""
    both = [case(config, 1, seed=seed + i) for i in range(2)]
    by_head = {"a", "bias", "skip"} | ({"g"} if config.decay == "head" else set())
    values = {
        name: one if name in by_head else np.concatenate([one, both[1][name]])
        for name, one in both[0].items()
    }
    values["initial"] = values["initial"].astype(np.float32)
    want = reference(config, values, SCALE["scale"])
    state = values.pop("initial")
    values.pop("final")
    given = {name: one if name in by_head else one[:, 0] for name, one in values.items()}
    mamba = config.decay == "step"
    given["state"] = (state.swapaxes(-1, -2) if mamba else state).copy()
    after = want["final"].swapaxes(-1, -2) if mamba else want["final"]
    return given, {"o": want["o"][:, 0], "state": after}


def of(config):
    return recurrent_step(replace(config, initial=False, final=False))


@pytest.fixture(scope="module")
def library():
    sources = [
        emitted(of(one), schedule_for(of(one))) for one in (STEPS[name] for name in EMULATED)
    ]
    return sources, emulate.compile_all(sources, None)


@pytest.mark.parametrize("name", STEPS)
def test_a_step_moves_the_state_as_the_next_row_does(name):
    values, want = one_row(STEPS[name])
    got = t.interpret(of(STEPS[name]), values, SCALE)
    assert distance(got["state"], want["state"]) < 1e-6
    assert distance(got["o"], want["o"]) < 3e-3


@pytest.mark.parametrize("number", range(len(EMULATED)), ids=EMULATED)
def test_a_step_is_right_on_the_emulated_machine(library, number):
    config = STEPS[EMULATED[number]]
    sources, made = library
    values, want = one_row(config, 7)
    got = emulate.run(made, number, sources[number], of(config), values, SCALE)
    assert distance(got["state"], want["state"]) < 1e-6
    assert distance(got["o"], want["o"]) < 3e-3


def test_steps_one_after_the_other_are_the_rows():
    """Rows of a sequence, each from the state that the one before it left."""
    config = replace(STEPS["gated"], initial=False)
    values = case(config, 5)
    want = reference(config, values, SCALE["scale"])
    state = np.zeros_like(want["final"], np.float32)
    for row in range(5):
        given = {name: values[name][:, row] for name in ("q", "k", "v", "o", "g")}
        got = t.interpret(of(config), given | {"state": state}, SCALE)
        state = got["state"]
        assert distance(got["o"], want["o"][:, row]) < 3e-3
    assert distance(state, want["final"]) < 1e-6


def test_states_of_its_own_arrays_are_refused():
    with pytest.raises(InputError, match="its state is in place"):
        recurrent_step(RecurrentConfig(final=True))


def test_operators_take_a_row_and_refuse_what_does_not_fit():
    torch = pytest.importorskip("torch")
    ops = pytest.importorskip("warploom.integrations.torch_recurrent_step")

    def make(*shape, dtype=torch.bfloat16):
        return torch.empty(shape, device="meta", dtype=dtype)

    def wide(*shape):
        return make(*shape, dtype=torch.float32)

    q, v, state = make(2, 4, 64), make(2, 8, 128), wide(2, 8, 64, 128)
    for more in (
        {},
        {"g": wide(8)},
        {"g": wide(2, 8)},
        {"g": make(2, 8, 64)},
        {"beta": make(2, 8)},
    ):
        assert ops.recurrent_step(q, q, v, state, **more).shape == v.shape
    x, dt, b, moved = make(2, 8, 128), make(2, 8), make(2, 2, 64), wide(2, 8, 128, 64)
    expanded = wide(8).reshape(8, 1, 1).expand(8, 128, 64)
    y = ops.selective_state_update(moved, x, dt, expanded, b, b, D=wide(8), dt_softplus=True)
    assert y.shape == x.shape
    with pytest.raises(InputError, match="of its own for every channel"):
        ops.selective_state_update(moved, x, dt, wide(8, 128, 64), b, b)
    with pytest.raises(InputError, match="dt_bias with dt_softplus"):
        ops.selective_state_update(moved, x, dt, wide(8), b, b, dt_bias=wide(8))
    with pytest.raises(InputError, match=r"expected \[2, 8, 64, 128\] of"):
        ops.recurrent_step(q, q, v, wide(2, 8, 64, 64))
