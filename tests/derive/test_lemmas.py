"""Streamability: lemmas found, lemmas registered, their exact tests, and what must be refused."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from fractions import Fraction
from random import Random

import numpy as np
import pytest
from tests.derive.cases import small

from warploom.derive.cost.work import operations
from warploom.derive.formula import frontend as f
from warploom.derive.formula.evaluate import compare, evaluate, random_inputs
from warploom.derive.formula.external import sympy
from warploom.derive.formula.frontend import build, tensor
from warploom.derive.formula.graph import Diagram
from warploom.derive.formula.library import formula
from warploom.derive.kernel import legal
from warploom.derive.kernel.kernel import Kernel, Loop
from warploom.derive.kernel.legal import make_kernel
from warploom.derive.lemmas import certify
from warploom.derive.lemmas.cascade import Refusal, dependent, reductions, scalar_form
from warploom.derive.lemmas.discover import Lemma, Term, discover
from warploom.derive.lemmas.lemmas import REGISTERED, Registered
from warploom.derive.lemmas.streaming import make_streamable, monoid_of

CASCADES = (
    ("attention", "x"),
    ("softmax", "x"),
    ("variance", "x"),
    ("rmsnorm_matmul", "d"),
    ("layernorm_matmul", "d"),
    ("spherical", "x"),
    ("logsumexp", "x"),
    ("mla", "x"),
    ("cross_entropy", "v"),
)


def found(diagram: Diagram, axis: str) -> list[tuple[Lemma, dict[str, str]]]:
    """Lemmas discovered for every dependent reduction of the diagram as written."""
    sources = {n.name: monoid_of(n) for n in reductions(diagram, axis)}
    result: list[tuple[Lemma, dict[str, str]]] = []
    for node in dependent(diagram, axis):
        scalar = scalar_form(diagram, node, axis)
        assert not isinstance(scalar, Refusal)
        lemma = discover(scalar, sources)
        assert not isinstance(lemma, Refusal), str(lemma)
        result.append((lemma, sources))
    return result


def law_error(lemma: Lemma, sources: Mapping[str, str], trials: int = 8, seed: int = 3) -> float:
    """Largest relative float64 error of the fold law and of the merge law on random streams."""
    rng = np.random.default_rng(seed)
    worst = 0.0
    for _ in range(trials):
        length = int(rng.integers(6, 40))
        stream = {n: rng.standard_normal(length) + 2.0 for n in lemma.scalar.leaves}
        fixed = {n: rng.uniform(0.5, 1.5) for n in lemma.scalar.parameters}
        cuts = sorted(rng.choice(np.arange(1, length), size=3, replace=False).tolist())
        want = certify.direct(lemma, sources, stream, fixed)
        folded = certify.fold(lemma, sources, stream, fixed, cuts)
        parts = np.split(np.arange(length), cuts)
        states = [
            certify.lift(lemma, sources, {n: v[p] for n, v in stream.items()}, fixed) for p in parts
        ]
        left = certify.merge(lemma, sources, states[0], states[1], fixed)
        right = certify.merge(lemma, sources, states[2], states[3], fixed)
        merged = certify.finish(lemma, certify.merge(lemma, sources, left, right, fixed), fixed)
        for got in (folded, merged):
            worst = max(worst, float(abs(got - want) / (abs(want) + 1e-300)))
    return worst


@pytest.mark.parametrize(("name", "axis"), CASCADES)
def test_every_discovered_lemma_is_exact_and_obeys_fold_and_merge(name: str, axis: str) -> None:
    for lemma, sources in found(formula(name), axis):
        assert certify.identity_error(lemma, samples=8, seed=99) < 1e-50
        assert law_error(lemma, sources, trials=12, seed=17) < 1e-12
        assert certify.is_stable(lemma, sources)


def test_online_softmax_is_found_not_looked_up() -> None:
    lemmas = [lemma for lemma, _ in found(formula("attention"), "x")]
    assert not any(lemma.registered for lemma in lemmas)
    contraction = lemmas[1].terms[0]
    assert "exp(-new_v_m + old_v_m)" in str(contraction.matrix)
    assert str(contraction.factor) == "1/v_z"


@pytest.mark.parametrize("inner", ["max", "mean", "sum"])
@pytest.mark.parametrize("outer", ["max", "min"])
def test_the_maximum_of_what_a_base_shifts_moves_with_it(inner: str, outer: str) -> None:
    """max (x - b) = max (x) - b: a correction that is added, where those of sums multiply."""
    x = tensor("X", "m x")
    ((lemma, sources),) = found(cascade_of(f.reduce(outer, x - f.reduce(inner, x, "x"), "x")), "x")
    assert [term.join for term in lemma.terms] == ["add"]
    assert certify.identity_error(lemma, samples=8, seed=99) < 1e-50
    assert law_error(lemma, sources) < 1e-12
    assert certify.is_stable(lemma, sources)
    (term,) = lemma.terms
    wrong = replace(lemma, terms=(replace(term, matrix=((-term.matrix[0][0],),)),))
    assert certify.identity_error(wrong) > 1e-6 and law_error(wrong, sources) > 1e-3


def test_welford_is_found_and_pruned_to_one_accumulator() -> None:
    made = make_streamable(formula("variance"), "x", True, False)
    assert not isinstance(made, Refusal)
    (correction,) = made.corrections
    assert correction.targets == ("out",)
    assert correction.shift == ("(new_v_mu - old_v_mu)**2",)


def test_unstable_algebra_is_rejected() -> None:
    """Σ exp(x) and mean x² - (mean x)² are exact identities and useless streams."""
    (lemma, sources), *_ = found(formula("softmax"), "x")
    sp = sympy()
    x, m = sp.Symbol("v_X", real=True), sp.Symbol("v_m", real=True)
    naive = replace(lemma, terms=(Term(sp.exp(-m), (sp.exp(x),), (), "mul"),))
    assert certify.identity_error(naive) < certify.EXACT
    assert not certify.is_stable(naive, sources)
    ((welford, means),) = found(formula("variance"), "x")
    mu = sp.Symbol("v_mu", real=True)
    terms = (
        Term(sp.Integer(1), (x**2,), (), "mul"),
        Term(-2 * mu, (x,), (), "mul"),
        Term(mu**2, (sp.Integer(1),), (), "mul"),
    )
    moments = replace(welford, terms=terms)
    assert certify.identity_error(moments) < certify.EXACT
    assert not certify.is_stable(moments, means)


def test_stability_is_tested_whatever_the_order_of_the_operands() -> None:
    """Were the maximum modelled over the values, two-pass evaluation would overflow as well, and
    exp(-m) Σ v exp(x) would pass."""
    x, v = tensor("X", "m x"), tensor("V", "m x")
    weight = f.apply("exp", x - f.reduce("max", x, "x"))
    for body in (v * weight, weight * v):
        made = make_streamable(cascade_of(f.reduce("sum", body, "x")), "x", True, False)
        assert not isinstance(made, Refusal)
        (lemma,) = made.lemmas
        assert lemma.terms[0].matrix and "exp" not in str(lemma.terms[0].factor)


@pytest.mark.parametrize("name", ["attention", "mlp", "layernorm_matmul", "cross_entropy"])
def test_a_split_axis_that_is_streamed_is_rewritten_once(name: str) -> None:
    diagram = formula(name)
    axis = {"attention": "x", "mlp": "h", "layernorm_matmul": "d", "cross_entropy": "v"}[name]
    for lemmas in (True, False):
        once = make_kernel(diagram, [Loop(axis, "stream")], lemmas=lemmas)
        both = make_kernel(diagram, [Loop(axis, "split"), Loop(axis, "stream")], lemmas=lemmas)
        assert not isinstance(once, Refusal) and not isinstance(both, Refusal)
        assert both.body == once.body and both.corrections == once.corrections
        operations(both)


def test_a_planted_wrong_correction_fails_every_check() -> None:
    (lemma, sources), *_ = found(formula("softmax"), "x")
    sp = sympy()
    wrong = replace(lemma, terms=(replace(lemma.terms[0], matrix=((sp.Integer(1),),)),))
    assert certify.identity_error(wrong) > 1e-6
    assert law_error(wrong, sources) > 1e-6


def test_every_half_of_an_identity_and_both_laws_are_tested(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (lemma, sources), *_ = found(formula("softmax"), "x")
    fold = certify.fold
    twice = replace(lemma, terms=(replace(lemma.terms[0], factor=2 * lemma.terms[0].factor),))
    assert certify.motion_error(twice.scalar, twice.terms) < certify.EXACT, (
        "the correction is right"
    )
    assert certify.identity_error(twice) > 1e-6
    assert law_error(lemma, sources) < 1e-12
    with monkeypatch.context() as planted:
        planted.setattr(certify, "fold", lambda *given: 1.01 * fold(*given))
        assert law_error(lemma, sources) > 1e-3
    monkeypatch.setattr(certify, "merge", lambda *given: given[2])
    assert law_error(lemma, sources) > 1e-3, "one part is lost"


def test_what_is_nearly_an_identity_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """exp(x - m) with a correction that is a millionth off, to be found in the register."""
    body = cascade_of(
        f.reduce("sum", f.apply("exp", (x := tensor("X", "m x")) - f.reduce("max", x, "x")), "x")
    )
    for correction, right in (("exp(old_0 - new_0)", True), ("1.000001*exp(old_0 - new_0)", False)):
        entry = replace(REGISTERED[0], correction=correction)
        monkeypatch.setattr("warploom.derive.lemmas.lemmas.REGISTERED", (entry,))
        make_streamable.cache_clear()
        made = make_streamable(body, "x", search=False)
        assert isinstance(made, Refusal) != right, correction
    make_streamable.cache_clear()


def test_without_lemmas_streaming_softmax_is_refused() -> None:
    answer = make_streamable(formula("attention"), "x", False, False)
    assert isinstance(answer, Refusal)
    assert answer.rule == "G8 lemma" and answer.axis == "x" and answer.box == "z"


@pytest.mark.parametrize("lemmas", [True, False])
@pytest.mark.parametrize(("name", "axis"), CASCADES)
def test_rewriting_keeps_the_meaning(name: str, axis: str, lemmas: bool) -> None:
    diagram = small(name)
    made = make_streamable(diagram, axis, True, lemmas)
    assert not isinstance(made, Refusal)
    arrays = random_inputs(diagram)
    assert compare(evaluate(made.body, arrays), evaluate(diagram, arrays)) < 1e-12


def cascade_of(body: f.Expr) -> Diagram:
    """A small diagram of one formula over axis x."""
    return build("probe", body, {"m": 3, "x": 9})


def test_new_cascades_nobody_registered() -> None:
    x, v = tensor("X", "m x"), tensor("V", "m x")
    top = f.reduce("max", x, "x")
    total = f.reduce("sum", f.apply("exp", x - top), "x")
    cases = {
        # the numerator of an entropy: needs two running sums
        "weighted by the centred score": f.reduce(
            "sum", f.apply("exp", x - top) * (x - top) * v, "x"
        ),
        "quantised sum": f.reduce("sum", x / f.reduce("max", f.apply("abs", x), "x") * v, "x"),
        "shifted maximum": f.reduce("max", x - f.reduce("sum", v, "x"), "x"),
        "trigonometric": f.reduce("sum", v / (total * total), "x"),
        "third moment": f.reduce("mean", (x - f.reduce("mean", x, "x")) * v, "x"),
    }
    for name, body in cases.items():
        diagram = cascade_of(body)
        made = make_streamable(diagram, "x")
        assert not isinstance(made, Refusal), f"{name}: {made}"
        arrays = random_inputs(diagram)
        assert compare(evaluate(made.body, arrays), evaluate(diagram, arrays)) < 1e-12


def test_what_has_no_finite_state_is_refused() -> None:
    x = tensor("X", "m x")
    mean = f.reduce("mean", x, "x")
    for body in (f.apply("sin", x * mean), f.apply("relu", x - mean), f.apply("tanh", x + mean)):
        answer = make_streamable(cascade_of(f.reduce("sum", body, "x")), "x")
        assert isinstance(answer, Refusal)
        assert answer.rule == "G8 lemma"
        assert "earlier kernel" in answer.nearest


@pytest.mark.parametrize("entry", REGISTERED, ids=lambda e: e.name)
def test_registered_identities_hold_symbolically_and_exactly(entry: Registered) -> None:
    sp = sympy()
    rng = Random(3)
    for left, right in entry.identities:
        a, b = sp.sympify(left), sp.sympify(right)
        assert sp.simplify(a - b) == 0
        point = {s: sp.Rational(rng.randint(1, 90), 37) for s in a.free_symbols | b.free_symbols}
        assert abs((a - b).subs(point).evalf(60)) < 1e-50
        planted = b * 2 + 1
        assert sp.simplify(a - planted) != 0


def compose(
    first: tuple[Fraction, Fraction], second: tuple[Fraction, Fraction]
) -> tuple[Fraction, Fraction]:
    """h -> a2 (a1 h + b1) + b2."""
    return second[0] * first[0], second[0] * first[1] + second[1]


def exact_merges(x: list[Fraction], y: list[Fraction]) -> dict[str, tuple[object, object]]:
    """(whole, from parts) of every seed on exact rationals; top-k with k = 3, scan on pairs."""
    n, k = len(x), len(y)

    def mean(v: list[Fraction]) -> Fraction:
        return sum(v, Fraction(0)) / len(v)

    def m2(v: list[Fraction]) -> Fraction:
        return sum(((e - mean(v)) ** 2 for e in v), Fraction(0))

    def top(v: list[Fraction]) -> list[Fraction]:
        return sorted(v, reverse=True)[:3]

    def arg(v: list[Fraction]) -> int:
        return max(range(len(v)), key=lambda i: (v[i], -i))

    def scan(v: list[Fraction]) -> tuple[Fraction, Fraction]:
        state = (Fraction(1), Fraction(0))
        for e in v:
            state = compose(state, (e, e + 1))
        return state

    both = x + y
    return {
        "dot product": (sum(both), sum(x) + sum(y)),
        "maximum": (max(both), max(top(x)[0], top(y)[0])),
        "minimum": (min(both), min(sorted(x)[0], sorted(y)[0])),
        "mean (weighted)": (mean(both), mean(x) + (mean(y) - mean(x)) * Fraction(k, n + k)),
        "Welford / Chan": (
            m2(both),
            m2(x) + m2(y) + (mean(y) - mean(x)) ** 2 * Fraction(n * k, n + k),
        ),
        "top-k": (top(both), top(top(x) + top(y))),
        "argmax": (arg(both), arg(x) if max(x) >= max(y) else n + arg(y)),
        "affine scan": (scan(both), compose(scan(x), scan(y))),
    }


def test_seed_merges_are_exact_on_rationals() -> None:
    rng = Random(5)
    for _ in range(50):
        x = [Fraction(rng.randint(-50, 50), rng.randint(1, 9)) for _ in range(rng.randint(3, 9))]
        y = [Fraction(rng.randint(-50, 50), rng.randint(1, 9)) for _ in range(rng.randint(3, 9))]
        merges = exact_merges(x, y)
        for name, (whole, parts) in merges.items():
            assert whole == parts, name
        a, b = (
            np.logaddexp.reduce([float(v) for v in x]),
            np.logaddexp.reduce([float(v) for v in y]),
        )
        whole = np.logaddexp.reduce([float(v) for v in x + y])
        assert abs(max(a, b) + np.log1p(np.exp(-abs(a - b))) - whole) < 1e-12


def test_refusals_name_box_axis_rule_and_a_fix() -> None:
    attention = formula("attention")
    cases = (
        (legal.group(attention, "x"), "G1", "x", "stream 'x' instead"),
        (legal.group(attention, "y"), "G1", "y", "axes are"),
        (make_kernel(formula("softmax"), [Loop("x", "stream")]), "G2", "x", "cut the kernel"),
        (make_streamable(attention, "x", False, False), "G8", "x", "register a lemma"),
        (legal.fuse(attention, ["contract", "e"]), "G3", "", "add"),
        (legal.fuse(attention, ["nobody"]), "G3", "", "boxes"),
        (legal.group(formula("linear_attention"), "t"), "G1", "t", "stream"),
        (legal.group(formula("convolution"), "i"), "G1", "i", "partition"),
    )
    for answer, rule, axis, fix in cases:
        assert isinstance(answer, Refusal)
        assert answer.rule.startswith(rule)
        assert answer.axis == axis
        assert fix in str(answer) and "\n" not in str(answer)
    for kind in ("stream", "split"):
        assert isinstance(make_kernel(attention, [Loop("x", kind)]), Kernel)
    assert legal.group(attention, "q") is None
    assert legal.fuse(attention, [n.name for n in attention.nodes]) is None
