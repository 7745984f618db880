"""Terms, both front ends, and the normal form they meet in."""

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
from warploom.derive.formula.terms import (
    Box,
    Identity,
    Weave,
    compile_term,
    copy,
    of_diagram,
    permute,
)
from warploom.errors import InputError

DOT = Box("contract", (("d",), ("d",)), (), ("d",))
MATMUL = Weave(Weave(DOT, "c", (False, True)), "a", (True, False))


def test_a_dot_product_weaved_twice_is_a_matmul() -> None:
    assert MATMUL.dom == (("a", "d"), ("c", "d"))
    assert MATMUL.cod == (("a", "c"),)
    diagram = compile_term(MATMUL, ("A", "B"), {"a": 3, "c": 4, "d": 5})
    arrays = random_inputs(diagram)
    got = evaluate(diagram, arrays)[diagram.outputs[0]]
    assert np.allclose(got, arrays["A"] @ arrays["B"].T)


def test_copy_permute_and_parallel_compose() -> None:
    square = Weave(Box("mul", ((), ()), ()), "a", (True, True))
    twice = copy(("a",)) >> square
    term = (
        (twice & Identity((("a",),)))
        >> permute((("a",), ("a",)), (1, 0))
        >> Weave(Box("sub", ((), ()), ()), "a", (True, True))
    )
    diagram = compile_term(term, ("X", "Y"), {"a": 6})
    arrays = random_inputs(diagram)
    got = evaluate(diagram, arrays)[diagram.outputs[0]]
    assert np.allclose(got, arrays["Y"] - arrays["X"] ** 2)


@pytest.mark.parametrize("name", [entry.name for entry in FORMULAS])
def test_a_diagram_read_as_a_term_means_the_same(name: str) -> None:
    diagram = small(name, 8)
    names = [array.name for array in diagram.inputs]
    again = compile_term(of_diagram(diagram), names, diagram.size)
    arrays = random_inputs(diagram)
    want = list(evaluate(diagram, arrays).values())
    got = evaluate(again, arrays)
    for value, reference, axes in zip(
        (got[o] for o in again.outputs), want, map(diagram.axes_of, diagram.outputs), strict=True
    ):
        order = [again.axes_of(again.outputs[0]).index(a) for a in axes] if len(want) == 1 else None
        shaped = np.transpose(value, order) if order else value
        assert np.allclose(shaped, reference)


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


BAD_TERMS = (
    (lambda: MATMUL >> MATMUL, "sequence"),
    (lambda: Weave(DOT, "d", (True, True)), "already there"),
    (lambda: Weave(DOT, "a", (False, False)), "at least one"),
    (lambda: Weave(DOT, "a", (True,)), "mask"),
    (lambda: Box("exp", ((), ()), ()), "takes 1"),
    (lambda: permute((("a",), ("b",)), (0, 0)), "no order"),
    (lambda: Box("expp", ((),), ()), "nearest"),
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


@pytest.mark.parametrize(("make", "says"), BAD_TERMS)
def test_bad_terms_are_refused_with_the_reason(make: Callable[[], object], says: str) -> None:
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
