"""The search through a user's program: points as data, the store, workers that fail, the model."""

import json
import os
import re
import signal
import sqlite3
import subprocess
import sys
import time
from concurrent.futures import Future
from concurrent.futures.process import BrokenProcessPool
from contextlib import closing
from dataclasses import replace
from math import prod
from pathlib import Path
from random import Random

import numpy as np
import pytest

from warploom import tile as t
from warploom import toolchain
from warploom.autosched.named import groups
from warploom.autosched.plans import choices, plans, registers, variations
from warploom.autosched.points import Point
from warploom.autosched.schedules import schedule_for
from warploom.autosched.selected import Selected
from warploom.codegen.compile.build import program_key
from warploom.codegen.passes.lower import lower
from warploom.engine.candidates import Candidates
from warploom.engine.estimate import Estimate
from warploom.engine.explored import Explored, Found
from warploom.engine.outcome import bound_of, told, tried
from warploom.engine.points import Space, described, orders
from warploom.engine.search import NEAR, _limited, _Search, search
from warploom.engine.store import PointStore, Row
from warploom.errors import CheckFailed, InputError, ToolMissing
from warploom.flows.built import from_file
from warploom.kernels.gemm.program import GemmConfig, default_policy
from warploom.kernels.gemm.program import gemm as gemm_program
from warploom.machine import load
from warploom.perf.launch_tasks import WAVES, makespan
from warploom.perf.launch_time import Launch, LaunchTime, why_slower
from warploom.perf.replay import Ends, Prediction, Replay, matmul_of
from warploom.schedule.model.costs import costs

FILE = "examples/textbook_attention.py:kernel"
SIZES = {"batch": 4, "heads": 16, "rows": 4096, "keys": 4096, "d": 128}
KEY = ("program", "point", "sizes", "h200", "nvcc")


@pytest.fixture
def space() -> Space:
    return Space(FILE, {})


@pytest.fixture
def store(tmp_path) -> PointStore:
    return PointStore(tmp_path / "points.sqlite")


def first_point(space: Space) -> Point:
    settings = next(iter(space.sizes()))
    form = space.forms(settings)[0]
    return Point(settings, form.rules, orders(form.program)[0])


# ---- points


def test_the_space_has_the_open_sizes_the_rules_and_the_plans(space) -> None:
    sizes = list(space.sizes())
    assert len(sizes) == len(set(sizes)) == 10 and dict(sizes[0])["rows_of_a_tile"] == "128"
    point = first_point(space)
    assert point.rules == ("in_powers_of_two", "divide_once_a_row", "skip_masked_blocks")
    program = space.selected(point, "h200").program
    chain = {"pingpong", "pingpong-early", "overlapped", "overlapped-early"}
    assert set(orders(program)) == {*chain, "lcsf"}
    assert ("balance=dynamic", "raster=8") in plans(program) and plans(program)[0] == ()
    assert not any("cluster" in word for words in plans(program) for word in words)  # loops differ
    assert ("task=prefetch",) in variations(program, ()) and () not in variations(program, ())
    assert () in variations(program, ("task=prefetch",))
    assert Point.from_json(point.to_json()) == point
    fixed = Space(FILE, {"rows_of_a_tile": "192"})
    assert {dict(one)["keys_of_a_tile"] for one in fixed.sizes()} == {
        "128",
        "80",
        "112",
        "64",
        "176",
    }
    text = described(space)
    assert "optimistic_rescale (or not)" in text and "registers: 32, 40" in text
    # Sizes, forms, orders, then one more than the values of each option of the plan.
    options = [1 + len(values) for values in choices(program).values()]
    counts = (10, len(space.forms(sizes[0])), 5, *options)
    assert f"{prod(counts):,} points" in text


def test_the_solver_of_a_search_has_the_seconds_asked_for(space, monkeypatch) -> None:
    seen = []
    monkeypatch.setattr(
        "warploom.kernels.tuned.variant.schedule_for",
        lambda program, policy, gpu: (
            seen.append(policy.search) or schedule_for(program, policy, gpu)
        ),
    )
    Space(FILE, {}, seconds=2.5).selected(first_point(space), "h200")
    assert [one.seconds for one in seen] == [2.5]


def test_plans_are_launch_plans(space) -> None:
    point = first_point(space)
    dynamic = space.selected(
        replace(point, plan=("balance=dynamic", "task=overlap")), "h200"
    ).launch
    assert dynamic.tile_scheduler == "dynamic" and dynamic.overlap_next_task
    assert dynamic.reverse == ("rows_tile",) and dynamic.task_rings
    # In whatever order they are said, options mean the same, and none undoes another one.
    for words in (("task=prefetch", "panels=4"), ("panels=4", "task=prefetch")):
        assert space.selected(replace(point, plan=words), "h200").launch.store_panels == 4
    program = space.selected(point, "h200").program
    assert ("task=prefetch", "panels=4") in variations(program, ("panels=4",))
    assert not any("store=direct" in words for words in variations(program, ("panels=4",)))
    lazy = replace(point, rules=(*point.rules, "lazy_rescale"))
    assert space.selected(lazy, "h200").launch.skip_unit
    assert not space.selected(lazy, "h200").launch.skip_voted


@pytest.mark.parametrize("compute", [1, 2, 3])
@pytest.mark.parametrize("resident", [1, 2])
@pytest.mark.parametrize("words", [(), ("registers=32",), ("registers=40", "balance=dynamic")])
def test_split_registers_are_no_more_than_a_block_has(compute, resident, words) -> None:
    """`groups` refuses a split beyond what a block begins with."""
    split = registers(words, compute, resident)
    loading, *computing = groups(compute, split, resident)
    assert split is None or (loading.registers, computing[0].registers) == split


def sequence(space: Space, sizes, outcome, count: int) -> list[Point]:
    """The points that a search tries one after the other, whose outcomes need no compiler."""
    candidates, explored = Candidates(space, sizes, "h200"), Explored()
    for settings in space.sizes():
        candidates.ideal(settings)
    candidates.trim()
    found: list[Point] = []
    ahead = candidates.first()
    while len(found) < count:
        point = candidates.next(explored.goal) if found else next(ahead)
        if point is None:
            break
        found.append(point)
        explored.found.append(Found(point, outcome(point)))
        candidates.note(explored.found[-1], explored)
    return found


