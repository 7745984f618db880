"""A built kernel of the library on the GPU here, in a process of its own with a watchdog.

Numerics against float64 at small sizes, then time and counted cycles at sizes that fill the GPU.
"""

from __future__ import annotations

import functools
import statistics
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np

from warploom.autosched.selected import Selected
from warploom.codegen.compile.build import Built, compile_source
from warploom.codegen.compile.probe import LOG, WORDS, Reading, probe, readings
from warploom.errors import CheckFailed, InputError, ToolMissing
from warploom.kernels.check import CheckResult, checked
from warploom.kernels.library import configure, entry
from warploom.kernels.select import check_sizes, full_sizes
from warploom.perf.replay import Prediction
from warploom.runtime.arrays import DeviceArray
from warploom.runtime.driver import CudaDevice
from warploom.runtime.helpers import Helpers
from warploom.runtime.kernel import Kernel
from warploom.runtime.stats import median_interval
from warploom.runtime.timing import Stopwatch, TimingSettings, launches_per_window
from warploom.runtime.worker import in_own_process
from warploom.tile import Program

ROUNDS = 15
WARM, REPEATS = 3, 5  # series that are not counted; launches of a series


@dataclass(frozen=True)
class Measured:
    """What the GPU said.

    check       what a run at small sizes showed
    microseconds   of a launch, the median of interleaved rounds
    control     time of the kernel over that of a second copy of it: median and 95 % interval
    counted     loop -> [cycles an iteration, SM clock in GHz]; empty with the reason in `uncounted`
    """

    device: str
    check: CheckResult
    sizes: dict[str, int]
    microseconds: float
    control: tuple[float, float, float]
    flops: float
    counted: dict[str, list[float]] = field(default_factory=dict[str, list[float]])
    uncounted: str = ""

    @property
    def correct(self) -> bool:
        """The check passed."""
        return self.check.passed

    @property
    def errors(self) -> dict[str, float]:
        """The relative error of each output."""
        return self.check.errors

    def to_json(self) -> dict[str, Any]:
        """The measurement as plain JSON data."""
        return {**asdict(self), "check": self.check.to_json()}

    def rows(self, predicted: Mapping[str, Prediction]) -> list[tuple[str, str]]:
        """The measurement beside the model, for people."""
        errors = ", ".join(
            f"{name} {error:.1e} (allowed {self.check.bounds[name]:.1e})"
            for name, error in self.errors.items()
        )
        sizes = ", ".join(f"{name} {size}" for name, size in self.sizes.items())
        same, low, high = self.control
        rows = [
            ("device", self.device),
            ("relative error against float64", errors),
            ("sizes timed", sizes),
            ("time", f"{self.microseconds:.1f} us"),
            ("a second copy of the kernel", f"{same:.4f} times as fast [{low:.4f}, {high:.4f}]"),
        ]
        if self.flops:
            rate = self.flops / self.microseconds * 1e-6
            rows.append(("rate", f"{rate:.0f} TFLOP/s"))
        for loop, (cycles, clock) in self.counted.items():
            told = f"{cycles:.0f} counted at {clock:.2f} GHz"
            if not cycles:
                told = "no iteration at these sizes"
            elif loop in predicted:
                model = predicted[loop].cycles
                told += f", {model:.0f} predicted ({model / cycles - 1:+.1%})"
            rows.append((f"cycles an iteration, loop {loop}", told))
        if self.uncounted:
            rows.append(("cycles an iteration", f"not counted: {self.uncounted}"))
        return rows


def measure_in_worker(
    name: str,
    settings: Mapping[str, str],
    selected: Selected,
    built: Built,
    say: Callable[[str], None],
) -> Measured:
    """Measure in a new process; raises `DeviceError` when it fails or hangs.

    The kernel with counters in it has to be compiled; where that cannot be, nothing is counted.
    """
    counting: Built | None = None
    loops: tuple[str, ...] = ()
    uncounted = ""
    try:
        source, loops = probe(built.source)
        cubin, resources = compile_source(source, built.arch, ("spills", "stack"))
        counting = replace(built, source=source, cubin=cubin, resources=resources)
    except (ToolMissing, CheckFailed, InputError) as error:
        uncounted = str(error)
    say(f"measuring {selected} on the GPU: 5 to 20 s")
    given = dict(settings)
    done = in_own_process(measure, name, given, built, counting, loops, subject=name)
    return replace(done, uncounted=uncounted)


def measure(
    name: str,
    settings: Mapping[str, str],
    built: Built,
    counting: Built | None,
    loops: tuple[str, ...],
) -> Measured:
    """The worker's side: the kernel, and the same with counters in it."""
    config, small = configure(name, settings)[0], check_sizes(name, settings)
    program, sizes = entry(name).program(config), full_sizes(name, settings)
    device = CudaDevice()
    memory = memory_of(device, program, sizes)
    micros, control = _times(device, built, memory)
    counted: dict[str, list[float]] = {}
    if counting is not None and loops:
        kernel = counting.kernel()
        launch = functools.partial(kernel, memory, stream=device.stream)
        series = counted_cycles(device, kernel, launch, loops)
        for loop in loops:
            seen = [one[loop] for one in series]
            cycles = statistics.median(reading.cycles_an_iteration for reading in seen)
            counted[loop] = [cycles, statistics.median(reading.gigahertz for reading in seen)]
    return Measured(
        device.info.name,
        checked(name, config, small, built),
        {dim: sizes[dim] for dim in program.dims},
        micros,
        control,
        entry(name).flops(config, sizes),
        counted,
    )


def memory_of(
    device: CudaDevice, program: Program, sizes: Mapping[str, int]
) -> dict[str, DeviceArray]:
    random = np.random.default_rng(0)
    return {
        spec.name: DeviceArray(
            device,
            random.standard_normal(tuple(sizes[dim] for dim in spec.dims), np.float32),
            spec.dtype,
        )
        for spec in program.arrays
    }


def _times(
    device: CudaDevice, built: Built, memory: Mapping[str, DeviceArray]
) -> tuple[float, tuple[float, float, float]]:
    """Microseconds a launch, and how a second copy of the kernel compares: the A/A control."""
    watch = Stopwatch(device, Helpers(device))
    calls = [
        functools.partial(kernel, memory, stream=device.stream)
        for kernel in (built.kernel(), built.kernel())
    ]
    launches = launches_per_window(watch.rough_us(calls[0]), TimingSettings())
    random = np.random.default_rng(0)
    watch.rounds(calls, 2, launches, random)  # warm up, not counted
    first, second = watch.rounds(calls, ROUNDS, launches, random)
    return float(np.median(first)), median_interval(second, first)


def counted_cycles(
    device: CudaDevice, kernel: Kernel, launch: Callable[[], None], loops: tuple[str, ...]
) -> list[dict[str, Reading]]:
    """What the counters in a kernel say of its loops after each of five series of launches.

    `launch` queues one on the device's stream. Series before them warm it up.
    """
    address, size = kernel.global_memory(LOG)
    series: list[dict[str, Reading]] = []
    for _ in range(WARM + 5):
        device.memset(address, 0, size)
        for _ in range(REPEATS):
            launch()
        data = device.download(address, size)
        words = [int(x) for x in np.frombuffer(data, np.uint64)[: WORDS * len(loops)]]
        series.append({reading.loop: reading for reading in readings(loops, words)})
    return series[WARM:]
