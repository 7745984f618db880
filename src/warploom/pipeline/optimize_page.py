"""The report of `optimize`: its page and the pictures on it."""

from __future__ import annotations

from collections.abc import Mapping

from warploom.codegen.build import Built
from warploom.codegen.extract import extract
from warploom.codegen.place import place
from warploom.codegen.plan import KernelSchedule
from warploom.pipeline.optimized import Optimized, proofs
from warploom.report.optimize_html import Page
from warploom.schedule.costs import costs
from warploom.schedule.picture import svg
from warploom.tile import Program


def pictures(program: Program, schedule: KernelSchedule, gpu: str) -> list[str]:
    """The steady state of every loop."""
    placement = place(program, schedule.launch.split, len(schedule.compute))
    result: list[str] = []
    for loop in program.loops():
        problem = extract(placement, loop, costs(gpu), skip_unit=schedule.launch.skip_unit)
        drawn = schedule.loops[loop.index]
        # Times of named and walked schedules are positions, not cycles: there is nothing to draw.
        if drawn.proof.status != "written" and "positions" not in drawn.params:
            result.append(svg(problem.graph, problem.target, schedule.loops[loop.index]))
    return result


def report_page(
    result: Optimized,
    program: Program,
    built: Built,
    derivation: str,
    drawn: list[str],
    sizes: Mapping[str, int],
) -> Page:
    settings = result.settings
    rows: list[tuple[str, str, str, str]] = []
    for name, found in result.predictions.items():
        mark = "built" if name == settings.schedule else ""
        if isinstance(found, str):
            rows.append((name, "does not fit", found, mark))
            continue
        for loop, one in found.items():
            rows.append((name, f"{one.cycles:.0f}", f"{one.bound} ({one.reason})", mark or loop))
    verdict = result.verdict
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
        summary=f"{result.schedule.name}: {proofs(result.schedule)}",
        derivation=derivation,
        program=str(program),
        schedules=rows,
        schedule_text="\n\n".join(str(one) for one in result.schedule.loops.values()),
        pictures=drawn,
        cuda=built.source.text,
        facts=facts,
        measured=[] if result.measured is None else result.measured.rows(result.chosen),
        seconds=[(name, f"{value:.2f} s") for name, value in result.seconds.items()],
        sizes=", ".join(f"{name} {value}" for name, value in sizes.items()),
    )
