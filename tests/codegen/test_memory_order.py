"""A task that loads what it has stored is refused; updates in place are not."""

import numpy as np
import pytest
from tests.gpu.cases import distance
from tests.lowering import lowered

from warploom import tile as t
from warploom.autosched.named import groups, write
from warploom.autosched.schedules import Policy, schedule_for
from warploom.codegen.ir.place import place
from warploom.codegen.ir.plan import KernelSchedule, LaunchPlan
from warploom.codegen.oracle.simulate import simulate
from warploom.codegen.passes.lower import lower
from warploom.errors import InputError

HERE, COLS = t.span(0, 64), t.span(0, 64)


def _program(after):
    def body(a, b, y, z):
        acc = t.zeros(m=64, n=64)
        for k in t.loop(t.cdiv(t.size("k"), 16)):
            part = t.span(k * 16, 16)
            acc += t.load(a, HERE, part) @ t.load(b, part, COLS)
        after(acc, b, y, z)

    arrays = {"a": t.array(t.BF16, "m k"), "b": t.array(t.BF16, "k n")}
    arrays |= {"y": t.array(t.BF16, "m n"), "z": t.array(t.FP32, "m n")}
    return t.trace(body, arrays, name="again")


def _loaded(acc, b, y, z):
    t.store(y, HERE, COLS, tile=acc.cast(t.BF16))
    t.store(z, HERE, COLS, tile=t.load(y, HERE, COLS).cast(t.FP32))


def _multiplied(acc, b, y, z):
    t.store(y, HERE, COLS, tile=acc.cast(t.BF16))
    left = t.load(y, t.span(0, 64, "m"), t.span(0, 64, "q"))
    t.store(z, HERE, COLS, tile=left @ t.load(b, t.span(0, 64, "q"), COLS))


def _carried(acc, b, y, z):
    for _ in t.loop(3):
        t.store(z, HERE, COLS, tile=t.load(z, HERE, COLS) + acc)


def _updated(acc, b, y, z):
    t.store(z, HERE, COLS, tile=t.load(z, HERE, COLS) + acc)


@pytest.mark.parametrize("after", [_loaded, _multiplied, _carried])
def test_what_a_task_stored_it_does_not_load(after):
    program = _program(after)
    with pytest.raises(InputError, match=r"test_memory_order\.py.*the same task stores to at"):
        schedule_for(program, Policy("lcsf"))


def test_an_update_in_place_is_fine():
    program = _program(_updated)
    random = np.random.default_rng(0)
    values = {name: random.integers(-3, 4, (64, 64)) for name in "abyz"}
    got = simulate(lowered(program, Policy("lcsf")), values, seed=0)
    assert distance(got["z"], t.interpret(program, values)["z"]) == 0


def test_stores_to_one_array_keep_their_order():
    def body(a, b, z):
        for k in t.loop(2):
            part = t.span(k * 16, 16)
            acc = t.load(a, HERE, part) @ t.load(b, part, COLS)
            t.store(z, HERE, COLS, tile=acc)
            t.store(z, HERE, t.span(0, 64), tile=acc + 1.0)

    arrays = {"a": t.array(t.BF16, "m k"), "b": t.array(t.BF16, "k n"), "z": t.array(t.FP32, "m n")}
    program = t.trace(body, arrays, name="twice")
    plan = LaunchPlan(split="", store="direct")
    good = schedule_for(program, Policy("multistage", plan, groups=1))
    lower(program, good)
    (loop,) = program.loops()
    order = [node.removesuffix("/0") for node in good.loops["i"].time if node.endswith("/0")]
    release = [(f"release {name.removesuffix('/0')}", 0) for name in
               good.loops["i"].params["release"]]  # fmt: skip
    stores = [label for label in order if label.startswith("store")]
    rest = [(label, 0) for label in order if label not in stores]
    turned = [*rest, *release, *[(label, 0) for label in reversed(stores)]]
    placement = place(program, plan.split, 1)
    bad = KernelSchedule("turned", {"i": write(placement, loop, groups(1), 2, turned)}, plan)
    with pytest.raises(InputError, match="both touch tile z"):
        lower(program, bad)
