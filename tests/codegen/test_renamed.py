"""Matrices under other names beside matmuls: one slot under two, results as next operands, tiles
that only arithmetic reads, operands that follow each other in one place."""

import numpy as np
import pytest
from tests.codegen import emulate
from tests.lowering import lowered

from warploom import tile as t
from warploom.autosched.schedules import Policy
from warploom.codegen.cuda.emit import emit
from warploom.codegen.ir.place import place
from warploom.codegen.ir.plan import LaunchPlan
from warploom.codegen.oracle.simulate import simulate

ROWS, DEPTH = 64, 32


def _body(k, x, power, both):
    (h,) = t.grid(heads=t.size("heads"))
    r, n = t.coordinate("r", ROWS), t.coordinate("n", ROWS)
    for i in t.loop(t.cdiv(t.size("m"), ROWS)):
        here, depth = t.span(i * ROWS, ROWS, "n"), t.span(0, DEPTH, "d")
        keys = t.load(k, h, here, depth)
        low = t.where(r > n, keys.rename("n", "r") @ keys, 0.0).cast(t.BF16)
        square = low.rename("n", "u") @ low.rename("r", "u")
        t.store(power, h, i, t.span(0, ROWS, "r"), t.span(0, ROWS, "n"), tile=square)
        rows = t.load(x, h, t.span(i * ROWS, ROWS, "s"), depth)
        operand = (rows.cast(t.FP32) + 1.0).cast(t.BF16)
        first = keys @ operand
        operand[:] = (rows.cast(t.FP32) * 2.0).cast(t.BF16)
        first += keys @ operand
        t.store(both, h, i, t.span(0, ROWS, "n"), t.span(0, ROWS, "s"), tile=first)


def case(m=150):
    """(program, arrays): sums of whole numbers, exact in any order."""
    arrays = {name: t.array(t.BF16, "heads m d") for name in "kx"}
    arrays |= {name: t.array(t.FP32, f"heads parts a{name} b{name}") for name in ("power", "both")}
    program = t.trace(_body, arrays, name="renamed")
    random, parts = np.random.default_rng(3), -(-m // ROWS)
    values = {name: random.integers(-1, 2, (2, m, DEPTH)) for name in "kx"}
    whole = np.full((2, parts, ROWS, ROWS), np.nan)
    return program, values | {"power": whole, "both": whole.copy()}


def meant(values):
    """By numpy, from the arrays."""
    parts = values["power"].shape[1]
    padded = np.zeros((2, 2, parts * ROWS, DEPTH))
    for number, name in enumerate("kx"):
        padded[number, :, : values[name].shape[1]] = values[name]
    k, x = padded.reshape(2, 2, parts, ROWS, DEPTH)
    low = np.tril(k @ k.swapaxes(2, 3), -1)
    return {"power": low @ low, "both": k @ (3 * x + 1).swapaxes(2, 3)}


@pytest.mark.parametrize("name", ["lcsf", "multistage"])
def test_renamed_tiles_mean_what_they_say(name):
    program, values = case()
    block = lowered(program, Policy(name, LaunchPlan(split="r")))
    source = emit(block)
    found = emulate.run(emulate.compile_all([source], None), 0, source, program, values)
    for got in (t.interpret(program, values), simulate(block, values, seed=2), found):
        for array, want in meant(values).items():
            assert np.array_equal(got[array], want), array


def test_what_is_read_under_two_names_or_twice_takes_one_slot():
    program, _ = case()
    placement = place(program, "r", 1)
    assert sorted(placement.shared) == ["k_t", "x_t"]
    assert not any(
        op.kind == "rename" and op.srcs[0].name == "k_t" for op in placement.program.ops()
    )
    # Two operands one after the other are one variable, hence one place.
    assert len(placement.staged) == 2
