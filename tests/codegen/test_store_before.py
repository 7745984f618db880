"""Stores of tiles that begin before their array: the copy engine traps on a box that ends there."""

import re
from dataclasses import replace

import numpy as np
import pytest
from tests.codegen import emulate
from tests.gpu.cases import distance
from tests.lowering import lowered

from warploom import tile as t
from warploom.autosched.schedules import Policy
from warploom.codegen.cuda.emit import emit


def program(behind):
    """y of a chunk is stored `behind` chunks before it, and so the first ones nowhere."""

    def body(x, w, y):
        (column,) = t.grid(n=t.cdiv(t.size("n"), 64))
        for i in t.loop(t.cdiv(t.size("m"), 64)):
            rows = t.load(x, t.span(i * 64, 64), t.span(0, 64))
            made = rows @ t.load(w, t.span(0, 64), t.span(column * 64, 64))
            where = t.span((i - behind) * 64, 64), t.span(column * 64, 64)
            t.store(y, *where, tile=made.cast(t.BF16))

    arrays = {"x": "m k", "w": "k n", "y": "m n"}
    return t.trace(body, {name: t.array(t.BF16, dims) for name, dims in arrays.items()})


@pytest.fixture(scope="module")
def kernels():
    """The kernel as emitted and without its guard, compiled together, with program and arrays."""
    random, made = np.random.default_rng(0), program(1)
    arrays = {name: t.round_to(t.BF16, random.normal(size=(192, 64))) for name in "xy"}
    arrays["w"] = t.round_to(t.BF16, random.normal(size=(64, 64)))
    source = emit(lowered(made, Policy("multistage")))
    bare = re.sub(r" && \(\(i_ - 1\) \* 64\) \+ 0 \+ 64 > 0", "", source.text)
    assert bare != source.text
    sources = source, replace(source, text=bare)
    return emulate.compile_all(sources, None), sources, made, arrays


def test_only_boxes_that_reach_their_array_are_stored(kernels):
    library, (source, _), made, arrays = kernels
    got = emulate.run(library, 0, source, made, arrays)["y"]
    assert distance(got, t.interpret(made, arrays)["y"]) < 1e-3


def test_the_emulated_copy_engine_traps_where_no_guard_keeps_such_a_box_back(kernels):
    library, (_, bare), made, arrays = kernels
    told = "box from -64 to 0 of dimension 1, which ends before its array begins"
    with pytest.raises(emulate.Fault, match=told) as fault:
        emulate.run(library, 1, bare, made, arrays)
    assert fault.value.kind == "rule"


def test_starts_that_are_never_negative_have_no_guard():
    assert "+ 64 > 0" not in emit(lowered(program(0), Policy("multistage"))).text
