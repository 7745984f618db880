"""A user's recurrence: the pair that steps compose by, its chunk form, traffic and tile program."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from warploom import tile as tl
from warploom.derive.bounds.bounds import BoundBroken
from warploom.derive.bounds.bounds import check as check_bound
from warploom.derive.derive import PAIRS, by_hand, derive, derive_on
from warploom.derive.execute import run_kernels
from warploom.derive.formula.evaluate import compare, evaluate, random_inputs
from warploom.derive.formula.frontend import Expr, apply, build, const, contract, tensor
from warploom.derive.formula.graph import Diagram
from warploom.derive.kernel.chunk import exchange
from warploom.derive.kernel.kernel import Kernel, Loop
from warploom.derive.kernel.legal import make_kernel
from warploom.derive.lemmas import recurrence as lemma
from warploom.derive.lemmas.cascade import Refusal
from warploom.derive.lemmas.recurrence import certify, pair_of, recurrence
from warploom.derive.lower.chunks import Weights
from warploom.derive.lower.lower import programs
from warploom.errors import InputError

SIZES = {"t": 13, "h": 2, "d": 5, "e": 6}
BF16_ROUNDING = 5e-3
"""Of operands, weights and the state to bf16, relative to the largest result."""


def sigmoid(x: Any) -> Any:
    return 1 / (1 + np.exp(-x))


# (axes of g, the step, the gate and the weight of a row in numpy)
STEPS: dict[str, tuple[str, Any, Any, Any]] = {
    "none": ("t h", lambda s, g, kv: s + kv, lambda g: 1.0, lambda g: 1.0),
    "number": ("t h", lambda s, g, kv: s * 0.9 + kv, lambda g: 0.9, lambda g: 1.0),
    "plain": ("t h", lambda s, g, kv: g * s + kv, lambda g: g, lambda g: 1.0),
    "late": ("t h", lambda s, g, kv: (s + kv) * g, lambda g: g, lambda g: g),
    "head": ("h", lambda s, g, kv: kv - s * g, lambda g: -g, lambda g: 1.0),
    "average": ("t h", lambda s, g, kv: s - (s - kv) * g, lambda g: 1 - g, lambda g: g),
    "divided": ("t h", lambda s, g, kv: s / (g + 3.0) - kv, lambda g: 1 / (g + 3), lambda g: -1.0),
    "channel": (
        "t h d", lambda s, g, kv: apply("exp", g) * s + kv, lambda g: np.exp(g)[..., None],
        lambda g: 1.0,
    ),
    "logistic": (
        "t d", lambda s, g, kv: apply("sigmoid", g) * s + kv,
        lambda g: sigmoid(g)[None, :, None], lambda g: 1.0,
    ),
}  # fmt: skip


def formula(axes: str, step: Any, sizes: dict[str, int] | None = None) -> Diagram:
    """o_t = q_t S_t in two heads."""
    q, k, v = tensor("q", "t h d"), tensor("k", "t h d"), tensor("v", "t h e")
    g, kv = tensor("g", axes), contract(k, v, out=("t", "h", "d", "e"))
    state = recurrence("t", "h d e", lambda s: step(s, g, kv))
    return build("own", {"o": contract(q, state, out=("t", "h", "e"))}, sizes or SIZES)


def by_rows(a: dict[str, Any], axes: str, gate: Any, weight: Any) -> Any:
    """The same, one row after the other."""
    state, out = np.zeros((*a["k"].shape[1:], a["v"].shape[-1])), []
    for t in range(len(a["q"])):
        g = a.get("g", np.zeros(1))
        g = g[t] if "g" in a and axes.split(maxsplit=1)[0] == "t" else g
        each = [np.asarray(f(g)) for f in (gate, weight)]
        each = [x[:, None, None] if x.ndim == 1 else x for x in each]
        state = each[0] * state + each[1] * a["k"][t][:, :, None] * a["v"][t][:, None, :]
        out.append(np.einsum("hd,hde->he", a["q"][t], state))
    return np.stack(out)


@pytest.mark.parametrize("name", STEPS)
def test_a_step_and_its_chunk_form_are_the_loop_over_rows(name: str) -> None:
    axes, step, gate, weight = STEPS[name]
    diagram = formula(axes, step)
    rewritten = exchange(diagram)
    assert [n.kind for n in rewritten.nodes].count("scan_contract") == 1
    assert not [n for n in rewritten.nodes if n.kind == "scan"]
    for seed in range(3):
        arrays = random_inputs(diagram, seed)
        want = {"o": by_rows(arrays, axes, gate, weight)}
        assert compare(evaluate(diagram, arrays), want) < 1e-12
        assert compare(evaluate(rewritten, arrays), want) < 1e-11


@pytest.mark.parametrize("name", ["plain", "head", "average", "channel"])
@pytest.mark.parametrize("step", [1, 3, 13])
def test_every_chunk_size_means_the_same_and_moves_what_is_counted(name: str, step: int) -> None:
    axes, written, gate, weight = STEPS[name]
    rewritten = exchange(formula(axes, written))
    loops = [Loop("h", "group"), Loop("e", "group"), Loop("t", "stream")]
    kernel = make_kernel(rewritten, loops)
    assert isinstance(kernel, Kernel)
    found = replace(
        derive(formula(axes, written), memory=400),
        kernels=(kernel.tiled({"g_h": 1, "g_e": 4, "s_t": step}),),
    )
    arrays = random_inputs(rewritten, 1)
    got, moved = run_kernels(found.kernels, arrays)
    assert compare({"o": got["o"]}, {"o": by_rows(arrays, axes, gate, weight)}) < 1e-11
    assert sum(one.total for one in moved) == found.traffic


def test_heads_that_share_keys_and_sums_of_rows_have_a_chunk_form() -> None:
    """Mamba-2's shape, and a second row that is added under the same gate."""
    sizes = {"t": 90, "h": 2, "d": 16, "e": 64}
    q, k, v = tensor("q", "t d"), tensor("k", "t d"), tensor("v", "t h e")
    step, rate = apply("exp", tensor("step", "t h") * 0.3), tensor("rate", "h")
    gate = apply("exp", step * apply("abs", rate) * -1.0)
    row = step * contract(k, v, out=("t", "h", "d", "e"))
    more = contract(tensor("k2", "t d"), tensor("v2", "t h e"), out=("t", "h", "d", "e"))
    for added, boxes in ((row, 1), (row - more, 2)):
        state = recurrence("t", "h d e", lambda s, added=added: gate * s + added)
        diagram = build("own", {"o": contract(q, state, out=("t", "h", "e"))}, sizes)
        rewritten = exchange(diagram)
        chunked = [n for n in rewritten.nodes if n.kind == "scan_contract"]
        assert len(chunked) == boxes and chunked[0].factors == ("q", "k", "v")
        arrays = random_inputs(diagram, boxes)
        assert compare(evaluate(rewritten, arrays), evaluate(diagram, arrays)) < 1e-12
        assert interpreted(diagram, arrays) < BF16_ROUNDING


