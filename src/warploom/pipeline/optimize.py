"""The whole path for one kernel of the library: program to schedule to CUDA to cubin to verdicts.

Everything but measuring works without a GPU. The folder gets `NAME.cu`, `NAME.cubin`,
`schedule.json`, `manifest.json`, `build.json`, `schedule.svg`, `result.json` and `report.html`;
every file is written whole or not at all, the report last, so that an interrupted run leaves no
wrong report.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from warploom.codegen.build import GPU_ARCHITECTURES, Built, build
from warploom.codegen.plan import KernelSchedule, LaunchPlan
from warploom.codegen.portfolio import Candidate, portfolio
from warploom.codegen.predict import Prediction, cycles_of
from warploom.codegen.replay import replay
from warploom.codegen.schedules import NAMES, schedule_named
from warploom.codegen.solve import Search
from warploom.diagram.bounds import check as check_bound
from warploom.diagram.derive import derive
from warploom.diagram.library import FORMULAS, formula
from warploom.errors import CheckFailed, DeviceError, InputError, ToolMissing, WarploomError
from warploom.files import write_text_atomically
from warploom.kernels.library import configure, entry
from warploom.machine import load as load_machine
from warploom.pipeline.built import write_build_note
from warploom.pipeline.optimize_measure import Measured, measure_in_worker
from warploom.pipeline.optimize_page import pictures, report_page
from warploom.pipeline.optimized import Optimized, OptimizeSettings, Trial, proofs
from warploom.pipeline.static_verdict import static_verdict
from warploom.report.optimize_html import page_html
from warploom.runtime.driver import device_count
from warploom.tile import Program

FORMULA = {"gemm": "matmul"}  # the formula of a kernel, where the names differ

Say = Callable[[str], None]


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
    search = Search(seconds=settings.seconds, replayed=True)
    if settings.candidates > 1:
        offered = portfolio(program, launch, settings.gpu, search, settings.candidates)
        clock.lap("schedule")
        schedule, built, trials = choose(program, offered, settings, measuring, say)
    else:
        trials = ()
        schedule = schedule_named(program, settings.schedule, launch, settings.gpu, search)
        clock.lap("schedule")
        built = build(program, schedule, GPU_ARCHITECTURES[settings.gpu])
    say(f"schedule {schedule.name}: {proofs(schedule)}")
    clock.lap("compile")
    verdict = static_verdict(built)
    say(f"static verdict: {verdict}")
    clock.lap("verdict")
    predictions = _predictions(program, launch, settings, schedule, built)
    clock.lap("predict")
    built.write(out)
    write_build_note(out, settings.name, settings.settings, settings.gpu, built)
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
    drawn = pictures(program, schedule, settings.gpu)
    write_text_atomically(out / "schedule.svg", drawn[0] if drawn else "")
    write_text_atomically(out / "result.json", json.dumps(result.to_json(), indent=1) + "\n")
    page = report_page(result, program, built, derivation, drawn, sizes)
    write_text_atomically(out / "report.html", page_html(page))
    return result


def choose(
    program: Program,
    offered: Sequence[Candidate],
    settings: OptimizeSettings,
    measuring: bool,
    say: Say,
) -> tuple[KernelSchedule, Built, tuple[Trial, ...]]:
    """The fastest of some schedules as measured, or without a GPU as its machine code replays.

    What does not compile (or was not brought, where there is no compiler), measures wrong or fails
    on the GPU is told and left out. Raises
    `CheckFailed` when nothing is left. The winner's time is measured again by the caller: the least
    of several noisy times is too good.
    """
    trials: list[Trial] = []
    kept: list[tuple[float, KernelSchedule, Built]] = []
    for one in offered:
        trial = Trial(one.name, one.cycles)
        try:
            built = build(program, one.schedule, GPU_ARCHITECTURES[settings.gpu])
            time_of = replayed(program, one.schedule, built, settings.gpu)
            trial = replace(trial, cycles=time_of)
            if measuring:
                measured = measure_in_worker(settings.name, settings.settings, built, say)
                time_of = measured.microseconds
                trial = replace(trial, microseconds=time_of)
                if not measured.correct:
                    raise CheckFailed(f"wrong numbers on the GPU: {measured.errors}")
            kept.append((time_of, one.schedule, built))
        except (CheckFailed, DeviceError, ToolMissing) as error:
            trial = replace(trial, refused=str(error))
        say(str(trial))
        trials.append(trial)
    if not kept:
        raise CheckFailed(
            f"{program.name}: none of {len(offered)} schedules is of use: {trials[0].refused}"
        )
    _, schedule, built = min(kept, key=lambda item: item[0])
    return schedule, built, tuple(trials)


def replayed(program: Program, schedule: KernelSchedule, built: Built, gpu: str) -> float:
    """Cycles an iteration of all loops of a built kernel, by the replay of its machine code."""
    return cycles_of(replay(program, schedule, built.cubin, gpu))


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


def _predictions(
    program: Program,
    launch: LaunchPlan,
    settings: OptimizeSettings,
    schedule: KernelSchedule,
    built: Built,
) -> dict[str, Mapping[str, Prediction] | str]:
    """Every schedule by name, built and replayed, or why it does not fit this program."""
    found: dict[str, Mapping[str, Prediction] | str] = {}
    for name in NAMES:
        try:
            if name == "solve" != settings.schedule:
                continue  # solving is asked for by name
            if name == settings.schedule:
                found[name] = replay(program, schedule, built.cubin, settings.gpu)
                continue
            one = schedule_named(program, name, launch, settings.gpu)
            other = build(program, one, GPU_ARCHITECTURES[settings.gpu])
            found[name] = replay(program, one, other.cubin, settings.gpu)
        except WarploomError as error:
            found[name] = str(error)
    return found
