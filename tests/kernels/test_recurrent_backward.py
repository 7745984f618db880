"""Gradients of recurrent attention: the references, the program, and what is emitted of it."""

from dataclasses import replace

import numpy as np
import pytest
from tests.codegen import emulate
from tests.gpu.cases import distance
from tests.kernels.recurrent_backward_case import (
    SCALE,
    backward_case,
    far,
    interpreted,
    of_part,
    summed,
)
from tests.kernels.test_recurrent import case
from tests.lowering import lowered

from warploom import tile as t
from warploom.autosched.schedules import compiled, schedule_for
from warploom.codegen.cuda.emit import emit
from warploom.codegen.oracle.simulate import simulate
from warploom.codegen.passes.lower import lower
from warploom.errors import InputError
from warploom.kernels.recurrent.backward import (
    ALLOW,
    backward_policy,
    parts_of,
    recurrent_backward,
    sizes_of,
)
from warploom.kernels.recurrent.program import RecurrentConfig, default_policy, recurrent
from warploom.kernels.recurrent.reference import gradients, reference

CASES = {
    "linear": RecurrentConfig("none", key_dim=32, value_dim=48, initial=True, final=True),
    "retention": RecurrentConfig("head", key_dim=128, value_dim=128, initial=True, final=True),
    "gated": RecurrentConfig("token", value_dim=96, gates=t.BF16),
    "wide": RecurrentConfig("step", key_dim=128, value_dim=128, skip=True, softplus=True),
    "mamba": RecurrentConfig(
        "step", softplus=True, shared=True, skip=True, initial=True, final=True
    ),
    "mamba-128": RecurrentConfig("step", key_dim=128, value_dim=64, skip=True),
    "gla": RecurrentConfig(
        "channel", gates=t.BF16, key_dim=48, value_dim=96, initial=True, final=True
    ),
    "delta": RecurrentConfig("none", delta=True, gates=t.BF16, value_dim=128, final=True),
    "gated-delta": RecurrentConfig("token", delta=True, key_dim=32, initial=True, final=True),
}
EMITTED = (
    ("mamba", "rows"), ("mamba-128", "rows"), ("gla", "keys"), ("gla", "queries"),
    ("gated-delta", "values"), ("gated-delta", "rest"),
)  # fmt: skip
SECOND = {"queries": ("dk", "starts"), "rest": ("dv", "after", "starts")}  # what they read
ROUNDING = 5e-3  # of weights, operands, states and results to bf16
OF_GATES = 2e-2  # the gradients of gates are small differences of large sums


def right(distances):
    wide = ("q", "k", "v", "initial")
    return all(far < (ROUNDING if x in wide else OF_GATES) for x, far in distances.items())


def small(config, rows=9):
    """Inputs and the gradients of results, in float64."""
    values, random = case(config, rows), np.random.default_rng(3)
    values = {name: np.asarray(one, np.float64) for name, one in values.items()}
    values["do"] = random.normal(size=values.pop("o").shape)
    if config.final:
        values["dfinal"] = random.normal(size=values.pop("final").shape)
    return values


@pytest.mark.parametrize("name", CASES)
def test_the_gradients_are_those_of_finite_differences(name):
    config = CASES[name]
    values = small(config)
    want, random, step = gradients(config, values, SCALE), np.random.default_rng(1), 1e-6

    def loss(changed):
        made = reference(config, values | changed, SCALE)
        return sum(float((made[x] * values[f"d{x}"]).sum()) for x in made)

    assert set(want) == set(values) - {"do", "dfinal"}
    for name_of, slope in want.items():
        way = random.normal(size=values[name_of].shape)
        high, low = (loss({name_of: values[name_of] + sign * step * way}) for sign in (1, -1))
        meant = float((slope * way).sum())
        assert abs((high - low) / (2 * step) - meant) < 1e-6 * max(1.0, abs(meant)), name_of


def test_the_gradients_are_those_of_autograd():
    torch = pytest.importorskip("torch")
    config = CASES["gated-delta"]
    values = small(config, 20)
    given = {name: torch.from_numpy(one).requires_grad_() for name, one in values.items()}
    state, out = given["initial"], []
    q, k = (given[x].expand(-1, -1, 2, -1) for x in "qk")
    for i in range(20):
        state = state * torch.exp(given["g"][:, i, :, None, None])
        new = given["v"][:, i] - torch.einsum("bhd,bhde->bhe", k[:, i], state)
        new = given["beta"][:, i, :, None] * new
        state = state + k[:, i, :, :, None] * new[:, :, None]
        out.append(SCALE * torch.einsum("bhd,bhde->bhe", q[:, i], state))
    loss = (torch.stack(out, 1) * given["do"]).sum() + (state * given["dfinal"]).sum()
    want = gradients(config, values, SCALE)
    got = torch.autograd.grad(loss, [given[name] for name in want])
    assert all(distance(a.numpy(), b) < 1e-12 for a, b in zip(got, want.values(), strict=True))


