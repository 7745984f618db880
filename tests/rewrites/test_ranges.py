"""Bounds that follow from conditions on positions, against counting."""

import itertools
from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from warploom import tile as t
from warploom.rewrites.ranges import Iterations, Positions, linear, minus, plus
from warploom.tile.index import as_index, symbol
from warploom.tile.tiles import coordinate

ROWS, KEYS = 8, 4


def masked(build):
    """A program with one loop and one condition, and the condition's variable."""

    def body(x, o):
        (i,) = t.grid(rows=4)
        row_at = coordinate("rows", ROWS, i * ROWS + (t.size("keys") - t.size("rows")))
        for j in t.loop(8):
            key_at = coordinate("keys", KEYS, j * KEYS)
            tile = t.load(x, t.span(0, ROWS), t.span(0, KEYS))
            t.store(
                o, t.span(0, ROWS), t.span(0, KEYS), tile=t.where(build(row_at, key_at), tile, 0.0)
            )

    arrays = {"x": t.array(t.BF16, "rows keys"), "o": t.array(t.BF16, "rows keys")}
    program = t.trace(body, arrays, name="masked")
    (choice,) = [op for op in program.ops() if op.kind == "where"]
    return program, choice.srcs[0]


CONDITIONS = {
    "below a size": lambda r, k: k < t.size("keys"),
    "causal": lambda r, k: r >= k,
    "causal, strict": lambda r, k: r + 1 > k,
    "within a window": lambda r, k: (r >= k) & (r - 5 < k),
    "least of two": lambda r, k: t.minimum(r + 1, t.size("keys")) > k,
    "strict": lambda r, k: r > k + 3,
    "a difference": lambda r, k: (2 - r) + k < 5,
    "greatest of two": lambda r, k: t.maximum(k, k + 2) < t.size("keys"),
    "three": lambda r, k: ((r >= k) & (k < t.size("keys"))) & (r - 9 < k),
}


def holds(name, rows, keys, i, j):
    row = np.arange(ROWS)[:, None] + i * ROWS + keys - rows
    key = np.arange(KEYS)[None, :] + j * KEYS
    return {
        "below a size": (key < keys) & (row > -99),
        "causal": key <= row,
        "causal, strict": row + 1 > key,
        "within a window": (key <= row) & (row - 5 < key),
        "least of two": np.minimum(row + 1, keys) > key,
        "strict": key + 3 < row,
        "a difference": key - row < 3,
        "greatest of two": (key + 2 < keys) & (row > -99),
        "three": (key <= row) & (key < keys) & (row - 9 < key),
    }[name]


def inside(bounds: Iterations, j: int, values) -> bool:
    return all(start.evaluate(values) <= j for start in bounds.starts) and all(
        j < stop.evaluate(values) for stop in bounds.stops
    )


@pytest.mark.parametrize("name", CONDITIONS)
def test_iterations_outside_of_the_bounds_have_no_element_and_those_inside_all(name) -> None:
    program, condition = masked(CONDITIONS[name])
    definitions = {op.dst.name: op for op in program.ops() if op.dst is not None}
    index = program.loops()[0].index
    positions = Positions(definitions)
    some, every = positions.somewhere(condition, index), positions.everywhere(condition, index)
    assert every is not None and (some.stops or some.starts)
    random, missed = Random(name), 0
    for _ in range(60):
        rows, keys = random.randrange(1, 40), random.randrange(1, 40)
        for i, j in itertools.product(range(4), range(8)):
            found = holds(name, rows, keys, i, j)
            values = {"rows": rows, "keys": keys, "rows_tile": i}
            if not inside(some, j, values):
                assert not found.any(), (rows, keys, i, j)
            elif not found.any():
                missed += 1
            assert inside(every, j, values) <= found.all(), (rows, keys, i, j)
            if len(every.starts) == 0:  # one-sided bounds are exact
                assert inside(every, j, values) == found.all(), (rows, keys, i, j)
    assert missed < 200  # of 1,920: a window's two sides are seen one by one


def test_a_bound_that_is_one_too_small_or_large_is_seen() -> None:
    """The comparison above can fail."""
    program, condition = masked(CONDITIONS["causal"])
    definitions = {op.dst.name: op for op in program.ops() if op.dst is not None}
    some = Positions(definitions).somewhere(condition, program.loops()[0].index)
    values = {"rows": 32, "keys": 32, "rows_tile": 1}
    (stop,) = some.stops
    last = stop.evaluate(values) - 1
    assert holds("causal", 32, 32, 1, last).any()
    assert not holds("causal", 32, 32, 1, last + 1).any()


def test_what_is_not_a_comparison_of_positions_says_nothing() -> None:
    program, condition = masked(lambda r, k: (r < k) | (r > k))
    definitions = {op.dst.name: op for op in program.ops() if op.dst is not None}
    positions, index = Positions(definitions), program.loops()[0].index
    assert positions.everywhere(condition, index) is None
    assert positions.somewhere(condition, index) == Iterations()


def test_a_condition_holds_everywhere_only_where_all_of_it_is_known() -> None:
    program, condition = masked(lambda r, k: (k < t.size("keys")) & ((r < k) | (r > k)))
    definitions = {op.dst.name: op for op in program.ops() if op.dst is not None}
    positions, index = Positions(definitions), program.loops()[0].index
    assert positions.everywhere(condition, index) is None
    (stop,) = positions.somewhere(condition, index).stops
    assert [stop.evaluate({"keys": keys}) for keys in (0, 1, 4, 5)] == [0, 1, 1, 2]


INDICES = st.recursive(
    st.one_of(st.sampled_from([symbol("x"), symbol("y")]), st.integers(-9, 9).map(as_index)),
    lambda inner: st.builds(
        lambda op, a, b: {"+": a + b, "-": a - b, "max": t.maximum_index(a, b)}[op],
        st.sampled_from(["+", "-", "max"]),
        inner,
        inner,
    ),
    max_leaves=8,
)


@given(INDICES, INDICES, st.integers(0, 50), st.integers(0, 50))
def test_sums_and_differences_have_the_value_of_their_parts(a: t.Index, b: t.Index, x, y) -> None:
    values = {"x": x, "y": y}
    assert plus(a, b).evaluate(values) == a.evaluate(values) + b.evaluate(values)
    assert minus(a, b).evaluate(values) == a.evaluate(values) - b.evaluate(values)


@given(INDICES, st.integers(-4, 4), st.integers(0, 50), st.integers(0, 50), st.integers(0, 50))
def test_a_linear_form_is_the_expression(rest: t.Index, factor, j, x, y) -> None:
    whole = rest + symbol("j") * factor - symbol("j")
    form = linear(whole, "j")
    assert form is not None
    values = {"j": j, "x": x, "y": y}
    assert form[0] * j + form[1].evaluate(values) == whole.evaluate(values)
    assert linear(symbol("j") // 2, "j") is None
    assert linear(t.maximum_index(symbol("j"), 0), "j") is None


def test_programs_of_these_tests_run() -> None:
    program, _ = masked(CONDITIONS["causal"])
    x = np.ones((16, 16), np.float32)
    assert t.interpret(program, {"x": x, "o": np.zeros((16, 16))})["o"].shape == (16, 16)
