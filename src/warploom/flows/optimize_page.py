"""The report of `optimize`: its page and the pictures on it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from warploom.autosched.selected import Selected
from warploom.codegen.compile.build import Built
from warploom.codegen.ir.place import place
from warploom.codegen.ir.plan import KernelSchedule
from warploom.codegen.simt.schedule import SimtSchedule
from warploom.flows.optimize_facts import Facts, rival_json
from warploom.flows.optimized import WRITTEN, Optimized, Trial, order_of
from warploom.perf.extract import extract
from warploom.perf.timeline import Timeline, stamped, steps_of_lines, steps_of_program, timeline
from warploom.perf.trace import MEASURED, PREDICTED
from warploom.report.optimize_html import Line, Page
from warploom.report.pages import SPECIAL, Figure, sentence
from warploom.sass.decode.cubin import parse
from warploom.sass.decode.kernel import Kernel, decode
from warploom.schedule.model.costs import costs
from warploom.schedule.model.schedule import Schedule
from warploom.schedule.view.picture import svg

KINDS_OF_STEPS = {
    "wait": ("Wait", "TurnWait", "Join", "Acquire", "Meet"),
    "matmul": ("Issue",),
    "copy": ("Fill",),
    "signal": ("Release", "Publish", "TurnPass"),
}


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
            f"{one.bound} ({one.reason}), {one.bound / one.cycles:.0%} of that",
            note,
        )
        for loop, one in trial.predicted.items()
    ]


def _loop_text(schedule: Schedule) -> str:
    """The schedule of a loop; of a named one the numbers are no times."""
    lead = "positions in an order, not cycles:\n" if schedule.proof.status == WRITTEN else ""
    return f"{lead}{schedule}"


def report_page(result: Optimized, built: Built, drawn: list[str], derivation: str) -> Page:
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
    found = Facts(result, decode(parse(built.cubin), built.source.name, with_source=True))
    steps = steps_of_program(selected.program, found.block)
    names = list(steps)
    of_line = steps_of_lines(built.source.text, steps)
    return Page(
        title=f"{settings.name} for {settings.gpu}",
        summary=sentence(f"{selected}; {order_of(selected)}."),
        figures=figures(found),
        answers=[
            ("What binds", [found.binds()]),
            ("Why this one", [found.beats()]),
            ("What to try", found.tries()),
        ],
        timelines=[_timeline_json(one, names) for one in timelines(found, of_line)],
        space=[rival_json(one, result.chosen.name) for one in found.rivals],
        recorded=found.compared.source if found.compared else "",
        steps=[(name, list(steps[name]), kind_of_step(name)) for name in names],
        program=_program_lines(str(selected.program)),
        cuda=_lines(enumerate(built.source.text.splitlines(), 1), of_line, names),
        sass=_sass_lines(found.kernel, of_line, names),
        derivation=derivation,
        checked=f"Interpreted at {told}. {result.check}",
        schedules=rows,
        schedule_text=text,
        pictures=drawn,
        facts=facts,
        measured=[] if result.measured is None else result.measured.rows(result.chosen.predicted),
        seconds=[(name, f"{value:.2f} s") for name, value in result.seconds.items()],
    )


def kind_of_step(name: str) -> str:
    """How a step is coloured, by its type and the operation that it runs."""
    what, _, rest = name.partition(" ")
    if what == "Run" and rest.split(".")[0] in SPECIAL:
        return "special"
    return next((kind for kind, words in KINDS_OF_STEPS.items() if what in words), "math")


def figures(found: Facts) -> list[Figure]:
    """Time, rate, share of the limit; each says whether it was measured or predicted."""
    least, words = found.limits[0]
    time, measured = found.microseconds, found.result.measured
    shown: list[Figure] = []
    if time is not None:
        kind = "predicted" if measured is None else "measured"
        dims = [dim for dim in found.launch.program.dims if dim != "one"]
        sizes = ", ".join(f"{dim} {found.sizes[dim]}" for dim in dims)
        shown.append(Figure(f"{time:,.1f}", "us", sizes, kind))
        if found.flops:
            rate = found.flops / time * 1e-6
            shown.append(Figure(f"{rate:,.0f}", "TFLOP/s", "of its matmuls", kind))
        if not found.flops or "DRAM" in words:
            rate = found.bytes / time * 1e-6
            shown.append(Figure(f"{rate:,.2f}", "TB/s", "of its arrays", kind))
        shown.append(
            Figure(
                f"{least / time:.{0 if least > 0.1 * time else 1}%}", "of the limit", words, kind
            )
        )
    else:
        shown.append(Figure(f"{least:,.1f}", "us at least", words, "bound"))
    if measured is None and found.recorded:
        row = found.recorded[-1]
        known = f"{row.measured[found.result.chosen.name]:,.1f}"
        shown.append(Figure(known, "us", f"recorded in {row.source}", "measured"))
    return shown


def headline(shown: Sequence[Figure]) -> str:
    """The same in a line."""
    kinds = dict.fromkeys(one.kind for one in shown)
    told = (
        f"{kind}: " + ", ".join(f"{x.value} {x.unit} ({x.about})" for x in shown if x.kind == kind)
        for kind in kinds
    )
    return "; ".join(told)


def timelines(found: Facts, of_line: Sequence[str]) -> list[Timeline]:
    """Of every loop; rows of a trace, where there is one, measured above predicted."""
    if isinstance(found.walks, str) or found.block is None:
        return []
    shown = [timeline(walk, found.block, of_line) for walk in found.walks]
    traced = found.result.traced
    if traced is None:
        return shown
    for one in list(shown):
        rows = ((MEASURED, traced.measured), (PREDICTED, traced.predicted))
        bars = [bar for what, trace in rows for bar in stamped(trace, one.loop, what)]
        bars.sort(key=lambda bar: bar.row)  # a group's two rows are neighbours
        end = max((bar.end for bar in bars), default=0.0)
        shown[shown.index(one)] = replace(one, cycles=max(one.cycles, end), bars=(*one.bars, *bars))
    return shown


def _timeline_json(one: Timeline, names: Sequence[str]) -> dict[str, Any]:
    """Bars by row, each [begin, end, number of its step, kind, whose it is]."""
    rows: dict[str, list[list[Any]]] = {}
    for bar in one.bars:
        rows.setdefault(bar.row, []).append(
            [
                round(bar.begin, 1),
                round(bar.end, 1),
                names.index(bar.step) if bar.step in names else -1,
                bar.kind,
                bar.group,
            ]
        )
    return {
        "loop": one.loop,
        "cycles": round(one.cycles, 1),
        "iterations": one.iterations,
        "rows": [{"name": name, "bars": bars} for name, bars in rows.items()],
    }


def _program_lines(text: str) -> list[Line]:
    """Lines of a tile program with the number of their operation."""
    found = ((line, re.match(r"\s+(\d+)  \S", line)) for line in text.splitlines())
    return [Line("", line, op=int(op.group(1)) if op else -1) for line, op in found]


def _lines(
    lines: Iterable[tuple[object, str]], of_line: Sequence[str], names: Sequence[str]
) -> list[Line]:
    """(label, text) with the step that each is of."""
    at = {name: number for number, name in enumerate(names)}
    return [
        Line(str(label), text, step=at.get(step, -1))
        for (label, text), step in zip(lines, of_line, strict=True)
    ]


def _sass_lines(kernel: Kernel, of_line: Sequence[str], names: Sequence[str]) -> list[Line]:
    """Instructions with the step that they were compiled from."""
    items = kernel.instructions
    steps = ["" if item.line.at is None else of_line[item.line.at[1] - 1] for item in items]
    return _lines(((f"{item.offset:04x}", item.line.text) for item in items), steps, names)
