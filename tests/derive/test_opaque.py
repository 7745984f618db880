"""When a bound may count products one by one: never where the composed map is a polynomial."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import cache
from random import Random
from typing import Any

import pytest

from warploom.derive.bounds import germs, operands
from warploom.derive.bounds.bounds import compulsory, lower_bounds
from warploom.derive.bounds.operands import is_opaque
from warploom.derive.bounds.product_bounds import products_value, tensors
from warploom.derive.formula import frontend as f
from warploom.derive.formula.external import mpmath
from warploom.derive.formula.frontend import Expr, apply, build, contract, reduce, tensor
from warploom.derive.formula.graph import Diagram

N, WIDTH, MEMORY = 65536, 16, 2.0**13
Map = Callable[[Expr], Expr]


def attention(g: Map, n: int = N, width: int = WIDTH) -> Diagram:
    """O_i = Σ_j g(q_i·k_j) v_j."""
    q, k, v = tensor("Q", "q d"), tensor("K", "x d"), tensor("V", "x e")
    weights = g(contract(q, k, out=("q", "x")))
    out = contract(weights, v, out=("q", "e"))
    return build("probe", out, {"q": n, "x": n, "d": width, "e": width})


def counted(diagram: Diagram) -> bool:
    """Whether more than inputs and outputs is claimed, with recomputation or without."""
    return {one.name for one in lower_bounds(diagram, MEMORY)} > {"compulsory"}


def exp(s: Expr) -> Expr:
    return apply("exp", s)


def log(s: Expr) -> Expr:
    return apply("log", s)


def square(s: Expr) -> Expr:
    return apply("square", s)


def root(s: Expr) -> Expr:
    return apply("sqrt", s)


def size(s: Expr) -> Expr:
    return apply("abs", s)


def tanh(s: Expr) -> Expr:
    return apply("tanh", s)


def largest(s: Expr) -> Expr:
    return reduce("max", s, "x")


def total(s: Expr) -> Expr:
    return reduce("sum", s, "x")


POLYNOMIALS: dict[str, Map] = {
    "s": lambda s: s * 1.0,
    "|s|^2": lambda s: square(size(s)),
    "|s| |s|": lambda s: size(s) * size(s),
    "(sqrt(s^2))^2": lambda s: square(root(square(s))),
    "sqrt(s^2) sqrt(s^2)": lambda s: root(square(s)) * root(square(s)),
    "sqrt(s^4)": lambda s: root(square(square(s))),
    "sqrt(2 s^4 + 4 s^2 + 2)": lambda s: root(square(square(s)) * 2.0 + square(s) * 4.0 + 2.0),
    "log(exp(s))": lambda s: log(exp(s)),
    "log(exp(s) exp(s^2))": lambda s: log(exp(s) * exp(square(s))),
    "exp(log(s))": lambda s: exp(log(s)),
    "exp(3 log(s))": lambda s: exp(log(s) * 3.0),
    "exp(40 log(s))": lambda s: exp(log(s) * 40.0),
    "maximum(s, s)": lambda s: apply("maximum", s, s),
    "maximum(s, s + 1)": lambda s: apply("maximum", s, s + 1.0),
    "maximum(s, -s)^2": lambda s: square(apply("maximum", s, -s)),
    "relu(s) - relu(-s)": lambda s: apply("relu", s) - apply("relu", -s),
    "0 exp(s) + s": lambda s: exp(s) * 0.0 + s,
    "exp(s) - exp(s) + s": lambda s: exp(s) - exp(s * 1.0) + s,
    "exp(s) exp(-s) s": lambda s: exp(s) * exp(-s) * s,
    "exp(s) / exp(s) s": lambda s: exp(s) / exp(s + 0.0) * s,
    "(exp(log 2) - 2) exp(s) + s": lambda s: (exp(log(f.const(2.0))) - 2.0) * exp(s) + s,
    "tanh(atanh(s / 99)), atanh by log": lambda s: tanh(
        log((s * 0.01 + 1.0) / (s * -0.01 + 1.0)) * 0.5
    ),
    "log(sigmoid(s) / sigmoid(-s))": lambda s: log(apply("sigmoid", s) / apply("sigmoid", -s)),
    "1 / (1 / s)": lambda s: apply("recip", apply("recip", s)),
    "s^2 / s": lambda s: square(s) / s,
    "sin(s)^2 + cos(s)^2 + s": lambda s: square(apply("sin", s)) + square(apply("cos", s)) + s,
    "rsqrt(s)^-2": lambda s: apply("recip", square(apply("rsqrt", s))),
    "silu(s) / sigmoid(s)": lambda s: apply("silu", s) / apply("sigmoid", s),
    "s of rows of length one": lambda s: s * apply("rsqrt", total(square(s))),
    # What is no polynomial of a free s, but is one of scores with their own statistics.
    "relu(s - max s) + s": lambda s: apply("relu", s - largest(s)) + s,
    "|s - max s|": lambda s: size(s - largest(s)),
    "maximum(s, max s) s": lambda s: apply("maximum", s, largest(s)) * s,
    "exp(s) (z - z') + s^2": lambda s: exp(s) * (total(exp(s)) - total(exp(s + 0.0))) + square(s),
    "maximum(s, min s - 1)": lambda s: apply("maximum", s, reduce("min", s, "x") - 1.0),
    "exp(max(s - max s, 0)) s": lambda s: exp(apply("relu", s - largest(s))) * s,
}


@pytest.mark.parametrize("name", POLYNOMIALS)
def test_no_bound_where_the_composed_map_is_a_polynomial(name: str) -> None:
    diagram = attention(POLYNOMIALS[name])
    assert not counted(diagram)
    assert not tensors(diagram)


def test_the_reassociated_square_beats_no_bound() -> None:
    """Σ_j (q·k_j)² v_j is (q ⊗ q)·Σ_j (k_j ⊗ k_j) v_jᵀ: one pass over K and V, one over Q."""
    state, rows = WIDTH**2 * WIDTH, WIDTH**2 + 4 * WIDTH
    moved = N * 4 * WIDTH
    assert state + rows <= MEMORY
    for g in ("|s|^2", "(sqrt(s^2))^2"):
        best = lower_bounds(attention(POLYNOMIALS[g]), MEMORY)[0]
        assert best.value <= moved
    claimed = lower_bounds(attention(exp), MEMORY)[0].value
    assert claimed > 5 * moved  # what was said of the square, too


OTHERS: dict[str, Map] = {
    "softmax": lambda s: f.softmax(s, "x"),
    "softmax of s / 1000": lambda s: f.softmax(s * 1e-3, "x"),
    "softmax, unshifted": lambda s: exp(s) / total(exp(s)),
    "softmax by logsumexp": lambda s: exp(s - f.logsumexp(s, "x")),
    "causal softmax": lambda s: f.softmax(f.causal(s, "q", "x"), "x"),
    "window softmax": lambda s: f.softmax(f.causal(s, "q", "x", 4096), "x"),
    "soft cap": lambda s: f.softmax(tanh(s * 0.02) * 50.0, "x"),
    "with a bias": lambda s: f.softmax(s + tensor("bias", "q x"), "x"),
    "gaussian": lambda s: exp(-square(s)),
    "relu": lambda s: apply("relu", s),
    "relu squared": lambda s: square(apply("relu", s)),
    "maximum(s, 1)": lambda s: apply("maximum", s, 1.0),
    "|s|": size,
    "sqrt(s^2)": lambda s: root(square(s)),
    "sqrt": root,
    "sigmoid": lambda s: apply("sigmoid", s),
    "sigmoid, written out": lambda s: apply("recip", exp(-s) + 1.0),
    "silu": lambda s: apply("silu", s),
    "silu, written out": lambda s: s * apply("sigmoid", s),
    "gelu": lambda s: apply("gelu", s),
    "tanh": tanh,
    "sine": lambda s: apply("sin", s),
    "cosine of squares": lambda s: apply("cos", square(s)),
    "1 / (1 + s^2)": lambda s: apply("recip", square(s) + 1.0),
    "exp of |s - max s|": lambda s: exp(-size(s - largest(s))),
    "cube of an exponential": lambda s: square(exp(s)) * 0.5 + s,
}


@pytest.mark.parametrize("name", OTHERS)
def test_functions_that_are_no_polynomials_keep_the_bound(name: str) -> None:
    assert counted(attention(OTHERS[name]))


def test_two_products_that_cancel_are_not_taken_for_functions_of_one() -> None:
    q, k, v = tensor("Q", "q d"), tensor("K", "x d"), tensor("V", "x e")
    first, second = (contract(q, one, out=("q", "x")) for one in (k, k + 0.0))
    for g in (exp(first - second), exp(first - second) + first):
        out = contract(g, v, out=("q", "e"))
        assert not counted(build("probe", out, {"q": N, "x": N, "d": WIDTH, "e": WIDTH}))


def test_powers_separate_where_the_width_is_one_and_one_key_has_weight_one() -> None:
    assert not counted(attention(size, width=1))
    assert not counted(attention(exp, width=1))  # cautious: this one does not separate
    single = attention(OTHERS["softmax"]).resized({"x": 1})
    assert not tensors(single)


def test_every_sum_over_the_scores_has_to_need_them() -> None:
    """A cumulative sum and a plain one are linear, whatever an exponential beside them is."""
    for op in ("sum", "mean"):
        spoilt = attention(lambda s, op=op: exp(s) * reduce(op, s, "x"))
        assert not counted(spoilt)
    scan = attention(lambda s: exp(s) + Expr("cumsum", (s,), s.axes, ("x",)))
    assert not counted(scan)


AB = {"a": 4096, "b": 4096, "c": 4096}


def product(left: Expr | None = None, right: Expr | None = None) -> Expr:
    return contract(left or tensor("A", "a b"), right or tensor("B", "b c"), out=("a", "c"))


RESULTS: dict[str, tuple[Expr, bool]] = {
    "AB": (product(), True),
    "gelu(AB)": (apply("gelu", product()), True),
    "(AB)^2": (square(product()), True),
    "AB / |AB|": (product() / root(reduce("sum", square(product()), "c")), True),
    "0 AB + C": (product() * 0.0 + tensor("C", "a c"), False),
    "AB - A(B + 0)": (product() - product(right=tensor("B", "b c") + 0.0), False),
    "relu(AB - max AB)": (apply("relu", product() - reduce("max", product(), "c")), False),
    "(0 A + u)B": (product(tensor("A", "a b") * 0.0 + tensor("u", "a")), False),
    "(A - (A + 0) + u)B": (
        product(tensor("A", "a b") - (tensor("A", "a b") + 0.0) + tensor("u", "a")),
        False,
    ),
    "relu(A - max A)B": (
        product(apply("relu", tensor("A", "a b") - reduce("max", tensor("A", "a b"), "b"))),
        False,
    ),
    "exp(A)B": (product(exp(tensor("A", "a b"))), True),
}


@pytest.mark.parametrize("name", RESULTS)
def test_matrix_products_are_counted_where_the_output_is_a_function_of_them(name: str) -> None:
    result, wanted = RESULTS[name]
    lengths = dict.fromkeys("abc", 4096)
    assert counted(build("probe", result, lengths)) is wanted


def test_inputs_that_change_nothing_need_not_be_read() -> None:
    a, b = tensor("A", "a b"), tensor("B", "a b")
    size_of = 4096.0**2
    sizes = {"a": 4096, "b": 4096}
    assert compulsory(build("sum", a + b, sizes)).value == 3 * size_of
    assert compulsory(build("one", a + b * 0.0, sizes)).value == 2 * size_of
    assert compulsory(build("root", root(a) + b - b, sizes)).value == 2 * size_of
    single = attention(OTHERS["softmax"], 4096).resized({"x": 1})  # one key: its weight is 1
    assert compulsory(single).value == WIDTH + 4096 * WIDTH


def test_products_that_end_in_nothing_are_not_counted() -> None:
    q, k, v = tensor("Q", "q d"), tensor("K", "x d"), tensor("V", "x e")
    weights = f.softmax(contract(q, k, out=("q", "x")), "x")
    out = contract(weights, v, out=("q", "e"))
    sizes = {"q": N, "x": N, "d": WIDTH, "e": WIDTH}
    assert counted(build("kept", out + tensor("C", "q e"), sizes))
    assert not counted(build("lost", out * 0.0 + tensor("C", "q e"), sizes))


def test_values_are_brought_to_pairs_only_where_pairs_are_multiplied_by_them() -> None:
    """Σ_i P_ij is summed first here: V is needed once a column, not once a pair."""
    q, k, v = tensor("Q", "q d"), tensor("K", "x d"), tensor("V", "x e")
    weights = apply("relu", contract(q, k, out=("q", "x")))
    sizes = {"q": N, "x": N, "d": WIDTH}

    def sandwich(result: Expr, **more: int) -> float:
        found = lower_bounds(build("probe", result, {**sizes, **more}), MEMORY)
        return next(one.value for one in found if one.name == "sandwich")

    alone = sandwich(reduce("sum", weights, "q"))
    summed = sandwich(contract(reduce("sum", weights, "q"), v, out=("e",)), e=8 * WIDTH)
    assert summed == alone
    assert sandwich(contract(weights, v, out=("q", "e")), e=8 * WIDTH) > 2 * alone


def test_sums_are_merged_through_what_only_looks_like_a_function() -> None:
    """log(exp(A B)) + C D is one running sum; tanh(A B) + C D is not."""
    left, right = product(), contract(tensor("C", "a d"), tensor("D", "d c"), out=("a", "c"))
    sizes = {**AB, "d": 4096}
    hidden = products_value(build("hidden", log(exp(left)) + right, sizes), MEMORY)
    assert len(hidden[1]) == 1
    apart = products_value(build("apart", tanh(left) + right, sizes), MEMORY)
    assert len(apart[1]) == 2


# --- an oracle that shares nothing: interpolation in 200 digits -----------------------------------

STEPS: dict[str, tuple[Map, Callable[..., Any]]] = {
    "square": (square, lambda s: s * s),
    "abs": (size, abs),
    "relu": (lambda s: apply("relu", s), lambda s: max(s, mpmath().mpf(0))),
    "exp": (exp, lambda s: mpmath().exp(s)),
    "log": (log, lambda s: mpmath().log(s)),
    "sqrt": (root, lambda s: mpmath().sqrt(s)),
    "tanh": (tanh, lambda s: mpmath().tanh(s)),
    "recip": (lambda s: apply("recip", s), lambda s: 1 / s),
    "line": (lambda s: s * 2.0 - 0.5, lambda s: s * 2 - mpmath().mpf(1) / 2),
    "minus": (lambda s: -s, lambda s: -s),
    "self": (lambda s: s + square(s), lambda s: s + s * s),
    "cosh": (lambda s: exp(s) + exp(-s), lambda s: mpmath().exp(s) + mpmath().exp(-s)),
    "twice": (lambda s: s * s * 0.5, lambda s: s * s / 2),
    "even": (lambda s: apply("maximum", s, -s), abs),
}


@cache
def interpolation() -> tuple[list[Any], list[Any], list[list[Any]]]:
    """(33 nodes on (-3, 3), points between, the weight of each node at each point)."""
    mp = mpmath()
    with mp.workdps(200):
        nodes = [mp.mpf(3) * mp.cos(mp.pi * (2 * k + 1) / 66) for k in range(33)]
        between = [mp.mpf(n) / 7 for n in range(-20, 21, 3)]
        weights = [
            [mp.fprod((s - b) / (a - b) for b in nodes if b is not a) for a in nodes]
            for s in between
        ]
        return nodes, between, weights


def misfit(g: Callable[[Any], Any]) -> float | None:
    """Largest relative distance of a function from its interpolation by a polynomial of degree 32;
    None where it is not real."""
    mp = mpmath()
    nodes, between, weights = interpolation()
    with mp.workdps(200):
        try:
            given, wanted = [g(s) for s in nodes], [g(s) for s in between]
        except (ZeroDivisionError, ValueError, TypeError):  # complex numbers have no order
            return None
        if any(isinstance(value, mp.mpc) for value in (*given, *wanted)):
            return None
        scale = max(abs(value) for value in (*given, *wanted)) or 1
        return max(
            float(abs(mp.fdot(row, given) - value) / scale)
            for row, value in zip(weights, wanted, strict=True)
        )


def judged(samples: int) -> tuple[int, int, list[list[str]]]:
    """(compositions called no polynomial, those that interpolate exactly, those that are both)."""
    rng = Random(11)
    claimed, exact, wrong = 0, 0, list[list[str]]()
    for _ in range(samples):
        words = [rng.choice([*STEPS]) for _ in range(rng.randint(1, 4))]
        if words.count("exp") + words.count("cosh") > 2:
            continue  # numbers of more digits than fit a computer
        gap = misfit(lambda s, words=words: composed(words, lambda word, s: STEPS[word][1](s), s))
        if gap is None:
            continue
        diagram = attention(
            lambda s, words=words: composed(words, lambda word, s: STEPS[word][0](s), s), 64
        )
        (node,) = [one for one in diagram.nodes if one.kind == "contract" and "d" in one.over]
        opaque = is_opaque(diagram, node)
        claimed, exact = claimed + opaque, exact + (gap < 1e-100)
        wrong += [words] if opaque and gap < 1e-100 else []
    return claimed, exact, wrong


def composed(words: list[str], step: Callable[[str, Any], Any], s: Any) -> Any:
    """One step after another."""
    for word in words:
        s = step(word, s)
    return s


def test_nothing_that_interpolates_exactly_is_called_no_polynomial() -> None:
    claimed, exact, wrong = judged(120)
    assert claimed >= 30 and exact >= 16
    assert not wrong


def test_two_functions_that_may_cancel_are_not_known() -> None:
    """1/s - 1/s, exp(s) exp(-s): only an algebraic function leaves a transcendental one so."""
    kinds = (germs.ALGEBRAIC, germs.TRANSCENDENTAL, germs.WAVE, germs.BOUNDED, germs.OTHER)
    for name, a, b in itertools.product(("add", "sub", "mul"), kinds, kinds):
        known = germs.image(name, (a, b))
        if {a.kind, b.kind} == {"algebraic", "transcendental"}:
            assert known is not None and known.kind == "transcendental"
        else:
            assert known is None, (name, a, b)


def test_planted_faults_of_both_halves_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operands, "RESIDUAL", -1.0)  # every curve is called no polynomial
    is_opaque.cache_clear()
    assert counted(attention(POLYNOMIALS["|s - max s|"]))
    assert not judged(40)[2]
    for name, germ in (("square", germs.ALGEBRAIC), ("neg", germs.WAVE)):
        with monkeypatch.context() as planted:
            planted.setitem(germs.RULES, name, lambda a, germ=germ: germ)
            is_opaque.cache_clear()
            assert judged(120)[2], name
    monkeypatch.undo()
    monkeypatch.setattr(operands, "_leaves_polynomials", lambda *_: True)
    is_opaque.cache_clear()
    assert counted(attention(POLYNOMIALS["exp(40 log(s))"]))
    is_opaque.cache_clear()
