"""The registered lemmas, as data: what the literature knows, each with identities to check.

A lemma names the monoids of the values a reduction reads (`bases`), the map that carries its
correction through the sum, and the correction itself. Applying one means *verifying* that the
formula at hand obeys f(r') = C(r, r') f(r) for this C; nothing is searched. `identities` are
proved by sympy and tested exactly at random points by `tests/derive/test_lemmas.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import permutations

from warploom.derive.formula.external import sympy
from warploom.derive.formula.ops import MONOIDS
from warploom.derive.lemmas import certify
from warploom.derive.lemmas.cascade import Scalar, renamed
from warploom.derive.lemmas.discover import Lemma, Term


@dataclass(frozen=True)
class Registered:
    """A known correction: `matrix` in old_0, new_0, ... for `bases`, `basis` in F, r0, and d/dr0.

    `deferred` are the values whose effect factors out of the sum and is applied once, at the end.
    `identities` are pairs of equal expressions, the algebra the lemma rests on.
    """

    name: str
    bases: tuple[str, ...]
    correction: str
    deferred: tuple[str, ...]
    identities: tuple[tuple[str, str], ...]
    source: str


REGISTERED: tuple[Registered, ...] = (
    Registered(
        "log-sum-exp",
        ("max",),
        "exp(old_0 - new_0)",
        (),
        (("exp(x - n)", "exp(o - n)*exp(x - o)"),),
        "Milakov & Gimelshein 2018, 1805.02867",
    ),
    Registered(
        "softmax-contraction, unscaled",
        ("max",),
        "exp(old_0 - new_0)",
        ("sum",),
        (("v*exp(x - n)/z", "(v*exp(o - n)*exp(x - o))/z"),),
        "FlashAttention-2, 2307.08691",
    ),
    Registered(
        "softmax-contraction, auxiliary",
        ("max", "sum"),
        "exp(old_0 - new_0)*old_1/new_1",
        (),
        (("v*exp(x - n)/y", "exp(o - n)*z/y*(v*exp(x - o)/z)"),),
        "FlashAttention, 2205.14135",
    ),
    Registered(
        "normalised contraction",
        (),
        "1",
        ("sum",),
        (("v*a/b", "(v*a)*(1/b)"),),
        "2505.09326, Definition 1",
    ),
    Registered(
        "mean-normalised contraction",
        (),
        "1",
        ("mean",),
        (("v*a/sqrt(b)", "(v*a)*(1/sqrt(b))"),),
        "RMSNorm folded into a matmul",
    ),
)
"""The order is preference: fewer corrections first is `discover`'s job, this list is for speed."""


def registered(scalar: Scalar, sources: Mapping[str, str]) -> Lemma | None:
    """The first registered lemma whose correction this formula obeys, verified; else None."""
    if MONOIDS[scalar.node.op if scalar.node.kind == "reduce" else "sum"].distributes != ("mul",):
        return None
    sp = sympy()
    leaves = [sp.Symbol(name, real=True) for name in scalar.leaves]
    for entry in REGISTERED:
        for bases in permutations(scalar.bases, len(entry.bases)):
            kinds = tuple(sources[scalar.bases[name]] for name in bases)
            rest = tuple(sources[scalar.bases[n]] for n in scalar.bases if n not in bases)
            if kinds != entry.bases or rest != entry.deferred:
                continue
            factor, inner = scalar.formula.as_independent(*leaves, as_Add=False)
            table: dict[str, object] = {}
            for index, name in enumerate(bases):
                table[f"old_{index}"] = renamed(scalar.bases[name], "old")
                table[f"new_{index}"] = renamed(scalar.bases[name], "new")
            entries = ((sp.sympify(entry.correction, locals=table),),) if bases else ()
            lemma = Lemma(entry.name, scalar, (Term(factor, (inner,), entries, "mul"),), 0, True)
            if certify.identity_error(lemma) <= certify.EXACT:
                return lemma
    return None
