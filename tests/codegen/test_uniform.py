"""Masks that hold everywhere are left out, and parts that are masked out end a loop early."""

import operator
import re
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from tests.lowering import lowered

from warploom import tile as t
from warploom.autosched.schedules import Policy
from warploom.codegen.analysis.guards import Combined, Everywhere
from warploom.codegen.analysis.register_tiles import RegisterTiles
from warploom.codegen.analysis.uniform import bounds, everywhere
from warploom.codegen.cuda.emit import emit
from warploom.codegen.cuda.emit_guards import condition
from warploom.codegen.cuda.values import Values
from warploom.codegen.ir.block import Pipeline
from warploom.codegen.ir.plan import LaunchPlan
from warploom.codegen.oracle.simulate import simulate
from warploom.codegen.passes.lower import lower
from warploom.errors import CheckFailed
from warploom.kernels.attention.program import AttentionConfig, attention
from warploom.tile import interpret

from .programs import attention_case


def written(tiles, mask):
    """The C++ of the test under which an op that masks is left out."""
    test = everywhere(tiles, mask.srcs[0])
    assert test is not None
    return condition(Values(tiles.placement), Everywhere(test), {"i": "j"})


def as_python(text):
    text = text.replace("::", "").replace("&&", "and").replace("||", "or").replace("!(", "not (")
    return re.sub(r"(?<![/])/(?!/)", "//", text)


# (rows, keys, tile of rows, block of 32 keys)
CASES = [(300, 300, 1, 2), (300, 300, 1, 9), (300, 290, 2, 9), (64, 500, 0, 3)]
# Every position of the last key and of the diagonal beside a block's edge: off by one is wrong.
EDGES = [(rows, keys, 1, 4) for rows in (128, 200) for keys in range(126, 194)]


def is_after(row, col):
    return row - col > 0


def is_multiple(row, col):
    return row >= (col - 20) * 3


def is_low(row, col):
    return row - 70 >= col * 0


@pytest.mark.parametrize("window", [None, 40])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("part", [0, 1])
def test_the_guard_holds_where_every_element_is_visible_and_nowhere_else(causal, window, part):
    """The emitted guard, run as Python, against what every row of the part sees."""
    config = AttentionConfig(head_dim=32, causal=causal, window=window, tile=(128, 32))
    program = attention(config)
    block = lowered(program, Policy("pingpong", LaunchPlan(split="rows"), groups=2, depth=2))
    tiles = RegisterTiles(block.placement)
    mask = next(op for op in program.ops() if op.kind == "where" and len(op.dst.type.axes) == 2)
    guard = written(tiles, mask)
    found = set()
    for rows, keys, tile, j in (*CASES, *EDGES):
        scope = {"rows": rows, "keys": keys, "rows_tile": tile, "j": j, "part": part}
        row, key = np.indices((64, 32))
        row, key = row + tile * 128 + part * 64 + keys - rows, key + j * 32
        seen = key < keys
        seen &= (key <= row) | (not causal)
        seen &= key > row - (window or 10**6)
        holds = bool(eval(as_python(guard), {"min": min, "max": max}, scope))
        assert holds == seen.all(), (rows, keys, tile, j)
        found.add(holds)
    # 64 rows are more than a window of 40: none of a causal block's keys is seen by all of them.
    assert found == {False, True} or window
    assert True not in found or not (window and causal)


@pytest.mark.parametrize(
    "compare", [operator.lt, operator.le, operator.gt, operator.ge, is_after, is_multiple, is_low]
)
def test_every_comparison_holds_up_to_its_last_element(compare):
    tiles, mask = masked(lambda row, col, _: compare(row, col))
    guard = written(tiles, mask)
    found = set()
    for tile, j, shift in np.ndindex(4, 8, 3):  # edges that meet, and one element to both sides
        col, row = np.arange(32) + j * 32 + shift - 1, np.arange(64)[:, None] + tile * 64
        holds = bool(eval(as_python(guard), {}, {"m_tile": tile, "j": j, "k": shift - 1}))
        assert holds == compare(row, col).all(), (tile, j, shift)
        found.add(holds)
    assert found == {False, True}


def test_multiples_that_turn_an_order_round_are_not_followed():
    tiles, mask = masked(lambda row, col, _: row >= col * -3)
    assert everywhere(tiles, mask.srcs[0]) is None


def changed(row, col, _):
    """A column number that is written again: it is no longer a coordinate."""
    other = col + 0
    other[:] = other + 1
    return row <= other


def fractions(row, col, _):
    """-0.5 >= -0.2 is false, though both are 0 as whole numbers."""
    axes = {"m": 64, "n": 32}
    return t.full(-0.5, t.FP32, **axes) >= t.full(-0.2, t.FP32, **axes)


