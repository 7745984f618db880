"""The whole path for one kernel: program to schedule to CUDA to cubin to verdicts.

Everything but measuring works without a GPU. The folder gets `NAME.cu`, `NAME.cubin`,
`schedule.json`, `manifest.json`, `build.json`, `result.json`, `report.html`, where a loop was
solved for `schedule.svg` and, where asked for, `trace.json`; every file is written whole or not at
all, the report last, so that an interrupted run leaves no wrong report.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from warploom.autosched.selected import Selected
from warploom.derive.program import derive_program
from warploom.errors import CheckFailed, InputError
from warploom.files import check_folder, write_text_atomically
from warploom.flows.built import write_build_note
from warploom.flows.choose import choose
from warploom.flows.optimize_measure import Measured, measure_in_worker
from warploom.flows.optimize_page import headline, pictures, report_page
from warploom.flows.optimized import Optimized, OptimizeSettings, Say
from warploom.flows.traced import Traced, traced
from warploom.kernels.check import CheckResult, checked
from warploom.kernels.select import check_sizes, full_sizes
from warploom.kernels.user import load_kernel
from warploom.machine import load as load_machine
from warploom.objects import is_held, names_object
from warploom.report.optimize_html import page_html
from warploom.runtime.driver import device_count, gpu_here
from warploom.tile import Program


def optimize(settings: OptimizeSettings, out: Path, say: Say = lambda _: None) -> Optimized:
    """Run the whole path and write the folder.

    Raises `InputError` for what cannot be used, and `CheckFailed` when no schedule compiles to code
    that passes the static verdict, or when the numerics fail.
    """
    clock = _Clock(say)
    check_folder(out)
    measuring = wants_gpu(settings)
    sizes = check_sizes(settings.name, settings.settings)
    clock.say(f"{settings.name} for {settings.gpu}")
    best, trials, space = choose(settings, measuring, clock.say)
    selected, built = best.selected, best.built
    clock.say(f"kept {selected}: {best.verdict}")
    clock.lap("choose and compile")
    interpreted = _interpreted(settings, selected, sizes, clock)
    clock.lap("interpret")
    built.write(out)
    write_build_note(out, settings.name, settings.settings, settings.gpu, built)
    measured: Measured | None = None
    if measuring:
        measured = measure_in_worker(settings.name, settings.settings, selected, built, clock.say)
        clock.lap("measure")
        if not measured.correct:
            problems = "; ".join(measured.check.problems)
            raise CheckFailed(f"{settings.name}: wrong numbers on the GPU: {problems}")
        check_rate(measured, selected.program, settings.gpu)
    steps: Traced | None = None
    if settings.trace:
        steps = traced(settings.name, settings.settings, selected, built, settings.gpu, measuring)
        clock.say(f"wrote {steps.write(out)}")
        clock.lap("trace")
    clock.say("writing the report")
    result = Optimized(
        settings,
        selected,
        best.trial,
        trials,
        best.verdict,
        interpreted,
        measured,
        clock.laps,
        out,
        steps,
        space,
    )
    drawn = pictures(selected, settings.gpu)
    page = report_page(result, built, drawn, _derivation(settings, selected))
    result = replace(result, headline=headline(page.figures))
    if drawn:
        write_text_atomically(out / "schedule.svg", drawn[0])
    else:  # an order by name is not solved for: there is no steady state to draw
        (out / "schedule.svg").unlink(missing_ok=True)
    write_text_atomically(out / "result.json", json.dumps(result.to_json(), indent=1) + "\n")
    write_text_atomically(out / "report.html", page_html(page))
    return result


def _interpreted(
    settings: OptimizeSettings, selected: Selected, sizes: Mapping[str, int], clock: _Clock
) -> CheckResult:
    """What the interpreter makes of the program that was built; raises `CheckFailed` if wrong."""
    dims = selected.program.dims
    text = ", ".join(f"{name} {size}" for name, size in sizes.items() if name in dims)
    clock.say(f"interpreting the program at {text}")
    return checked(settings.name, selected.config, sizes).require()


def _derivation(settings: OptimizeSettings, selected: Selected) -> str:
    """Why the formula is fused and streamed as it is at the sizes the kernel was chosen for, in the
    words of the derivation; or why there is none."""
    sizes = full_sizes(settings.name, settings.settings)
    if names_object(settings.name):
        own = load_kernel(settings.name).derivation
        return own or "None: a program of one's own comes without the formula that it computes."
    try:
        fields = cast("Mapping[str, Any]", vars(selected.config))
        return str(derive_program(settings.name, fields, sizes, settings.gpu))
    except InputError as error:
        return f"None: {error}"


def check_rate(measured: Measured, program: Program, gpu: str) -> None:
    """Raise `CheckFailed` for a time in which the GPU's tensor cores cannot have done the work."""
    names = {op.srcs[0].type.dtype.rate for op in program.ops() if op.kind == "mma"}
    peak = max((load_machine(gpu).value(f"peak.tensor_{name}") for name in names), default=0.0)
    rate = measured.flops / measured.microseconds * 1e-6  # TFLOP/s, as the peak
    if peak and rate > peak:
        raise CheckFailed(
            f"{program.name}: {measured.microseconds:.1f} us would be {rate:.0f} TFLOP/s, "
            f"above the {peak:.0f} the {gpu} can do: the time is not the kernel's"
        )


class _Clock:
    """Progress with the seconds since the start, and what each stage took."""

    def __init__(self, say: Say) -> None:
        self.laps: dict[str, float] = {}
        self._say = say
        self._start = self._last = time.perf_counter()

    def say(self, text: str) -> None:
        self._say(f"{time.perf_counter() - self._start:5.1f} s  {text}")

    def lap(self, name: str) -> None:
        now = time.perf_counter()
        self.laps[name] = round(now - self._last, 3)
        self._last = now


def wants_gpu(settings: OptimizeSettings) -> bool:
    """Whether kernels are measured here; raises `InputError` where they cannot be, but must."""
    if settings.measure == "gpu" and device_count() == 0:
        raise InputError("--measure gpu: no GPU here; use --measure none or auto")
    measuring = settings.measure != "none" and gpu_here()
    if measuring and is_held(settings.name):
        raise InputError(
            f"{settings.name}: kernels are measured in a process of their own, which cannot load "
            "an object of this one; put it into a file and name FILE.py:OBJECT, or measure='none'"
        )
    return measuring
