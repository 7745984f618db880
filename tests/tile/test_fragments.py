"""Arrays in fragments: where their elements lie in memory."""

import numpy as np
import pytest

from warploom import tile as t
from warploom.codegen.compile.build import emitted
from warploom.codegen.simt.choose import simt
from warploom.emulate.kernel import Library
from warploom.errors import InputError
from warploom.tile.fragments import in_memory, in_order

COLUMNS = 48


def reader(fragments):
    """Rows of x, doubled; x is in fragments or not."""

    def body(x, y):
        head, i = t.grid(heads=t.size("heads"), rows=t.cdiv(t.size("m"), 64))
        at = (head, t.span(i * 64, 64, "r"), t.span(0, COLUMNS, "c"))
        t.store(y, *at, tile=t.load(x, *at) * 2.0)

    arrays = {"x": t.array(t.FP32, "heads m n", fragments), "y": t.array(t.FP32, "heads m n")}
    return t.trace(body, arrays, name="doubled")


def weighed():
    """Vectors of w."""

    def body(w, y):
        (i,) = t.grid(m=t.cdiv(t.size("m"), 16))
        at = t.span(i * 16, 16, "m")
        t.store(y, at, tile=t.load(w, at) * 2.0)

    return t.trace(
        body, {"w": t.array(t.FP32, "m", fragments=True), "y": t.array(t.FP32, "m")}, name="weighed"
    )


def place(row, col):
    """PTX ISA, register fragments of wgmma: warp w of four has rows 16 w to 16 w + 15; its thread
    has columns 2 (lane % 4) and the next of row lane / 4, then the same of 8 rows below."""
    lane = row % 8 * 4 + col % 8 // 2
    thread = row % 64 // 16 * 32 + lane
    return row // 64 * 64 * COLUMNS + col // 8 * 512 + thread * 4 + row % 16 // 8 * 2 + col % 2


def test_tiles_lie_as_registers_hold_them():
    x = np.arange(2 * 128 * COLUMNS, dtype=np.float32).reshape(2, 128, COLUMNS)
    moved = in_memory(reader(True), {"x": x, "y": x})
    for head, row, col in np.ndindex(x.shape):
        assert moved["x"][head].flat[place(row, col)] == x[head, row, col]
    assert (moved["y"] == x).all()
    assert (in_order(reader(True), moved)["x"] == x).all()


def test_vectors_lie_as_columns_do():
    x = np.arange(32, dtype=np.float32)
    moved = in_memory(weighed(), {"w": x})
    assert moved["w"][:16].tolist() == [0, 1, 8, 9, 2, 3, 10, 11, 4, 5, 12, 13, 6, 7, 14, 15]
    assert (in_order(weighed(), moved)["w"] == x).all()


def test_a_run_gives_and_takes_arrays_in_order():
    x = np.random.default_rng(0).standard_normal((2, 128, COLUMNS)).astype(np.float32)
    arrays = {"x": x, "y": np.full_like(x, np.nan)}
    programs = [reader(True), reader(False)]
    sources = [emitted(one, simt(one)) for one in programs]
    library = Library(sources)
    for number in range(2):
        got = library.run(number, programs[number], arrays)
        assert (got["y"] == 2 * x).all() and (got["x"] == x).all()
    # planted: a kernel that takes an array in fragments for one in rows
    assert (library.run(1, reader(True), arrays)["y"] != 2 * x).mean() > 0.9


@pytest.mark.parametrize("shape", [(1, 100, COLUMNS), (1, 64, 44)])
def test_parts_are_whole(shape):
    with pytest.raises(InputError, match=r"dimension of (100|44), expected a multiple of (64|8)"):
        in_memory(reader(True), {"x": np.zeros(shape)})


def test_an_array_has_one_order():
    def both(x, y):
        (i,) = t.grid(m=t.cdiv(t.size("m"), 64))
        rows, cols = t.span(i * 64, 64, "r"), t.span(0, 64, "c")
        t.store(y, rows, cols, tile=t.load(x, rows, cols) + t.load(x, 0, cols))

    arrays = {"x": t.array(t.FP32, "m n", fragments=True), "y": t.array(t.FP32, "m n")}
    with pytest.raises(InputError, match="vectors and tiles lie in different orders"):
        in_memory(t.trace(both, arrays), {"x": np.zeros((64, 64))})
