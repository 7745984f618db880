"""The space of kernels: what the library's tables have is in it, and options that need another."""

from dataclasses import replace

import pytest

from warploom.autosched.plans import ADDING, choices, fits, planned, policy, variations
from warploom.autosched.points import Point
from warploom.autosched.schedules import schedule_for
from warploom.codegen.compile.build import Built, Resources
from warploom.codegen.ir.plan import LaunchPlan
from warploom.engine.points import Space
from warploom.errors import CheckFailed, InputError
from warploom.kernels.gemm.program import GemmConfig, gemm
from warploom.kernels.library import KERNELS
from warploom.perf.launch_time import Launch, at_bounds
from warploom.rewrites.accumulators import cluster_reduce, swap_operands
from warploom.rewrites.split_sums import leaves_sums, split_sums
from warploom.tile.index import as_index

TABLES = {name: one.table for name, one in KERNELS.items() if one.table is not None}


@pytest.mark.parametrize(
    ("name", "label"), [(name, label) for name, table in TABLES.items() for label in table.known]
)
def test_what_a_table_has_is_a_point_of_the_space(name, label):
    """With the program that the rules make of the textbook."""
    table = TABLES[name]
    kind = table.known[label]
    space = Space(name, kind.settings)
    variants = [table.variants[one] for one in kind.replays]
    variants = [one for one in variants if one.takes(space.base)]
    points = [one.template.fit(space.base, one.point) for one in variants]
    missing = [one.name for one, point in zip(variants, points, strict=True) if point not in space]
    assert variants and not missing
    for one, point in list(zip(variants, points, strict=True))[:3]:
        program, plan = space.laid_out(space.rewritten(point), point)
        assert (program, plan) == one.laid_out(one.config(space.base))


@pytest.mark.parametrize(
    ("change", "value"),
    [
        ("settings", (("tile", "128,248"),)),
        ("settings", (("tile", "128,256"), ("stages", "2"))),
        ("rules", ("lazy_rescale",)),
        ("order", "pingpong"),
        ("plan", ("task=prefetch",)),
        ("plan", ("rows=40",)),
        ("plan", ("cluster=m_tile:3",)),
    ],
)
def test_what_is_no_point_is_not_in_the_space(change, value):
    space, point = Space("gemm", {}), TABLES["gemm"].variants["128x256"].point
    assert point in space and replace(point, **{change: value}) not in space


def test_options_mean_what_they_say():
    program = gemm(GemmConfig(tile=(128, 64, 64)))
    point = Point(plan=("groups=1", "depth=3", "resident=2", "launch=dependent"))
    made, plan = planned(program, LaunchPlan(), point.plan)
    schedule = schedule_for(made, policy("inflight", plan, point.plan))
    assert made is program and schedule.launch.dependent and len(schedule.compute) == 1
    assert set(schedule.any_loop.ring_depth.values()) == {3}
    # Two groups have their rows; three have none.
    assert choices(program)["groups"] == ("1",) and "rows" not in choices(program)
    with pytest.raises(InputError, match=r"plan 'groups=3' of gemm: expected groups=1"):
        planned(program, LaunchPlan(), ("groups=3",))
    with pytest.raises(InputError, match=r"plan 'store=over' of gemm: expected store=direct"):
        planned(program, LaunchPlan(), ("store=over",))
    with pytest.raises(InputError, match="depth=3: the solver finds that itself"):
        schedule_for(program, policy("solve", plan, ("depth=3",)))


def test_a_search_varies_what_the_model_can_tell_apart():
    program = gemm(GemmConfig(tile=(128, 64, 64)))
    words = {word.partition("=")[0] for plan in variations(program, ("depth=3",)) for word in plan}
    assert {"groups", "panels", "resident"} < words and "launch" not in words
    assert all("depth=3" in plan for plan in variations(program, ("depth=3",)))


def test_slices_cut_the_program_once():
    program = gemm(GemmConfig(tile=(64, 64, 64)))
    made, plan = planned(program, LaunchPlan(), ("slices=4",))
    assert plan.cluster == ("slices_tile", 4) and made.grid[0][0] == "slices_tile"
    assert planned(made, LaunchPlan(), ("slices=4",)) == (made, plan)
    two = gemm(GemmConfig(dual=True, tile=(64, 64, 64)))
    assert "slices" not in choices(two)  # one sum only


