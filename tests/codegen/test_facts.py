"""What is decided before a kernel is printed: where things lie, and what stands under what."""

from dataclasses import replace
from itertools import combinations

import pytest
from tests.codegen.programs import attention_case, gemm_case
from tests.codegen.state_program import state_case
from tests.codegen.test_votes import body_of
from tests.lowering import lowered, with_slots

from warploom.autosched.schedules import Policy, schedule_for
from warploom.codegen.analysis import shared_layout
from warploom.codegen.analysis.guards import Vote
from warploom.codegen.analysis.kernel_facts import kernel_facts
from warploom.codegen.analysis.role_code import Guarded, LoopCode, overwritten
from warploom.codegen.analysis.shared_layout import block_layout
from warploom.codegen.ir.plan import LaunchPlan
from warploom.codegen.passes.lower import lower
from warploom.errors import DoesNotFit


def planned(case, **changes):
    program, schedule, _ = case
    launch = schedule.launch.with_options(**changes)
    return lower(program, replace(schedule, launch=launch))


def staged():
    program, _ = state_case()
    return lowered(program, Policy("multistage", LaunchPlan(store="direct")))


BLOCKS = {
    "gemm": lambda: planned(gemm_case(300, 320, 100)),
    "dynamic": lambda: planned(gemm_case(300, 320, 100), tile_scheduler="dynamic"),
    "two-on-an-sm": lambda: planned(gemm_case(300, 320, 100), resident=2),
    "in-cluster": lambda: planned(
        gemm_case(120, 70, 100, slices=4, in_cluster=True), cluster=("slices_tile", 4)
    ),
    "attention": lambda: planned(attention_case(200, 200, causal=True)),
    "over-queries": lambda: planned(attention_case(200, 200), store_over="q_t"),
    "staged": staged,
}


def regions(block, layout):
    """(first byte, bytes) of all that lies in shared memory, by name."""
    parts = block.placement.parts
    for ring in block.rings:
        yield ring.name, layout.rings[ring.name], ring.depth * ring.slot_bytes
        yield f"{ring.name} full", layout.full[ring.name], 8 * ring.depth
        yield f"{ring.name} empty", layout.empty[ring.name], 8 * ring.depth
    if not block.launch.store_over:
        yield "panels", layout.panels, parts * layout.panel_bytes
    yield "scratch", layout.scratch, parts * layout.scratch_bytes
    yield "parts", layout.parts, parts * layout.parts_bytes
    for name, at in layout.staged.items():
        for part in range(parts):
            tile = block.placement.staged[name]
            yield f"{name} of {part}", at + part * layout.staged_bytes, tile.bytes
    if layout.parts_bytes:
        yield "parts full and free", layout.parts_full, 2 * 8 * parts
    if block.launch.tile_scheduler == "dynamic":
        yield "tasks", layout.tasks, 2 * (8 + 8 + 4)


@pytest.mark.parametrize("name", BLOCKS)
def test_nothing_in_shared_memory_overlaps_and_the_block_has_room_for_all(name):
    block = BLOCKS[name]()
    layout = block_layout(block)
    assert layout.staged.keys() == block.placement.staged.keys(), "each has a place"
    found = [(what, at, at + size) for what, at, size in regions(block, layout) if size]
    for (one, start, stop), (other, first, last) in combinations(found, 2):
        assert stop <= first or last <= start, f"{one} and {other}"
    end = max(last for _, _, last in found)
    assert layout.total == end + (1024 if block.launch.resident == 1 else 0)
    barriers = [*layout.full.values(), *layout.empty.values(), layout.parts_full, layout.tasks]
    assert all(at % 8 == 0 for at in barriers)
    swizzled = [*layout.rings.values(), *layout.staged.values()]
    assert all(at % 1024 == 0 for at in swizzled) and layout.panels % 1024 == 0


def test_stores_over_the_queries_take_their_slot():
    layout = block_layout(BLOCKS["over-queries"]())
    assert layout.panel_bytes == 0 and layout.panels == layout.rings["q"]


def test_what_does_not_fit_says_what_takes_the_room():
    program, schedule, _ = gemm_case(300, 320, 100, tile=(128, 256, 64))
    schedule = with_slots(schedule, 8)
    with pytest.raises(DoesNotFit, match=r"ring|a_b 8 x .* store panels .* make a ring shallower"):
        block_layout(lower(program, schedule))
    two = replace(schedule, launch=schedule.launch.with_options(resident=2))
    with pytest.raises(DoesNotFit, match="a block for 2 on an SM; make a ring shallower"):
        block_layout(lower(program, two))
    with pytest.raises(DoesNotFit, match=r"has [\d,]+; make a ring shallower"):
        block_layout(lower(program, schedule))


def test_a_swizzled_tile_is_aligned_whatever_lies_before_it(monkeypatch):
    block = BLOCKS["staged"]()
    monkeypatch.setattr(shared_layout, "region_bytes", lambda placement: 48)
    layout = block_layout(block)
    (at,) = layout.staged.values()
    assert layout.scratch_bytes == 48 and at % 1024 == 0 and at >= layout.scratch + 48


def votes(codes):
    """The conditions that stand under each other, by condition."""
    found = {}
    for code in codes:
        if isinstance(code, Guarded):
            inner = [one.guard for one in code.body if isinstance(one, Guarded)]
            if isinstance(code.guard, Vote):
                found[code.guard.condition] = inner
    return found


@pytest.mark.parametrize(("form", "nested"), [("within", 1), ("changed", 0), ("apart", 0)])
def test_a_vote_stands_under_another_only_where_nothing_it_reads_is_written(form, nested):
    program, schedule, _ = body_of(form)
    facts = kernel_facts(lower(program, schedule))
    (code,) = facts.codes
    loop = next(section for section in code.sections if isinstance(section, LoopCode))
    found = votes(loop.steady)
    assert found and sum(map(len, found.values())) == nested


def test_sums_are_overwritten_where_one_loop_alone_adds_to_them():
    program, _, _ = gemm_case(64, 64, 64)
    assert len(overwritten(program)) == 1
    # Attention rescales its sums between two matmuls.
    assert not overwritten(attention_case(64, 64)[0])


def test_groups_that_do_the_same_share_their_code():
    block = BLOCKS["attention"]()
    assert len(kernel_facts(block).codes) in (1, block.placement.parts)
    program, schedule, _ = gemm_case(300, 320, 100)
    block = lower(program, schedule)
    assert len(kernel_facts(block).codes) == 1
    first, *others = (role for role in block.roles if not role.loads)
    other = replace(others[0], sections=others[0].sections[:-1])
    loader = next(role for role in block.roles if role.loads)
    apart = replace(block, roles=(loader, first, other))
    assert len(kernel_facts(apart).codes) == 2


def test_the_rings_of_a_named_schedule_are_as_deep_as_whole_slots_allow():
    # 48 columns of 16 rows take 1,536 B, and 2,048 in a slot.
    program, _, _ = gemm_case(300, 320, 100, tile=(128, 48, 16))
    launch = LaunchPlan(split="m", resident=4)
    made = schedule_for(program, Policy("lcsf", launch))
    (depth,) = {slots for loop in made.loops.values() for slots in loop.ring_depth.values()}
    block = lower(program, made)
    (ring,) = block.rings
    assert ring.slot_bytes == 4096 + 2048 and 2 < depth < 8
    assert block_layout(block).total <= (228 * 1024) // 4 - 1024
    with pytest.raises(DoesNotFit):
        block_layout(lower(program, with_slots(made, depth + 1)))