@pytest.fixture(scope="module")
def emitted():
    """Some cases by their default schedules."""
    made = [(CASES[name], part) for name, part in EMITTED]
    programs = [
        (recurrent_backward(*one), schedule_for(recurrent_backward(*one), backward_policy(*one)))
        for one in made
    ]
    sources = [emit(lower(*one)) for one in programs]
    return sources, emulate.compile_all(sources, None)


@pytest.mark.parametrize("name", CASES)
def test_every_gradient_is_right(name):
    config, scale = CASES[name], {"scale": SCALE}
    values, want = backward_case(config)
    meant = interpreted(config, values)
    assert right(far(meant, want))
    for part in parts_of(config):
        program, schedule = (
            recurrent_backward(config, part),
            schedule_for(recurrent_backward(config, part), backward_policy(config, part)),
        )
        arrays = of_part(config, values, part)
        if part in SECOND:
            arrays |= {x: meant[x] for x in SECOND[part] if x in arrays}
        ran = simulate(lower(program, schedule), arrays, scale, seed=1)
        assert all(distance(ran[x], meant[x]) == 0 for x in ran)


@pytest.mark.parametrize("delta", [False, True])
def test_sums_of_gates_over_all_rows_keep_no_error_of_a_chunk(delta):
    """Under decays that leave nothing of a chunk an error in where the chunk begins would stay in
    all of its rows: 1.2e-2 of the sum, 8e-3 with the delta rule, where do was rounded twice."""
    config = RecurrentConfig("token", delta=delta)
    values, want = backward_case(config, 512, 8, decay=1.0)
    got = summed(interpreted(config, values), want)
    assert distance(got["g"].sum((0, 1)), want["g"].sum((0, 1))) < 4e-3


@pytest.mark.parametrize("number", range(len(EMITTED)), ids=lambda n: "-".join(EMITTED[n]))
def test_the_emitted_code_gives_the_gradients(emitted, number):
    sources, library = emitted
    (name, part), scale = EMITTED[number], {"scale": SCALE}
    config = CASES[name]
    values, _ = backward_case(config, 70)
    if part in SECOND:
        values |= interpreted(config, values)
    program, arrays = recurrent_backward(config, part), of_part(config, values, part)
    meant = t.interpret(program, arrays, scale)
    got = emulate.run(library, number, sources[number], program, arrays, scale, blocks=4)
    assert all(distance(got[x], one) < 1e-3 for x, one in meant.items())


def test_the_forward_pass_keeps_the_states():
    for config in (CASES["mamba"], CASES["retention"], CASES["gated-delta"]):
        kept = replace(config, states=True)
        values, sizes = case(kept, 150), sizes_of(config, 1, 150, 2)
        for one in (x for x in recurrent(kept).arrays if x.name not in values):
            values[one.name] = np.full([sizes[dim] for dim in one.dims], np.nan)
        got = simulate(lowered(recurrent(kept), default_policy(kept)), values, {"scale": SCALE})
        for name, want in reference(kept, values, SCALE).items():
            assert distance(got[name], want) < ROUNDING, name


@pytest.mark.parametrize("rows", [1, 64, 65])
def test_rows_that_fill_no_chunk_have_their_gradients(rows):
    for config in (CASES[x] for x in ("retention", "mamba", "gla", "gated-delta")):
        values, want = backward_case(config, rows)
        assert right(far(interpreted(config, values), want))


@pytest.mark.parametrize("decay", [0.0, 1e-4, 1.0, 30.0])
def test_decays_near_one_and_near_nothing_keep_their_gradients(decay):
    """Sums for a gate never leave its chunk: with decays near 1 they are as right as any."""
    config = replace(CASES["retention"], decay="token", key_dim=64)
    values, want = backward_case(config, 300, decay=decay)
    found = far(interpreted(config, values), want)
    assert right(found), found


@pytest.mark.parametrize("fault", ["states", "dfinal", "do", "inverse", "fresh"])
def test_a_wrong_input_makes_wrong_gradients(fault):
    """What the comparison must notice: each input counts."""
    config = CASES["gated-delta" if fault in ("inverse", "fresh") else "retention"]
    values, want = backward_case(config)
    values[fault] = values[fault] * -1.0
    assert not right(far(interpreted(config, values), want))


@pytest.mark.parametrize(("name", "part"), [EMITTED[1], EMITTED[4]])
def test_loops_do_not_wait_for_single_matmuls(name, part):
    """ptxas says so where it makes one matmul wait for another; `build` refuses it."""
    program = recurrent_backward(CASES[name], part)
    compiled(program, backward_policy(CASES[name], part), allow=ALLOW)


def test_keys_that_no_kernel_is_for_are_refused():
    long = RecurrentConfig("none", delta=True, key_dim=128)
    for refused in (lambda: recurrent_backward(long, "values"), lambda: replace(long, states=True)):
        with pytest.raises(InputError, match="key_dim=128: expected none or token, and at most 64"):
            refused()
