"""The whole path for one kernel of the library: program to schedule to CUDA to cubin to verdicts.

Everything but measuring works without a GPU. The folder gets `NAME.cu`, `NAME.cubin`,
`schedule.json`, `manifest.json`, `schedule.svg`, `result.json` and `report.html`; every file is
written whole or not at all, the report last, so that an interrupted run leaves no wrong report.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from warploom.codegen.build import GPU_ARCHITECTURES, Built, build
from warploom.codegen.extract import extract
from warploom.codegen.place import place
from warploom.codegen.plan import KernelSchedule, LaunchPlan
from warploom.codegen.portfolio import Candidate, portfolio
from warploom.codegen.predict import Prediction, predict
from warploom.codegen.schedules import NAMES, schedule_named
from warploom.codegen.solve import Search
from warploom.diagram.bounds import check as check_bound
from warploom.diagram.derive import derive
from warploom.diagram.library import FORMULAS, formula
from warploom.errors import CheckFailed, DeviceError, InputError, ToolMissing, WarploomError
from warploom.files import write_text_atomically
from warploom.kernels.library import configure, entry
from warploom.machine import load as load_machine
from warploom.pipeline.optimize_measure import Measured, measure_in_worker
from warploom.report.optimize_html import Page, page_html
from warploom.runtime.driver import device_count
from warploom.sass.cubin import parse
from warploom.sass.kernel import decode
from warploom.sass.lint import ERROR, lint
from warploom.sass.stats import stats
from warploom.schedule.costs import costs
from warploom.schedule.picture import svg
from warploom.tile import Program

SCHEMA, VERSION = "warploom.optimize", 1
MOST_CANDIDATES = 32
MINED_RULES = ("LATENCY", "REUSE_OPERAND")  # of the lint
FORMULA = {"gemm": "matmul"}  # the formula of a kernel, where the names differ

Say = Callable[[str], None]


@dataclass(frozen=True)
class OptimizeSettings:
    """What to optimise and how hard to look.

    settings    configuration fields and array sizes of the kernel, as texts
    schedule    the schedule that is built; the others are predicted beside it
    measure     "gpu", "none", or "auto": the GPU when there is one
    seconds     of the solver, a loop
    candidates  distinct schedules to build (`codegen.portfolio`): the fastest measured is kept, or
                without a GPU the first that compiles
    """

    name: str
    gpu: str = "h200"
    settings: Mapping[str, str] = field(default_factory=dict[str, str])
    schedule: str = "solve"
    measure: str = "auto"
    seconds: float = 10.0
    candidates: int = 1

    def __post_init__(self) -> None:
        if not 1 <= self.candidates <= MOST_CANDIDATES:
            raise InputError(f"--candidates {self.candidates}: expected 1 to {MOST_CANDIDATES}")
        if self.candidates > 1 and self.schedule != "solve":
            raise InputError(f"--candidates goes with --schedule solve, not {self.schedule}")
        if self.gpu not in GPU_ARCHITECTURES:
            raise InputError(
                f"--gpu {self.gpu!r}: code is emitted for {', '.join(GPU_ARCHITECTURES)}"
            )
        if self.schedule not in NAMES:
            raise InputError(f"--schedule {self.schedule!r}: expected one of {', '.join(NAMES)}")
        if self.measure not in ("auto", "gpu", "none"):
            raise InputError(f"--measure {self.measure!r}: expected auto, gpu or none")
        if not 0 < self.seconds < float("inf"):
            raise InputError(f"--time-limit {self.seconds:g}: expected seconds above 0")


@dataclass(frozen=True)
class StaticVerdict:
    """What the machine code says without being run; `faults` is empty when it passes."""

    faults: tuple[str, ...]
    registers: int
    spill_bytes: int
    stack_bytes: int
    shared_bytes: int
    instructions: int
    matrix_instructions: int
    serialised_groups: int
    warnings: int
    compiler: str

    @property
    def passed(self) -> bool:
        """No rule is broken."""
        return not self.faults

    def __str__(self) -> str:
        head = "pass" if self.passed else f"FAIL: {self.faults[0]}"
        return (
            f"{head}; {self.matrix_instructions} matrix instructions, "
            f"{self.serialised_groups} serialised, {self.spill_bytes} B spilled, "
            f"{self.registers} registers at entry, {self.shared_bytes} B of shared memory"
        )


@dataclass(frozen=True)
class Trial:
    """One candidate: cycles predicted, microseconds measured (None without a GPU), why refused."""

    name: str
    cycles: float
    microseconds: float | None = None
    refused: str = ""

    def __str__(self) -> str:
        told = self.refused[:90] if self.refused else "built"
        if self.microseconds is not None:
            told = f"{self.microseconds:.1f} us"
        return f"candidate {self.name}: {self.cycles:.0f} cycles predicted, {told}"


@dataclass(frozen=True)
class Optimized:
    """The result: what was built, what the model says of it and of the others, the verdicts."""

    settings: OptimizeSettings
    schedule: KernelSchedule
    predictions: Mapping[str, Mapping[str, Prediction] | str]
    verdict: StaticVerdict
    measured: Measured | None
    seconds: Mapping[str, float]
    folder: Path
    trials: tuple[Trial, ...] = ()

    @property
    def chosen(self) -> Mapping[str, Prediction]:
        """The prediction of the schedule that was built."""
        found = self.predictions[self.settings.schedule]
        assert not isinstance(found, str)
        return found

    def to_json(self) -> dict[str, Any]:
        """The result as plain JSON data."""
        return {
            "schema": SCHEMA,
            "version": VERSION,
            "kernel": self.settings.name,
            "gpu": self.settings.gpu,
            "settings": dict(self.settings.settings),
            "schedule": self.settings.schedule,
            "turns": self.schedule.turns,
            "candidates": [asdict(trial) for trial in self.trials],
            "proof": {name: str(s.proof.status) for name, s in self.schedule.loops.items()},
            "predicted": {
                name: found
                if isinstance(found, str)
                else {loop: [p.cycles, p.bound] for loop, p in found.items()}
                for name, found in self.predictions.items()
            },
            "verdict": {"passed": self.verdict.passed, "faults": list(self.verdict.faults)},
            "measured": None if self.measured is None else self.measured.to_json(),
            "seconds": dict(self.seconds),
        }


def optimize(settings: OptimizeSettings, out: Path, say: Say = lambda _: None) -> Optimized:
    """Run the whole path and write the folder.

    Raises `InputError` for what cannot be used, `CheckFailed` when a schedule does not exist, the
    compiler refuses the code, or the static verdict or the numerics fail.
    """
    if out.exists() and not out.is_dir():
        raise InputError(f"-o {out}: is a file, expected a folder")
    measuring = _measuring(settings)
    kernel = entry(settings.name)
    config, sizes = configure(settings.name, settings.settings)
    clock = _Clock()
    program = kernel.program(config)
    launch = kernel.schedule(config).launch
    clock.lap("trace")
    derivation = _derivation(settings)
    clock.lap("derive")
    search = Search(seconds=settings.seconds)
    if settings.candidates > 1:
        offered = portfolio(program, launch, settings.gpu, search, settings.candidates)
        clock.lap("schedule")
        schedule, built, trials = choose(program, offered, settings, measuring, say)
    else:
        trials = ()
        schedule = schedule_named(program, settings.schedule, launch, settings.gpu, search)
        clock.lap("schedule")
        built = build(program, schedule, GPU_ARCHITECTURES[settings.gpu])
    say(f"schedule {schedule.name}: {_proofs(schedule)}")
    clock.lap("compile")
    verdict = static_verdict(built)
    say(f"static verdict: {verdict}")
    clock.lap("verdict")
    predictions = _predictions(program, launch, settings, schedule)
    clock.lap("predict")
    built.write(out)
    if not verdict.passed:
        raise CheckFailed(f"{settings.name}: {'; '.join(verdict.faults)}; see {out}")
    measured: Measured | None = None
    if measuring:
        measured = measure_in_worker(settings.name, settings.settings, built, say)
        clock.lap("measure")
        if not measured.correct:
            raise CheckFailed(f"{settings.name}: wrong numbers on the GPU: {measured.errors}")
        check_rate(measured, program, settings.gpu)
    result = Optimized(settings, schedule, predictions, verdict, measured, clock.laps, out, trials)
    pictures = _pictures(program, schedule, settings.gpu)
    write_text_atomically(out / "schedule.svg", pictures[0] if pictures else "")
    write_text_atomically(out / "result.json", json.dumps(result.to_json(), indent=1) + "\n")
    page = _page(result, program, built, derivation, pictures, sizes)
    write_text_atomically(out / "report.html", page_html(page))
    return result


def choose(
    program: Program,
    offered: Sequence[Candidate],
    settings: OptimizeSettings,
    measuring: bool,
    say: Say,
) -> tuple[KernelSchedule, Built, tuple[Trial, ...]]:
    """The fastest of some schedules as measured, or without a GPU the first that compiles.

    What does not compile, measures wrong or fails on the GPU is told and left out. Raises
    `CheckFailed` when nothing is left. The winner's time is measured again by the caller: the least
    of several noisy times is too good.
    """
    trials: list[Trial] = []
    kept: list[tuple[float, KernelSchedule, Built]] = []
    for one in offered:
        trial = Trial(one.name, one.cycles)
        try:
            built = build(program, one.schedule, GPU_ARCHITECTURES[settings.gpu])
            time_of = one.cycles if kept else 0.0  # without a GPU: the first
            if measuring:
                measured = measure_in_worker(settings.name, settings.settings, built, say)
                time_of = measured.microseconds
                trial = replace(trial, microseconds=time_of)
                if not measured.correct:
                    raise CheckFailed(f"wrong numbers on the GPU: {measured.errors}")
            kept.append((time_of, one.schedule, built))
        except (CheckFailed, DeviceError) as error:
            trial = replace(trial, refused=str(error))
        say(str(trial))
        trials.append(trial)
    if not kept:
        raise CheckFailed(f"{program.name}: none of {len(offered)} schedules is of use")
    _, schedule, built = min(kept, key=lambda item: item[0])
    return schedule, built, tuple(trials)


def check_rate(measured: Measured, program: Program, gpu: str) -> None:
    """Raise `CheckFailed` for a time in which the GPU's tensor cores cannot have done the work."""
    operands = {op.srcs[0].type.dtype.name for op in program.ops() if op.kind == "mma"}
    names = {"fp8" if name in ("e4m3", "e5m2") else name for name in operands}
    peak = max((load_machine(gpu).value(f"peak.tensor_{name}") for name in names), default=0.0)
    rate = measured.flops / measured.microseconds * 1e-6  # TFLOP/s, as the peak
    if peak and rate > peak:
        raise CheckFailed(
            f"{program.name}: {measured.microseconds:.1f} us would be {rate:.0f} TFLOP/s, "
            f"above the {peak:.0f} the {gpu} can do: the time is not the kernel's"
        )