def test_a_wrong_pair_is_noticed() -> None:
    before, g, x = tensor(lemma.BEFORE, "t d"), tensor("g", "t"), tensor("x", "t d")
    step = (before - x) * g
    a, b = pair_of(step, before)
    assert a is not None and b is not None
    certify(step, (a, b), "t")
    for wrong in ((a, None), (None, b), (a + 1e-6, b), (a, -b), (a, b * g), (const(1.0), b)):
        with pytest.raises(InputError, match="pair"):
            certify(step, wrong, "t")


def test_brackets_that_do_not_compose_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The certificate folds runs: a composition in the other order gives other states."""
    right = lemma.composed

    def backwards(pairs: Any, rng: Any) -> Any:
        return right(pairs[::-1], rng)

    monkeypatch.setattr(lemma, "composed", backwards)
    with pytest.raises(InputError, match="differ"):
        formula(*STEPS["plain"][:2])


@pytest.mark.parametrize(
    ("step", "reason"),
    [
        (lambda s, x: apply("tanh", s) + x, "'tanh' of the state"),
        (lambda s, x: s * s + x, "'mul' of the state"),
        (lambda s, x: x / (s + 1.0), "'div' of the state"),
        (lambda s, x: apply("maximum", s, x), "'maximum' of the state"),
        (lambda s, x: s - x * contract(x, s, out=("t", "e")), "'contract' of the state"),
        (lambda s, x: tensor("y", "t d e z") + s, "a step gives axes"),
        (lambda s, x: s, "what a step adds"),
    ],
)
def test_what_composes_to_no_pair_is_refused(step: Any, reason: str) -> None:
    with pytest.raises(InputError, match=reason):
        recurrence("t", "d e", lambda s: step(s, tensor("x", "t d")))


def gated(axes: str, gate: Any = None, sizes: dict[str, int] | None = None) -> Diagram:
    """exp(-|g|) as the gate, or another."""
    make = gate or (lambda g: apply("exp", g))
    return formula(axes, lambda s, g, kv: make(g) * s + kv, sizes)


def interpreted(diagram: Diagram, arrays: dict[str, Any]) -> float:
    """The error of a derivation's tile program in bf16, run by the interpreter in fp32."""
    found = derive_on(diagram, "h200", "bf16", streams=1)
    (kernel,) = found.kernels
    assert kernel.tile["s_t"] == 64 and found.lemmas == (PAIRS,)
    (program,) = programs(kernel)
    given = {
        name: tl.round_to(program.array(name).dtype, value.astype(np.float32))
        for name, value in arrays.items()
    }
    want = evaluate(diagram, {name: np.asarray(x, np.float64) for name, x in given.items()})
    got = tl.interpret(program, given | {"o": np.full(want["o"].shape, np.nan)})
    return compare({"o": np.asarray(got["o"], np.float64)}, want)


