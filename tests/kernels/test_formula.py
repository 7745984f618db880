"""A formula as a kernel: derived, run by the interpreter, emulated, compiled."""

from pathlib import Path

import numpy as np
import pytest
from tests.codegen import emulate

from warploom.autosched.schedules import Policy, schedule_for
from warploom.codegen.cuda.emit import emit
from warploom.codegen.passes.lower import lower
from warploom.derive.derive import derive_on
from warploom.derive.formula.evaluate import compare, evaluate, random_inputs
from warploom.derive.formula.frontend import apply, build, contract, softmax, tensor
from warploom.derive.formula.library import formula
from warploom.derive.lemmas.recurrence import recurrence
from warploom.errors import InputError
from warploom.kernels.check import checked
from warploom.kernels.formula import formula_kernel
from warploom.kernels.library import configure
from warploom.kernels.user import load_kernel
from warploom.objects import hold, load_object
from warploom.tile import round_to

EXAMPLE = f"{Path(__file__).resolve().parents[2]}/examples/derive_my_recurrence.py:diagram"


def gla():
    """A gate of its own for every channel, and a head narrower than a tile."""
    q, k, v = tensor("q", "t h d"), tensor("k", "t h d"), tensor("v", "t h e")
    gate = apply("exp", -apply("abs", tensor("g", "t h d")))
    row = contract(k, v, out=("t", "h", "d", "e"))
    state = recurrence("t", "h d e", lambda before: gate * before + row)
    out = contract(q, state, out=("t", "h", "e"))
    return build("gla", {"o": out}, {"t": 4096, "h": 16, "d": 32, "e": 48})


def test_a_formula_runs_as_a_kernel_and_carries_its_derivation():
    kernel = load_kernel(EXAMPLE)
    assert "is proven necessary" in kernel.derivation
    config, sizes = configure(EXAMPLE, {"t": "70", "h": "1"})
    assert sizes == {"t": 70, "h": 1, "d": 64, "e": 64}
    assert kernel.full_sizes()["t"] == 4096
    result = checked(EXAMPLE, config, sizes).require()
    assert result.judge == "the reference given" and result.bounds["o"] < 0.02


def test_a_formula_of_several_programs_is_refused():
    with pytest.raises(InputError, match="mlp: derived as 2 programs, expected one"):
        load_kernel(hold(formula("mlp"), "mlp"))


def test_parts_that_a_second_program_would_join_are_made_by_one():
    """One head of attention fills a GPU in parts of its keys alone."""
    q, k, v = tensor("Q", "q d"), tensor("K", "x d"), tensor("V", "x e")
    made = build("one_head", softmax(q @ k.T * 0.125) @ v, {"q": 4096, "x": 4096})
    assert any(one.splits for one in derive_on(made, "h200", "bf16", streams=1).kernels)
    name = hold(made, "one_head")
    config, sizes = configure(name, {"q": "70", "x": "77"})
    assert sizes == {"q": 70, "x": 77, "d": 64, "e": 64}
    assert checked(name, config, sizes).require().judge == "the reference given"


@pytest.mark.parametrize(("dim", "size"), [("d", 65), ("x", 63), ("q", 4096)])
def test_other_sizes_of_what_tasks_take_whole_are_refused(dim, size):
    """Of a formula without sizes, 64 each, a single task takes all."""
    q, k, v = tensor("Q", "q d"), tensor("K", "x d"), tensor("V", "x e")
    name = hold(softmax(q @ k.T * 0.125) @ v, "small")
    assert configure(name, {dim: "64"})[1] == dict.fromkeys("qdxe", 64)
    with pytest.raises(InputError, match=f"{dim}={size}, expected 64, which the formula has"):
        configure(name, {dim: str(size)})


def test_derived_recurrences_are_right_on_the_emulated_machine():
    """Rows that fill no chunk; gates of either sign, and one for every channel."""
    made = [formula_kernel(one) for one in (load_object(EXAMPLE), gla())]
    programs = [one.program for one in made]
    schedules = [schedule_for(one.program, Policy(launch=one.launch)) for one in made]
    sources = [emit(lower(*pair)) for pair in zip(programs, schedules, strict=True)]
    library = emulate.compile_all(sources, None)
    for number, one in enumerate(made):
        diagram = one.found.diagram
        small = diagram.resized({"t": 90, "h": 1})
        given = {
            name: round_to(one.program.array(name).dtype, value.astype(np.float32))
            for name, value in random_inputs(small, number).items()
        }
        want = evaluate(small, given)
        given["o"] = np.full(want["o"].shape, np.nan)
        got = emulate.run(library, number, sources[number], one.program, given)
        assert compare({"o": got["o"].astype(float)}, want) < 8e-3
