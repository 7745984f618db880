"""The report of `optimize`: its page and the pictures on it."""

from __future__ import annotations

from warploom.codegen.compile.build import Built
from warploom.codegen.ir.place import place
from warploom.codegen.ir.plan import KernelSchedule
from warploom.codegen.simt.schedule import SimtSchedule
from warploom.flows.optimized import WRITTEN, Optimized, Trial, order_of
from warploom.kernels.select import Selected
from warploom.perf.extract import extract
from warploom.report.optimize_html import Page
from warploom.schedule.model.costs import costs
from warploom.schedule.model.schedule import Schedule
from warploom.schedule.view.picture import svg


def pictures(selected: Selected, gpu: str) -> list[str]:
    """The steady state of every loop that was solved."""
    program, schedule = selected.program, selected.schedule
    if isinstance(schedule, SimtSchedule):
        return []
    placement = place(program, schedule.launch.split, len(schedule.compute))
    result: list[str] = []
    for loop in placement.program.loops():
        problem = extract(placement, loop, costs(gpu), skip_unit=schedule.launch.skip_unit)
        drawn = schedule.loops[loop.index]
        # Times of named and walked schedules are positions, not cycles: there is nothing to draw.
        if drawn.proof.status != WRITTEN and "positions" not in drawn.params:
            result.append(svg(problem.graph, problem.target, drawn))
    return result


def schedule_rows(trial: Trial, built: bool) -> list[tuple[str, str, str, str]]:
    """(name, cycles an iteration, bound, note) of a schedule, a row a loop."""
    note = "built" if built else ""
    if trial.refused:
        return [(trial.name, "not of use", trial.refused, note)]
    if trial.unpredicted:
        return [(trial.name, "not predicted", trial.unpredicted, note)]
    several = len(trial.predicted) > 1
    return [
        (
            f"{trial.name}, loop {loop}" if several else trial.name,
            f"{one.cycles:.0f}",
            f"{one.bound} ({one.reason}): {one.bound / one.cycles:.0%}",
            note,
        )
        for loop, one in trial.predicted.items()
    ]


def _loop_text(schedule: Schedule) -> str:
    """The schedule of a loop; of a named one the numbers are no times."""
    lead = "positions in an order, not cycles:\n" if schedule.proof.status == WRITTEN else ""
    return f"{lead}{schedule}"


def report_page(
    result: Optimized,
    built: Built,
    drawn: list[str],
    derivation: str,
) -> Page:
    """What `report.html` shows."""
    settings, selected, verdict = result.settings, result.selected, result.verdict
    rows = [
        row
        for trial in result.trials
        for row in schedule_rows(trial, trial.name == result.chosen.name)
    ]
    told = ", ".join(f"{name} {size}" for name, size in result.check.sizes.items())
    text = str(selected.schedule)
    if isinstance(selected.schedule, KernelSchedule):
        text = "\n\n".join(_loop_text(one) for one in selected.schedule.loops.values())
    facts = [
        ("static verdict", "pass" if verdict.passed else "; ".join(verdict.faults)),
        ("compiler", verdict.compiler),
        ("registers a thread at entry", str(verdict.registers)),
        ("spilled", f"{verdict.spill_bytes} B"),
        ("stack frame", f"{verdict.stack_bytes} B"),
        ("shared memory", f"{verdict.shared_bytes} B"),
        ("instructions", str(verdict.instructions)),
        ("matrix instructions", str(verdict.matrix_instructions)),
        ("serialised matrix instructions", str(verdict.serialised_groups)),
        ("lint warnings", str(verdict.warnings)),
    ]
    return Page(
        title=f"{settings.name} for {settings.gpu}",
        summary=f"Built: {selected}. Order: {order_of(selected)}.",
        derivation=derivation,
        program=str(selected.program),
        checked=f"Interpreted at {told}. {result.check}",
        schedules=rows,
        schedule_text=text,
        pictures=drawn,
        cuda=built.source.text,
        facts=facts,
        measured=[] if result.measured is None else result.measured.rows(result.chosen.predicted),
        seconds=[(name, f"{value:.2f} s") for name, value in result.seconds.items()],
    )