GEMM = "examples/textbook_gemm.py:kernel"
FEW_SIZES = {"tile_m": "128", "tile_n": "128"}
PRODUCT = {"m": 4096, "n": 4096, "k": 4096}


def test_where_the_usual_form_is_refused_others_are_tried() -> None:
    """A point whose machine code is refused does not end a search."""

    def swapped_is_refused(point: Point) -> Row:
        return Row(refused="x") if "swap_operands" in point.rules else Row(1e6)

    found = sequence(Space(GEMM, FEW_SIZES), PRODUCT, swapped_is_refused, 12)
    assert found[0].rules == ("swap_operands",) and () in [one.rules for one in found[:4]]


def test_a_program_without_a_grid_is_one_task_and_can_be_searched(tmp_path) -> None:
    (tmp_path / "small.py").write_text(
        "from warploom.derive import tensor\n"
        "out = tensor('A', 'm k') @ tensor('B', 'k n')\n"  # 64 of each: one tile
    )
    sizes = dict.fromkeys("mkn", 64)
    space = Space(f"{tmp_path}/small.py:out", {})
    candidates = Candidates(space, sizes, "h200")
    (settings, *_) = space.sizes()
    assert 0 < candidates.ideal(settings) < float("inf")
    point = next(candidates.first())
    program = space.rewritten(point)
    assert program.grid == ()
    assert Launch(*space.laid_out(program, point), sizes, "h200").order.shape == (1, 0)


def test_sizes_that_do_not_fit_one_rewrite_are_candidates_without_it() -> None:
    """200 columns are no rows of three groups, which swapped operands would make them."""
    candidates = Candidates(Space(GEMM, {"tile_m": "192", "tile_n": "200"}), PRODUCT, "h200")
    (settings,) = candidates.space.sizes()
    assert candidates.ideal(settings) < float("inf")
    assert next(candidates.first()).rules == ()


def test_what_spills_is_tried_in_fewer_groups() -> None:
    space = Space(FILE, {"rows_of_a_tile": "128", "keys_of_a_tile": "64", "dim": "64"})
    candidates = Candidates(space, SIZES, "h200")
    first = next(candidates.first())
    candidates.note(Found(first, Row(refused="spills 8 B of registers")), Explored())
    assert [*candidates.open] == [first.having("groups=1")]


def test_the_order_of_a_solver_is_not_solved_again_with_fewer_groups(monkeypatch) -> None:
    """It chooses the groups itself, and a search would wait for it, its seconds over or not."""
    space = Space(FILE, {"rows_of_a_tile": "128", "keys_of_a_tile": "64", "dim": "64"})
    candidates = Candidates(space, SIZES, "h200")
    solved = replace(next(candidates.first()), order="solve")
    monkeypatch.setattr(Space, "selected", lambda self, point, gpu: pytest.fail(f"solves {point}"))
    candidates.note(Found(solved, Row(refused="spills 8 B of registers")), Explored())
    assert not candidates.open


