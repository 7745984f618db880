"""A trace of a kernel's steps: the same kernel with time stamps, predicted and, on a GPU, measured.

Stamps cost cycles, so both traces are of the stamped kernel: what they differ by is the model's
error, step by step.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from warploom.autosched.selected import Selected
from warploom.codegen.compile.build import Built, compile_source
from warploom.codegen.compile.stamps import LOG, Stamps, stamped_cycles, with_stamps
from warploom.codegen.ir.plan import KernelSchedule
from warploom.errors import InputError
from warploom.files import write_text_atomically
from warploom.flows.optimize_measure import memory_of
from warploom.kernels.library import configure, entry
from warploom.kernels.select import full_sizes
from warploom.perf.launch_time import Launch
from warploom.perf.trace import (
    MEASURED,
    PREDICTED,
    Mark,
    Trace,
    errors,
    perfetto,
    predicted,
    settled,
)
from warploom.runtime.driver import CudaDevice
from warploom.runtime.worker import in_own_process

FILE = "trace.json"
LAUNCHES = 3  # the log has the last one
ITERATIONS = 4  # of a trace


@dataclass(frozen=True)
class Traced:
    """Both traces, `measured` empty without a GPU."""

    predicted: Trace
    measured: Trace = ()

    def write(self, folder: Path) -> Path:
        """The Perfetto file, measured and predicted steps of a loop under each other."""
        traces = {MEASURED: self.measured, PREDICTED: self.predicted}
        path = folder / FILE
        shown = perfetto({name: trace for name, trace in traces.items() if trace})
        write_text_atomically(path, json.dumps(shown) + "\n")
        return path

    def __str__(self) -> str:
        """The model's error by step, the largest first; without a GPU the steps alone."""
        if not self.measured:
            return f"{len(self.predicted)} steps predicted, none measured: no GPU was used"
        lines = ["cycles from step to step, predicted and measured:"]
        lines += [
            f"  loop {loop}: {step}: {model:.0f}, {real:.0f} ({model - real:+.0f})"
            for loop, step, model, real in errors(self.predicted, self.measured)
        ]
        return "\n".join(lines)


def traced(
    name: str,
    settings: Mapping[str, str],
    selected: Selected,
    built: Built,
    gpu: str,
    measuring: bool,
) -> Traced:
    """Stamp a kernel, predict its steps and, where asked, measure them in a process of its own.

    Raises `InputError` for a kernel without a loop of matmuls, and what compiling and measuring do.
    """
    schedule = selected.schedule
    if not isinstance(schedule, KernelSchedule):
        raise InputError(f"--trace: {selected} has no matmul, so it has no loop to stamp")
    source, stamps = with_stamps(built.source)
    cubin, resources = compile_source(source, built.arch, ("spills", "stack"))
    stamped = replace(built, source=source, cubin=cubin, resources=resources)
    rates = Launch(selected.program, selected.launch, full_sizes(name, settings), gpu).rates()
    model = predicted(selected.program, schedule, cubin, gpu, rates, ITERATIONS)
    if not measuring:
        return Traced(model)
    given = dict(settings)
    return Traced(model, in_own_process(measure, name, given, stamped, stamps, subject=name))


def measure(
    name: str, settings: Mapping[str, str], stamped: Built, stamps: tuple[Stamps, ...]
) -> Trace:
    """The worker's side: some launches, then the log."""
    config, sizes = configure(name, settings)[0], full_sizes(name, settings)
    device, kernel = CudaDevice(), stamped.kernel()
    memory = memory_of(device, entry(name).program(config), sizes)
    address, size = kernel.global_memory(LOG)
    device.memset(address, 0, size)
    for _ in range(LAUNCHES):
        kernel(memory, stream=device.stream)
    words = [int(x) for x in np.frombuffer(device.download(address, size), np.uint32)]
    return measured_trace(stamps, words)


def measured_trace(stamps: tuple[Stamps, ...], words: list[int]) -> Trace:
    """The trace of a log; its first iterations fill the pipeline and are left out."""
    marks = [Mark(*one) for one in stamped_cycles(stamps, words)]
    found: list[Mark] = []
    for loop in dict.fromkeys(mark.loop for mark in marks):
        found += settled([mark for mark in marks if mark.loop == loop], ITERATIONS)
    return tuple(found)
