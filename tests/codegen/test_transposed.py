"""`.T` on a loaded operand of a matmul: the matmul reads the load itself, whichever way it lies."""

import numpy as np
import pytest
from tests.gpu.cases import distance

from warploom import tile as t
from warploom.autosched.schedules import Policy, fitting_name, schedule_for
from warploom.codegen.cuda.emit import emit
from warploom.codegen.ir.plan import LaunchPlan
from warploom.codegen.passes.lower import lower
from warploom.errors import InputError


def product(left=False, right=False, kind=t.BF16, written=True):
    """c = a b where a is stored `k m` (left) and b `n k` (right); `.T` is written, or left out."""

    def body(a, b, c):
        m, n = t.grid(m=t.cdiv(t.size("m"), 128), n=t.cdiv(t.size("n"), 64))
        rows, cols = t.span(m * 128, 128), t.span(n * 64, 64)
        acc = t.zeros(m=128, n=64)
        for i in t.loop(t.cdiv(t.size("k"), 32)):
            depth = t.span(i * 32, 32)
            x = t.load(a, depth, rows) if left else t.load(a, rows, depth)
            y = t.load(b, cols, depth) if right else t.load(b, depth, cols)
            x, y = (x.T if left and written else x), (y.T if right and written else y)
            acc += x @ y
        t.store(c, rows, cols, tile=acc.cast(t.BF16))

    arrays = {
        "a": t.array(kind, "k m" if left else "m k"),
        "b": t.array(kind, "n k" if right else "k n"),
        "c": t.array(t.BF16, "m n"),
    }
    return t.trace(body, arrays, name="product")


def source(program):
    schedule = schedule_for(program, Policy("inflight", LaunchPlan(split="m"), groups=2, depth=3))
    text = emit(lower(program, schedule)).text
    # Comments name the lines of this file.
    return [line for line in text.splitlines() if not line.strip().startswith("//")]


SIDES = [(True, False), (False, True), (True, True)]


@pytest.mark.parametrize(("left", "right"), SIDES)
def test_the_kernel_is_that_of_the_operand_as_it_lies(left, right):
    program = product(left, right)
    assert not any(op.kind == "transpose" for op in program.ops())
    assert source(program) == source(product(left, right, written=False))
    schedule_for(program, Policy(fitting_name(program) or ""))

    rng = np.random.default_rng(1)
    a, b = rng.normal(size=(130, 70)), rng.normal(size=(70, 90))
    given = {"a": a.T if left else a, "b": b.T if right else b, "c": np.full((130, 90), np.nan)}
    assert distance(t.interpret(program, given)["c"], a @ b) < 1e-2


def test_8_bit_operands_lie_along_the_depth_or_are_refused_with_the_remedy():
    source(product(right=True, kind=t.E4M3))  # b as it lies is what wgmma reads
    with pytest.raises(InputError, match=r"needs 'k' contiguous: .*; store the array with that"):
        source(product(left=True, right=True, kind=t.E4M3))


def test_a_reduction_of_a_matmuls_operand_is_refused_with_the_remedy():
    def body(a, b, c):
        rows, cols, depth = t.span(0, 128), t.span(0, 64), t.span(0, 32)
        acc = t.zeros(m=128, n=64)
        for _ in t.loop(1):
            right = t.load(b, cols, depth)
            acc += t.load(a, rows, depth) @ right
            acc += t.max_along(right, "k").cast(t.FP32)
        t.store(c, rows, cols, tile=acc.cast(t.BF16))

    arrays = {
        x: t.array(t.BF16, dims) for x, dims in zip("abc", ("m k", "n k", "m n"), strict=True)
    }
    with pytest.raises(InputError, match=r"reads b_t.*b_t\.copy\(\) keeps one in registers"):
        source(t.trace(body, arrays, name="both"))


def test_a_tile_that_changes_after_its_transpose_is_not_read_in_its_place():
    """What requires a single writer: `y` is the transpose of what `x` was."""

    def body(a, c):
        x = t.load(a, t.span(0, 16), t.span(0, 16, "k"))
        y = t.load(a, t.span(0, 16, "n"), t.span(0, 16, "k"))
        turned = y.T
        y[:] = y * 2.0
        for row, right in ((0, turned), (16, y)):
            at = t.span(row, 16, "m"), t.span(0, 16, "n")
            t.store(c, *at, tile=(x @ right).cast(t.BF16))

    program = t.trace(body, {"a": t.array(t.BF16, "m k"), "c": t.array(t.BF16, "r n")}, name="old")
    a = np.random.default_rng(2).normal(size=(16, 16))
    got = t.interpret(program, {"a": a, "c": np.full((32, 16), np.nan)})["c"]
    assert distance(got[:16], a @ a.T) < 1e-2
    assert distance(got[16:], 2 * a @ a.T) < 1e-2
