"""Random schedules and launch plans for a program: named, solved, with every option there is."""

from __future__ import annotations

import random

from warploom import tile as t
from warploom.autosched.schedules import Policy, schedule_for
from warploom.autosched.solve import Search, row_axis
from warploom.codegen.ir.plan import KernelSchedule, LaunchPlan
from warploom.tile.ir import walk

NAMED = ("unpipelined", "multistage", "lcsf", "inflight", "overlapped", "pingpong")


def wild_plan(program: t.Program, draw: random.Random, older: bool = False) -> LaunchPlan:
    """A launch plan; `older`: for a GPU without TMA and clusters."""
    names = [name for name, _ in program.grid]
    blocks = draw.choice((1, 1, 1, 2, 2, 4)) if not older else 1
    cluster = (draw.choice(names), blocks) if blocks > 1 else ("", 1)
    schedulers = ["static", "static", "serpentine"] + ["dynamic"] * (blocks == 1 and not older)
    scheduler = draw.choice(schedulers)
    return LaunchPlan(
        split=draw.choice(("", "m")),
        cluster=cluster,
        persistent=scheduler != "static" or draw.random() < 0.7,
        supergroup=draw.choice((0, 0, 1, 2, 3)) if len(names) > 1 else 0,
        grouped=draw.choice(("row", "all")),
        reverse=tuple(name for name in names if draw.random() < 0.3),
        tile_scheduler=scheduler,
        store="direct" if older else draw.choice(("tma", "tma", "direct")),
        store_panels=draw.choice((1, 2, 2, 3, 4, 8)),
        store_rows=draw.choice((0, 0, 8, 16, 32)),
        dependent=not older and draw.random() < 0.2,
        skip_unit=draw.random() < 0.3,
        skip_voted=draw.random() < 0.5,
        resident=draw.choice((1, 1, 1, 2)),
        overlap_next_task=not older and draw.random() < 0.15,
        early_release=draw.random() < 0.3,
    )


def wild_schedule(
    program: t.Program, plan: LaunchPlan, draw: random.Random, solve: bool = True
) -> KernelSchedule:
    """A schedule; raises `InputError` or `CheckFailed` where the draw does not fit."""
    rows = [op.dst.type.size("m") for op in program.ops() if op.dst and "m" in op.dst.type.names]
    groups = draw.choice([n for n in (1, 2, 3) if max(rows) % (64 * n) == 0])
    plan = plan if groups == 1 else plan.with_options(split="m")
    pairs = all(sum(o.kind == "mma" for o in walk(lo.body)) > 1 for lo in program.loops())
    form = draw.choice(("plain", "plain", "named", *["pairs"] * 2 * pairs, *["solve"] * solve))
    depth = draw.choice((1, 2, 2, 3, 4))
    if form == "plain":
        flying = draw.choice((0, 0, 1)) if depth > 1 else 0
        order = ("inflight" if flying else "lcsf") + "-early" * (draw.random() < 0.5)
        return schedule_for(program, Policy(order, plan, groups, depth))
    if form == "pairs":
        order = "pingpong" if groups > 1 and draw.random() < 0.5 else "overlapped"
        order += "-early" * (draw.random() < 0.5)
        return schedule_for(program, Policy(order, plan, groups, max(2, depth)))
    if form == "named":
        return schedule_for(program, Policy(draw.choice(NAMED if pairs else NAMED[:4]), plan))
    search = Search(seconds=draw.choice((0.5, 1.5)), seed=draw.randrange(10))
    return schedule_for(program, Policy("solve", plan, search=search))


__all__ = ["NAMED", "row_axis", "wild_plan", "wild_schedule"]
