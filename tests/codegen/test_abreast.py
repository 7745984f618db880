"""Groups of a block that do tasks of their own: on the emulated machine, in any order of events.

The program multiplies pieces of rows by a matrix that is the same for every task, and by one that
is not: the block loads the first once, every group the second for itself.
"""

import re

import numpy as np
import pytest
from tests.codegen import emulate
from tests.lowering import lowered

from warploom import tile as t
from warploom.autosched.schedules import Policy
from warploom.codegen.analysis.kernel_facts import kernel_facts
from warploom.codegen.cuda.emit import emit
from warploom.codegen.ir.plan import LaunchPlan
from warploom.errors import DoesNotFit, InputError

SIDE, PIECES = 64, 3


def products(x, fixed, own, y):
    """y[task] = sum over pieces of (x @ fixed) @ own[task]."""
    (task,) = t.grid(task=t.size("tasks"))
    acc = t.zeros(t.FP32, m=SIDE, n=SIDE)
    held = t.load(fixed, t.span(0, SIDE, "k"), t.span(0, SIDE, "l"))
    for i in t.loop(PIECES):
        a = t.load(x, task, t.span(i * SIDE, SIDE, "m"), t.span(0, SIDE, "k"))
        b = t.load(own, task, t.span(0, SIDE, "l"), t.span(0, SIDE, "n"))
        acc += (a @ held).cast(t.BF16) @ b
    t.store(y, task, t.span(0, SIDE, "m"), t.span(0, SIDE, "n"), tile=acc)


def program():
    arrays = {
        "x": t.array(t.BF16, "tasks rows k"),
        "fixed": t.array(t.BF16, "k l"),
        "own": t.array(t.BF16, "tasks l n"),
        "y": t.array(t.FP32, "tasks m n"),
    }
    return t.trace(products, arrays, name="products")


def policy(abreast, **plan):
    return Policy("lcsf", LaunchPlan(abreast=abreast, **plan), groups=1, depth=2)


def arrays(tasks):
    random = np.random.default_rng(0)
    shapes = {"x": (tasks, PIECES * SIDE, SIDE), "fixed": (SIDE, SIDE), "own": (tasks, SIDE, SIDE)}
    found = {name: t.round_to(t.BF16, random.normal(size=one)) for name, one in shapes.items()}
    return found | {"y": np.full((tasks, SIDE, SIDE), np.nan)}


@pytest.fixture(scope="module")
def emitted():
    sources = [emit(lowered(program(), policy(count))) for count in (1, 2, 3)]
    return sources, emulate.compile_all(sources, None)


@pytest.mark.parametrize("number", range(3))
@pytest.mark.parametrize("tasks", [1, 7])
def test_every_group_does_its_tasks(emitted, number, tasks):
    sources, library = emitted
    given = arrays(tasks)
    right = t.interpret(program(), given)["y"]
    for seed in (1, 2, 3):
        found = emulate.run(library, number, sources[number], program(), given, seed=seed)["y"]
        assert np.allclose(found, right, rtol=1e-4, atol=1e-2)


def test_what_no_task_changes_is_loaded_once_a_block(emitted):
    one, _, three = (source.text for source in emitted[0])
    facts = kernel_facts(lowered(program(), policy(3)))
    assert facts.kept == {"fixed"}
    assert not kernel_facts(lowered(program(), policy(1))).kept
    assert (emitted[0][0].threads, emitted[0][2].threads) == (256, 512)
    assert three.index("&fixed_map, fixed_full") < three.index("for (int task")
    assert one.index("&fixed_map, fixed_full") > one.index("for (int task")
    tile = SIDE * SIDE * 2  # bytes
    assert facts.layout.rings["x"] - facts.layout.rings["fixed"] == tile
    assert facts.layout.rings["own"] - facts.layout.rings["x"] == 3 * 2 * tile  # of two slots each


def test_a_group_that_takes_the_slots_of_another_is_found(emitted):
    """Planted fault: all groups read the first one's slots of x."""
    source = emitted[0][2]
    text = re.sub(r"(x_base = shared \+ \d+) \+ part \* \d+;", r"\1;", source.text)
    assert text != source.text
    wrong = type(source)(**{**vars(source), "text": text})
    with pytest.raises(emulate.Fault):
        emulate.run(emulate.compile_all([wrong], None), 0, wrong, program(), arrays(7))


@pytest.mark.parametrize(
    "plan, said",
    [
        ({"abreast": 5}, "abreast=5, expected 1 to 4"),
        ({"abreast": 2, "persistent": False}, "abreast=2: expected persistent blocks"),
        ({"abreast": 2, "tile_scheduler": "dynamic"}, "abreast=2: expected persistent blocks"),
        ({"abreast": 2, "cluster": ("task", 2)}, "abreast=2: expected persistent blocks"),
    ],
)
def test_other_plans_are_refused(plan, said):
    with pytest.raises(InputError, match=re.escape(said)):
        LaunchPlan(**plan)


def test_a_task_has_one_group():
    two = Policy("lcsf", LaunchPlan(abreast=2, split="m"), groups=2, depth=2)
    with pytest.raises((InputError, DoesNotFit)):
        emit(lowered(program(), two))
