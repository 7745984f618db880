"""Both front ends, and the normal form they meet in."""

from __future__ import annotations

import json
from collections.abc import Callable

import numpy as np
import pytest
from tests.derive.cases import small

from warploom.derive.formula import frontend as f
from warploom.derive.formula.evaluate import compare, evaluate, random_inputs
from warploom.derive.formula.frontend import build, tensor
from warploom.derive.formula.graph import Diagram
from warploom.derive.formula.library import FORMULAS, formula
from warploom.errors import InputError


@pytest.mark.parametrize("name", [entry.name for entry in FORMULAS])
def test_json_round_trip(name: str) -> None:
    diagram = formula(name)
    again = Diagram.from_json(json.loads(json.dumps(diagram.to_json())))
    assert again == diagram
    assert again.digest == diagram.digest


def reference_attention(q: np.ndarray, k: np.ndarray, v: np.ndarray, scale: float) -> np.ndarray:
    """Softmax attention written out, sharing nothing with the package."""
    scores = scale * q @ k.T
    weights = np.exp(scores - scores.max(1, keepdims=True))
    return (weights / weights.sum(1, keepdims=True)) @ v


def test_python_operators_and_einsum_agree_with_numpy() -> None:
    q, k, v = tensor("Q", "q d"), tensor("K", "x d"), tensor("V", "x e")
    sizes = {"q": 5, "x": 7, "d": 3, "e": 4}
    by_operators = build("a", f.softmax(q @ k.T * 0.5) @ v, sizes)
    scores = f.einsum("q d, x d -> q x", q, k) * 0.5
    by_einsum = build("a", f.einsum("q x, x e -> q e", f.softmax(scores), v), sizes)
    assert by_operators.digest == by_einsum.digest
    arrays = random_inputs(by_operators)
    want = reference_attention(arrays["Q"], arrays["K"], arrays["V"], 0.5)
    assert compare(evaluate(by_operators, arrays), {"out": want}) < 1e-14


def test_the_same_axis_name_on_wires_that_never_meet_is_two_axes() -> None:
    q, k, v = tensor("Q", "q d"), tensor("K", "x d"), tensor("V", "x d")
    diagram = build("a", f.softmax(q @ k.T) @ v, {"q": 4, "x": 4, "d": 8})
    assert diagram.axes_of("V") == ("x", "d2")
    assert diagram.size["d2"] == 8


def test_equal_expressions_are_one_box() -> None:
    x = tensor("X", "m d")
    diagram = build("a", f.apply("exp", x) + f.apply("exp", x))
    assert sum(node.op == "exp" for node in diagram.nodes) == 1


BAD_FORMULAS = (
    (lambda: tensor("Q", "q d") @ tensor("K", "x d"), "transpose one side"),
    (lambda: tensor("Q", "q q"), "repeats"),
    (lambda: f.reduce("sum", tensor("Q", "q d"), "x"), "has axes"),
    (lambda: f.einsum("q d -> q", tensor("Q", "d q")), "write them so"),
    (lambda: f.einsum("q d, q", tensor("Q", "q d")), "->"),
    (lambda: f.causal(tensor("Q", "q d"), "q", "x"), "mask over"),
    (lambda: build("a", tensor("Q", "q d") * 2.0, {"y": 3}), "size given"),
    (lambda: formula("atention"), "attention"),
    (lambda: formula("attention").resized({"y": 4}), "its axes are"),
    (lambda: formula("attention").resized({"q": 0}), "at least 1"),
    (lambda: Diagram.from_json({"schema": "x"}), "expected"),
)


@pytest.mark.parametrize(("make", "says"), BAD_FORMULAS)
def test_bad_formulas_are_refused_with_the_reason(make: Callable[[], object], says: str) -> None:
    with pytest.raises(InputError) as refused:
        make()
    assert says in str(refused.value)
    assert "\n" not in str(refused.value)


def test_wrong_arrays_are_refused() -> None:
    diagram = small("attention")
    arrays = random_inputs(diagram)
    with pytest.raises(InputError, match="missing"):
        evaluate(diagram, {k: v for k, v in arrays.items() if k != "V"})
    with pytest.raises(InputError, match="shape"):
        evaluate(diagram, {**arrays, "V": arrays["V"][:, :2]})
