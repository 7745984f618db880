"""What rounding explains: the interpreter's own errors, for programs of every family of ops."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.codegen.simt_programs import PROGRAMS, make

from warploom import tile as t
from warploom.tile import rounding
from warploom.tile.interpret import bind, interpret
from warploom.tile.rounding import Spread, limits, spreads


@pytest.mark.parametrize("name", PROGRAMS)
def test_the_interpreter_is_as_exact_as_rounding_allows(name: str) -> None:
    program, arrays, scalars, _ = make(name)
    held = bind(program, arrays)
    got = interpret(program, held, scalars)
    for output, spread in spreads(program, held, scalars).items():
        gap = np.abs(got[output].astype(float) - spread.exact)
        beyond = spread.known & (gap > limits(spread, 8.0))
        if name == "casts" and output in ("eight", "half", "back"):
            assert beyond.any()  # numbers that e4m3 or fp16 does not hold: that is found
            continue
        assert not beyond.any(), (output, gap[beyond], spread.exact[beyond])
        size = np.linalg.norm(spread.exact[spread.known]) or 1.0
        assert np.linalg.norm(gap[spread.known]) / size <= 4 * spread.relative


def summed(n: int, kind: t.DType) -> t.Program:
    def body(x: t.Array, y: t.Array) -> None:
        (i,) = t.grid(m=t.cdiv(t.size("m"), 16))
        tile = t.load(x, t.span(i * 16, 16), t.span(0, n))
        t.store(y, t.span(i * 16, 16), tile=t.sum_along(tile, "n").cast(kind))

    arrays = {"x": t.array(t.FP32, "m n"), "y": t.array(kind, "m")}
    return t.trace(body, arrays, name="summed")


def test_the_deviation_of_a_cast_is_that_of_a_uniform_rounding() -> None:
    """Half a spacing at most, evenly spread: its root mean square is spacing / sqrt(12)."""
    arrays = {"x": np.random.default_rng(0).normal(size=(4096, 4)), "y": np.full(4096, np.nan)}
    program = summed(4, t.BF16)
    spread = spreads(program, bind(program, arrays))["y"]
    assert spread.known.all()
    got = interpret(program, arrays)["y"]
    actual = np.sqrt(np.mean((got - spread.exact) ** 2))
    assert actual == pytest.approx(np.sqrt(np.mean(spread.deviation**2)), rel=0.05)


def test_a_sum_of_positive_terms_drifts_with_their_number() -> None:
    """Errors of partial sums add up: beyond the root of the number, where all have one sign."""
    relative = {}
    for n in (64, 4096):
        program = summed(n, t.FP32)
        x = np.random.default_rng(1).uniform(1, 2, size=(64, n))
        spread = spreads(program, bind(program, {"x": x, "y": np.full(64, np.nan)}))["y"]
        relative[n] = spread.relative
        held = bind(program, {"x": x, "y": np.full(64, np.nan)})
        plain = np.zeros(64, np.float32)
        for column in held["x"].T:
            plain = plain + column  # the worst order there is
        gap = np.abs(plain - spread.exact) / limits(spread, 8.0)
        assert gap.max() < 1
        actual = np.sqrt(np.mean((plain - spread.exact) ** 2))
        assert 0.5 < np.sqrt(np.mean(spread.deviation**2)) / actual < 4, "and no wider than it is"
    assert 6 < relative[4096] / relative[64] < 10


# Largest errors, relative, of the manuals that `rounding.APPROXIMATED` names, copied once more.
MANUALS = {
    "exp2": 2.0**-22,
    "log2": 2.0**-22,
    "rsqrt": 2.0**-22.9,
    "reciprocal": 2.0**-23,
    "tanh": 2.0**-11,
}


@pytest.mark.parametrize("name", MANUALS)
def test_a_function_moves_by_the_error_of_its_manual(name: str) -> None:
    """Evenly spread up to it, and rounded to fp32: roots of a third of their squares."""

    def body(x: t.Array, y: t.Array) -> None:
        rows = t.span(0, 4096)
        t.store(y, rows, tile=getattr(t, name)(t.load(x, rows)))

    program = t.trace(body, {"x": t.array(t.FP32, "m"), "y": t.array(t.FP32, "m")}, name=name)
    x = np.random.default_rng(8).uniform(2.5, 3.5, 4096)
    spread = spreads(program, bind(program, {"x": x, "y": np.full(4096, np.nan)}))["y"]
    step = np.spacing(np.abs(spread.exact).astype(np.float32)).astype(float)
    # log2 may be off by as much again, whatever its size: its result is near 0 somewhere.
    bound = MANUALS[name] * (np.abs(spread.exact) + (name == "log2"))
    wanted = np.sqrt(np.mean(bound**2 / 3 + step**2 / 12))
    assert np.sqrt(np.mean(spread.deviation**2)) == pytest.approx(wanted, rel=0.03)


def test_what_is_smaller_than_any_normal_number_may_be_zero() -> None:
    """The functions' results flush to zero below 2^-126, as normal numbers of fp32 end there."""

    def body(x: t.Array, y: t.Array) -> None:
        rows = t.span(0, 64)
        t.store(y, rows, tile=t.exp2(t.load(x, rows)))

    program = t.trace(body, {"x": t.array(t.FP32, "m"), "y": t.array(t.FP32, "m")}, name="tiny")
    for power, lost in ((-126.5, True), (-125.5, False)):
        arrays = {"x": np.full(64, power), "y": np.full(64, np.nan)}
        spread = spreads(program, bind(program, arrays))["y"]
        assert (spread.relative > 0.3) == lost, power