LONG = {"t": 150, "h": 1, "d": 16, "e": 64}


@pytest.mark.parametrize("axes", ["t h", "h", "t h d"])
@pytest.mark.parametrize("decay", [0.0, 1e-4, 0.1, 30.0, 1e4])
def test_decays_near_one_and_near_nothing_keep_their_meaning(axes: str, decay: float) -> None:
    diagram = gated(axes, sizes=LONG)
    arrays = random_inputs(diagram, 2)
    arrays["g"] = -np.abs(arrays["g"]) * decay
    assert interpreted(diagram, arrays) < BF16_ROUNDING


def one_less(g: Expr) -> Expr:
    return const(1.0) - apply("sigmoid", g)


@pytest.mark.parametrize(
    ("axes", "gate", "scale"),
    [
        ("t h", lambda g: g, 1.0),  # of either sign
        ("t h", lambda g: apply("relu", g), 1.0),  # nothing, half of the time
        ("t h", lambda g: apply("sigmoid", g), 9.0),
        ("t h", one_less, 9.0),
        ("t d", one_less, 9.0),
        ("t d", lambda g: apply("sigmoid", g) * apply("exp", -apply("square", g)), 1.0),
        ("t h d", lambda g: apply("exp", g), 0.03),  # growing too
    ],
)
def test_any_gate_has_a_chunk_form(axes: str, gate: Any, scale: float) -> None:
    diagram = gated(axes, gate, LONG)
    arrays = random_inputs(diagram, 3)
    arrays["g"] *= scale
    assert interpreted(diagram, arrays) < BF16_ROUNDING


def test_wrong_weights_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    diagram = gated("t h", lambda g: apply("sigmoid", g), LONG)
    arrays = random_inputs(diagram, 4)
    right = Weights.between
    monkeypatch.setattr(Weights, "between", lambda self: right(replace(self, own=self.before)))
    assert interpreted(diagram, arrays) > 0.1


def test_a_gate_of_values_goes_step_by_step() -> None:
    """Rows would weigh each other by a number for every column of the result."""
    diagram = gated("t h e")
    assert exchange(diagram).digest == diagram.digest
    raw = gated("t d", lambda g: g)  # may be negative in one channel and not in the next
    assert exchange(raw).digest == raw.digest


def test_traffic_meets_the_proven_bound_and_less_is_refused() -> None:
    sizes = {"t": 4096, "h": 16, "d": 64, "e": 64}
    found = derive_on(gated("t h", sizes=sizes), "h200", "bf16", streams=1)
    assert found.percent_of_bound == pytest.approx(100.0)
    error, moved = found.verify()
    small = found.shrunk()
    assert error < 1e-12 and moved == small.traffic
    with pytest.raises(BoundBroken):
        check_bound(found.diagram, found.traffic - 1, found.capacity)


def test_a_memory_smaller_than_the_state_cuts_its_columns() -> None:
    """Never the axis that a chunk sums over: every nest has to give the right numbers."""
    diagram = gated("t h", sizes={"t": 256, "h": 2, "d": 64, "e": 64})
    for memory in (500, 2000, 6000):
        found = derive(diagram, memory=memory)
        error, moved = found.verify()
        assert error < 1e-12 and moved == found.shrunk().traffic
        assert "d" not in {one.axis for kernel in found.kernels for one in kernel.loops}
    cut = make_kernel(exchange(diagram), [Loop("d", "stream"), Loop("t", "stream")])
    assert isinstance(cut, Refusal) and "takes it whole" in str(cut)


def test_a_nest_of_ones_own_is_of_the_chunk_form() -> None:
    diagram = gated("t h", sizes={"t": 256, "h": 2, "d": 16, "e": 16})
    for step in (32, 64, 128):
        tiles = {"h": 1, "t": step}
        found = by_hand(diagram, {"h": "group", "t": "stream"}, tiles, 40_000)
        assert found.lemmas == (PAIRS,) and found.verify()[0] < 1e-12


def test_a_state_over_thousands_of_rows_drifts_no_further() -> None:
    """Nothing is forgotten, or almost nothing: fp32 carries it through 64 chunks."""
    for scale in (0.0, 1e-3):
        diagram = gated("t h", sizes=LONG | {"t": 4096})
        arrays = random_inputs(diagram, 5)
        arrays["g"] = -np.abs(arrays["g"]) * scale
        assert interpreted(diagram, arrays) < BF16_ROUNDING
