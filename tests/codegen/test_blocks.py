"""Inverses of unit lower triangular tiles, and products that are taken off a sum: the interpreter
against float64, the emitted kernels against the interpreter."""

import re

import numpy as np
import pytest
from tests.codegen import emulate
from tests.gpu.cases import distance
from tests.lowering import lowered

from warploom import tile as t
from warploom.autosched.schedules import Policy
from warploom.codegen.cuda.emit import emit
from warploom.codegen.cuda.emit_sm80 import emit_sm80
from warploom.codegen.oracle.simulate import simulate
from warploom.errors import InputError
from warploom.tile.ops import TAKEN_OFF

SIZE = 64
HALVES = 1e-3  # fp16 operands of the inverse


def body(a, b, inverse, rest):
    """The inverse of 1 + (a b below its diagonal), and 2 a b - a c with c: more columns of b."""
    whole = t.span(0, SIZE)
    for _ in t.loop(1):
        left, right = t.load(a, whole, whole), t.load(b, whole, whole)
        product = left @ right
        t.store(inverse, whole, whole, tile=t.lower_inverse(product))
        product *= 2.0
        product -= left @ t.load(b, whole, t.span(SIZE, SIZE))
        t.store(rest, whole, whole, tile=product)


ARRAYS = {"a": "m k", "b": "k n", "inverse": "m n", "rest": "m n"}
PROGRAM = t.trace(
    body,
    {n: t.array(t.BF16 if n in "ab" else t.FP32, dims) for n, dims in ARRAYS.items()},
    name="blocks",
)


def case():
    random = np.random.default_rng(3)
    values = {name: t.round_to(t.BF16, random.normal(size=(SIZE, n)) / 8)
              for name, n in (("a", SIZE), ("b", 2 * SIZE))}  # fmt: skip
    return values | {name: np.full((SIZE, 2 * SIZE), np.nan) for name in ("inverse", "rest")}


def right(values):
    """In float64, by numpy's inverse."""
    a, b = (np.asarray(values[name], np.float64) for name in "ab")
    product = a @ b
    inverse = np.linalg.inv(np.eye(SIZE) + np.tril(product[:, :SIZE], -1))
    return {"inverse": inverse, "rest": 2 * product[:, :SIZE] - product[:, SIZE:]}


def kept(found):
    return {name: found[name][:, :SIZE] for name in ("inverse", "rest")}


@pytest.mark.parametrize("arch", ["sm_90a", "sm_80"])
def test_the_emitted_kernel_does_what_the_program_says(arch):
    values = case()
    block = lowered(PROGRAM, Policy("multistage"), arch=arch)
    source = (emit if arch == "sm_90a" else emit_sm80)(block)
    library = emulate.compile_all([source], None)
    meant = kept(t.interpret(PROGRAM, values))
    got = kept(emulate.run(library, 0, source, PROGRAM, values))
    ran = kept(simulate(block, values))
    for name, wanted in right(values).items():
        assert distance(meant[name], wanted) < (HALVES if name == "inverse" else 1e-6)
        assert distance(got[name], meant[name]) < 1e-5  # one fp16 may be rounded the other way
        assert np.array_equal(ran[name], meant[name])
    # A planted fault: the diagonal is not part of L.
    assert distance(meant["inverse"], right(values)["inverse"] + np.eye(SIZE)) > 0.1


def test_a_product_taken_off_is_one_matmul():
    matmuls = [op for op in PROGRAM.ops() if op.kind == "mma"]
    assert [op.value for op in matmuls] == [None, TAKEN_OFF]
    assert not any(op.kind == "sub" for op in PROGRAM.ops())


@pytest.mark.parametrize(
    "make, said",
    [
        (lambda x: t.lower_inverse(x.cast(t.BF16)), "expected fp32 and two axes of 64"),
        (lambda x: t.lower_inverse(x.sub("n", 0, 32)), "expected fp32 and two axes of 64"),
        (lambda x: t.lower_inverse(x.T), "expected rows of register tiles"),
    ],
)
def test_other_tiles_are_refused(make, said):
    def wrong(a, b, inverse):
        whole = t.span(0, SIZE)
        for _ in t.loop(1):
            product = t.load(a, whole, whole) @ t.load(b, whole, whole)
            made = make(product)
            t.store(inverse, whole, whole, tile=made if made.type.names[0] == "m" else made.T)

    def build():
        arrays = {n: t.array(t.BF16 if n in "ab" else t.FP32, ARRAYS[n]) for n in ("a", "b")}
        arrays["inverse"] = t.array(t.FP32, "m n")
        program = t.trace(wrong, arrays, name="wrong")
        return emit(lowered(program, Policy("multistage")))

    with pytest.raises(InputError, match=re.escape(said)):
        build()
