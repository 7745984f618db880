"""Making an axis streamable: apply or find lemmas until no reduction of it resists.

*requires* a body and an axis. *before*: a cascade of reductions over the axis. *after*: the same
function, each dependent reduction either independent (deferred) or carrying a `Correction`.
*keeps* the outputs, over the reals (rule G7); each step's certificate is in its `Lemma`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from warploom.derive.formula.external import sympy
from warploom.derive.formula.graph import Diagram, Node
from warploom.derive.lemmas import certify
from warploom.derive.lemmas.cascade import (
    Refusal,
    Scalar,
    dependent,
    reductions,
    scalar_form,
    symbol,
)
from warploom.derive.lemmas.discover import Lemma, Term, discover
from warploom.derive.lemmas.emit import Emitter
from warploom.derive.lemmas.lemmas import registered

COUNT = "count"
"""In a correction: how many elements the old state has already summed."""


@dataclass(frozen=True)
class Correction:
    """How running sums follow when the values they were computed with move.

    state' = matrix(old, new)·state + shift(old, new) for `join` "mul", state + matrix for "add".
    Entries are sympy source over `old_<base>`, `new_<base>` and parameters; `symbols` says which
    box each symbol name stands for.
    """

    targets: tuple[str, ...]
    bases: tuple[str, ...]
    join: str
    matrix: tuple[tuple[str, ...], ...]
    shift: tuple[str, ...]
    symbols: tuple[tuple[str, str], ...]
    lemma: str

    def to_json(self) -> dict[str, Any]:
        """Plain JSON data."""
        return {
            "targets": list(self.targets),
            "bases": list(self.bases),
            "join": self.join,
            "matrix": [list(row) for row in self.matrix],
            "shift": list(self.shift),
            "symbols": [list(pair) for pair in self.symbols],
            "lemma": self.lemma,
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Correction:
        """Back from JSON."""
        return cls(
            tuple(data["targets"]),
            tuple(data["bases"]),
            data["join"],
            tuple(tuple(row) for row in data["matrix"]),
            tuple(data["shift"]),
            tuple((symbol_, value) for symbol_, value in data["symbols"]),
            data["lemma"],
        )

    def readable(self) -> tuple[str, ...]:
        """One line a target, with box names instead of symbols: `out <- exp(m' - m) out`."""
        lines: list[str] = []
        for target, row, shift in zip(self.targets, self.matrix, self.shift, strict=True):
            parts: list[str] = []
            for entry, source in zip(row, self.targets, strict=True):
                if entry == "0":
                    continue
                parts.append(source if entry == "1" and self.join == "mul" else f"{entry}·{source}")
            if self.join == "add":
                parts = [row[0], target]
            text = " + ".join([*parts, *([shift] if shift != "0" else [])])
            for name, value in self.symbols:
                text = text.replace(f"old_{name}", f"{value}'").replace(f"new_{name}", value)
                text = text.replace(name, value)
            lines.append(f"{target} <- {text}")
        return tuple(lines)


@dataclass(frozen=True)
class Streamable:
    """A body whose axis can be streamed: the rewritten body, corrections, the lemmas used."""

    body: Diagram
    corrections: tuple[Correction, ...]
    lemmas: tuple[Lemma, ...]
    steps: tuple[tuple[str, str, Diagram], ...] = ()
    """(lemma, its correction as text, body after it), one an application."""


def monoid_of(node: Node) -> str:
    """The monoid behind a reduction; a contraction sums."""
    return node.op if node.kind == "reduce" else "sum"


@cache
def make_streamable(
    body: Diagram, axis: str, search: bool = True, lemmas: bool = True
) -> Streamable | Refusal:
    """Rewrite the body so that `axis` can be streamed, or say which box prevents it.

    `lemmas` allows the registered ones, `search` allows finding one. With neither, plain softmax
    is refused (rule G8).
    """
    done: list[Correction] = []
    used: list[Lemma] = []
    steps: list[tuple[str, str, Diagram]] = []
    corrected: set[str] = set()
    while True:
        waiting = [node for node in dependent(body, axis) if node.name not in corrected]
        if not waiting:
            return Streamable(body, tuple(done), tuple(used), tuple(steps))
        node = waiting[0]
        scalar = scalar_form(body, node, axis)
        if isinstance(scalar, Refusal):
            return scalar
        sources = {item.name: monoid_of(item) for item in reductions(body, axis)}
        if unknown := [kind for kind in sources.values() if kind == "topk"]:
            return Refusal(
                "G2 stream", node.name, axis, f"depends on {unknown[0]}", "split the kernel"
            )
        lemma = registered(scalar, sources) if lemmas else None
        if lemma is None and search:
            lemma = discover(scalar, sources)
        if lemma is None:
            return Refusal(
                "G8 lemma",
                node.name,
                axis,
                f"reads {', '.join(scalar.bases.values())}, a whole reduction of {axis!r}",
                "register a lemma or allow the search",
            )
        if isinstance(lemma, Refusal):
            return lemma
        body, correction = _apply(body, scalar, lemma, sources)
        used.append(lemma)
        said = "; ".join(line for item in correction for line in item.readable())
        steps.append((lemma.name, said, body))
        done.extend(correction)
        corrected |= {target for item in correction for target in item.targets}
        if not correction:
            corrected.add(node.name)


def _apply(
    body: Diagram, scalar: Scalar, lemma: Lemma, sources: Mapping[str, str]
) -> tuple[Diagram, list[Correction]]:
    """Rewrite one reduction as its lemma says."""
    sp = sympy()
    names = {**scalar.bases, **scalar.leaves, **scalar.parameters}
    emitter = Emitter(body, names)
    corrections: list[Correction] = []
    node = scalar.node
    whole = sp.Integer(0)
    for index, term in enumerate(lemma.terms):
        keeps = len(lemma.terms) == 1 and term.factor == 1
        targets: list[str] = []
        kept, constants = _prune(body, scalar, term, sources)
        for row in kept:
            if keeps and row == 0:
                targets.append(node.name)
                continue
            label = (
                f"{node.name}~"
                if len(lemma.terms) == 1 and row == 0
                else f"{node.name}~{index}{row or ''}"
            )
            factors = sp.Mul.make_args(term.basis[row])
            targets.append(emitter.product(factors, node, label))
        corrections += _corrections(scalar, term, targets, kept, constants, lemma.name)
        accumulator = symbol(targets[0])
        emitter.values[str(accumulator)] = targets[0]
        whole = whole + term.factor * accumulator
    if len(lemma.terms) == 1 and lemma.terms[0].factor == 1:
        return emitter.finish(), corrections
    emitter.rename(emitter.expression(whole), node.name, node.axes)
    return emitter.finish(), corrections


def _prune(
    body: Diagram, scalar: Scalar, term: Term, sources: Mapping[str, str]
) -> tuple[list[int], dict[int, Any]]:
    """(basis rows that need an accumulator, rows with a known value).

    The mean of a constant is that constant, its sum is `count` times it, and the mean (or sum) of
    c·(x - mean x) is zero.
    """
    sp = sympy()
    constants: dict[int, Any] = {}
    per_element = sp.Integer(1) if monoid_of(scalar.node) == "mean" else sp.Symbol(COUNT)
    for row, item in enumerate(term.basis[1:], start=1):
        if item.is_number:
            constants[row] = item * per_element
            continue
        for name, base in scalar.bases.items():
            leaf = symbol(body.node[base].inputs[0])
            centred = leaf - sp.Symbol(name, real=True)
            if sources[base] == "mean" and sp.cancel(item / centred).is_number:
                constants[row] = sp.Integer(0)
    return [row for row in range(len(term.basis)) if row not in constants], constants


def _corrections(
    scalar: Scalar,
    term: Term,
    targets: list[str],
    kept: list[int],
    constants: Mapping[int, Any],
    lemma: str,
) -> list[Correction]:
    """The correction of one term, pruned rows folded into the shift."""
    if not term.matrix:
        return []
    sp = sympy()
    matrix = tuple(tuple(str(term.matrix[i][j]) for j in kept) for i in kept)
    shifts = [
        sum((term.matrix[i][j] * c for j, c in constants.items()), sp.Integer(0)) for i in kept
    ]
    read = {str(s) for row in term.matrix for entry in row for s in entry.free_symbols}
    bases = {n: v for n, v in scalar.bases.items() if {f"old_{n}", f"new_{n}"} & read}
    symbols = tuple({**bases, **{n: v for n, v in scalar.parameters.items() if n in read}}.items())
    return [
        Correction(
            tuple(targets),
            tuple(bases.values()),
            term.join,
            matrix,
            tuple(str(sp.factor(shift)) for shift in shifts),
            symbols,
            lemma,
        )
    ]


@cache
def parse(text: str, names: tuple[str, ...]) -> Any:
    """A correction entry as a sympy expression with real symbols."""
    sp = sympy()
    table = {
        f"{prefix}{name}": sp.Symbol(f"{prefix}{name}", real=True)
        for name in names
        for prefix in ("", "old_", "new_")
    }
    table[COUNT] = sp.Symbol(COUNT)
    return sp.sympify(text, locals=table)


def evaluate_entry(correction: Correction, text: str, values: Mapping[str, Any]) -> Any:
    """One entry on numpy arrays; `values` by symbol name."""
    names = tuple(name for name, _ in correction.symbols)
    return certify.numeric(parse(text, names), values)
