"""One tile axis of ranges of several dimensions: interpreted, simulated, as emitted, refused."""

import numpy as np
import pytest

from warploom import tile as t
from warploom.autosched.schedules import Policy, schedule_for
from warploom.codegen.cuda.emit import emit
from warploom.codegen.cuda.simt.emit import emit_simt
from warploom.codegen.ir.plan import LaunchPlan
from warploom.codegen.oracle.simulate import simulate
from warploom.codegen.passes.lower import lower, verified
from warploom.codegen.simt.choose import simt
from warploom.emulate.kernel import Library
from warploom.errors import InputError
from warploom.tile import interpret
from warploom.tile.footprint import footprints

TOKENS, HEADS, GROUP, K = 37, 2, 3, 64
ARRAYS = {
    "a": t.array(t.BF16, "tokens heads group k"),
    "b": t.array(t.BF16, "heads k n"),
    "c": t.array(t.BF16, "tokens heads group n"),
}
PLAN = LaunchPlan(store="direct")


def _rows(a, b, c, high=128, room=4):
    """A product for each head of the rows that its group of some tokens are."""
    head, i = t.grid(heads=t.size("heads"), blocks=t.cdiv(t.size("tokens"), high // room))
    tokens, group = t.span(i * (high // room), high // room, "m"), t.span(0, room, "m")
    acc = t.zeros(m=high, n=64)
    for j in t.loop(t.cdiv(t.size("k"), 32)):
        left = t.load(a, tokens, head, group, t.span(j * 32, 32))
        acc += left @ t.load(b, head, t.span(j * 32, 32), t.span(0, 64))
    until = t.span(i * (high // room), high // room, "m", t.size("tokens") - 1)
    t.store(c, until, head, group, t.span(0, 64), tile=acc.cast(t.BF16))


def arrays():
    random = np.random.default_rng(0)
    a = random.integers(-3, 4, (TOKENS, HEADS, GROUP, K)).astype(np.float32)
    b = random.integers(-3, 4, (HEADS, K, 64)).astype(np.float32)
    return {"a": a, "b": b, "c": np.full((TOKENS, HEADS, GROUP, 64), 7.0, np.float32)}


@pytest.mark.parametrize(("groups", "room"), [(1, 4), (2, 4), (2, 128)])
def test_rows_of_two_dimensions_lie_where_they_belong(groups, room):
    program = t.trace(_rows, ARRAYS, high=64 * groups, room=room)
    given = arrays()
    want = np.einsum("thgk,hkn->thgn", given["a"], given["b"])
    want[-1] = 7.0  # behind the stop
    found = interpret(program, given)["c"]
    assert np.abs(found - want).max() <= 1 / 2  # of sums below 128, as bf16 has them
    assert footprints(program, given)["c"].written.sum() == want[:-1].size
    policy = Policy("inflight", PLAN, groups=groups, depth=2)
    block = lower(program, schedule_for(program, policy), verified)
    assert np.array_equal(simulate(block, given, seed=1)["c"], found)
    assert np.array_equal(Library([emit(block)]).run(0, program, given)["c"], found)


def test_types_say_what_an_axis_may_be_made_of():
    def apart(a, b, c):
        (i,) = t.grid(heads=t.size("heads"))
        t.load(a, t.span(0, 4, "m"), i, t.span(0, 4, "n"), t.span(0, 8, "m"))

    def stacked(a, b, c):
        (i,) = t.grid(heads=t.size("heads"))
        t.load(a, t.span(0, 4, "m"), [i, i], t.span(0, 4, "m"), t.span(0, 8))

    for body in (apart, stacked):
        with pytest.raises(InputError, match="an axis of ranges behind one another"):
            t.trace(body, ARRAYS)


def _in_registers(a, b, c):
    head, i = t.grid(heads=t.size("heads"), blocks=t.cdiv(t.size("tokens"), 16))
    where = (t.span(i * 16, 16, "m"), head, t.span(0, 4, "m"))
    acc = t.load(a, *where, t.span(0, 64, "n")).cast(t.FP32)
    for j in t.loop(2):
        left = t.load(a, *where, t.span(j * 32, 32))
        acc += left @ t.load(b, head, t.span(j * 32, 32), t.span(0, 64))
    t.store(c, *where, t.span(0, 64), tile=acc.cast(t.BF16))


def _copied(a, b, c):
    head, i = t.grid(heads=t.size("heads"), tokens=t.size("tokens"))
    where = (t.span(i, 1, "m"), head, t.span(0, 4, "m"), t.span(0, 64))
    t.store(c, *where, tile=t.load(a, *where).rename("k", "n"))


def test_what_has_no_code_is_refused():
    program = t.trace(_in_registers, ARRAYS)
    with pytest.raises(InputError, match="several dimensions are into registers"):
        schedule_for(program, Policy("inflight", PLAN, groups=1, depth=2))
    program = t.trace(_copied, ARRAYS)
    with pytest.raises(InputError, match="of several dimensions has code beside matmuls only"):
        emit_simt(program, simt(program), "sm_90")
    program = t.trace(_rows, ARRAYS, high=384, room=128)
    block = lower(program, schedule_for(program, Policy("inflight", PLAN, groups=2, depth=2)))
    with pytest.raises(InputError, match="groups share out whole elements of it"):
        simulate(block, arrays())
