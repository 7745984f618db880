"""Few heads of many rows in three kernels: segments beside a loop over all rows in float64."""

import numpy as np
import pytest
from tests.codegen import emulate
from tests.gpu.cases import distance
from tests.kernels.test_recurrent import ROUNDING, SCALE, case

from warploom import tile as t
from warploom.autosched.schedules import Policy, schedule_for
from warploom.codegen.compile.build import emitted
from warploom.errors import InputError
from warploom.kernels.recurrent.program import RecurrentConfig, default_policy, recurrent
from warploom.kernels.recurrent.reference import reference
from warploom.kernels.recurrent.segments import configs, scan, segments

COUNT, ROWS = 3, 192
CASES = {
    "mamba": RecurrentConfig("step", shared=True, skip=True, initial=True, final=True),
    "gated": RecurrentConfig("token", key_dim=48, final=True),
    "retention": RecurrentConfig("head", key_dim=128, value_dim=128, initial=True, final=True),
    "linear": RecurrentConfig("none", value_dim=48, final=True),
}


def cut(name, one):
    rows = one.ndim > 1 and one.shape[1] == ROWS
    return one.reshape(COUNT, ROWS // COUNT, *one.shape[2:]) if rows else one


def in_three(config, values, run):
    """{"o", "final"}, each kernel by `run(number, program, arrays, scalars)`."""
    states, outputs = configs(config)
    d, e = config.key_dim, config.value_dim
    parts = {name: cut(name, one) for name, one in values.items()}
    empty = np.full((COUNT, 2, d, e), np.nan)

    def given(program, more):
        return {array.name: (parts | more)[array.name] for array in program.arrays}

    first, middle, last = recurrent(states), scan(config), recurrent(outputs)
    added = run(0, first, given(first, {"final": empty}), SCALE)["final"]
    gates = {"step": lambda: values["dt"] * values["a"], "token": lambda: values["g"],
             "head": lambda: np.broadcast_to(values["g"], (1, ROWS, 2)),
             "none": lambda: np.zeros((1, ROWS, 2))}[config.decay]()  # fmt: skip
    sums = np.asarray(gates, np.float64).reshape(1, COUNT, -1, 2).sum(2)
    more = {"added": added[None], "sums": sums.astype(np.float32), "before": empty[None],
            "final": empty[:1]} | {n: values[n] for n in ("initial",) if n in values}  # fmt: skip
    found = run(1, middle, more, {})
    out = run(2, last, given(last, {"initial": found["before"][0]}), SCALE)["o"]
    return {"o": out.reshape(values["o"].shape), "final": found["final"]}


@pytest.mark.parametrize("name", CASES)
def test_segments_are_right(name):
    config = CASES[name]
    values = case(config, rows=ROWS)
    right = reference(config, values, SCALE["scale"])

    def meant(number, program, arrays, scalars):
        return t.interpret(program, arrays, scalars)

    for key, found in in_three(config, values, meant).items():
        assert distance(found, right[key]) < ROUNDING, key
    # A planted fault: the second segment begins with no state.
    later = case(config, rows=ROWS)
    alone = {
        n: cut(n, x)[1:2] if n != "initial" and cut(n, x) is not x else x for n, x in later.items()
    }
    fresh = reference(config, alone, SCALE["scale"])["o"]
    assert distance(fresh, right["o"][:, ROWS // COUNT : 2 * ROWS // COUNT]) > 0.1


def test_segments_are_right_as_emitted():
    config = CASES["mamba"]
    values = case(config, rows=ROWS)
    states, outputs = configs(config)
    programs = [recurrent(states), scan(config), recurrent(outputs)]
    policies = [default_policy(states), Policy(), default_policy(outputs)]
    sources = [
        emitted(program, schedule_for(program, policy))
        for program, policy in zip(programs, policies, strict=True)
    ]
    library = emulate.compile_all(sources, None)

    def ran(number, program, arrays, scalars):
        return emulate.run(library, number, sources[number], program, arrays, scalars, blocks=4)

    def meant(number, program, arrays, scalars):
        return t.interpret(program, arrays, scalars)

    right = in_three(config, values, meant)
    for key, found in in_three(config, values, ran).items():
        assert distance(found, right[key]) < 1e-3, key


def test_segments_are_cut_where_blocks_would_idle():
    config = RecurrentConfig("step", shared=True)
    assert segments(config, 16, 16, 4096, 132) == 1
    assert segments(config, 1, 16, 32768, 132) > 4
    assert segments(config, 1, 16, 32768 + 8, 132) == 1
    assert segments(config, 1, 16, 256, 132) == 1
    assert segments(RecurrentConfig("token", delta=True), 1, 1, 32768, 132) == 1


@pytest.mark.parametrize("more", [{"delta": True}, {"skip": True}, {"final": False}])
def test_states_alone_are_refused_where_they_are_not_all(more):
    with pytest.raises(InputError, match="output=False: expected final, no skip, no delta"):
        RecurrentConfig("token", output=False, **({"final": True} | more))