@pytest.mark.parametrize("compare", [changed, fractions])
def test_only_whole_numbers_that_stay_have_bounds(compare):
    tiles, mask = masked(compare)
    assert everywhere(tiles, mask.srcs[0]) is None


@pytest.mark.parametrize("join", [operator.and_, operator.or_])
def test_nothing_holds_everywhere_that_depends_on_values(join):
    """Where a part of a condition is not known, neither is the whole."""
    tiles, mask = masked(lambda row, col, acc: join(row <= col, acc > 0.0))
    assert everywhere(tiles, mask.srcs[0]) is None


def masked(condition):
    """A matmul whose sums are masked by rows, columns and values; and the op that masks."""

    def body(a, b, c):
        (i,) = t.grid(m=t.cdiv(t.size("m"), 64))
        rows, depth = t.span(i * 64, 64), t.span(0, 16)
        acc = t.load(a, rows, depth) @ t.load(b, depth, t.span(0, 32))
        for j in t.loop(t.cdiv(t.size("n"), 32)):
            cols = t.span(j * 32, 32)
            col = t.coordinate("n", 32, j * 32 + t.size("k"))
            acc += t.load(a, rows, depth) @ t.load(b, depth, cols)
            seen = condition(t.coordinate("m", 64, i * 64), col, acc)
            acc[:] = t.where(seen, acc, -1.0)
        t.store(c, rows, t.span(0, 32), tile=acc)

    dims = {"a": (t.BF16, "m k"), "b": (t.BF16, "k n"), "c": (t.FP32, "m n")}
    program = t.trace(body, {name: t.array(*kind) for name, kind in dims.items()}, name="masked")
    block = lowered(program, Policy("multistage", LaunchPlan(), groups=1))
    (mask,) = (op for op in program.ops() if op.kind == "where")
    return RegisterTiles(block.placement), mask


@pytest.mark.parametrize("pingpong", [False, True])
@pytest.mark.parametrize("rows", [130, 200])
def test_groups_that_end_early_keep_rings_and_turns(rows, pingpong):
    program, schedule, arrays = attention_case(
        rows, rows, pingpong=pingpong, groups=3, causal=True, group=2
    )
    want = interpret(program, arrays)["o"]
    for seed in range(3):
        got = simulate(lower(program, schedule), arrays, seed=seed)["o"]
        assert got.tobytes() == want.tobytes()


def _without(block, field):
    roles = []
    for role in block.roles:
        sections = [
            replace(s, **{field: ()}) if isinstance(s, Pipeline) else s for s in role.sections
        ]
        roles.append(replace(role, sections=tuple(sections)))
    return replace(block, roles=tuple(roles))


@pytest.mark.parametrize("field", ["skip", "empty"])
def test_forgetting_what_a_left_out_iteration_owes_is_found(field):
    program, schedule, arrays = attention_case(200, 200, groups=3, causal=True, group=2)
    block = _without(lower(program, schedule), field)
    with pytest.raises(CheckFailed):
        for seed in range(6):
            simulate(block, arrays, seed=seed)


def test_only_a_split_along_the_promised_axis_ends_early():
    for groups, early in ((1, False), (2, True)):
        program, schedule, _ = attention_case(64, 64, groups=groups, pingpong=False)
        assert ("i_end" in emit(lower(program, schedule)).text) == early


def test_unit_factors_are_skipped_only_when_the_plan_says_so():
    program, schedule, _ = attention_case(64, 64)
    plain = emit(lower(program, schedule)).text
    plan = schedule.launch.with_options(skip_unit=True)
    skipping = emit(lower(program, replace(schedule, launch=plan))).text
    assert "__all_sync" not in plain and skipping.count("__all_sync") == 2


def test_an_integer_tile_lies_between_bounds_only_where_all_it_is_made_of_does():
    def body(x, y):
        rows = t.span(0, 8, "m")
        at, loaded = t.coordinate("m", 8, 40), t.load(x, rows)
        tiles = [at + 5, 5 - at, at - at, at * 2, at * -2, at * at, at + loaded, at]
        for tile in tiles:
            t.store(y, rows, tile=tile)

    program = t.trace(body, {"x": t.array(t.INT32, "m"), "y": t.array(t.INT32, "m")})
    placement = SimpleNamespace(program=program, local=lambda kind: kind)
    tiles = SimpleNamespace(placement=placement, part_size=lambda axis, size: 0)
    stored = [op.srcs[0] for op in program.ops() if op.kind == "store"]
    low, high = bounds(tiles, stored[-1])
    assert (low.last, high.last) == (None, 7)
    assert [bounds(tiles, var) for var in stored] == [
        (Combined("+", low, 5), Combined("+", high, 5)),
        (Combined("-", 5, high), Combined("-", 5, low)),
        (Combined("-", low, high), Combined("-", high, low)),
        (Combined("*", low, 2), Combined("*", high, 2)),
        None,
        None,
        None,
        (low, high),
    ]