def test_slices_of_a_point_are_checked_against_the_textbook(monkeypatch):
    space = Space("examples/textbook_gemm.py:kernel", {})
    point = Point((("tile_m", "64"), ("tile_n", "64")), (), "inflight", ("slices=2",))
    sizes = {"m": 70, "n": 40, "k": 300}
    assert space.check(point, sizes) < 1e-9

    def short(program, parts, width=None):
        (loop,) = program.loops()
        body = [replace(x, stop=x.stop - 1) if x is loop else x for x in program.body]
        return cluster_reduce(replace(program, body=tuple(body)), parts, width)

    monkeypatch.setattr("warploom.autosched.plans.cluster_reduce", short)
    with pytest.raises(CheckFailed, match="difference of"):
        Space("examples/textbook_gemm.py:kernel", {}).check(point, sizes)


def test_parts_are_of_sums_whose_rows_are_those_of_the_result():
    program = gemm(GemmConfig(tile=(64, 64, 64)))
    made, _ = planned(program, LaunchPlan(), ("parts=4",))
    assert made.grid[0] == ("slices_tile", as_index(4)) and leaves_sums(made)
    assert planned(made, LaunchPlan(), ("parts=4",))[0] is made
    assert "parts" not in choices(swap_operands(program))
    assert not fits(("slices=2", "parts=2")) and fits(("cluster=m_tile:2", "parts=2"))


def test_parts_of_a_point_and_what_adds_them_up_are_checked_against_the_textbook(monkeypatch):
    space = Space("examples/textbook_gemm.py:kernel", {})
    point = Point((("tile_m", "64"), ("tile_n", "64")), (), "inflight", ("parts=3",))
    sizes = {"m": 70, "n": 40, "k": 640}
    assert point in space and space.check(point, sizes) < 1e-9
    after = space.selected(point, "h200").after
    assert after is not None and after.schedule is ADDING and "c" in str(after.program)

    def short(program, parts, tile):
        made = split_sums(program, parts, tile)
        return replace(made, first=split_sums(program, parts + 1, tile).first)

    monkeypatch.setattr("warploom.autosched.plans.split_sums", short)
    with pytest.raises(CheckFailed, match="difference of"):
        Space("examples/textbook_gemm.py:kernel", {}).check(point, sizes)


def test_a_launch_in_parts_has_the_time_of_what_adds_them_up():
    space, sizes = Space("gemm", {}), {"m": 512, "n": 512, "k": 16384}
    point = Point((("tile", "128,128"),), (), "inflight", ("parts=8",))
    launch = Launch(*space.laid_out(space.rewritten(point), point), sizes, "h200")
    whole = Launch(*space.laid_out(space.rewritten(point), replace(point, plan=())), sizes, "h200")
    (loop,) = space.rewritten(point).loops()
    walked = at_bounds({loop.index: 512.0})
    assert whole.added_up == 0.0 and 1.0 < launch.added_up < 4.0
    found = launch.time(walked)
    least = found.work / found.mhz + launch.added_up
    assert least <= found.microseconds < whole.time(walked).microseconds


def test_a_kernel_and_what_goes_on_from_it_lie_in_one_folder(tmp_path):
    space = Space("examples/textbook_gemm.py:kernel", {})
    point = Point((("tile_m", "64"), ("tile_n", "64")), (), "inflight", ("parts=3",))
    selected = space.selected(point, "h200")
    assert selected.after is not None

    def unbuilt(one):
        return Built(one.emitted(), b"machine code", Resources(1, 0, 0, "none", 0.0), one.arch)

    replace(unbuilt(selected), after=unbuilt(selected.after)).write(tmp_path)
    found = Built.read(tmp_path)
    assert found.after is not None and found.after.source.name == "combine_kernel"
    assert found.taken == {"a", "b", "c"} and found.after.taken == {"parts", "c"}
    (tmp_path / "after" / "manifest.json").unlink()
    with pytest.raises(InputError, match=r"no manifest\.json"):
        Built.read(tmp_path)


def test_options_of_a_point_are_changed_and_taken_away():
    point = Point(plan=("raster=8", "panels=4"))
    assert point.having("panels=", "depth=3").plan == ("raster=8", "depth=3")
    assert point.having("panels=1").number("panels", 2) == 1
    assert Point.from_json(point.to_json()) == point
