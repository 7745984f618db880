"""Masks that hold everywhere are left out, and parts that are masked out end a loop early."""

import re
from dataclasses import replace

import numpy as np
import pytest

from warploom.codegen.block import Pipeline
from warploom.codegen.emit import emit
from warploom.codegen.lower import lower
from warploom.codegen.named import overlapped
from warploom.codegen.plan import LaunchPlan
from warploom.codegen.simulate import simulate
from warploom.codegen.uniform import everywhere
from warploom.codegen.values import Values
from warploom.errors import CheckFailed
from warploom.kernels.attention import AttentionConfig, attention
from warploom.tile import interpret

from .programs import attention_case


def as_python(text):
    text = text.replace("::", "").replace("&&", "and").replace("||", "or").replace("!(", "not (")
    return re.sub(r"(?<![/])/(?!/)", "//", text)


CASES = [(300, 300, 1, 2), (300, 300, 1, 9), (300, 290, 2, 9), (64, 500, 0, 3)]


@pytest.mark.parametrize("window", [None, 40])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("part", [0, 1])
def test_the_guard_holds_only_where_every_element_is_visible(causal, window, part):
    """The emitted guard, run as Python, against what every row of the part sees."""
    config = AttentionConfig(head_dim=32, causal=causal, window=window, tile=(128, 32))
    program = attention(config)
    block = lower(program, overlapped(program, {"k": 2, "v": 2}, LaunchPlan(split="rows")))
    values = Values(block.placement, part)
    mask = next(op for op in program.ops() if op.kind == "where" and len(op.dst.type.axes) == 2)
    guard = everywhere(values, mask.srcs[0], {"i": "j"})
    assert guard is not None
    found = set()
    for rows, keys, tile, j in CASES:
        scope = {"rows": rows, "keys": keys, "rows_tile": tile, "j": j, "part": part}
        row, key = np.indices((64, 32))
        row, key = row + tile * 128 + part * 64 + keys - rows, key + j * 32
        seen = key < keys
        seen &= (key <= row) | (not causal)
        seen &= key > row - (window or 10**6)
        holds = bool(eval(as_python(guard), {"min": min, "max": max}, scope))
        assert not holds or seen.all()
        found.add(holds)
    assert found == ({False, True} if window is None else {False})


@pytest.mark.parametrize("turns", [False, True])
@pytest.mark.parametrize("rows", [130, 200])
def test_groups_that_end_early_keep_rings_and_turns(rows, turns):
    program, schedule, arrays = attention_case(
        rows, rows, turns=turns, groups=3, causal=True, group=2
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
        program, schedule, _ = attention_case(64, 64, groups=groups, turns=False)
        assert ("i_end" in emit(lower(program, schedule)).text) == early


def test_unit_factors_are_skipped_only_when_the_plan_says_so():
    program, schedule, _ = attention_case(64, 64)
    plain = emit(lower(program, schedule)).text
    plan = schedule.launch.with_options(skip_unit=True)
    skipping = emit(lower(program, replace(schedule, launch=plan))).text
    assert "__all_sync" not in plain and skipping.count("__all_sync") == 2
