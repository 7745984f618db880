"""Ranges that begin before an array, between 16 bytes or end early: every target and store."""

import numpy as np
import pytest
from tests.codegen import emulate
from tests.lowering import lowered

from warploom import tile as t
from warploom.autosched.schedules import Policy
from warploom.codegen.cuda.emit import emit
from warploom.codegen.cuda.emit_sm80 import emit_sm80
from warploom.codegen.ir.plan import LaunchPlan
from warploom.tile.index import const, maximum_index, symbol

SIZES = {"m": 100, "n": 32, "k": 40, "blocks": 2, "h": 1}


def product(a, b, i, first=0, plane=None):
    """The product of a block of rows, over blocks of the depth from `first` on."""
    acc = t.zeros(m=64, n=32)
    for k in t.loop(first, t.cdiv(t.size("k"), 16)):
        part = t.span(k * 16, 16)
        where = (t.span(i * 64, 64), part)
        left = t.load(a, *where) if plane is None else t.load(a, plane, *where)
        acc += left @ t.load(b, part, t.span(0, 32))
    return acc


def grid():
    return t.grid(m=t.cdiv(t.size("m"), 64))[0]


def columns_end(a, b, c):
    i = grid()
    rows, cols = t.span(i * 64, 64, stop=70), t.span(0, 32, stop=20)
    t.store(c, rows, cols, tile=product(a, b, i))


def turned_rows_end(a, b, c):
    i = grid()
    tile = product(a, b, i).T.cast(t.BF16)
    t.store(c, t.span(0, 32), t.span(i * 64, 64, stop=70), tile=tile)


def turned_and_added(a, b, c):
    i = grid()
    tile = product(a, b, i).cast(t.INT32).T
    t.store(c, t.span(0, 32), t.span(i * 64, 64), tile=tile, add=True)


def between_16_bytes(a, b, c):
    i = grid()
    tile = product(a, b, i).cast(t.BF16)
    t.store(c, t.span(i * 64, 64), t.span(3, 32, "n"), tile=tile)


def read_before_the_array(a, b, c, places, x):
    i = grid()
    at, acc = t.read(places, i), product(a, b, i)
    acc += t.load(x, t.span(i * 64, 64), t.span(at, 32, "n"))
    acc += t.load(x, t.span(at, 64, "m"), t.span(0, 32, "n"))
    acc += t.number((at + 1) // 4, t.FP32) + t.number(at % 4, t.FP32)
    t.store(c, t.span(i * 64, 64), t.span(at, 32, "n"), tile=acc)


def loop_from_below(a, b, c, x):
    i = grid()
    acc = t.zeros(m=64, n=32)
    for k in t.loop(-2, t.cdiv(t.size("k"), 16)):
        part = t.span(k * 16, 16)
        acc += t.load(a, t.span(i * 64, 64), part) @ t.load(b, part, t.span(0, 32))
        acc += t.load(x, t.span(k * 64, 64, "m"), t.span(k * 2, 32, "n"))
    t.store(c, t.span(i * 64, 64), t.span(0, 32), tile=acc)


def plane_outside(a, b, c):
    i = grid()
    t.store(c, t.span(i * 64, 64), t.span(0, 32), tile=product(a, b, i, plane=i - 1))


def loops_of_two_depths(a, b, c):
    """The same arrays in tiles of three sizes, in loops and outside: rings of their own."""
    i = grid()
    rows, cols = t.span(i * 64, 64), t.span(0, 32)
    first = t.load(a, rows, t.span(0, 16)) @ t.load(b, t.span(0, 16), cols)
    acc = product(a, b, i)
    for k in t.loop(t.cdiv(t.size("k"), 32)):
        part = t.span(k * 32, 32)
        acc += t.load(a, rows, part) @ t.load(b, part, cols)
    last = t.load(a, rows, t.span(0, 32)) @ t.load(b, t.span(0, 32), cols)
    t.store(c, rows, cols, tile=acc + first - last)


BODIES = {
    columns_end: {"c": (t.FP32, "m n")},
    loops_of_two_depths: {"c": (t.FP32, "m n")},
    turned_rows_end: {"c": (t.BF16, "n m")},
    turned_and_added: {"c": (t.INT32, "n m")},
    between_16_bytes: {"c": (t.BF16, "m n")},
    read_before_the_array: {
        "c": (t.FP32, "m n"), "places": (t.INT32, "blocks"), "x": (t.FP32, "m n")
    },
    loop_from_below: {"c": (t.FP32, "m n"), "x": (t.FP32, "m n")},
    plane_outside: {"a": (t.BF16, "h m k"), "c": (t.FP32, "m n")},
}  # fmt: skip
NAMES = [body.__name__ for body in BODIES]


def case(body):
    """(program, arrays)."""
    kinds = {"a": (t.BF16, "m k"), "b": (t.BF16, "k n"), **BODIES[body]}
    program = t.trace(body, {n: t.array(kind, dims) for n, (kind, dims) in kinds.items()})
    draw = np.random.default_rng(5)
    arrays = {n: draw.integers(-2, 3, [SIZES[d] for d in k[1].split()]) for n, k in kinds.items()}
    return program, {**arrays, "places": np.array([-7, -30])}


@pytest.fixture(scope="module")
def kernels(tmp_path_factory):
    """Every program for Hopper with both stores, and for older GPUs."""
    found = []
    for body in BODIES:
        program, arrays = case(body)
        for target in ("tma", "direct", "sm_80"):
            plan = LaunchPlan(store="tma" if target == "tma" else "direct")
            block = lowered(program, Policy("multistage", plan, groups=1))
            source = emit_sm80(block) if target == "sm_80" else emit(block)
            found.append((body.__name__, target, program, arrays, source))
    library = emulate.compile_all([each[-1] for each in found], tmp_path_factory.mktemp("edges"))
    return library, found


@pytest.mark.parametrize("target", ["tma", "direct", "sm_80"])
@pytest.mark.parametrize("name", NAMES)
def test_the_emitted_code_means_what_the_program_means(kernels, name, target):
    library, found = kernels
    number = next(n for n, each in enumerate(found) if each[:2] == (name, target))
    _, _, program, arrays, source = found[number]
    got = emulate.run(library, number, source, program, arrays)
    assert np.array_equal(got["c"], t.interpret(program, arrays)["c"])


def test_what_may_be_negative():
    i, read = symbol("i"), symbol("read", signed=True)
    assert not (i * 3 + 4).signed and not (read % 4).signed
    assert (i - 1).signed and (read + 3).signed and (read // 2).signed and const(-1).signed
    assert not maximum_index(i - 1, 0).signed
