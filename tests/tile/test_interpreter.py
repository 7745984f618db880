"""The interpreter at the edges of arrays, beside numpy: everything emitted is held to it."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from warploom import tile as t
from warploom.errors import InputError
from warploom.tile.widen import widened

STARTS = st.integers(-12, 12)
SIZES = st.integers(1, 9)
LENGTHS = st.integers(1, 9)


@given(start=STARTS, size=SIZES, length=LENGTHS, edge=st.sampled_from([0.0, np.inf, -np.inf]))
def test_a_load_gives_its_edge_value_outside_of_the_array(start, size, length, edge) -> None:
    def body(x, y) -> None:
        t.store(y, t.span(0, size, "m"), tile=t.load(x, t.span(start, size, "m"), edge=edge))

    program = t.trace(body, {"x": t.array(t.FP32, "m"), "y": t.array(t.FP32, "n")}, name="loaded")
    x = np.arange(1.0, length + 1.0)
    want = [x[at] if 0 <= at < length else edge for at in range(start, start + size)]
    assert t.interpret(program, {"x": x, "y": np.zeros(size)})["y"].tolist() == want


@given(start=STARTS, size=SIZES, length=LENGTHS, stop=st.integers(-3, 12), add=st.booleans())
def test_a_store_drops_what_lies_outside_or_behind_its_stop(start, size, length, stop, add) -> None:
    def body(y) -> None:
        tile = t.coordinate("m", size).cast(t.FP32) + 10.0
        t.store(y, t.span(start, size, "m", stop=stop), tile=tile, add=add)

    program = t.trace(body, {"y": t.array(t.FP32, "m")}, name="stored")
    before = np.arange(length) * 100.0
    want = before.copy()
    for number in range(size):
        at = start + number
        if 0 <= at < min(length, stop):
            want[at] = 10.0 + number + (before[at] if add else 0.0)
    assert t.interpret(program, {"y": before})["y"].tolist() == want.tolist()


@given(row=STARTS, rows=LENGTHS)
def test_a_row_that_is_not_there_is_neither_read_nor_written(row, rows) -> None:
    def body(x, y) -> None:
        t.store(y, row, t.span(0, 2), tile=t.load(x, row, t.span(0, 2), edge=np.inf) + 1.0)

    kinds = {name: t.array(t.FP32, "m n") for name in "xy"}
    x = np.arange(2.0 * rows).reshape(rows, 2)
    found = t.interpret(t.trace(body, kinds, name="row"), {"x": x, "y": np.zeros((rows, 2))})["y"]
    want = np.zeros((rows, 2))
    if 0 <= row < rows:
        want[row] = x[row] + 1.0
    assert np.array_equal(found, want)


def test_a_sum_in_memory_has_the_precision_of_its_array() -> None:
    def body(y) -> None:
        t.store(y, t.span(0, 2), tile=t.full(1.0, t.BF16, m=2), add=True)

    program = t.trace(body, {"y": t.array(t.BF16, "m")}, name="added")
    assert t.interpret(program, {"y": np.array([256.0, 2.0])})["y"].tolist() == [256.0, 3.0]


def test_products_are_added_up_exactly_and_rounded_once() -> None:
    def body(a, b, c) -> None:
        rows, depth, cols = t.span(0, 16), t.span(0, 16), t.span(0, 16)
        acc = t.full(3.0, t.FP32, m=16, n=16)
        acc += t.load(a, rows, depth) @ t.load(b, depth, cols)
        t.store(c, rows, cols, tile=acc)

    kinds = {"a": t.array(t.BF16, "m k"), "b": t.array(t.BF16, "k n"), "c": t.array(t.FP32, "m n")}
    program = t.trace(body, kinds, name="products")
    a, b = np.zeros((16, 16)), np.zeros((16, 16))
    a[0, :3], b[:3, 0] = (4096.0, 1.0, -4096.0), (8192.0, 1.0, 8192.0)
    found = t.interpret(program, {"a": a, "b": b, "c": np.zeros((16, 16))})["c"]
    assert found[0, 0] == 4.0 and (found[1:, 1:] == 3.0).all()


def test_the_arrays_given_stay_and_count_in_their_declared_types() -> None:
    def body(x) -> None:
        t.store(x, t.span(0, 2), tile=t.load(x, t.span(0, 2)) + 1.0)

    program = t.trace(body, {"x": t.array(t.FP32, "m")}, name="grown")
    for given_ in (np.array([1.0, 2.0]), np.array([1.0, 2.0], np.float32)):
        assert t.interpret(program, {"x": given_})["x"].tolist() == [2.0, 3.0]
        assert given_.tolist() == [1.0, 2.0]
    narrow = t.trace(body, {"x": t.array(t.BF16, "m")}, name="grown")
    fine = np.array([1.0 + 2.0**-9, 3.0])
    assert t.interpret(narrow, {"x": fine})["x"].tolist() == [2.0, 4.0]
    # Without rounding, the same program keeps every bit.
    assert t.interpret(widened(narrow), {"x": fine})["x"].tolist() == [2.0 + 2.0**-9, 4.0]


@pytest.mark.parametrize("at", [-1, 3])
def test_a_task_reads_numbers_of_its_array_only(at) -> None:
    def body(k, y) -> None:
        (i,) = t.grid(m=1)
        t.store(y, t.span(t.read(k, i + at), 1, "n"), tile=t.zeros(n=1))

    kinds = {"k": t.array(t.INT32, "m"), "y": t.array(t.FP32, "n")}
    program = t.trace(body, kinds, name="told")
    with pytest.raises(InputError, match=rf"reads element \[{at}\] of shape \[3\]"):
        t.interpret(program, {"k": np.zeros(3, np.int32), "y": np.zeros(4)})


def test_a_scalar_is_one_number() -> None:
    def body(x) -> None:
        at = t.span(0, 2, "m")
        t.store(x, at, tile=t.load(x, at) * t.scalar("factor"))

    program = t.trace(body, {"x": t.array(t.FP32, "m")}, name="scaled")
    array = {"x": np.array([1.0, 2.0])}
    for given_ in (3, 3.0, np.float32(3.0), np.array(3.0)):
        assert t.interpret(program, array, {"factor": given_})["x"].tolist() == [3.0, 6.0]
    for given_ in ([3.0], np.array([3.0, 4.0]), "3", None):
        with pytest.raises(InputError, match="expected a number"):
            t.interpret(program, array, {"factor": given_})
    with pytest.raises(InputError, match="needs the scalar factor"):
        t.interpret(program, array, {})


@pytest.mark.parametrize(("shift", "right"), [(-1, False), (0, True), (1, False)])
def test_a_gather_takes_positions_of_its_tile_only(shift, right) -> None:
    def body(x, y) -> None:
        places = t.coordinate("m", 4) + shift
        t.store(y, t.span(0, 4, "m"), tile=t.gather(t.load(x, t.span(0, 4, "m")), places, "m"))

    program = t.trace(body, {"x": t.array(t.FP32, "m"), "y": t.array(t.FP32, "n")}, name="picked")
    arrays = {"x": np.arange(4.0), "y": np.zeros(4)}
    if right:
        assert t.interpret(program, arrays)["y"].tolist() == [0.0, 1.0, 2.0, 3.0]
    else:
        with pytest.raises(InputError, match="outside of axis 'm' of length 4"):
            t.interpret(program, arrays)


@pytest.mark.parametrize("width", [2, 4])
def test_each_task_of_a_cluster_has_its_part_of_the_sum_of_all(width) -> None:
    """Whatever the order the tasks are given in; tasks beyond the last part have zeros."""

    def body(x, y) -> None:
        part, row = t.grid(parts=4, m=t.size("m"))
        own = t.load(x, part, t.span(0, 8)) * t.number(row + 1).cast(t.FP32)
        share = t.reduce_scatter(own, part, 4, "n", width)
        t.store(y, row, part, t.span(0, width, "n"), tile=share)

    kinds = {"x": t.array(t.FP32, "p n"), "y": t.array(t.FP32, "m q w")}
    program = t.trace(body, kinds, name="shared")
    x = np.random.default_rng(0).integers(-9, 9, (4, 8)).astype(np.float32)
    want = np.zeros((2, 4, width))
    for row in range(2):
        for part in range(8 // width):
            want[row, part] = x.sum(axis=0)[part * width :][:width] * (row + 1)
    arrays = {"x": x, "y": np.full((2, 4, width), 7.0)}
    tasks = [{"parts_tile": p, "m_tile": row} for p in (2, 0, 3, 1) for row in (1, 0)]
    assert {name for name, _ in program.grid} == set(tasks[0])
    assert np.array_equal(t.interpret(program, arrays)["y"], want)
    assert np.array_equal(t.interpret(program, arrays, tasks=tasks)["y"], want)


def test_whole_quotients_are_rounded_down() -> None:
    def body(y) -> None:
        tile = (t.coordinate("m", 32) - 16) // 5
        t.store(y, t.span(0, 32, "m"), tile=tile)

    program = t.trace(body, {"y": t.array(t.INT32, "m")}, name="quotients")
    want = [n // 5 for n in range(-16, 16)]
    assert t.interpret(program, {"y": np.zeros(32, np.int32)})["y"].tolist() == want


@pytest.mark.parametrize(("by", "kind"), [(0, t.INT32), (2.0, t.INT32), (2, t.FP32)])
def test_other_whole_quotients_are_refused(by, kind) -> None:
    def body(y) -> None:
        t.store(y, t.span(0, 32, "m"), tile=t.coordinate("m", 32).cast(kind) // by)

    with pytest.raises(InputError, match=r"a whole number above 0|needs an int32 tile"):
        t.trace(body, {"y": t.array(kind, "m")}, name="quotients")


def test_random_bits_are_those_of_philox() -> None:
    """The block of zeros is that of Random123's known answers; other numbers give others."""

    def drawn(row, key) -> list[int]:
        def body(y) -> None:
            keys = (t.full(word, t.INT32) for word in (key, 0))
            draw = t.philox(t.coordinate("m", 1, row), t.coordinate("n", 4), *keys)
            t.store(y, t.span(0, 1), t.span(0, 4), tile=draw)

        program = t.trace(body, {"y": t.array(t.INT32, "m n")}, name="drawn")
        found = t.interpret(program, {"y": np.zeros((1, 4))})["y"]
        return [int(x) & 0xFFFFFFFF for x in found[0]]

    assert drawn(0, 0) == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]
    assert len({*drawn(0, 0), *drawn(1, 0), *drawn(0, -1), *drawn(-1, 0)}) == 16