class _Clock:
    def __init__(self) -> None:
        self.laps: dict[str, float] = {}
        self._last = time.perf_counter()

    def lap(self, name: str) -> None:
        now = time.perf_counter()
        self.laps[name] = round(now - self._last, 3)
        self._last = now


def _measuring(settings: OptimizeSettings) -> bool:
    if settings.measure == "none":
        return False
    try:
        there = device_count() > 0
    except ToolMissing:
        if settings.measure == "gpu":
            raise
        return False
    if settings.measure == "gpu" and not there:
        raise InputError("--measure gpu: no GPU here; use --measure none or auto")
    return there


def _derivation(settings: OptimizeSettings) -> str:
    """Why the formula is fused and streamed as it is, in the words of the diagram floor."""
    name = FORMULA.get(settings.name, settings.name)
    if name not in {one.name for one in FORMULAS}:
        return ""
    found = derive(formula(name), gpu_name=settings.gpu)
    check_bound(found.diagram, found.traffic, found.capacity)
    return str(found)


def _proofs(schedule: KernelSchedule) -> str:
    return "; ".join(
        f"loop {name} II {one.initiation_interval}, {one.proof.status}"
        + (f" ({one.proof.reason})" if one.proof.reason else "")
        for name, one in schedule.loops.items()
    )


