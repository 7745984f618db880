"""Finding the lemma that makes a cascade streamable, instead of looking it up.

For a dependent reduction ⊕ over F(r, leaves) two algebraic facts suffice, and both are searched:

* *deferral*: F = h(r) ⊗ G(leaves) with ⊗ distributing over ⊕. Stream G, apply h once at the end
  (the division by the softmax normaliser, the 1/rms of a normalised matmul).
* *correction*: a basis f_1..f_k (f_1 = F) with f(r', leaves) = C(r, r') f(r, leaves). The running
  state moves from base r to r' by the k x k matrix C: `state' = C(r, r') state ⊕ Σ f(r', slice)`.
  k = 1 is online softmax (C = exp(m - m')); k = 3 is Welford's variance (C shifts the mean).

C is found from its definition: with sample points the functional equation is linear, so
C = A(r') A(r)^-1 with A_ij = f_i(r, point_j). The basis is F and its derivatives in r. The same C
gives the merge of two partial results, hence every split-axis algorithm (split-K, flash-decoding).

Candidates must pass an exact test (60 digits, random points) and a float32 stability test on
large and shifted inputs, which is what rejects Σ exp(x) and mean x² - (mean x)². See `certify.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from warploom.derive.formula.external import sympy
from warploom.derive.formula.ops import MONOIDS
from warploom.derive.lemmas import certify
from warploom.derive.lemmas.cascade import Refusal, Scalar, renamed
from warploom.derive.lemmas.lemma import Lemma, Term

MAX_RANK = 3
"""Largest state basis tried for one reduction."""


def discover(scalar: Scalar, sources: dict[str, str]) -> Lemma | Refusal:
    """The cheapest stable lemma for a dependent reduction, or a refusal saying what failed.

    `sources` gives the monoid behind each base, which the numeric tests need.
    """
    found: list[Lemma] = []
    tried = 0
    for candidate in _candidates(scalar):
        tried += 1
        lemma = Lemma("", scalar, candidate, tried)
        if certify.identity_error(lemma) > certify.EXACT:
            continue
        if not certify.is_stable(lemma, sources):
            continue
        found.append(lemma)
    if not found:
        bases = ", ".join(scalar.bases.values())
        return Refusal(
            "G8 lemma",
            scalar.node.name,
            ",".join(scalar.node.over),
            f"no state of up to {MAX_RANK} numbers corrects it when {bases} change ({tried} tried)",
            f"compute {bases} in an earlier kernel",
        )
    best = min(found, key=lambda lemma: lemma.cost)
    return replace(best, name=describe(best, sources), tried=tried)


def describe(lemma: Lemma, sources: dict[str, str]) -> str:
    """A name a reader recognises, from what the lemma does."""
    bases = sorted(sources[name] for name in lemma.scalar.bases.values())
    deferred = any(_depends(term.factor, lemma.scalar) for term in lemma.terms)
    corrected = any(term.matrix for term in lemma.terms)
    rank = max(len(term.basis) for term in lemma.terms)
    if rank > 1:
        return f"shifted moments (rank {rank}, Welford)"
    if corrected and "max" in bases:
        return "running maximum, unscaled" if deferred else "running maximum"
    if corrected:
        return "running rescale"
    return "deferred normalisation"


def _depends(expression: Any, scalar: Scalar) -> bool:
    """Whether an expression reads any base."""
    return bool({str(s) for s in expression.free_symbols} & set(scalar.bases))


def _candidates(scalar: Scalar) -> Iterator[tuple[Term, ...]]:
    """Every way tried: as written, one sum distributed, all expanded; defer, then correct."""
    seen: set[tuple[Any, ...]] = set()
    for parts in _expansions(scalar.formula):
        for explicit in (False, True):
            terms = _terms(scalar, parts, explicit)
            if terms is not None and terms not in seen:
                seen.add(terms)
                yield terms


def _expansions(formula: Any) -> Iterator[tuple[Any, ...]]:
    """The formula as one term, then with each sum distributed, then fully expanded."""
    sp = sympy()
    yield (formula,)
    for factor in sp.Mul.make_args(formula):
        if isinstance(factor, sp.Add):
            rest = formula / factor
            yield tuple(part * rest for part in factor.args)
    full = sp.expand(formula)
    if isinstance(full, sp.Add):
        yield full.args


def _terms(scalar: Scalar, parts: tuple[Any, ...], explicit: bool) -> tuple[Term, ...] | None:
    """Defer what factors out of each part and correct the rest; None when a part resists.

    `explicit` splits exponentials of sums first, so that more can be deferred.
    """
    monoid = _monoid(scalar)
    if monoid.distributes == ("add",):
        return _additive(scalar, parts)
    sp = sympy()
    leaves = [sp.Symbol(name, real=True) for name in scalar.leaves]
    collected: dict[Any, Any] = {}
    for part in parts:
        shaped = sp.expand_power_exp(part) if explicit else part
        factor, inner = shaped.as_independent(*leaves, as_Add=False)
        collected[inner] = collected.get(inner, sp.Integer(0)) + factor
    terms: list[Term] = []
    for inner, factor in collected.items():
        moved = _correct(scalar, inner)
        if moved is None:
            return None
        terms.append(Term(factor, moved[0], moved[1], "mul"))
    return tuple(terms)


def _additive(scalar: Scalar, parts: tuple[Any, ...]) -> tuple[Term, ...] | None:
    """Max and min: a correction may only be added."""
    if len(parts) != 1:
        return None
    sp = sympy()
    formula = scalar.formula
    old, new = _moved(scalar, formula, "old"), _moved(scalar, formula, "new")
    shift = sp.simplify(new - old)
    if _reads_leaves(shift, scalar):
        return None
    return (Term(sp.Integer(1), (formula,), ((shift,),), "add"),)


def _correct(
    scalar: Scalar, inner: Any
) -> tuple[tuple[Any, ...], tuple[tuple[Any, ...], ...]] | None:
    """(basis, matrix) for what could not be deferred; an empty matrix when nothing is left."""
    if not _depends(inner, scalar):
        return (inner,), ()
    sp = sympy()
    old, new = _moved(scalar, inner, "old"), _moved(scalar, inner, "new")
    ratio = sp.powsimp(sp.simplify(new / old))
    if not _reads_leaves(ratio, scalar):
        return (inner,), ((ratio,),)
    running = [name for name in scalar.bases if sp.Symbol(name, real=True) in inner.free_symbols]
    if len(running) != 1 or inner.atoms(sp.Function):
        return None
    return _basis(scalar, inner, running[0])


def _basis(
    scalar: Scalar, inner: Any, running: str
) -> tuple[tuple[Any, ...], tuple[tuple[Any, ...], ...]] | None:
    """The derivatives of F in one base, closed under moving that base; None beyond `MAX_RANK`."""
    sp = sympy()
    base = sp.Symbol(running, real=True)
    basis = [inner]
    while len(basis) < MAX_RANK:
        slope = sp.factor(sp.diff(basis[-1], base))
        if slope == 0:
            break
        basis.append(slope)
        leaves = [sp.Symbol(name, real=True) for name in scalar.leaves]
        points = _points(len(basis), len(leaves))
        table = sp.Matrix(
            [
                [item.subs(dict(zip(leaves, point, strict=True))) for point in points]
                for item in basis
            ]
        )
        if sp.simplify(table.det()) == 0:
            continue
        before = table.subs(base, renamed_symbol(running, "old"))
        after = table.subs(base, renamed_symbol(running, "new"))
        # Factored, so that a shift enters as (new - old)² and not as three large squares.
        matrix = (after * before.inv()).applyfunc(sp.factor)
        entries = tuple(tuple(matrix[i, j] for j in range(len(basis))) for i in range(len(basis)))
        trial = Term(sp.Integer(1), tuple(basis), entries, "mul")
        if certify.motion_error(scalar, (trial,)) <= certify.EXACT:
            return tuple(basis), entries
    return None


def _points(count: int, width: int) -> list[tuple[Any, ...]]:
    """`count` distinct rational sample points of `width` leaves."""
    sp = sympy()
    return [
        tuple(sp.Rational((2 + point) ** (leaf + 1) + leaf, 3 + leaf) for leaf in range(width))
        for point in range(count)
    ]


def _moved(scalar: Scalar, expression: Any, when: str) -> Any:
    """The expression with every base renamed to its old or new value."""
    sp = sympy()
    return expression.subs(
        {sp.Symbol(name, real=True): renamed(value, when) for name, value in scalar.bases.items()}
    )


def renamed_symbol(name: str, when: str) -> Any:
    """The old or new twin of a base's symbol name."""
    return sympy().Symbol(f"{when}_{name}", real=True)


def _reads_leaves(expression: Any, scalar: Scalar) -> bool:
    """Whether an expression still reads the stream."""
    return bool({str(s) for s in expression.free_symbols} & set(scalar.leaves))


def _monoid(scalar: Scalar) -> Any:
    """The reduction's monoid; a contraction sums."""
    return MONOIDS[scalar.node.op if scalar.node.kind == "reduce" else "sum"]