def multiplied(k: int) -> t.Program:
    def body(a: t.Array, b: t.Array, c: t.Array) -> None:
        (i,) = t.grid(m=t.cdiv(t.size("m"), 16))
        left = t.load(a, t.span(i * 16, 16), t.span(0, k))
        t.store(
            c, t.span(i * 16, 16), t.span(0, 16), tile=left @ t.load(b, t.span(0, k), t.span(0, 16))
        )

    arrays = {"a": t.array(t.BF16, "m k"), "b": t.array(t.BF16, "k n"), "c": t.array(t.FP32, "m n")}
    return t.trace(body, arrays, name="multiplied")


def test_a_matmul_drifts_with_the_root_of_its_terms() -> None:
    """A tensor core cuts each sum to fp32: up to a last place, of one sign, at every step."""
    relative = {}
    for k in (16, 1024):
        arrays = {
            "a": np.random.default_rng(3).uniform(1, 2, size=(16, k)),
            "b": np.random.default_rng(4).uniform(1, 2, size=(k, 16)),
            "c": np.full((16, 16), np.nan),
        }
        program = multiplied(k)
        held = bind(program, arrays)
        spread = spreads(program, held)["c"]
        relative[k] = spread.relative
        cut = np.zeros((16, 16), np.float32)
        for column, row in zip(held["a"].T, held["b"], strict=True):
            exact = cut.astype(float) + np.outer(column.astype(float), row.astype(float))
            cut = exact.astype(np.float32)
            cut = np.where(cut > exact, np.nextafter(cut, np.float32(0)), cut)
        assert (np.abs(cut - spread.exact) < limits(spread, 8.0) * np.sqrt(k) / 4).all()
    assert 5 < relative[1024] / relative[16] < 12


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.floats(0, 4), st.floats(-8, 8)), min_size=2, max_size=9))
def test_an_element_is_given_the_deviation_of_its_row(row: list[tuple[float, float]]) -> None:
    """Even where no sample moved it; more in proportion where it is larger than its row."""
    deviation, exact = (np.array(column)[None] for column in zip(*row, strict=True))
    known = np.ones_like(exact, bool)
    allowed = limits(Spread(t.FP32, exact, deviation, known), 3.0)[0]
    usual, beside = np.sqrt(np.mean(exact**2)), np.sqrt(np.mean(deviation**2))
    for place, (own, value) in enumerate(row):
        larger = max(1.0, abs(value) / usual) if usual else 1.0
        least = 3.0 * max(own, beside * larger)
        assert least * (1 - 1e-12) <= allowed[place] <= least + 3e-5 * (abs(value) + 1)


def test_copies_and_exact_products_have_no_deviation() -> None:
    def body(x: t.Array, y: t.Array) -> None:
        rows = t.span(0, 16)
        t.store(y, rows, tile=(t.load(x, rows).cast(t.FP32) * 0.5).cast(t.BF16))

    program = t.trace(body, {"x": t.array(t.BF16, "m"), "y": t.array(t.BF16, "m")}, name="halved")
    arrays = {"x": np.arange(16.0), "y": np.full(16, np.nan)}
    spread = spreads(program, bind(program, arrays))["y"]
    assert not spread.deviation.any() and spread.known.all()
    assert not limits(spread, 8.0).any()


def test_an_output_that_begins_as_numbers_is_known_only_where_tasks_ran(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Planted fault: numbers that no task wrote would pass for results without any deviation."""
    monkeypatch.setattr(rounding, "WORK", 1)
    program = summed(64, t.BF16)
    x = np.random.default_rng(2).normal(size=(256, 64))
    for before, ran in ((np.nan, 32), (0.0, 256)):
        held = bind(program, {"x": x, "y": np.full(256, before)})
        spread = spreads(program, held)["y"]
        assert spread.known.sum() == ran and spread.deviation[spread.known].all()


def test_some_tasks_stand_for_many() -> None:
    """128 tasks of a long sum: few of them run, and elements of the others are not judged."""
    program = summed(4096, t.FP32)
    arrays = {"x": np.ones((2048, 4096), np.float32), "y": np.full(2048, np.nan, np.float32)}
    spread = spreads(program, arrays)["y"]
    assert 128 < spread.known.sum() < 1024 and spread.known[0] and spread.known[-1]
    assert np.isinf(limits(spread, 8.0)[~spread.known]).all()


def test_whole_numbers_are_known_where_tasks_changed_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """They have no NaN: what stands there before, and is no result, marks what no task wrote."""
    monkeypatch.setattr(rounding, "WORK", 1)

    def body(x, y) -> None:
        (i,) = t.grid(m=t.cdiv(t.size("m"), 4))
        rows = t.span(i * 4, 4)
        t.store(y, rows, tile=t.argmax_along(t.load(x, rows, t.span(0, 8)), "n"))

    arrays = {"x": t.array(t.FP32, "m n"), "y": t.array(t.INT32, "m")}
    program = t.trace(body, arrays, name="places")
    x = np.random.default_rng(3).normal(size=(64, 8))
    spread = spreads(program, bind(program, {"x": x, "y": np.full(64, -7)}))["y"]
    ran = np.flatnonzero(spread.known)
    assert ran.tolist() == [0, 1, 2, 3, 60, 61, 62, 63]
    assert spread.exact[ran].tolist() == x.argmax(axis=1)[ran].tolist()