def _predictions(
    program: Program, launch: LaunchPlan, settings: OptimizeSettings, schedule: KernelSchedule
) -> dict[str, Mapping[str, Prediction] | str]:
    """Every schedule by name: its prediction, or why it does not fit this program."""
    found: dict[str, Mapping[str, Prediction] | str] = {}
    for name in NAMES:
        try:
            one = schedule
            if name == "solve" != settings.schedule:
                continue  # solving is asked for by name
            if name != settings.schedule:
                one = schedule_named(program, name, launch, settings.gpu)
            found[name] = predict(program, one, settings.gpu)
        except WarploomError as error:
            found[name] = str(error)
    return found


def static_verdict(built: Built) -> StaticVerdict:
    """Judge machine code: no serialised matmul, no spill, no stack frame, no lint error.

    Rules that were mined from what compilers emit cannot convict a compiler's own output: what
    breaks one is a distance the tables have not seen, and counts as a warning.
    """
    cubin = parse(built.cubin, built.source.name)
    kernel = decode(cubin, None)
    counted = stats(cubin, kernel)
    findings = lint(kernel)
    errors = [f for f in findings if f.severity == ERROR and f.rule not in MINED_RULES]
    resources = built.resources
    faults: list[str] = []
    if counted.serialised_groups:
        faults.append(f"{counted.serialised_groups} matrix instructions wait for the one before")
    if resources.spill_bytes:
        faults.append(f"{resources.spill_bytes} B of registers spilled")
    if resources.stack_bytes:
        faults.append(f"a stack frame of {resources.stack_bytes} B")
    faults += [str(error) for error in errors[:4]]
    faults += list(resources.notes)
    return StaticVerdict(
        tuple(faults),
        resources.registers,
        resources.spill_bytes,
        resources.stack_bytes,
        built.source.shared_bytes,
        counted.instructions,
        counted.matrix_instructions,
        counted.serialised_groups,
        len(findings) - len(errors),
        resources.compiler,
    )


def _pictures(program: Program, schedule: KernelSchedule, gpu: str) -> list[str]:
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


def _page(
    result: Optimized,
    program: Program,
    built: Built,
    derivation: str,
    pictures: list[str],
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
        summary=f"{result.schedule.name}: {_proofs(result.schedule)}",
        derivation=derivation,
        program=str(program),
        schedules=rows,
        schedule_text="\n\n".join(str(one) for one in result.schedule.loops.values()),
        pictures=pictures,
        cuda=built.source.text,
        facts=facts,
        measured=[] if result.measured is None else result.measured.rows(result.chosen),
        seconds=[(name, f"{value:.2f} s") for name, value in result.seconds.items()],
        sizes=", ".join(f"{name} {value}" for name, value in sizes.items()),
    )
