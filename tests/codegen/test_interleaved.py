"""Loads and stores of neighbours in memory that two tiles have: one access for both."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from warploom import tile as t
from warploom.codegen.cuda.simt.emit import emit_simt
from warploom.codegen.simt.facts import simt_facts
from warploom.codegen.simt.schedule import SimtSchedule
from warploom.emulate.kernel import Library
from warploom.errors import InputError
from warploom.integrations.exports.manifest import launch_of
from warploom.runtime.interface import Interface
from warploom.runtime.kernel import Kernel
from warploom.runtime.tensors import View

PLAN = SimtSchedule("pairs", 64, 8, 4, aligned=True)
ROWS, COLS = 9, 40


def turned(x, angle, y):
    """Pairs of a row turned by the angles of their columns."""
    (i,) = t.grid(i=t.cdiv(t.size("m"), 8))
    rows, cols = t.span(i * 8, 8, "r"), t.span(0, COLS, "c")
    c = t.load(angle, cols)
    a, b = (t.load(x, rows, cols, part).cast(t.FP32) for part in (0, 1))
    kind = x.dtype
    t.store(y, rows, cols, 0, tile=(a * c - b).cast(kind))
    t.store(y, rows, cols, 1, tile=(b * c + a).cast(kind))


def turned_in_place(x, angle):
    turned(x, angle, x)


def program(body, kind=t.BF16):
    arrays = {"x": t.array(kind, "m n two"), "angle": t.array(t.FP32, "n")}
    arrays |= {"y": t.array(kind, "m n two")} if body is turned else {}
    return t.trace(body, arrays, name=body.__name__)


def values(body):
    random = np.random.default_rng(0)
    found = {
        "x": t.round_to(t.BF16, random.normal(size=(ROWS, COLS, 2))),
        "angle": random.normal(size=COLS).astype(np.float32),
    }
    return found | ({"y": np.full((ROWS, COLS, 2), np.nan)} if body is turned else {})


@pytest.mark.parametrize("body", [turned, turned_in_place])
def test_a_line_has_both(body):
    made = program(body)
    source = emit_simt(made, PLAN, "sm_90a")
    result, given = "y" if body is turned else "x", values(body)
    want = t.interpret(made, given)[result]
    found = Library([source]).run(0, made, given, {}, blocks=2)[result]
    assert np.allclose(found, want, rtol=2**-7, atol=1e-6)
    assert "write_pairs<4>(" in source.text and "read_any(" not in source.text
    pointers = [one for one in source.parameters if one.get("interleaved")]
    assert {one["array"] for one in pointers} == {"x", result}
    assert {one["line"] for one in pointers} == {16}


@pytest.mark.parametrize(
    "shape, strides",
    [((9, 40, 3), (120, 3, 1)), ((9, 40, 2), (160, 4, 1)), ((9, 40, 2), (81, 2, 1))],
)
def test_other_arrays_are_refused(shape, strides):
    """Three elements, room between pairs, and rows that begin at no multiple of a line."""
    made = emit_simt(program(turned), PLAN, "sm_90a")
    asked = Interface(**Interface.read(made.to_json()), arch="sm_90a", registers=32)
    views = {
        "x": View(0, (9, 40, 2), (80, 2, 1), "bf16"),
        "angle": View(0, (40,), (1,), "fp32"),
        "y": View(0, (9, 40, 2), (80, 2, 1), "bf16"),
    }
    kernel = SimpleNamespace(interface=asked)
    Kernel._check_parameters(kernel, views, {"n": 40})
    with pytest.raises(InputError, match=r"neighbours|multiples of 16 B"):
        Kernel._check_parameters(kernel, views | {"x": View(0, shape, strides, "bf16")}, {"n": 40})
    with pytest.raises(InputError, match="launchers do not check"):
        launch_of(asked)


def test_other_schedules_and_programs_have_single_elements():
    def reversed_pairs(x, angle, y):
        """The first is loaded where the second has been stored already."""
        (i,) = t.grid(i=t.cdiv(t.size("m"), 8))
        rows, cols = t.span(i * 8, 8, "r"), t.span(0, COLS, "c")
        a = t.load(x, rows, cols, 0)
        t.store(x, rows, cols, 1, tile=a)
        t.store(y, rows, cols, 0, tile=(t.load(x, rows, cols, 1).cast(t.FP32)).cast(t.BF16))
        t.store(y, rows, cols, 1, tile=(a.cast(t.FP32) * t.load(angle, cols)).cast(t.BF16))

    def pairs(made, plan):
        return len(simt_facts(made, plan, "sm_90a").interleaved) // 2

    arrays = {"x": t.array(t.BF16, "m n two"), "angle": t.array(t.FP32, "n")}
    arrays |= {"y": t.array(t.BF16, "m n two")}
    assert pairs(program(turned), PLAN) == 2
    assert pairs(t.trace(reversed_pairs, arrays, name="reversed"), PLAN) == 1  # the stores to y
    assert pairs(program(turned), replace(PLAN, aligned=False)) == 0
    assert pairs(program(turned), replace(PLAN, vector=1)) == 0
    assert pairs(program(turned, t.FP32), PLAN) == 0  # 32 bytes are no access
