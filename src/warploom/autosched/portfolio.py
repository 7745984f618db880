"""Several answers to one question: distinct schedules of a program, best predicted first.

Orders that the model cannot tell apart differ by some per cent on the machine, and the model
itself is a few per cent off, so the last choice belongs to a measurement (`warploom optimize
--candidates`). What is on offer:

    the solver's orders     at both ends of the costs, from a few seeds
    copies                  `passes.copies`: tiles with two names
    walked orders           `autosched.refine` on the above
    shallow rings           two slots each, whose index is cheaper to count
    named orders            those of `autosched.schedules` that fit the program

Two schedules that lower to the same steps are one.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import zip_longest

from warploom.autosched.chosen import shallow, steps_of
from warploom.autosched.schedules import NAMES, schedule_named
from warploom.autosched.solve import Search, row_axis
from warploom.codegen.ir.plan import KernelSchedule, LaunchPlan
from warploom.errors import WarploomError
from warploom.perf.predict import cycles_of, predict
from warploom.tile import Program

SEEDS = 2
PLAIN = ("unpipelined", "multistage")  # never the fastest: not worth a place


@dataclass(frozen=True)
class Candidate:
    """One schedule: how it came about, and the cycles an iteration of all loops it should take."""

    name: str
    schedule: KernelSchedule
    cycles: float


def portfolio(
    program: Program,
    launch: LaunchPlan | None = None,
    gpu: str = "h200",
    search: Search | None = None,
    count: int = 8,
) -> list[Candidate]:
    """Up to `count` distinct schedules: the solver's own answer, then plain and walked ones in
    turn, the best predicted first.

    Raises what `schedule_named` raises when not even the solver's answer exists.
    """
    asked = search or Search()
    plan = launch or LaunchPlan()
    plan = plan if plan.split else plan.with_options(split=row_axis(program))
    first = schedule_named(program, "solve", plan, gpu, asked)
    found = [_candidate("solve", program, first, gpu)]
    seen = {steps_of(program, first)}
    rest: list[Candidate] = []
    for name, schedule in _variants(program, plan, gpu, replace(asked, replayed=False)):
        try:
            steps = steps_of(program, schedule)
            if steps not in seen:
                seen.add(steps)
                rest.append(_candidate(name, program, schedule, gpu))
        except WarploomError:
            continue  # it does not lower
    rest.sort(key=lambda one: one.cycles)
    # Walked orders are predicted too well: they have every second place, not all.
    plain = [one for one in rest if "+walked" not in one.name]
    walked = [one for one in rest if "+walked" in one.name]
    for pair in zip_longest(plain, walked):
        found += [one for one in pair if one is not None]
    return found[: max(1, count)]


def _candidate(name: str, program: Program, schedule: KernelSchedule, gpu: str) -> Candidate:
    return Candidate(name, schedule, cycles_of(predict(program, schedule, gpu)))


def _variants(
    program: Program, plan: LaunchPlan, gpu: str, search: Search
) -> Iterator[tuple[str, KernelSchedule]]:
    for name in NAMES:
        if name not in (*PLAIN, "solve"):
            yield from _try(name, program, name, plan, gpu, search)
    for expand in (False, True):
        for seed in range(search.seed, search.seed + SEEDS):
            for walks in (0, max(search.walks, 150)):
                other = replace(search, expand=expand, seed=seed, walks=walks)
                name = "solve" + "+copies" * expand + "+walked" * (walks > 0)
                yield from _try(f"{name}+seed{seed}", program, "solve", plan, gpu, other)
    for name, answer in _try("solve+shallow", program, "solve", plan, gpu, search):
        yield name, shallow(answer)
    nominal = replace(search, cost_end="nominal")
    yield from _try("solve+nominal", program, "solve", plan, gpu, nominal)


def _try(
    label: str, program: Program, name: str, plan: LaunchPlan, gpu: str, search: Search
) -> Iterator[tuple[str, KernelSchedule]]:
    """The schedule of that name, or nothing where it does not fit or none is found."""
    try:
        yield label, schedule_named(program, name, plan, gpu, search)
    except WarploomError:
        return
