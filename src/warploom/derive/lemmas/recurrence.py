"""A recurrence as the user writes it, S_t = step(S_{t-1}), and the pair that steps compose by.

*requires* a step that is affine in the state, element by element: step(S) = a S + b, where neither
a nor b reads S. *before*: one step after the other. *after*: a scan of pairs (decay, state), of
which any run of steps is one, (a', b') after (a, b) = (a' a, a' b + b'). *keeps* every state: the
composition is associative, so runs may be bracketed in any way, in chunks above all.

The pair is read off the formula; `certify` believes nothing of that. It runs the step as it was
written, one position after the other, and folds the pairs of random runs in random brackets.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from warploom.derive.formula.evaluate import align, evaluate
from warploom.derive.formula.frontend import Expr, apply, build, const, tensor
from warploom.derive.formula.graph import Diagram
from warploom.errors import InputError

BEFORE = "state before"
"""The name of the state that a step reads."""
POSITIONS = 12
TOLERANCE = 1e-9
"""Of two ways to the same state in float64, relative to the largest one."""
Pair = tuple[Expr | None, Expr | None]
"""(a, b) of a S + b; None is zero."""
Value = Any


def recurrence(axis: str, axes: str, step: Callable[[Expr], Expr]) -> Expr:
    """All states of S_t = step(S_{t-1}) along `axis`, from S = 0: [axis, *axes].

    `axes` are those of one state (as "d e"), `step` is given the state before and gives the one
    after. Raises `InputError` for a step that is not affine in the state element by element, or
    whose result has other axes.
    """
    names = (axis, *axes.split())
    before = tensor(BEFORE, names)
    after = step(before)
    if set(after.axes) != set(names):
        raise InputError(f"recurrence along {axis!r}: a step gives axes {after.axes}, not {names}")
    parts: dict[Expr, Expr] = {}
    plain = _abstract(after, before, parts)
    pair = pair_of(plain, before)
    certify(plain, pair, axis)
    given = {place: value for value, place in parts.items()}
    gate, drive = (value and _replaced(value, given) for value in pair)
    drive = drive or const(0.0)
    gate = gate or const(0.0)
    if set(drive.axes) | set(gate.axes) != set(names):
        raise InputError(f"recurrence along {axis!r}: what a step adds has axes {drive.axes}")
    if gate == const(1.0):
        return Expr("cumsum", (drive,), names, (axis,))
    return Expr("affine_scan", (gate, drive), names, (axis,))


def pair_of(value: Expr, state: Expr) -> Pair:
    """(a, b) with value = a · state + b; raises `InputError` naming the box that is not affine."""
    if value == state:
        return const(1.0), None
    if not _reads(value, state):
        return None, value
    pairs = [pair_of(source, state) for source in value.inputs]
    if value.op in ("add", "sub"):
        first, second = pairs
        if value.op == "sub":
            second = _each(second, lambda part: _product(part, const(-1.0)))
        return _sum(first[0], second[0]), _sum(first[1], second[1])
    if value.op == "neg":
        return _each(pairs[0], lambda part: _product(part, const(-1.0)))
    reading = [source for source in value.inputs if _reads(source, state)]
    if value.op == "mul" and len(reading) == 1:
        (pair,) = (p for p, s in zip(pairs, value.inputs, strict=True) if s is reading[0])
        (other,) = (s for s in value.inputs if s is not reading[0])
        return _each(pair, lambda part: _product(part, other))
    if value.op == "div" and reading == [value.inputs[0]]:
        return _each(pairs[0], lambda part: part / value.inputs[1])
    raise InputError(
        f"recurrence: {value.op!r} of the state is not affine in it, element by element, so that "
        "steps do not compose to a pair (decay, state); expected a · S + b"
    )


def certify(step: Expr, pair: Pair, axis: str, seed: int = 5) -> None:
    """Hold a pair to the step it was read off; raises `InputError` where they differ.

    Random streams, also with gates of nothing and of either sign: the step run from position to
    position in float64 against the pairs of runs, composed in random brackets.
    """
    rng = np.random.default_rng(seed)
    leaves = _leaves(step)
    axes = next((one for one in leaves if _name(one) == BEFORE), step).axes
    lengths = {a: 2 for leaf in leaves for a in leaf.axes} | {axis: 1}
    shape = [lengths[a] for a in axes]
    whole = [build("step", value or const(0.0) * 1.0) for value in (step, *pair)]
    runs = [run.resized({a: lengths[a] for a in run.size}) for run in whole]
    for scales in ((0.0, 1.0, 2.0), (1.0, 2.0)):  # a step may divide by what is nothing
        truth, states, pairs = np.zeros(shape), list[Value](), list[tuple[Value, Value]]()
        for _ in range(POSITIONS):
            stream = {
                _name(leaf): rng.standard_normal([lengths[a] for a in leaf.axes])
                * rng.choice(scales)
                for leaf in leaves
            } | {BEFORE: truth}
            with np.errstate(all="ignore"):
                truth, decay, added = (_at(run, stream, axes, shape) for run in runs)
            states.append(truth)
            pairs.append((decay, added))
        if np.isfinite(states).all():
            break
    size = np.max(np.abs(states))
    for length, state in enumerate(states, 1):
        with np.errstate(all="ignore"):
            _, added = composed(pairs[:length], rng)  # from a state of zero
        if not np.max(np.abs(added - state)) <= TOLERANCE * size:
            raise InputError(
                f"recurrence along {axis!r}: steps and the pair (decay, state) differ: the step is "
                "no function of the state and of one position"
            )


def composed(pairs: Sequence[tuple[Value, Value]], rng: np.random.Generator) -> tuple[Value, Value]:
    """A run of steps as one pair, bracketed at random."""
    if len(pairs) == 1:
        return pairs[0]
    cut = int(rng.integers(1, len(pairs)))
    (a, b), (after_a, after_b) = composed(pairs[:cut], rng), composed(pairs[cut:], rng)
    return after_a * a, after_a * b + after_b


def _abstract(value: Expr, state: Expr, parts: dict[Expr, Expr]) -> Expr:
    """A step with an array in the place of whatever does not read the state."""
    if value == state:
        return value
    if not _reads(value, state):
        if value.op == "const":
            return value
        return parts.setdefault(value, tensor(f"part {len(parts)}", value.axes))
    inputs = tuple(_abstract(source, state, parts) for source in value.inputs)
    return Expr(value.op, inputs, value.axes, value.over, value.attrs, value.label)


def _replaced(value: Expr, given: dict[Expr, Expr]) -> Expr:
    """A formula with its arrays replaced."""
    if value in given:
        return given[value]
    inputs = tuple(_replaced(source, given) for source in value.inputs)
    return Expr(value.op, inputs, value.axes, value.over, value.attrs, value.label)


def _reads(value: Expr, state: Expr) -> bool:
    return value == state or any(_reads(source, state) for source in value.inputs)


def _leaves(value: Expr) -> tuple[Expr, ...]:
    """The arrays of a formula, once each."""
    if value.op == "input":
        return (value,)
    return tuple(dict.fromkeys(leaf for source in value.inputs for leaf in _leaves(source)))


def _name(leaf: Expr) -> str:
    return str(dict(leaf.attrs)["name"])


def _at(
    run: Diagram, stream: Mapping[str, Value], target: Sequence[str], shape: Sequence[int]
) -> Value:
    """What a diagram gives at one position, broadcast to the axes of the state."""
    got = evaluate(run, {array.name: stream[array.name] for array in run.inputs})
    (name,) = run.outputs
    return np.broadcast_to(align(got[name], run.axes_of(name), target), shape)


def _each(pair: Pair, change: Callable[[Expr], Expr]) -> Pair:
    a, b = pair
    return a and change(a), b and change(b)


def _sum(x: Expr | None, y: Expr | None) -> Expr | None:
    return apply("add", x, y) if x and y else x or y


def _product(x: Expr, y: Expr) -> Expr:
    """x y, without a factor of 1; numbers are multiplied out."""
    one = const(1.0)
    if one in (x, y):
        return y if x == one else x
    if x.op == y.op == "const":
        first, second = (dict(one.attrs)["value"] for one in (x, y))
        assert isinstance(first, float) and isinstance(second, float)
        return const(first * second)
    return x * y