@pytest.mark.parametrize("seed", range(2))
def test_a_search_goes_where_times_are_short(seed) -> None:
    """Whichever choices make a point fast, an eighth of all points has one of the fastest 2 %."""
    space = Space(FILE, {"causal": "false", "rows_of_a_tile": "128"})
    every = Candidates(space, FEW, "h200")
    for settings in space.sizes():
        every.ideal(settings)
    random, worth = Random(seed), dict[str, float]()

    def outcome(point: Point) -> Row:
        words = [*map(str, point.settings), *point.rules, point.order]
        longer = prod(worth.setdefault(word, random.uniform(0.9, 1.15)) for word in words)
        return Row(1.5 * longer * every.ideals[point.settings])

    times = sorted(outcome(point).predicted or 0.0 for point in every.open)
    found = [outcome(one).predicted for one in sequence(space, FEW, outcome, len(times) // 8)]
    assert len(times) > 200 and min(found) <= times[len(times) // 50]


def test_an_estimate_knows_what_was_tried_and_doubts_what_is_far(space) -> None:
    point = first_point(space)
    near, far = replace(point, plan=("store=direct",)), replace(point, rules=(), order="lcsf")
    asked = Estimate(lambda _: 100.0)
    mean, off = asked.asked([point, far])
    assert mean[0] == mean[1] and off[0] == off[1]
    asked.add(point, 150.0)
    asked.add(replace(point, order="overlapped"), 130.0)
    asked.add(far, None)  # refused: as slow as the slowest
    mean, off = asked.asked([point, near, replace(point, order="lcsf"), far])
    assert np.exp(mean[0]) == pytest.approx(150.0, rel=5e-3) == np.exp(mean[3])
    assert off[0] < 0.02 < off[1] < off[2]


def test_bounds_of_loops_say_how_the_grid_is_laid_out(space) -> None:
    """A causal mask wants a balance; equal tasks do not."""
    candidates = Candidates(space, SIZES, "h200")
    settings = next(iter(space.sizes()))
    assert 0 < candidates.ideal(settings) < float("inf")
    assert all("balance" in point.options for point in candidates.open)
    full = Candidates(Space(FILE, {"causal": "false"}), SIZES, "h200")
    assert full.ideal(next(iter(full.space.sizes()))) > candidates.ideal(settings)
    assert full.open and not any("balance" in point.options for point in full.open)


def test_what_a_search_leaves_out_is_counted(space, store) -> None:
    made = _Search(space, FEW, "h200", store, "quick", lambda _: None)
    point = first_point(space)
    for _ in range(2):
        made._take(point, {"pruned": True, "bound": 1.0})
    made.end = 0.0
    made._try(replace(point, order=order) for order in ("lcsf", "pingpong", "overlapped"))
    told = "0 points, 2 pruned by their bounds, 3 left out, as the time was over"
    assert str(made.explored) == told and made.pool is None


def test_a_rewritten_point_is_checked_against_the_textbook(space, monkeypatch) -> None:
    point = first_point(space)
    sizes = {"batch": 1, "heads": 1, "rows": 150, "keys": 170, "d": 128}
    assert space.check(point, sizes) < 1e-9
    monkeypatch.setattr("warploom.rewrites.exponents.LOG2E", 1.4)
    with pytest.raises(CheckFailed, match="difference of"):
        Space(FILE, {}).check(point, sizes)


# ---- the model of time


def replayed(cycles: float, ends: Ends, events: dict[str, float] | None = None) -> Replay:
    return Replay({"i": Prediction("i", cycles, 1, "", 1, 0, events or {})}, ends)


def brute_force(tasks: list[float], places: int, balance: str) -> float:
    ends = [0.0] * places
    line = [*range(places), *reversed(range(places))]
    for number, task in enumerate(tasks):
        at = number % places
        if balance == "serpentine":
            at = line[number % len(line)]
        if balance == "dynamic":
            at = ends.index(min(ends))
        ends[at] += task
    return max(ends)


@pytest.mark.parametrize("balance", ["", "dynamic", "serpentine"])
def test_tasks_are_shared_out_as_the_plan_says(space, balance) -> None:
    point = first_point(space)
    plan = (f"balance={balance}",) if balance else ()
    selected = space.selected(replace(point, plan=plan), "h200")
    cycles, each = 2500.0, 1300.0
    walked = replayed(cycles, Ends(tail=900.0, head=each - 900.0))
    for rows in (128, 7 * 128, 32 * 128):
        sizes = {**SIZES, "rows": rows, "keys": rows}
        found = launch_of(selected, sizes).time(walked)
        tiles = rows // 128
        row_tiles = range(tiles - 1, -1, -1) if balance else range(tiles)
        trips = [i + 1 for _ in range(64) for i in row_tiles]
        assert found.tasks == len(trips) and found.iterations == sum(trips)
        # Queries have one slot: what is loaded into it is waited for beside the tail.
        fill = 121 + 94 + 362 + 32 * 9.8
        whole = max(900.0, fill) + each - 900.0 + 32 * 50.9  # and 32 KiB of results leave
        right = brute_force([trip * cycles + whole for trip in trips], 132, balance)
        assert found.microseconds == pytest.approx(max(right / found.mhz, found.memory), rel=1e-6)
        assert found.overhead == pytest.approx(
            len(trips) * whole / (sum(trips) * cycles + len(trips) * whole)
        )


def test_groups_that_are_through_leave_the_sm_to_the_others() -> None:
    """Of 192 rows under a causal mask the first 64 see fewer blocks of 128 keys than the last; rows
    beyond the array see none."""
    rows, heads = 700, 3
    space = Space(FILE, {"rows_of_a_tile": "192", "keys_of_a_tile": "128"})
    sizes = {**SIZES, "batch": 1, "heads": heads, "rows": rows, "keys": rows}
    launch = launch_of(space.selected(first_point(space), "h200"), sizes)
    most = -(-rows // 128)

    def blocks(tile: int, part: int) -> int:
        begin = tile * 192 + part * 64
        return min(most, -(-(begin + 64) // 128)) if begin < rows else 0

    each = [[blocks(tile, part) for part in range(3)] for tile in range(4)]
    assert launch.trips[0].tolist() == [max(own) for own in each] * heads
    assert launch.parts[0].T.tolist() == [sorted(own) for own in each] * heads
    nothing = launch._ends(Ends())
    for bound in (1, 1600):
        walked = Replay({"i": Prediction("i", 2400.0, bound, "", 1)}, Ends())
        found = launch._tasks(walked) - nothing
        # Of three groups one leaves after another: two of them share the SM, then one has it alone.
        paces = [max(2400.0 * active / 3, bound) for active in (3, 2, 1)]
        least = [np.diff(sorted(own), prepend=0) @ paces for own in each] * heads
        assert found.tolist() == pytest.approx(least)


def test_results_leave_behind_the_code_that_packs_them() -> None:
    """Those of registers and of panels, 64 KiB of 128 x 256 elements."""
    sizes, leave = {"m": 4096, "n": 4096, "k": 4096}, 64 * 50.9
    for tail in (900.0, 5000.0):
        ends = Ends(tail=tail, head=400.0)
        for store in ("tma", "direct"):
            assert gemm(sizes, store=store)._ends(ends) == pytest.approx(tail + 400.0 + leave)


def test_a_balanced_order_is_faster_under_a_causal_mask(space) -> None:
    point = first_point(space)
    walked = replayed(2500.0, Ends(tail=700.0, head=400.0))
    times = {
        plan: launch_of(space.selected(replace(point, plan=plan), "h200"), SIZES)
        .time(walked)
        .microseconds
        for plan in ((), ("balance=longest_first",), ("balance=dynamic",), ("task=prefetch",))
    }
    assert times["balance=dynamic",] < times["balance=longest_first",] <= times[()]
    assert times["task=prefetch",] < times[()]  # no slot to wait for


def gemm(sizes: dict[str, int], gpu: str = "h200", **plan) -> Launch:
    config = GemmConfig()
    launch = default_policy(config).launch.with_options(**plan)
    return Launch(gemm_program(config), launch, sizes, gpu)


def launch_of(selected: Selected, sizes: dict[str, int]) -> Launch:
    return Launch(selected.program, selected.launch, sizes, "h200")


@pytest.mark.parametrize(
    "plan",
    [
        {"supergroup": 0},
        {"supergroup": 3},
        {"supergroup": 5, "cluster": ("m_tile", 2)},
        {"supergroup": 2, "cluster": ("n_tile", 2)},
        {"supergroup": 64, "cluster": ("", 1)},
    ],
)
def test_tasks_come_in_the_order_that_the_kernel_takes_them(plan) -> None:
    """By the formula of the emitted kernel, task by task: one is a cluster's."""
    rows, cols = 12, 7
    sizes = {"m": rows * 128, "n": cols * 256, "k": 64}
    launch = gemm(sizes, **plan)
    axis, blocks = launch.plan.cluster
    high, wide = (-(-count // (blocks if name == axis else 1)) for name, count in
                  (("m_tile", rows), ("n_tile", cols)))  # fmt: skip
    expected = []
    for task in range(high * wide):
        group = plan["supergroup"]
        row, col = task // wide, task % wide
        if group:
            band, inside = divmod(task, group * wide)
            of_band = min(group, high - band * group)
            row, col = band * group + inside % of_band, inside // of_band
        expected += [
            (row * blocks + rank, col) if axis == "m_tile" else (row, col * blocks + rank)
            for rank in range(blocks)
        ]
    assert list(map(tuple, launch.order.tolist())) == expected
    # Seven columns in pairs: the eighth is taken, and nothing of it is stored.
    assert (len(expected) > rows * cols) == (axis == "n_tile")


def test_rounds_are_followed_one_by_one_but_for_those_of_long_launches() -> None:
    random, places = Random(3), 2
    tasks = [random.uniform(1.0, 9.0) for _ in range(4 * WAVES)]
    for count in (1, WAVES + 9, 2 * WAVES - 1, 2 * WAVES, 3 * WAVES, 4 * WAVES):
        right = brute_force(tasks[:count], places, "dynamic")
        most = 0.0 if count <= places * WAVES else 9.0
        assert abs(makespan(np.array(tasks[:count]), places, "dynamic") - right) <= most + 1e-6


def test_more_tasks_than_are_counted_are_refused(monkeypatch) -> None:
    monkeypatch.setattr("warploom.perf.launch_tasks.MOST_TASKS", 12)
    plan = {"supergroup": 0, "cluster": ("", 1)}
    assert len(gemm({"m": 3 * 128, "n": 4 * 256, "k": 64}, **plan).order) == 12
    with pytest.raises(InputError, match="gemm of 13 tasks: the model of a launch counts at most"):
        gemm({"m": 13 * 128, "n": 256, "k": 64}, **plan).order  # noqa: B018 (made when asked for)


def test_loads_of_neighbours_are_served_together() -> None:
    sizes = {"m": 4096, "n": 4096, "k": 4096}
    one = gemm(sizes, supergroup=11, cluster=("", 1))
    a, b = sorted(one.apart.values())
    # 132 tasks: 11 rows of tiles by 12 columns.
    assert (a, b) == (11 / 132, 12 / 132)
    alone = gemm({**sizes, "n": 256}, supergroup=0, cluster=("", 1))
    assert sorted(alone.apart.values()) == [1 / 32, 1.0]


def test_the_clock_falls_until_the_power_is_at_its_limit() -> None:
    sizes = {"m": 8192, "n": 8192, "k": 8192}
    launch, machine = gemm(sizes), load("h200")
    cycles = 1030.0
    little = launch.time(replayed(cycles, Ends(), {"matmul": 10.0})).mhz
    assert little == machine.value("clock.tensor")
    assert launch.time(replayed(cycles, Ends(), {"instruction": 10.0})).mhz == 1980
    events = {"matmul": 1024.0, "operands": 80e3, "instruction": 100.0, "copy": 40e3}
    short = launch.time(replayed(cycles, Ends(), events))
    assert short.mhz < 1830
    # What the whole launch takes at that clock, added up here in joules. A pair of blocks asks L2
    # for its 256 columns of b once.
    steps, asked = 64 * 32 * 128, (2 * 64 * 128, 2 * 64 * 256 // 2)
    again = machine.value("l2.read_again")
    read = sum(
        size * (apart + again * (1.0 - apart))
        for size, apart in zip(asked, launch.apart.values(), strict=True)
    )
    on_chip = steps * (3145 * 1024 + 10.5 * 80e3 + 278 * 100 + 16.9 * 40e3 + read * (29.5 - 16.9))
    on_chip += 8192 * 8192 * 2 * 35
    # Both operands are shared by rows or columns of tiles: their bytes go to both parts of L2.
    stored, shared = 8192 * 8192 * 2, launch.shared
    assert 0.8 < shared < 1.0
    far = stored * 84 + (launch.traffic - stored) * (148 * shared + 84 * (1 - shared))
    joules = 1e-12 * (on_chip * (short.mhz / 1980) ** 1.8 + far)
    assert 123 + joules / (short.microseconds * 1e-6) == pytest.approx(891, rel=0.01)
    alone = replace(launch, limit="power.limit").time(replayed(cycles, Ends(), events))
    joules = 1e-12 * (on_chip * (alone.mhz / 1980) ** 1.8 + far)
    assert 123 + joules / (alone.microseconds * 1e-6) == pytest.approx(700, rel=0.01)


def test_rows_come_as_fast_as_the_places_of_a_line_allow_where_they_begin() -> None:
    """Tiles 200 elements wide, of rows of several lengths: every row is counted."""
    space, table = Space("gemm", {}), costs("h200")
    point = Point((("tile", "256,200"),), (), "lcsf-early", ("groups=2",))

    def rate(place: int) -> float:
        if place == 0:
            return table.value("load.per_kib")
        slow = table.at("high")
        if place % 32 == 0:
            return slow.value("load.per_kib_sector")
        return slow.value("load.per_kib_beside" if place in (16, 112) else "load.per_kib_inside")

    for n in (4096, 4000, 4016, 4008):
        sizes = {"m": 256, "n": n, "k": 4096}
        launch = Launch(*space.laid_out(space.rewritten(point), point), sizes, "h200")
        first, second = (launch._own[strip.op.label] for strip in launch.strips)
        assert first == pytest.approx(rate(0))  # 8192 B a row
        assert len(second) == -(-n // 200)
        for tile, found in enumerate(second):
            rows = [rate((2 * n * row + 400 * tile) % 128) for row in range(64)]
            assert found == pytest.approx(sum(rows) / len(rows))


def test_sums_that_a_cluster_exchanges_take_their_time() -> None:
    space, sizes = Space("gemm", {}), {"m": 256, "n": 256, "k": 8192}

    def tail(parts: int) -> tuple[float, float]:
        point = Point((("tile", "64,64"),), (), "inflight", (f"slices={parts}",))
        launch = Launch(*space.laid_out(space.rewritten(point), point), sizes, "h200")
        return launch.frame.exchanged, launch._ends(Ends())

    (few, short), (many, long) = tail(2), tail(8)
    assert few == 64 * 32 * 4 and many == 7 * 64 * 8 * 4
    assert long - short == pytest.approx((many - few) / 14.1 - 64 * 24 * 2 / 1024 * 50.9, rel=0.01)


def test_the_energy_of_a_launch_goes_with_what_it_multiplies_and_asks_l2_for() -> None:
    sizes = {"m": 8192, "n": 8192, "k": 8192}
    pairs, alone = gemm(sizes), gemm(sizes, cluster=("", 1))

    def clock(launch: Launch, matmul: str) -> float:
        events = {matmul: 1024.0, "operands": 80e3, "copy": 48e3}
        return launch.time(replayed(1030.0, Ends(), events)).mhz

    assert clock(alone, "matmul") < clock(pairs, "matmul")
    assert clock(pairs, "matmul_fp16") < clock(pairs, "matmul")
    assert clock(pairs, "matmul_fp8") < clock(pairs, "matmul")


@pytest.mark.parametrize(
    ("dtype", "matmul"), [("bf16", "matmul"), ("fp16", "matmul_fp16"), ("e4m3", "matmul_fp8")]
)
def test_a_replay_tells_what_a_loop_multiplies(dtype, matmul) -> None:
    space = Space("gemm", {"dtype": dtype, "out": "bf16"})
    selected = space.selected(Point((("tile", "64,64"),), (), "inflight"), "h200")
    block = lower(selected.program, selected.schedule)
    assert matmul_of(block, selected.program.loops()[0].index) == matmul


def test_a_point_is_never_predicted_below_its_bound(space) -> None:
    """One real point: compiled, replayed, and above what its loops take on all SMs."""
    point = first_point(space)
    outcome = tried(space, point, SIZES, "h200", float("inf"))
    assert outcome["bound"] <= outcome["predicted"], outcome
    bound = bound_of(space.selected(point, "h200"), SIZES, "h200")
    assert bound == outcome["bound"]
    assert tried(space, point, SIZES, "h200", bound * 0.99)["pruned"]


def test_a_point_is_pruned_at_its_bound_and_not_before(space, monkeypatch) -> None:
    point = first_point(space)
    bound = bound_of(space.selected(point, "h200"), SIZES, "h200")

    def built(self):
        raise CheckFailed("built")

    monkeypatch.setattr("warploom.kernels.select.Selected.emitted", built)
    assert tried(space, point, SIZES, "h200", bound * 0.999)["pruned"]
    for best in (bound, bound * 1.001, bound * 1.5, bound * 100):
        assert tried(space, point, SIZES, "h200", best) == {"refused": "built"}


def test_the_bound_is_of_loops_on_all_sms_and_of_bytes(space, monkeypatch) -> None:
    """SMs may have tasks all the time."""
    selected = space.selected(first_point(space), "h200")
    for memory, bound in ((10.0, 60.0), (70.0, 70.0)):
        whole = LaunchTime(100.0, 7, 7, overhead=0.0, busy=0.6, memory=memory, mhz=1980.0)
        monkeypatch.setattr(Launch, "time", lambda *_, t=whole: t)
        assert bound_of(selected, SIZES, "h200") == pytest.approx(bound)


def test_the_model_knows_the_h100_too(space) -> None:
    sizes = {"m": 4096, "n": 4096, "k": 4096}
    walked = replayed(1030.0, Ends(1000.0, 0.0, 300.0, 700.0, 400.0), {"matmul": 1024.0})
    small, large = (gemm(sizes, gpu).time(walked) for gpu in ("h100", "h200"))
    assert small.memory > large.memory  # its DRAM is slower
    assert small.mhz > 1000 and small.microseconds == pytest.approx(large.microseconds, rel=0.1)


def test_a_launch_takes_as_long_as_its_arrays_need() -> None:
    """With loops that take no time what is left are the ends of tasks, and DRAM."""
    space = Space(FILE, {"causal": "false"})
    selected = space.selected(first_point(space), "h200")
    few = {"batch": 1, "heads": 132, "rows": 128, "keys": 1 << 20, "d": 128}
    found = launch_of(selected, few).time(replayed(1e-3, Ends()))
    bytes_ = 2 * (2 * few["rows"] + 2 * few["keys"]) * few["heads"] * few["d"]
    rate = load("h200").value("dram.copy_bandwidth")
    assert found.memory == pytest.approx(bytes_ / rate * 1e6, rel=1e-9)
    assert found.microseconds == found.memory and "arrays" in found.limits


def test_loops_whose_length_an_array_gives_are_not_counted(space) -> None:
    def ragged(x, lengths, y) -> None:
        (i,) = t.grid(m=t.size("m"))
        total = t.zeros(n=8)
        for j in t.loop(t.read(lengths, i)):
            total += t.load(x, i, t.span(j * 8, 8, "n"))
        t.store(y, i, t.span(0, 8, "n"), tile=total)

    kinds = {"x": t.array(t.FP32, "m n"), "lengths": t.array(t.INT32, "m")}
    program = t.trace(ragged, {**kinds, "y": t.array(t.FP32, "m o")}, name="ragged")
    selected = replace(space.selected(first_point(space), "h200"), program=program)
    sizes = {"m": 4, "n": 64, "o": 8}
    with pytest.raises(CheckFailed, match=r"iterations depend on .*, read by tasks"):
        launch_of(selected, sizes).trips  # noqa: B018 (it is counted when asked for)


# ---- the store


def test_rows_are_kept_and_replaced(store) -> None:
    assert store.find(KEY) is None
    store.put(KEY, Row(1.5, None, "", {"limits": "its loops"}))
    store.put(KEY, Row(1.5, 2.0, "", {"limits": "its loops"}))
    store.close()
    with pytest.raises(sqlite3.ProgrammingError, match="closed"):
        store.find(KEY)
    again = PointStore(store.path)
    assert again.find(KEY) == Row(1.5, 2.0, "", {"limits": "its loops"}) and list(again) == [KEY]


def test_a_row_is_written_while_another_process_reads(store) -> None:
    for number in range(3):
        store.put(("other", str(number), *KEY[2:]), Row(1.0))
    with closing(sqlite3.connect(store.path)) as other:
        reading = other.execute("select * from points")
        assert reading.fetchone()
        store.put(KEY, Row(2.0))
        assert store.find(KEY) == Row(2.0)


def test_a_poisoned_row_is_tried_again_and_a_wrong_file_refused(store, tmp_path) -> None:
    store.put(KEY, Row(1.0))
    with sqlite3.connect(store.path) as file:
        file.execute("update points set told = '{broken'")
    assert store.find(KEY) is None
    (tmp_path / "text").write_text("no database, only text" * 100)
    with pytest.raises(InputError, match="no store of points"):
        PointStore(tmp_path / "text")
    with sqlite3.connect(store.path) as file:
        file.execute("pragma user_version=99")
    with pytest.raises(InputError, match="version 99"):
        PointStore(store.path)


# ---- the search, with outcomes that need no compiler


def number_of(point: Point) -> float:
    return 100.0 + Random(str(point)).random() * 50


def quick(space, point, sizes, gpu, best):
    if dict(point.settings)["keys_of_a_tile"] == "176":
        return {"refused": "does not fit"}
    walked = replayed(2500.0, Ends(tail=700.0, head=400.0)).to_json()
    return {"predicted": number_of(point), "limits": "its loops", "replay": walked}


def slow(space, point, sizes, gpu, best):
    time.sleep(0.3)
    return quick(space, point, sizes, gpu, best)


def deadly(space, point, sizes, gpu, best):
    if "lazy_rescale" in point.rules and dict(point.settings)["keys_of_a_tile"] == "80":
        os._exit(3)
    return quick(space, point, sizes, gpu, best)


SMALL = {"rows_of_a_tile": "128"}  # of the open sizes only the keys of a tile
FEW = {**SIZES, "batch": 1, "rows": 256, "keys": 256}  # tasks that are counted at once


NEXT = Candidates.next


def ends_after(monkeypatch, count: int) -> None:
    """Have searches end after so many candidates, however slow the machine is."""
    left = iter(range(count))
    limited = lambda self, goal: NEXT(self, goal) if next(left, None) is not None else None  # noqa: E731
    monkeypatch.setattr(Candidates, "next", limited)


def test_a_search_finds_the_best_and_remembers(store, monkeypatch) -> None:
    ends_after(monkeypatch, 60)
    space, said = Space(FILE, SMALL), list[str]()
    found = search(space, FEW, "h200", store, "normal", said.append, quick)
    assert found.best == min(number_of(one.point) for one in found.found)
    assert len(found.found) > 50 and "points, best" in said[-1]
    assert {"pingpong", "overlapped", "solve"} <= {one.point.order for one in found.found}
    words = {word.split("=")[0] for one in found.found for word in one.point.plan}
    assert words >= {"balance", "task"}
    ends_after(monkeypatch, 60)
    again = search(space, FEW, "h200", store, "normal", said.append, deadly)
    assert again.known > 20 and again.best <= found.best
    ends_after(monkeypatch, 1)
    other = search(space, {**FEW, "rows": 512}, "h200", store, "quick", said.append, quick)
    assert other.known == 0


def every_form(space: Space) -> list[Point]:
    return [
        Point(settings, form.rules, "pingpong")
        for settings in space.sizes()
        for form in space.forms(settings)
    ]


def every_order(space: Space) -> list[Point]:
    first = first_point(space)
    return [replace(first, order=name) for name in orders(space.rewritten(first))]


def honest(space, point, sizes, gpu, best):
    """What `tried` tells, of machine code that takes as long as the point's number says."""
    walked = replayed(25.0 * number_of(point), Ends(tail=700.0, head=400.0))
    return told(Launch(*space.laid_out(space.rewritten(point), point), sizes, gpu), walked, 1.0)


@pytest.mark.parametrize(
    "poison",
    [
        "predicted = 0.001",
        "predicted = null",
        "told = '{}'",
        """told = json_set(told, '$.bound', 1e9)""",
        "predicted = predicted / 2, told = json_remove(told, '$.replay')",
    ],
)
def test_a_row_that_its_replay_denies_is_tried_again(store, monkeypatch, poison) -> None:
    """Nothing else of the store is lost, and what is found is what was found without it."""
    monkeypatch.setattr("warploom.engine.search.tried", honest)
    monkeypatch.setattr(_Search, "_explore", lambda self: self._try(every_order(self.space)))
    arguments = (Space(FILE, SMALL), FEW, "h200", store, "quick")
    found = search(*arguments)
    key = found.keys[str(found.useful[0].point)]
    where = " and ".join(f"{name} = ?" for name in ("program", "point", "sizes", "gpu", "compiler"))
    with sqlite3.connect(store.path) as file:
        assert file.execute(f"update points set {poison} where {where}", key).rowcount == 1
    again = search(*arguments)
    assert again.useful[0] == found.useful[0] and len(again.found) == len(found.found)
    assert again.known == len(found.found) - 1 and store.find(key) == found.useful[0].row


def test_a_search_that_was_made_is_told_from_the_store(store, monkeypatch) -> None:
    """Without a worker, and by a row of the store that says which points there were."""
    monkeypatch.setattr("warploom.engine.search.tried", honest)
    monkeypatch.setattr(_Search, "_explore", lambda self: self._try(every_order(self.space)))
    space = Space(FILE, SMALL)
    found = search(space, FEW, "h200", store, "quick")
    monkeypatch.setattr(_Search, "_try", lambda *_: pytest.fail("a point is tried"))
    again = search(Space(FILE, SMALL), FEW, "h200", store, "quick")
    assert again.found == found.found and again.known == len(found.found)
    assert again.keys == found.keys
    for other in (
        lambda: search(space, FEW, "h200", store, "normal"),
        lambda: search(space, {**FEW, "rows": 512}, "h200", store, "quick"),
        lambda: search(Space(FILE, {**SMALL, "causal": "false"}), FEW, "h200", store, "quick"),
    ):
        with pytest.raises(pytest.fail.Exception):
            other()
    with sqlite3.connect(store.path) as file:  # a point of it is gone
        file.execute(
            "delete from points where point = ?", (again.keys[str(found.found[0].point)][1],)
        )
    with pytest.raises(pytest.fail.Exception):
        search(space, FEW, "h200", store, "quick")


def test_what_was_tried_at_other_sizes_is_tried_first(store, monkeypatch) -> None:
    """The fastest of them by their replays there; what belongs to another program is not."""
    monkeypatch.setattr("warploom.engine.search.tried", honest)
    monkeypatch.setattr(_Search, "_explore", lambda self: self._try(every_order(self.space)))
    found = search(Space(FILE, SMALL), FEW, "h200", store, "quick")
    sizes = {**FEW, "rows": 1024, "keys": 1024}
    made = _Search(Space(FILE, SMALL), sizes, "h200", store, "normal", print)
    first = made._elsewhere(3)
    near = [one for one in found.useful if one.microseconds <= NEAR * found.best]
    ranked = sorted(near, key=lambda one: made._guess(one.point, one.row))
    assert first == [one.point for one in ranked[:3]] and first
    other = _Search(Space(FILE, {**SMALL, "causal": "false"}), sizes, "h200", store, "quick", print)
    assert not other._elsewhere(3)


def test_what_is_as_fast_elsewhere_is_not_compiled_again(store, monkeypatch) -> None:
    """Where its loads come as fast as there; where they do not it is tried."""
    monkeypatch.setattr("warploom.engine.search.tried", honest)
    monkeypatch.setattr(_Search, "_explore", lambda self: self._try(every_order(self.space)))
    space = Space(FILE, SMALL)
    found = search(space, FEW, "h200", store, "quick")
    near = [one.point for one in found.useful if one.microseconds <= NEAR * found.best]
    made = _Search(space, {**FEW, "rows": 512, "keys": 512}, "h200", store, "quick", print)
    made.evaluate = honest
    rates = Launch.rates
    monkeypatch.setattr(Launch, "rates", lambda self: dict.fromkeys(rates(self), 9.8))
    with sqlite3.connect(store.path) as file:
        file.execute("update points set told = json_set(told, '$.rates', json(?))", (
            json.dumps(dict.fromkeys(found.useful[0].row.told["rates"], 9.8)),))  # fmt: skip
    assert not made._elsewhere(8) and {one.point for one in made.explored.found} == {*near}
    for one in made.explored.found:
        right = honest(space, one.point, made.sizes, "h200", 0.0)
        assert one.microseconds == right["predicted"] and one.row.told["alone"] == right["alone"]
    monkeypatch.setattr(Launch, "rates", lambda self: dict.fromkeys(rates(self), 20.0))
    other = _Search(space, {**FEW, "rows": 768, "keys": 768}, "h200", store, "quick", print)
    other.evaluate = honest
    assert other._elsewhere(8) and not other.explored.found


def test_a_model_that_is_below_the_bound_of_a_point_is_not_believed(space, monkeypatch) -> None:
    """As one that ranks backwards is, of whatever takes long."""
    point = first_point(space)
    time = Launch.time
    monkeypatch.setattr(
        Launch, "time", lambda *a: replace(t := time(*a), microseconds=1e3 / t.microseconds)
    )
    monkeypatch.setattr("warploom.engine.outcome.bound_of", lambda *_: 100.0)
    monkeypatch.setattr("warploom.engine.outcome.compile_source", lambda *_: (b"", None))
    walked = replayed(2500.0, Ends())
    monkeypatch.setattr("warploom.engine.outcome.replay", lambda *_, **__: walked)
    outcome = tried(space, point, SIZES, "h200", float("inf"))
    assert "the model of a launch is wrong" in str(outcome["refused"])


def test_only_what_a_solver_finds_depends_on_its_seconds(space, store) -> None:
    keys = {}
    for seconds in (10.0, 11.0):
        made = _Search(Space(FILE, {}, seconds=seconds), SIZES, "h200", store, "normal", print)
        for order in ("pingpong", "solve"):
            keys[order, seconds] = made._key(replace(first_point(space), order=order))
    assert keys["pingpong", 10.0] == keys["pingpong", 11.0]
    assert keys["solve", 10.0] != keys["solve", 11.0]


def test_a_worker_that_dies_costs_its_point(store, monkeypatch) -> None:
    monkeypatch.setattr(_Search, "_explore", lambda self: self._try(every_form(self.space)))
    space = Space(FILE, SMALL)
    found = search(space, FEW, "h200", store, "normal", lambda _: None, deadly)
    dead = [one for one in found.found if one.row.refused not in ("", "does not fit")]
    assert dead and all("died" in one.row.refused for one in dead)
    assert all("lazy_rescale" in one.point.rules for one in dead)
    assert all(dict(one.point.settings)["keys_of_a_tile"] == "80" for one in dead)
    assert len(found.useful) > 15 and found.useful[0].point not in [one.point for one in dead]


def test_without_a_compiler_a_search_refuses_before_it_tries_anything(store, monkeypatch) -> None:
    def missing(name: str) -> None:
        raise ToolMissing(f"no {name} here")

    monkeypatch.setattr(toolchain, "find", missing)
    monkeypatch.setattr(_Search, "_submit", lambda self, point: pytest.fail(f"{point} is tried"))
    with pytest.raises(ToolMissing, match="no nvcc here"):
        search(Space(FILE, SMALL), FEW, "h200", store)
    assert not list(store)


@pytest.mark.parametrize("deadly_one", range(3))
def test_of_several_that_ran_when_a_worker_died_none_is_blamed_unheard(
    store, monkeypatch, deadly_one
) -> None:
    """Each is tried again by itself; only what dies alone is refused."""
    made = _Search(Space(FILE, SMALL), FEW, "h200", store, "normal", lambda _: None)
    first = first_point(made.space)
    points = [replace(first, order=name) for name in ("pingpong", "overlapped", "multistage")]
    made.workers = len(points)
    together: list[Future] = []
    alone: list[Point] = []

    def submit(point: Point) -> Future:
        future: Future = Future()
        if made.workers > 1:
            together.append(future)
            if len(together) == len(points):
                for each in together:
                    each.set_exception(BrokenProcessPool("a process died"))
            return future
        alone.append(point)
        if point == points[deadly_one]:
            future.set_exception(BrokenProcessPool("a process died"))
        else:
            future.set_result({"predicted": 100.0})
        return future

    monkeypatch.setattr(made, "_submit", submit)
    ahead = iter(points)
    made._in_workers(lambda: next(ahead, None))
    assert sorted(map(str, alone)) == sorted(map(str, points)), "each once by itself"
    refused = {one.point: bool(one.row.refused) for one in made.explored.found}
    assert refused == {point: point == points[deadly_one] for point in points}


def hanging(space, point, sizes, gpu, best):
    if point.order != "pingpong":
        time.sleep(600)
    return quick(space, point, sizes, gpu, best)


def test_a_worker_that_hangs_costs_its_point(store, monkeypatch) -> None:
    """Its process ends itself by a signal that no code of the point can hold back."""
    monkeypatch.setattr("warploom.engine.search._limited", impatient)
    monkeypatch.setattr(_Search, "_explore", lambda self: self._try(every_order(self.space)))
    found = search(Space(FILE, SMALL), FEW, "h200", store, "quick", print, hanging)
    refused = [one for one in found.found if one.row.refused]
    assert refused and all("took over" in one.row.refused for one in refused)
    assert all(one.point.order != "pingpong" for one in refused) and found.useful


def impatient(*arguments):
    """As `_limited` in a worker whose limit is a second."""
    from warploom.engine import search as module  # noqa: PLC0415 (in the worker)

    module.MOST_SECONDS = 1
    return _limited(*arguments)


def test_of_points_that_tie_the_plainest_comes_first() -> None:
    def found(microseconds: float, rules: int, words: int, order: str = "", **told) -> Found:
        return Found(Point((), ("r",) * rules, order, ("w",) * words), Row(microseconds, told=told))

    ranked = [found(100.0, 2, 1), found(100.3, 1, 1), found(100.4, 1, 0), found(101.0, 0, 0)]
    assert Explored([*reversed(ranked)]).useful == [ranked[2], ranked[1], ranked[0], ranked[3]]
    # A matmul in flight before one that is waited for; more room below DRAM's rate before both.
    waits, in_flight = found(100.0, 0, 0, "lcsf"), found(100.1, 3, 2, "inflight")
    hidden = found(100.2, 3, 3, "lcsf", alone=60.0)
    assert Explored([waits, in_flight, hidden]).useful == [hidden, in_flight, waits]
    assert hidden.goal < waits.goal < in_flight.goal
    # Who is free takes the next task, before more room: no SM gets the same share of that rate.
    shared = found(100.2, 3, 0, "lcsf", alone=80.0)
    shared = replace(shared, point=replace(shared.point, plan=("balance=dynamic",)))
    assert Explored([hidden, shared, waits]).useful == [shared, hidden, waits]


def test_tasks_that_wait_for_memory_are_tried_shared_out_as_blocks_are_free() -> None:
    """Though they are equally long: `batched_gemm` took 70 us in place of 77."""
    plain, shared = ("raster=8",), ("balance=dynamic", "raster=8")
    for alone, offered in ((60.0, True), (100.0, False)):
        candidates = Candidates(Space(GEMM, FEW_SIZES), PRODUCT, "h200")
        point = Point((), (), "inflight", plain)
        found = Found(point, Row(100.0, told={"alone": alone}))
        candidates.note(found, Explored([found]))
        assert (replace(point, plan=shared) in candidates.open) == offered


def test_what_was_measured_tells_of_points_near_to_it(space) -> None:
    """Where one of two forms takes longer than predicted, so do its other points."""
    first = first_point(space)
    wrong, right = (replace(first, order=name) for name in ("overlapped", "lcsf"))
    others = [replace(one, plan=("store=direct",)) for one in (wrong, right)]
    predicted = [(wrong, 100.0), (right, 103.0), (others[0], 101.0), (others[1], 104.0)]
    explored = Explored([Found(point, Row(time)) for point, time in predicted])
    assert [one.point for one in explored.forms(4)] == [wrong, right, *others]
    # Nothing is as fast as the wrong one is predicted, and the other ones are in their own order.
    assert explored.likely({wrong: 120.0, right: 103.0})[0].point == others[1]
    assert explored.likely({right: 103.0, wrong: 100.0})[0].point == others[0]
    assert explored.likely({wrong: 120.0, right: None})
    assert not explored.likely({one.point: 1.0 for one in explored.found})


def test_why_a_launch_is_slower() -> None:
    best = {"work": 1000.0, "busy": 0.98, "mhz": 1700.0}
    assert why_slower({**best, "work": 1030.0}, best) == "its tasks take 3.0% more cycles"
    assert why_slower({**best, "busy": 0.49, "mhz": 1610.0}, best) == (
        "SMs are without a task for 100.0% longer, its energy leaves a clock 5.6% lower"
    )
    assert why_slower(best, best) == "no slower that the model can tell"


def test_workers_end_with_their_search(tmp_path) -> None:
    """A search that is killed leaves no process behind, and its rows are whole."""
    code = (
        "from tests.engine.test_engine import FILE, FEW, SMALL, slow\n"
        "from warploom.engine.points import Space\n"
        "from warploom.engine.search import search\n"
        "from warploom.engine.store import PointStore\n"
        "from pathlib import Path\n"
        f"store = PointStore(Path({str(tmp_path / 'points.sqlite')!r}))\n"
        "if __name__ == '__main__':\n"
        "    search(Space(FILE, SMALL), FEW, 'h200', store, 'normal', print, slow)\n"
    )
    script = tmp_path / "search.py"
    script.write_text(code)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path.cwd()), *sys.path])}
    running = subprocess.Popen(
        [sys.executable, str(script)], stdout=subprocess.PIPE, env=environment, text=True
    )
    assert running.stdout is not None
    assert re.search("points?, best", running.stdout.readline())
    children = Path(f"/proc/{running.pid}/task/{running.pid}/children").read_text().split()
    running.send_signal(signal.SIGKILL)
    running.wait()
    assert children
    end = time.monotonic() + 20
    while any(Path(f"/proc/{child}").exists() for child in children) and time.monotonic() < end:
        time.sleep(0.2)
    assert not [child for child in children if Path(f"/proc/{child}").exists()]
    store = PointStore(tmp_path / "points.sqlite")
    assert len(list(store)) >= 1 and all(store.find(key) for key in store)


def test_the_schedule_of_a_search_builds_again(space, tmp_path) -> None:
    """`build --schedule` finds the form of the program that a searched schedule was made for."""
    form = space.forms(list(space.sizes())[1])[3]
    point = Point(list(space.sizes())[1], form.rules, "overlapped")
    selected = space.selected(point, "h200")
    file = tmp_path / "schedule.json"
    key = program_key(str(selected.program))
    file.write_text(json.dumps({**selected.schedule.to_json(), "program": key}))
    found = from_file(file, FILE, {}, "h200")
    assert found.program == selected.program and found.config["keys_of_a_tile"] == 80
    file.write_text(json.dumps({**selected.schedule.to_json(), "program": "0" * 16}))
    with pytest.raises(InputError, match="made for another program"):
        from_file(file, FILE, {}, "h200")
