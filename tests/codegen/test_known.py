"""What is known before a loop's first iteration, and what is left out there."""

from dataclasses import replace

import numpy as np
import pytest
from tests.codegen import emulate
from tests.codegen.programs import attention_case
from tests.gpu.cases import distance

from warploom.codegen.analysis import role_code
from warploom.codegen.analysis.known import lasting, needed, truth
from warploom.codegen.cuda.emit import emit
from warploom.codegen.ir.place import place
from warploom.codegen.passes.lower import lower
from warploom.kernels.attention.program import AttentionConfig, attention
from warploom.tile import interpret

PROGRAM = attention(AttentionConfig(head_dim=32, tile=(64, 32), optimistic_threshold=12.0))
FUSION = place(PROGRAM, "rows", 1).fusion
OPS = {op.id: op for op in PROGRAM.ops()}


def named(kind, nth=0):
    return [op for op in PROGRAM.ops() if op.kind == kind][nth]


# The sums of rows: what the second reduction of weights is added to.
TOTAL = next(
    op.dst.name
    for op in PROGRAM.ops()
    if op.kind == "fill" and op.value == 0 and len(op.dst.type.axes) == 1
)
CALM, RIGHT = named("le").dst, named("and").dst
# The weights of a block; exponentials before it are of rows.
GUESSED = next(op for op in PROGRAM.ops() if op.kind == "exp2" and len(op.dst.type.axes) == 2)


@pytest.mark.parametrize(
    ("total", "calm", "right"), [(0.0, True, False), (2.0**20, False, None), (None, None, None)]
)
def test_conditions_follow_from_what_is_known(total, calm, right):
    known = {} if total is None else {TOTAL: total}
    assert truth(FUSION, known, CALM) is calm
    assert truth(FUSION, known, RIGHT) is right


def test_nobody_needs_a_guess_when_nothing_was_seen():
    guessed, part = GUESSED, named("reduce_sum")
    for op in (guessed, part):
        assert needed(PROGRAM, FUSION, {}, op)
    assert not needed(PROGRAM, FUSION, {TOTAL: 0.0}, part)
    again = named("reduce_sum", 1)
    assert needed(PROGRAM, FUSION, {TOTAL: 0.0}, again)
    assert needed(PROGRAM, FUSION, {TOTAL: 0.0}, named("reduce_max"))


def test_a_fact_lasts_while_no_where_on_it_comes_after_its_change():
    body = next(iter(PROGRAM.loops())).body
    change = max(op.id for op in body if op.dst is not None and op.dst.name == TOTAL)
    order, optimistic_threshold = tuple(op.id for op in body if op.id in FUSION.kept), GUESSED
    assert lasting(PROGRAM, FUSION, {TOTAL: 0.0}, order, optimistic_threshold) == {TOTAL: 0.0}
    at = order.index(optimistic_threshold.id) + 1
    sooner = (*order[:at], change, *(n for n in order[at:] if n != change))
    last = max(op.id for op in body if op.kind == "where")
    without = tuple(n for n in order if n != last)
    assert lasting(PROGRAM, FUSION, {TOTAL: 0.0}, sooner, optimistic_threshold) == {}
    assert lasting(PROGRAM, FUSION, {TOTAL: 0.0}, without, optimistic_threshold) == {}
    assert lasting(PROGRAM, FUSION, {TOTAL: 0.0}, (), optimistic_threshold) == {}


def guessing(rows, keys, **config):
    """Small attention by guess with scores that rise, so that guesses are wrong now and then."""
    config = {"optimistic_threshold": 12.0, "lse": True} | config
    program, schedule, arrays = attention_case(rows, keys, 2, False, **config)
    launch = schedule.launch.with_options(skip_unit=True, skip_voted=True)
    arrays["q"][..., 0] = 32**0.5
    arrays["k"][..., 0] = np.linspace(0, 90, keys)
    return program, replace(schedule, launch=launch), arrays


def peaked():
    """Keys that outweigh all before them by a little or by far, huge values, rows without a key."""
    program, schedule, arrays = guessing(260, 200, causal=True, lse=False)
    arrays["k"][..., 0] = 0.0
    arrays["k"][0, 0, [40, 70, 110, 150, 199], 0] = 3.0, 7.0, 22.0, 24.0, 60.0
    arrays["v"] = np.where(arrays["v"] < 0, -3e38, 3e38)
    return program, schedule, arrays


CASES = {
    "full": lambda: guessing(130, 170),
    "causal": lambda: guessing(200, 200, causal=True),
    "split_mask_loop": lambda: guessing(150, 200, causal=True, split_mask_loop=True),
    "one-block": lambda: guessing(70, 20),
    "peaks": peaked,
}


@pytest.fixture(scope="module")
def kernels(tmp_path_factory):
    """Every case, emitted and compiled as one library."""
    made = {name: make() for name, make in CASES.items()}
    sources = {name: emit(lower(*case[:2])) for name, case in made.items()}
    library = emulate.compile_all(list(sources.values()), tmp_path_factory.mktemp("known"))
    return library, made, sources


def run(kernels, name, seed):
    library, made, sources = kernels
    program, _, arrays = made[name]
    number = list(sources).index(name)
    got = emulate.run(library, number, sources[name], program, arrays, blocks=2, seed=seed)
    return max(distance(got[x], want) for x, want in interpret(program, arrays).items())


@pytest.mark.parametrize("name", CASES)
def test_the_emitted_code_means_what_the_program_means(kernels, name):
    assert run(kernels, name, 1) < 1e-3


class Stubborn(dict):
    """Facts that are never forgotten."""

    def clear(self):
        """What a loop does to them."""

    def pop(self, *_):
        """What a write does to one."""


LEFT_OUT = "// not needed here"


@pytest.mark.parametrize("forgetful", [True, False])
def test_only_the_first_iteration_leaves_the_guess_out(monkeypatch, forgetful):
    if not forgetful:
        coder = role_code._Coder
        monkeypatch.setattr(role_code, "_Coder", lambda *args: coder(*args, known=Stubborn()))
    text = emit(lower(*guessing(130, 170)[:2])).text
    first, loop = (
        text.index(mark) for mark in ("start iteration 0 ahead", "for (int i_ = i_start + 1")
    )
    assert text[first:loop].count(LEFT_OUT) >= 3
    assert (LEFT_OUT in text[loop:]) is not forgetful
