"""Several answers to one question: distinct schedules of a program.

Orders that the model cannot tell apart differ by some per cent on the machine. So a measurement
(`warploom optimize --candidates`) or a replay of the compiled code makes the last choice. The
portfolio offers, in this order:

    the solver's own order
    named orders            those of `autosched.schedules` that fit the program
    copies                  `passes.copies`: tiles with two names
    nominal costs           no slack where the machine is slower
    shallow rings           two slots each, whose index is cheaper to count
    ping-pong               groups take the tensor core in the order of the schedule
    other seeds             of the solver, with copies and without

Two schedules that lower to the same steps are one.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from warploom.autosched.chosen import shallow, steps_of
from warploom.autosched.schedules import NAMES, schedule_named
from warploom.autosched.solve import Search, row_axis
from warploom.codegen.ir.plan import KernelSchedule, LaunchPlan
from warploom.errors import WarploomError
from warploom.tile import Program

SEEDS = 2
PLAIN = ("unpipelined", "multistage")  # never the fastest: not worth a place


@dataclass(frozen=True)
class Candidate:
    """One schedule, and how it came about."""

    name: str
    schedule: KernelSchedule


def portfolio(
    program: Program,
    launch: LaunchPlan | None = None,
    gpu: str = "h200",
    search: Search | None = None,
    count: int = 8,
) -> list[Candidate]:
    """Up to `count` distinct schedules, the solver's own answer first.

    Raises what `schedule_named` raises when not even that exists.
    """
    asked = search or Search()
    plan = launch or LaunchPlan()
    plan = plan if plan.split else plan.with_options(split=row_axis(program))
    first = schedule_named(program, "solve", plan, gpu, asked)
    found = [Candidate("solve", first)]
    seen = {steps_of(program, first)}
    for name, schedule in _variants(program, plan, gpu, replace(asked, replayed=False)):
        if len(found) >= count:
            break
        try:
            steps = steps_of(program, schedule)
        except WarploomError:
            continue  # it does not lower
        if steps not in seen:
            seen.add(steps)
            found.append(Candidate(name, schedule))
    return found


def _variants(
    program: Program, plan: LaunchPlan, gpu: str, search: Search
) -> Iterator[tuple[str, KernelSchedule]]:
    for name in NAMES:
        if name not in (*PLAIN, "solve"):
            yield from _try(name, program, name, plan, gpu, search)
    copies = replace(search, expand=True)
    yield from _try("solve+copies", program, "solve", plan, gpu, copies)
    nominal = replace(search, cost_end="nominal")
    yield from _try("solve+nominal", program, "solve", plan, gpu, nominal)
    for name, answer in _try("solve", program, "solve", plan, gpu, search):
        yield f"{name}+shallow", shallow(answer)
        if len(answer.compute) > 1:
            turns = replace(answer, name=f"{answer.name}-pingpong", pingpong=True)
            yield f"{name}+pingpong", turns
    for seed in range(search.seed + 1, search.seed + SEEDS):
        for name, other in (("solve", search), ("solve+copies", copies)):
            reseeded = replace(other, seed=seed)
            yield from _try(f"{name}+seed{seed}", program, "solve", plan, gpu, reseeded)


def _try(
    label: str, program: Program, name: str, plan: LaunchPlan, gpu: str, search: Search
) -> Iterator[tuple[str, KernelSchedule]]:
    """The schedule of that name, or nothing where it does not fit or none is found."""
    try:
        yield label, schedule_named(program, name, plan, gpu, search)
    except WarploomError:
        return
